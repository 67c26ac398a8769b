"""The step put together: parts, overlap, and what must grow or shrink."""

import pytest

from piper_megatron.errors import LayoutError, PlatformError
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.job import Job
from piper_megatron.layout.pipeline import pipeline_layout
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.layer_time import LayerTime, Machine, Sides, layer_time, together_s
from piper_megatron.resources.step import PARTS, StepTime, step_time
from piper_megatron.workload.spec import Attention, BatchSpec, Experts, ModelSpec, TrainingSpec

H100 = load_platform("dgx-h100")
MODEL = ModelSpec(
    hidden=4096,
    ffn=12288,
    gated=True,
    attention=Attention(heads=32, groups=8, head_dim=128),
    moe_layers=(False,) * 2 + (True,) * 14,
    experts=Experts(count=64, topk=4, ffn=1536, shared_ffn=1536),
    vocab=100_000,
    tied_embeddings=False,
    max_positions=4096,
    norm="RMSNorm",
    linear_bias=False,
)
TRAINING = TrainingSpec(
    precision="bf16",
    use_distributed_optimizer=True,
    dispatcher="alltoall",
    moe_grouped_gemm=True,
    moe_permute_fusion=True,
    attention_backend="flash",
    attention_dropout=0,
    hidden_dropout=0,
)
BESIDE = {"overlap_moe_expert_parallel_comm": True, "overlap_p2p_comm": True}


def job(pp=4, vpp=1, ep=8, tp=1, cp=1, micro_batches=16, world=64, model=MODEL, **changes) -> Job:
    layout = ParallelLayout(world=world, tp=tp, cp=cp, pp=pp, ep=ep)
    return Job(
        model=model,
        batch=BatchSpec(seq=4096, micro_batch=1, global_batch=micro_batches * layout.dp),
        training=TRAINING.model_copy(update=changes),
        layout=layout,
        pipeline=pipeline_layout(model.layers, pp, vpp, mtp_layers=model.mtp_layers),
    )


def step(**settings) -> StepTime:
    return step_time(job(**settings), H100)


FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pp": 1},
        {"pp": 1, "world": 8, "micro_batches": 1},
        {"vpp": 2, "overlap_p2p_comm": True},
        {"vpp": 2, **BESIDE, "delay_wgrad_compute": True},
        {"pp": 1, **BESIDE},
        {"tp": 4, "cp": 2, "sequence_parallel": True, "tp_comm_overlap": True},
        {"pp": 1, "fsdp": "megatron", "data_parallel_sharding_strategy": "optim_grads_params"},
        {"overlap_grad_reduce": True, "overlap_param_gather": True, **FULL},
        {"dispatcher": "flex", "fp8": "hybrid", "fp8_recipe": "tensorwise"},
        {"model": MODEL.model_copy(update={"mtp_layers": 1})},
    ],
    ids=str,
)
def test_parts_add_up(settings):
    found = step(**settings)
    assert tuple(found.parts) == PARTS
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert all(spent >= -1e-12 for spent in found.parts.values())
    peak = H100.need_accelerator().tflops
    tflops = peak.fp8 if settings.get("fp8") else peak.bf16
    assert found.time.mfu == pytest.approx(found.time.tflops_per_gpu / tflops)


def test_without_a_pipeline_a_step_is_its_passes_and_what_follows():
    found = step(pp=1, world=8, micro_batches=6)
    assert found.parts["pp_bubble"] == pytest.approx(0, abs=1e-9)
    assert found.timeline.working_s[0] == pytest.approx(found.timeline.step_s)
    more = step(pp=1, world=8, micro_batches=12)
    assert more.timeline.step_s == pytest.approx(2 * found.timeline.step_s)
    assert more.after_s == pytest.approx(found.after_s)


def test_bubble_shrinks_with_micro_batches_and_with_chunks():
    few, many = step(micro_batches=8), step(micro_batches=64)
    assert few.parts["pp_bubble"] / few.step_s > many.parts["pp_bubble"] / many.step_s
    interleaved = step(micro_batches=8, vpp=2, overlap_p2p_comm=True)
    assert interleaved.parts["pp_bubble"] < few.parts["pp_bubble"]


@pytest.mark.parametrize(
    ("settings", "slower"),
    [
        ({}, {"imbalance": 1.5}),
        ({"dispatcher": "alltoall"}, {"recompute": FULL}),
    ],
    ids=["imbalance", "recompute"],
)
def test_more_work_takes_longer(settings, slower):
    imbalance = slower.get("imbalance", 1.0)
    base = step_time(job(**settings), H100)
    worse = step_time(job(**settings, **slower.get("recompute", {})), H100, imbalance=imbalance)
    assert worse.step_s > base.step_s


def test_full_recomputation_repeats_the_forward_pass_of_layers():
    plain, repeated = step(pp=1), step(pp=1, **FULL)
    names = ("attention", "experts", "mlp", "other")
    assert repeated.parts["recompute"] > 0.25 * sum(plain.parts[name] for name in names)
    assert repeated.parts["attention"] == pytest.approx(plain.parts["attention"])


def test_block_recomputation_spares_the_layers_behind():
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    spent = [step(**block, recompute_num_layers=count).parts["recompute"] for count in (0, 2, 4)]
    assert spent[0] == 0
    assert spent[0] < spent[1] < spent[2]
    assert spent[2] == pytest.approx(step(**FULL).parts["recompute"])


