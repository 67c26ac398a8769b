"""What Megatron can train on GPUs trains on the CPU: layouts, precisions, checkpoints, models.

Losses are compared exactly where the same sums are taken in the same order, and to five digits
where only their order differs.
"""

from functools import cache
from pathlib import Path

import pytest
from ranks import RankServer, Run
from test_register import OTHER_RELEASES, wheel
from tiny import SCRIPT, tiny_command

ITERATIONS = 5
ANOTHER_ORDER_OF_SUMS = 1e-5
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
DENSE = "--num-experts 0"
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12"
)
DEEPSEEK = (
    f"{LATENT} --qk-layernorm --num-experts 8 --moe-ffn-hidden-size 32 "
    "--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-layer-freq [0,1,1,1] --mtp-num-layers 1"
)
PIPELINE = "--pipeline-model-parallel-size 2"
EXPERTS = "--expert-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE_RECOMPUTE = (
    "--recompute-granularity selective "
    "--recompute-modules core_attn mla_up_proj layernorm moe shared_experts"
)
HYBRID_SCRIPT = Path(__file__).with_name("pretrain_hybrid.py")

LAYOUTS = {
    "PP2 x EP2 x DP2": (8, f"{PIPELINE} {EXPERTS}"),
    "TP2, ETP1, sequence": (2, f"{TENSOR} --sequence-parallel --expert-tensor-parallel-size 1"),
    "ETP2 x EP2": (4, f"{TENSOR} {EXPERTS} --expert-tensor-parallel-size 2 --sequence-parallel"),
    "interleaved VPP2": (2, f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"),
    "layout string": (2, f"{PIPELINE} --pipeline-model-parallel-layout Et|t|t|tL"),
    "uneven layout string": (2, f"{PIPELINE} --pipeline-model-parallel-layout Ettt|tL"),
    "overlapped dispatch": (2, f"{EXPERTS} --overlap-moe-expert-parallel-comm --bf16"),
    "all-gather dispatch": (2, f"{EXPERTS} --moe-token-dispatcher-type allgather"),
    "bf16": (2, f"{PIPELINE} --bf16"),
    "fp16": (2, "--fp16 --initial-loss-scale 1024"),
    "DeepSeek style": (4, f"{DEEPSEEK} {PIPELINE} {EXPERTS}"),
    "DeepSeek style, TP2": (2, f"{DEEPSEEK} {TENSOR} --sequence-parallel"),
}


@pytest.fixture(scope="module")
def train(ranks):
    """Trains with some flags, once for each combination of them."""

    @cache
    def run(world: int, flags: str = "", script: Path = SCRIPT) -> Run:
        command = tiny_command(*f"{NO_DROPOUT} {flags}".split(), iterations=ITERATIONS)
        return ranks.run(script, command, world).check()

    return run


def same(expected: list[float]):
    return pytest.approx(expected, rel=ANOTHER_ORDER_OF_SUMS)


@pytest.mark.parametrize(("world", "flags"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_loss_falls(train, world, flags):
    losses = train(world, flags).losses
    assert len(losses) == ITERATIONS
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("flags", ["", DEEPSEEK], ids=["GPT", "DeepSeek style"])
def test_losses_do_not_depend_on_the_number_of_data_parallel_ranks(train, flags):
    alone, pair = train(1, flags), train(2, flags)
    assert pair.losses == same(alone.losses)
    assert pair.grad_norms == same(alone.grad_norms)


def test_the_distributed_optimizer_trains_like_the_plain_one(train):
    assert train(2, OVERLAPPED).losses == same(train(2).losses)


def test_sequence_parallelism_changes_no_loss(train):
    split = train(2, f"{TENSOR} {DENSE} --sequence-parallel")
    whole = train(2, f"{TENSOR} {DENSE}")
    assert split.losses == same(whole.losses)
    assert split.grad_norms == same(whole.grad_norms)


def test_context_parallelism_changes_no_loss(train):
    split, whole = train(2, f"{DENSE} --context-parallel-size 2"), train(1, DENSE)
    assert split.losses == same(whole.losses)
    assert split.grad_norms == same(whole.grad_norms)


@pytest.mark.parametrize("recompute", [FULL_RECOMPUTE, SELECTIVE_RECOMPUTE], ids=["full", "some"])
def test_recomputation_changes_no_loss(train, recompute):
    again, once = train(2, f"{DEEPSEEK} {recompute}"), train(2, DEEPSEEK)
    assert again.losses == same(once.losses)
    assert again.grad_norms == same(once.grad_norms)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (4, f"{PIPELINE} {EXPERTS}"),
        (2, f"{OVERLAPPED} --bf16"),
        (2, f"--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable {DEEPSEEK}"),
    ],
    ids=["plain optimizer", "distributed optimizer in bf16", "reshardable, DeepSeek style"],
)
def test_a_saved_run_continues_bit_for_bit(ranks, tmp_path, world, flags):
    assert_continues(ranks, tmp_path, world, flags)


@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_other_releases_train_and_continue(tmp_path, release):
    server = RankServer(python_path=str(wheel(release)))
    try:
        assert_continues(server, tmp_path, 2, f"{DEEPSEEK} {PIPELINE} {OVERLAPPED} --bf16")
    finally:
        server.close()


def assert_continues(server: RankServer, folder: Path, world: int, flags: str) -> None:
    """Dropout is on: the random state comes back as well."""
    save = f"--save {folder} --save-interval 3"
    saving = server.run(SCRIPT, tiny_command(*f"{flags} {save}".split()), world).check()
    load = f"--load {folder} --ckpt-step 3"
    loading = server.run(SCRIPT, tiny_command(*f"{flags} {load}".split()), world).check()
    assert saving.losses[-1] < saving.losses[0] - 0.05
    assert [step["iteration"] for step in loading.iterations[-1]] == [4, 5]
    assert loading.losses == saving.losses[3:]
    assert loading.grad_norms == saving.grad_norms[3:]


@pytest.mark.parametrize(
    ("world", "pattern"),
    [(2, f"*E|*-E*E {PIPELINE}"), (2, f"+E+E/+E {LATENT} {EXPERTS}")],
    ids=["PP2", "latent attention and MTP, EP2"],
)
def test_a_hybrid_model_trains(train, world, pattern):
    losses = train(world, f"--hybrid-layer-pattern {pattern}", HYBRID_SCRIPT).losses
    assert len(losses) == ITERATIONS
    assert losses[-1] < losses[0] - 0.05
