"""The vectorised core against single estimates of the same layouts."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.job import Job
from piper_megatron.layout.pipeline import balanced_layout_string, pipeline_layout
from piper_megatron.layout.sizes import Sizes
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.communicators import communicators_gib
from piper_megatron.resources.evaluate import evaluate
from piper_megatron.resources.memory import memory
from piper_megatron.resources.stage_layers import leading_stages, stage_layers
from piper_megatron.resources.step import step_time
from piper_megatron.workload.arguments import read_arguments
from piper_megatron.workload.presets import preset_arguments
from piper_megatron.workload.reading import effective, model_spec
from piper_megatron.workload.spec import BatchSpec, ModelSpec, TrainingSpec

H100 = load_platform("dgx-h100")
WORLD, BATCH, SEQ = 256, 1024, 4096
TRAINING = TrainingSpec(
    precision="bf16",
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    overlap_p2p_comm=True,
    sequence_parallel=True,
    dispatcher="alltoall",
    moe_grouped_gemm=True,
    moe_permute_fusion=True,
    attention_backend="flash",
    attention_dropout=0,
    hidden_dropout=0,
)
SETTINGS = {
    "plain": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("moe_act", "mlp")},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
    "flex fp8": {"dispatcher": "flex", "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "no overlap": {"overlap_grad_reduce": False, "overlap_param_gather": False},
    "fsdp": {"fsdp": "megatron", "data_parallel_sharding_strategy": "optim_grads_params"},
}


def preset(name: str) -> ModelSpec:
    batch = f"--micro-batch-size 1 --global-batch-size 8 --seq-length {SEQ} --bf16".split()
    return model_spec(effective(read_arguments([*preset_arguments(name), *batch]).values, 8))


def legal_layouts(model: ModelSpec) -> list[dict[str, int]]:
    names = ("tp", "cp", "pp", "ep", "vpp", "micro_batch")
    found = []
    for values in itertools.product(
        (1, 2, 4), (1, 2), (1, 2, 4, 8, 16), (1, 4, 8, 16, 32), (1, 2, 3), (1, 2)
    ):
        layout = dict(zip(names, values, strict=True))
        tp, cp, pp, ep, vpp, micro_batch = values
        dp = WORLD // (tp * cp * pp)
        if WORLD % (ep * pp) or (model.experts.count % ep) or (pp == 1 and vpp > 1):
            continue
        micro_batches = BATCH // (micro_batch * dp)
        if vpp > 1 and (micro_batches < pp or micro_batches % pp):
            continue
        if micro_batches and pp * vpp <= model.layers:
            found.append(layout)
    return found


def sizes_of(layouts: list[dict[str, int]]) -> Sizes:
    columns = {name: np.array([layout[name] for layout in layouts]) for name in layouts[0]}
    return Sizes(world=WORLD, etp=1, global_batch=BATCH, seq=SEQ, **columns)


def job_of(model: ModelSpec, training: TrainingSpec, layout: dict[str, int]) -> Job:
    pp, vpp = layout["pp"], layout["vpp"]
    even = model.layers % (pp * vpp) == 0
    text = None if even else balanced_layout_string(model.layers, pp, vpp, model.mtp_layers)
    return Job(
        model=model,
        batch=BatchSpec(seq=SEQ, micro_batch=layout["micro_batch"], global_batch=BATCH),
        training=training,
        layout=ParallelLayout(
            world=WORLD, tp=layout["tp"], cp=layout["cp"], pp=pp, ep=layout["ep"]
        ),
        pipeline=pipeline_layout(model.layers, pp, vpp, mtp_layers=model.mtp_layers, text=text),
    )


def errors(model: ModelSpec, training: TrainingSpec, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of step time and of peak memory on random layouts."""
    layouts = legal_layouts(model)
    chosen = np.random.default_rng(7).choice(len(layouts), count, replace=False)
    picked = [layouts[i] for i in chosen]
    many = evaluate(model, training, sizes_of(picked), H100)
    single = []
    for layout in picked:
        job = job_of(model, training, layout)
        single.append((step_time(job, H100).step_s, memory(job, H100).peak_gib))
    step_s, peak_gib = np.array(single).T
    return many.step_s / step_s - 1, many.peak_gib / peak_gib - 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_agrees_with_single_estimates(setting):
    """Tolerance: half of the layouts within 2%, nine of ten within 8% (time) and 10% (memory)."""
    training = TRAINING.model_copy(update=SETTINGS[setting])
    for error, most in zip(errors(preset("qwen3-30b-a3b"), training, 24), (0.08, 0.1), strict=True):
        assert np.median(np.abs(error)) < 0.02
        assert np.quantile(np.abs(error), 0.9) < most


