"""What Megatron refuses after start-up: real jobs die where the rule says, and we say so before."""

import re

import pytest
from megatron_judge import gpu_job
from tiny import SCRIPT, tiny_command

from piper_megatron.check.rule import RULES
from piper_megatron.check.run import check
from piper_megatron.workload.arguments import read_arguments

pytestmark = pytest.mark.filterwarnings("ignore")

TENSOR = "--tensor-model-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
# rule -> ranks, and flags that break it in a job that trains without them
REAL_JOBS = {
    "moe.sequence-parallel": (2, TENSOR),
    "sequence.tensor": (2, f"{TENSOR} --sequence-parallel --seq-length 31"),
    "schedule.micro-batches": (2, f"{PIPELINE} --global-batch-size 3"),
    "pipeline.build": (2, f"{PIPELINE} --num-layers 6"),
    "build.widths": (2, f"{TENSOR} --sequence-parallel --moe-ffn-hidden-size 25"),
    "router.top-k": (1, "--moe-router-topk 5"),
    "router.group-top-k": (1, "--moe-router-num-groups 4 --moe-router-group-topk 1"),
    "router.sinkhorn-loss": (
        1,
        "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
    ),
    "router.quantile": (
        1,
        "--moe-router-load-balancing-type quantile_balancing --num-experts 6 --seq-length 31",
    ),
    "mtp.recomputation": (1, f"--mtp-num-layers 1 {FULL}"),
    "experts.probs-on-input": (1, "--moe-apply-probs-on-input"),
    "experts.pattern": (1, "--moe-layer-freq ([1]*3)"),
    "attention.latent-norm": (1, "--multi-latent-attention --qk-l2-norm --no-rope-fusion"),
    "ddp.buckets": (1, "--ddp-num-buckets 2 --ddp-bucket-size 100"),
}


def errors(command, gpus):
    return [f for f in check(read_arguments(command), gpus) if f.severity == "error"]


def citations(rule_id):
    return {citation for rule in RULES if rule.id == rule_id for citation in rule.at}


def test_the_tiny_job_itself_is_fine():
    assert errors(tiny_command(), 1) == []


@pytest.mark.parametrize("rule_id", REAL_JOBS)
def test_real_jobs_die_where_the_rule_says(ranks, rule_id):
    world, flags = REAL_JOBS[rule_id]
    command = tiny_command(*flags.split(), iterations=1)
    assert [(finding.id, finding.late) for finding in errors(command, world)] == [(rule_id, True)]

    run = ranks.run(SCRIPT, command, world)
    assert any(run.codes)
    frames = re.findall(r'File "[^"]*/megatron/([^"]+)", line (\d+)', "\n".join(run.outputs))
    assert {f"{file}:{line}" for file, line in frames} & citations(rule_id)


# rule -> flags that the configuration of the optimizer or of DDP refuses
CONFIGURATIONS = {
    "optimizer.precision-aware": ["--use-precision-aware-optimizer"],
    "optimizer.dtypes": ["--exp-avg-dtype bf16", "--main-grads-dtype bf16 --bf16"],
    "optimizer.mxfp8-step": [
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--overlap-param-gather-with-optimizer-step --reuse-grad-buf-for-mxfp8-param-ag "
        "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --ckpt-format torch "
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    ],
    "ddp.reused-buffer": ["--reuse-grad-buf-for-mxfp8-param-ag"],
    "ddp.buckets": ["--ddp-num-buckets 2 --ddp-bucket-size 100", "--ddp-num-buckets 0"],
    "ddp.fp32-patterns": ["--bf16 --ddp-param-name-patterns-for-fp32-local-accumulation router"],
}


def configure(command, gpus, monkeypatch):
    """What Megatron's optimizer and DDP configurations say of a command."""
    from megatron.training import arguments, training

    monkeypatch.setattr("sys.argv", ["script", *command])
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    with gpu_job():
        args = arguments.parse_args()
        arguments.validate_args(args)
        training.get_megatron_ddp_config(args)
        training.get_megatron_optimizer_config(args)


@pytest.mark.parametrize(
    ("rule_id", "flags"), [(i, flags) for i, rows in CONFIGURATIONS.items() for flags in rows]
)
def test_configurations_refuse_where_the_rule_says(rule_id, flags, monkeypatch):
    command = tiny_command(*flags.split())
    assert rule_id in [finding.id for finding in errors(command, 4)]
    with pytest.raises((AssertionError, ValueError)) as refusal:
        configure(command, 4, monkeypatch)
    last = refusal.traceback[-1]
    at = f"{str(last.path).rpartition('/megatron/')[2]}:{last.lineno + 1}"
    assert at in citations(rule_id)


def test_configurations_accept_the_tiny_job(monkeypatch):
    configure(tiny_command("--use-distributed-optimizer"), 4, monkeypatch)


# what needs a GPU or Transformer Engine to fail; the cited source alone speaks for it
@pytest.mark.parametrize(
    ("rule_id", "flags", "gpus"),
    [
        ("dispatcher.one-rank", "--moe-token-dispatcher-type flex", 1),
        (
            "dispatcher.ncclep-build",
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep "
            "--expert-model-parallel-size 2",
            2,
        ),
        ("attention.unfused-context", "--context-parallel-size 2 --attention-backend unfused", 2),
        (
            "attention.context-heads",
            "--context-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
            "--cp-comm-type a2a",
            8,
        ),
        ("experts.op-fuser", "--use-transformer-engine-op-fuser --moe-apply-probs-on-input", 1),
        ("experts.latent-overlap", "--moe-latent-size 16 --moe-shared-expert-overlap", 1),
        ("precision.aligned", "--fp8-format hybrid --hidden-size 40", 1),
        (
            "mtp.overlap-dense",
            "--bf16 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm "
            "--mtp-num-layers 1 --moe-layer-freq [1,1,1,0]",
            2,
        ),
    ],
)
def test_what_only_a_gpu_would_show(rule_id, flags, gpus):
    more = "--moe-grouped-gemm --moe-shared-expert-intermediate-size 32".split()
    found = errors(tiny_command(*more, *flags.split()), gpus)
    assert rule_id in [finding.id for finding in found if finding.late]


def test_biases_of_grouped_and_shared_experts():
    command = [
        flag for flag in tiny_command("--moe-grouped-gemm") if flag != "--disable-bias-linear"
    ]
    assert [finding.id for finding in errors(command, 1)] == ["experts.grouped-bias"]
    assert errors([*command, "--no-bias-dropout-fusion"], 1) == []
    shared = [*command, "--no-bias-dropout-fusion", "--moe-shared-expert-intermediate-size", "32"]
    assert [finding.id for finding in errors(shared, 1)] == ["experts.shared-bias"]
