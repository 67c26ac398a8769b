"""Peaks of memory: phases, stages, what the schedule keeps in flight, and published peaks."""

import pytest

from piper_megatron.errors import PlatformError
from piper_megatron.layout.job import job_of
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.memory import memory
from piper_megatron.validation.runs import read_runs
from piper_megatron.workload.arguments import read_arguments
from piper_megatron.workload.presets import preset_arguments

DEEPSEEK = """
    --micro-batch-size 1 --global-batch-size 512 --seq-length 4096 --bf16
    --use-distributed-optimizer --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --expert-tensor-parallel-size 1
""".split()
RUNS = {run.id: run for run in read_runs()}


def deepseek(flags, gpus=256, imbalance=1.0):
    argv = [*preset_arguments("deepseek-v2-lite"), *DEEPSEEK, *flags.split()]
    job = job_of(read_arguments(argv).values, gpus)
    return memory(job, load_platform("dgx-h100"), imbalance)


def published(name):
    run = RUNS[name]
    job = job_of(read_arguments(run.megatron_args).values, run.ranks)
    return memory(job, load_platform(run.platform))


@pytest.fixture(scope="module")
def plain():
    return deepseek("--pipeline-model-parallel-size 3 --expert-model-parallel-size 8", 192)


def test_the_peak_is_the_largest_phase_and_not_a_sum(plain):
    for stage in plain.stages:
        assert stage.peak_gib == max(stage.peaks_gib.values())
        kept = stage.weights_gib + stage.gradients_gib + stage.optimizer_gib + stage.buffers_gib
        assert stage.resident_gib == pytest.approx(kept)
        running = stage.activations_gib + stage.dispatch_gib + stage.logits_gib
        assert stage.peak_gib == pytest.approx(kept + running)
    assert plain.peak_gib == max(stage.peak_gib for stage in plain.stages)
    assert plain.peak_gib == plain.stages[plain.worst_stage].peak_gib


def test_every_phase_is_named(plain):
    assert {"forward", "boundaries", "dispatch", "optimizer step", "load"} <= set(
        plain.stages[1].peaks_gib
    )
    assert "logits" in plain.stages[-1].peaks_gib
    assert "logits" not in plain.stages[0].peaks_gib
    assert "embedding" in plain.stages[0].peaks_gib


def test_the_hottest_rank_needs_more(plain):
    hot = deepseek("--pipeline-model-parallel-size 3 --expert-model-parallel-size 8", 192, 1.5)
    for even, uneven in zip(plain.stages, hot.stages, strict=True):
        assert uneven.dispatch_gib == pytest.approx(1.5 * even.dispatch_gib, rel=0.1)
        assert uneven.resident_gib == even.resident_gib


def test_earlier_stages_keep_more_micro_batches(plain):
    # stage 1 has no end of the model; its boundaries are those of 2 micro-batches
    boundaries = [stage.peaks_gib["boundaries"] - stage.resident_gib for stage in plain.stages]
    assert boundaries[0] / boundaries[1] == pytest.approx(1.5, rel=0.05)


def test_full_recomputation_leaves_boundaries_and_one_layer(plain):
    full = deepseek(
        "--pipeline-model-parallel-size 3 --expert-model-parallel-size 8 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        192,
    )
    stage, before = full.stages[1], plain.stages[1]
    kept = stage.peaks_gib["boundaries"] - stage.resident_gib
    assert kept < 0.1 * (before.peaks_gib["boundaries"] - before.resident_gib)
    assert stage.peaks_gib["dispatch"] > stage.peaks_gib["boundaries"]


@pytest.mark.parametrize(
    ("name", "stage", "within"),
    [
        ("A125-mbc4", "0", 0.005),  # MLA, experts
        ("A127-mbc4", "0", 0.005),
        ("A129-tp1pp2-mbc4", "0", 0.005),  # both ends of a pipeline
        ("A129-tp1pp2-mbc4", "last", 0.005),
        ("A130-tp4-mbc4", "0", 0.005),  # tensor and sequence parallel
        ("A131-70b-tp2cp4-32k", "0", 0.005),  # context parallel
        ("A131-405b-tp1cp8-32k", "0", 0.005),
    ],
)
def test_published_peak_of_a_stage(name, stage, within):
    predicted = published(name).stages[0 if stage == "0" else -1].peak_gib
    assert predicted == pytest.approx(RUNS[name].measured.peak_gib_by_stage[stage], rel=within)


def test_a_platform_without_an_accelerator(tmp_path):
    network = tmp_path / "network.yaml"
    network.write_text(
        "name: network\ndescription: a network alone\nranks_per_node: 8\nlevels:\n"
        "  - {name: node, gbps: 100, evidence: assumed, source: a guess for this test}\n"
        "  - {name: machine, gbps: 10, evidence: assumed, source: a guess for this test}\n"
    )
    argv = [*preset_arguments("deepseek-v2-lite"), *DEEPSEEK]
    job = job_of(read_arguments(argv).values, 8)
    with pytest.raises(PlatformError, match="platform network has no key 'accelerator'"):
        memory(job, load_platform(str(network)))