def test_experts_exchange_hides_beside_another_micro_batch():
    plain, beside = step(pp=1), step(pp=1, **BESIDE)
    assert beside.parts["dispatch"] < 0.5 * plain.parts["dispatch"]
    delayed = step(pp=1, **BESIDE, delay_wgrad_compute=True)
    assert delayed.step_s <= beside.step_s
    assert delayed.parts["experts"] == pytest.approx(plain.parts["experts"])


def test_gradients_and_parameters_hide_behind_passes():
    exposed = step(pp=1)
    hidden = step(pp=1, overlap_grad_reduce=True, overlap_param_gather=True)
    assert 0 < hidden.parts["dp"] < 0.5 * exposed.parts["dp"]
    assert hidden.parts["experts"] == pytest.approx(exposed.parts["experts"])


def test_sharded_parameters_are_gathered_in_every_pass():
    sharded = {"fsdp": "megatron", "data_parallel_sharding_strategy": "optim_grads_params"}
    few, many = (step(pp=1, micro_batches=n, **sharded).parts["dp"] for n in (2, 8))
    assert many > 2 * few


def test_the_slowest_stage_is_the_one_with_the_large_head():
    large = MODEL.model_copy(update={"vocab": 1_000_000})
    assert step(model=large).worst_stage == 3


def test_multi_token_prediction_costs_a_layer_and_a_head():
    plain, predicting = step(), step(model=MODEL.model_copy(update={"mtp_layers": 1}))
    assert predicting.worst_stage == 3
    assert predicting.timeline.working_s[3] > 1.25 * plain.timeline.working_s[3]


def test_a_slower_stack_slows_all_kernels():
    accelerator = H100.need_accelerator()
    slow = accelerator.stacks[0].model_copy(update={"name": "slow", "efficiency": 0.5})
    stacks = (*accelerator.stacks, slow.model_copy(update={"match": "slow"}))
    platform = H100.model_copy(
        update={"accelerator": accelerator.model_copy(update={"stacks": stacks})}
    )
    fast, halved = step_time(job(), platform), step_time(job(), platform, "slow")
    ratio = fast.parts["experts"] / halved.parts["experts"]
    expected = 0.5 / accelerator.stack(None).efficiency
    assert ratio == pytest.approx(expected)
    assert halved.parts["dispatch"] == pytest.approx(fast.parts["dispatch"])


def test_small_layers_wait_for_the_host():
    small = MODEL.model_copy(
        update={"hidden": 256, "ffn": 256, "attention": Attention(heads=4, groups=4, head_dim=64)}
    )
    assert step(pp=1, model=small).parts["host"] > 0
    graphs = step(pp=1, model=small, cuda_graph_impl="full_iteration")
    assert graphs.parts["host"] < step(pp=1, model=small).parts["host"]


def test_too_few_micro_batches_for_chunks():
    with pytest.raises(LayoutError, match="micro-batches"):
        step(vpp=2, micro_batches=2)


def test_a_platform_without_an_accelerator():
    with pytest.raises(PlatformError, match="accelerator"):
        step_time(job(), H100.model_copy(update={"accelerator": None}))


def sides(before, dispatch, between, combine, before_weight=0.0, between_weight=0.0):
    forward = Sides(before, dispatch, between, combine)
    backward = Sides(
        2 * before - before_weight,
        dispatch,
        2 * between - between_weight,
        combine,
        before_weight,
        between_weight,
    )
    return LayerTime({}, {}, forward_sides=forward, backward_sides=backward)


def delayed(delay: bool) -> TrainingSpec:
    return TRAINING.model_copy(update={"delay_wgrad_compute": delay})


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(
    ("layer", "seconds"),
    [
        # nothing to exchange: computation alone
        (sides(1, 0, 1, 0, 1, 1), 6),
        # exchanges of both passes alone
        (sides(0, 1, 0, 1), 4),
        # all exchanges fit behind computation of the other pass, which they slow down for a third
        # of its time by the share of an H100 that DeepEP takes
        (sides(2, 1, 2, 1, 2, 2), 12 / (1 - 20 / 132 / 3)),
    ],
)
def test_streams_side_by_side(layer, seconds, delay):
    assert together_s(layer, layer, delayed(delay)) == pytest.approx(seconds)


def test_delayed_weight_products_hide_a_long_dispatch():
    # the backward dispatch waits for the experts' gradients; weight products fill the gap
    layer = sides(1, 3, 2, 1, between_weight=2)
    apart, joined = (together_s(layer, layer, delayed(delay)) for delay in (True, False))
    assert apart < joined


def test_a_layer_beside_another_is_never_faster_than_its_streams():
    platform = H100
    machine = Machine(platform=platform, stack=platform.need_accelerator().stack(None))
    for ep in (2, 8, 64):
        settings = job(ep=ep, pp=1, **BESIDE)
        time = layer_time(settings.model, settings.training, settings.sizes, machine, moe=True)
        f, b = time.forward_sides, time.backward_sides
        computing = f.before_s + f.between_s + b.before_s + b.between_s
        computing += b.before_weight_s + b.between_weight_s
        exchanging = f.dispatch_s + f.combine_s + b.dispatch_s + b.combine_s
        both = together_s(time, time, settings.training)
        assert max(computing, exchanging) <= both <= 1.2 * computing + exchanging