def test_agrees_with_dense_first_layers_mla_and_prediction():
    model = preset("deepseek-v3").model_copy(update={"mtp_layers": 1})
    time, peak = errors(model, TRAINING, 24)
    for error in (time, peak):
        assert np.median(np.abs(error)) < 0.03
        assert np.quantile(np.abs(error), 0.9) < 0.1


def test_passes_side_by_side():
    model = preset("qwen3-30b-a3b")
    training = TRAINING.model_copy(update={"overlap_moe_expert_parallel_comm": True})
    layouts = [layout for layout in legal_layouts(model) if layout["vpp"] > 1 or layout["pp"] == 1]
    picked = layouts[:: len(layouts) // 12]
    many = evaluate(model, training, sizes_of(picked), H100)
    single = np.array(
        [step_time(job_of(model, training, layout), H100).step_s for layout in picked]
    )
    assert np.quantile(np.abs(many.step_s / single - 1), 0.9) < 0.1


def test_one_call_is_as_good_as_many():
    model = preset("qwen3-30b-a3b")
    layouts = legal_layouts(model)[::17]
    together = evaluate(model, TRAINING, sizes_of(layouts), H100)
    for i in (0, len(layouts) // 2, len(layouts) - 1):
        alone = evaluate(model, TRAINING, sizes_of([layouts[i]]), H100)
        for field in fields(together):
            assert getattr(alone, field.name)[0] == getattr(together, field.name)[i]


def test_numbers_are_layouts_of_one():
    model = preset("qwen3-30b-a3b")
    sizes = sizes_of(legal_layouts(model)[:1])
    single = replace(sizes, **{name: int(getattr(sizes, name)[0]) for name in ("tp", "cp", "pp")})
    assert evaluate(model, TRAINING, single, H100).step_s.shape == (1,)


def test_feasible_is_what_the_device_holds():
    model = preset("qwen3-30b-a3b")
    found = evaluate(model, TRAINING, sizes_of(legal_layouts(model)), H100)
    capacity = H100.need_accelerator().memory.capacity_gib
    assert found.feasible.any()
    assert not found.feasible.all()
    assert found.needed_gib[found.feasible].max() <= capacity
    assert found.needed_gib[~found.feasible].min() > capacity
    assert np.all(found.needed_gib > found.peak_gib)


@pytest.mark.parametrize("layers", [43, 48, 61, 78, 94])
@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_stages_hold_what_the_balanced_layout_says(layers, mtp_layers):
    """Within one layer, all layers once, and the fullest stage among the leading ones."""
    base = preset("deepseek-v3")
    moe = (False,) * 3 + (True,) * (layers - 3)
    model = base.model_copy(update={"moe_layers": moe, "mtp_layers": mtp_layers})
    for pp, vpp in ((1, 1), (2, 2), (4, 3), (8, 1), (8, 2), (16, 2)):
        layout = {"tp": 1, "cp": 1, "pp": pp, "ep": 1, "vpp": vpp, "micro_batch": 1}
        sizes = sizes_of([layout])
        stages = job_of(model, TRAINING, layout).pipeline.stages
        counts = [int(stage_layers(model, sizes, np.array([p])).count[0]) for p in range(pp)]
        assert sum(counts) == layers
        exact = [sum(len(chunk.layers) for chunk in stage) for stage in stages]
        assert np.abs(np.subtract(counts, exact)).max() <= 1
        leading = {int(stage[0]) for stage in leading_stages(model, sizes)}
        assert max(counts) == max(counts[stage] for stage in leading)


def test_communicators_count_peers():
    overheads = H100.need_accelerator().overheads
    sizes = sizes_of([{"tp": 2, "cp": 1, "pp": 4, "ep": 8, "vpp": 1, "micro_batch": 1}])
    # rings of TP 2, PP 4, DP 32 and EDP 8 have 1, 2, 2 and 2 peers, an all-to-all of EP 8 has 7
    expected = overheads.context_gib + overheads.communicator_gib
    expected += 14 * overheads.peer_communicator_gib
    assert communicators_gib(sizes, overheads) == pytest.approx(expected)
