"""Piper's dispatchers in whole trainings, against Megatron's own `alltoall`.

`flat`, `2dh` and `halo` move rows alone: losses and gradient norms are the same bit for bit. `rail`
and `rbd` add up the same numbers in another order; differences that rounding makes grow from one
iteration to the next.
"""

import re
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
from ranks import RankServer, Run, losses
from test_cpu_training import DEEPSEEK, HYBRID_SCRIPT, LATENT, NO_DROPOUT
from test_register import OTHER_RELEASES, wheel
from tiny import SCRIPT, tiny_command

from piper_megatron.runtime.dispatch.recall import Remembering, note, recall

MOVE = ("flat", "2dh", "halo")
ADD_UP = ("rail", "rbd")
# of losses; 2e-7 was seen after 20 iterations, and 2e-6 of gradient norms
ROUNDING = 1e-6
# 1e-4 and 7e-3 were seen
BF16_ROUNDING = 2e-3
# two nodes in every expert group of four ranks
HOSTS = tuple("aabb")
EXPERTS = "--expert-model-parallel-size 4"
PRESENT = (
    f"{DEEPSEEK} {EXPERTS} --moe-router-topk 4 --moe-aux-loss-coeff 1e-2 "
    "--moe-router-bias-update-rate 1e-2"
)
EVALUATION = "--eval-iters 1 --eval-interval 2"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE_RECOMPUTE = (
    "--recompute-granularity selective "
    "--recompute-modules core_attn layernorm moe moe_act shared_experts"
)
SHARED_OVERLAP = "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap"
SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"

# what halo does there is what Megatron's dispatcher does, but for the counts
COUNTED_OTHERWISE = {
    "ETP2, several experts a rank": (
        HOSTS,
        f"{SEQUENCE} --expert-tensor-parallel-size 2 --expert-model-parallel-size 2 "
        f"--moe-router-topk 3 {SHARED_OVERLAP}",
    ),
    "capacity and padding": (
        HOSTS,
        f"{EXPERTS} --num-experts 8 --moe-expert-capacity-factor 1.0 "
        "--moe-pad-expert-input-to-capacity",
    ),
    "capacity": (HOSTS, f"{EXPERTS} --moe-expert-capacity-factor 0.5 --deterministic-mode"),
}
LAYOUTS = {
    **COUNTED_OTHERWISE,
    "TP2, ETP1, overlapped shared experts, evaluation": (
        HOSTS,
        f"{EXPERTS} {SEQUENCE} --expert-tensor-parallel-size 1 --num-experts 8 {SHARED_OVERLAP} "
        f"{EVALUATION}",
    ),
    "PP2 x VPP2, full recomputation, distributed optimizer": (
        tuple("aabbccdd"),
        f"{EXPERTS} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        f"{FULL_RECOMPUTE} {OVERLAPPED}",
    ),
    "selective recomputation, evaluation, latent attention, MTP": (
        HOSTS,
        f"{PRESENT} {SELECTIVE_RECOMPUTE} {EVALUATION}",
    ),
}


@pytest.fixture(scope="module")
def train(ranks):
    """Trains with some flags, once for each combination of them."""

    @cache
    def run(flags: str, algorithm: str | None = None, iterations: int = 3, **options) -> Run:
        return train_on(ranks, flags, algorithm, iterations, **options)

    return run


def train_on(
    server: RankServer,
    flags: str,
    algorithm: str | None,
    iterations: int,
    hosts: tuple[str, ...] = HOSTS,
    script: Path = SCRIPT,
) -> Run:
    """Trains on a server's ranks, with one of Piper's dispatchers or with Megatron's own."""
    piper = "" if algorithm is None else f"--piper-dispatcher {algorithm}"
    command = tiny_command(*f"{NO_DROPOUT} {flags} {piper}".split(), iterations=iterations)
    run = server.run(script, command, len(hosts), hosts=hosts).check()
    assert len(run.losses) == iterations
    assert run.losses[-1] < run.losses[0]
    return run


def evaluations(run: Run) -> list[float]:
    """What Megatron prints of every evaluation."""
    return [float(x) for x in re.findall(r"lm loss value: (\S+)", "".join(run.outputs))]


def assert_same(run: Run, expected: Run, rounding: float = 0) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=rounding, abs=0)
    # a norm adds up the roundings of all gradients
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=10 * rounding, abs=0)
    assert evaluations(run) == pytest.approx(evaluations(expected), rel=rounding, abs=0)


@pytest.mark.parametrize("algorithm", [*MOVE, *ADD_UP])
def test_twenty_iterations_of_a_deepseek_style_model(train, algorithm):
    expected = train(PRESENT, iterations=20)
    run = train(PRESENT, algorithm, iterations=20)
    assert_same(run, expected, 0 if algorithm in MOVE else ROUNDING)


@pytest.mark.parametrize(("hosts", "flags"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(train, hosts, flags):
    expected = train(flags, hosts=hosts)
    assert bool(evaluations(expected)) == (EVALUATION in flags)
    assert_same(train(flags, "rail", hosts=hosts), expected, ROUNDING)


@pytest.mark.parametrize(
    ("hosts", "flags"), COUNTED_OTHERWISE.values(), ids=COUNTED_OTHERWISE.keys()
)
def test_rows_that_only_move(train, hosts, flags):
    assert_same(train(flags, "halo", hosts=hosts), train(flags, hosts=hosts))


@pytest.mark.parametrize("algorithm", ["halo", "rbd"])
def test_overlapped_micro_batches_in_bf16(train, algorithm):
    flags = (
        f"{EXPERTS} --num-experts 8 --moe-router-topk 4 --moe-shared-expert-intermediate-size 32 "
        f"--bf16 --overlap-moe-expert-parallel-comm {OVERLAPPED}"
    )
    expected = train(flags)
    assert_same(train(flags, algorithm), expected, 0 if algorithm in MOVE else BF16_ROUNDING)


def test_a_hybrid_model(train):
    flags = f"--hybrid-layer-pattern +E+E/+E {LATENT} {EXPERTS}"
    expected = train(flags, script=HYBRID_SCRIPT)
    assert_same(train(flags, "rail", script=HYBRID_SCRIPT), expected, ROUNDING)


def test_a_checkpoint_continues_with_another_dispatcher(ranks, tmp_path):
    whole = train_on(ranks, f"{EXPERTS} --save {tmp_path} --save-interval 2", "flat", 4)
    load = f"{EXPERTS} --load {tmp_path} --ckpt-step 2"
    command = tiny_command(*f"{NO_DROPOUT} {load} --piper-dispatcher halo".split(), iterations=4)
    rest = ranks.run(SCRIPT, command, 4, hosts=HOSTS).check()
    assert rest.losses == whole.losses[2:]
    assert rest.grad_norms == whole.grad_norms[2:]


@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_other_releases(release):
    flags = f"{PRESENT} --moe-shared-expert-overlap"
    server = RankServer(python_path=str(wheel(release)))
    try:
        expected = train_on(server, flags, None, 2)
        assert_same(train_on(server, flags, "halo", 2), expected)
        assert_same(train_on(server, flags, "rail", 2), expected, ROUNDING)
    finally:
        server.close()


def plans_made(argv: list[str]) -> tuple[int, int]:
    """Trains; how often this rank asked the others for counts, and told relays of its rows."""
    from piper_megatron.runtime.dispatch import dispatcher
    from piper_megatron.runtime.launch import run_script

    gather_counts, announce = Mock(), Mock()
    gather_counts.side_effect = dispatcher._PiperDispatcher._gather_counts
    announce.side_effect = dispatcher.announce
    dispatcher._PiperDispatcher._gather_counts = lambda *args: gather_counts(*args)
    dispatcher.announce = announce
    run_script(str(SCRIPT), argv)
    return gather_counts.call_count, announce.call_count


def test_recomputation_makes_no_plan(ranks):
    layout = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
    flags = f"{NO_DROPOUT} {layout} {FULL_RECOMPUTE} --piper-dispatcher rail"
    argv = tiny_command(*flags.split(), iterations=2)
    layers, micro_batches, iterations = 2, 4, 2
    once = layers * micro_batches * iterations
    run = ranks.call(plans_made, argv, world=4, hosts=tuple("abab")).check()
    assert run.values == [(once, once)] * 4


def test_notes_are_recalled_in_order_by_whom_they_are_of():
    def layer(owner: str, known: str) -> str:
        if (recalled := recall(owner)) is None:
            note(owner, known)
        return recalled or known

    def block(known: str) -> list[str]:
        return [layer("first", known + "1"), layer("second", known + "2")]

    one, other = Remembering(block), Remembering(block)
    assert [one("a"), other("b")] == [["a1", "a2"], ["b1", "b2"]]
    assert [one("x"), other("y"), one("z")] == [["a1", "a2"], ["b1", "b2"], ["a1", "a2"]]
    assert layer("first", "c") == "c"
    assert layer("first", "d") == "d"


def train_behind_graphs(argv: list[str]) -> None:
    """Trains as if routing and counting were replayed: of dispatchers, tensors alone are fresh."""
    import torch
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from piper_megatron.runtime.launch import run_script

    original = MoELayer.preprocess

    def replay(layer, hidden_states, probs, routing_map):
        dispatcher = layer.token_dispatcher
        dispatcher.cuda_dtoh_point = "before_ep_alltoall"
        outputs = original(layer, hidden_states, probs, routing_map)
        values = {name: getattr(dispatcher, name) for name in dispatcher.cudagraph_attrs}
        original(layer, hidden_states, probs.flip(-1), routing_map.flip(-1))
        dispatcher.census = None
        for name, value in values.items():
            if torch.is_tensor(value):
                setattr(dispatcher, name, value)
        return outputs

    MoELayer.preprocess = replay
    run_script(str(SCRIPT), argv)


def test_counts_of_a_cuda_graph_reach_the_exchange(ranks, train):
    flags = f"{NO_DROPOUT} {EXPERTS} --piper-dispatcher flat"
    argv = tiny_command(*flags.split(), iterations=3)
    run = ranks.call(train_behind_graphs, argv, world=4, hosts=HOSTS).check()
    expected = train(EXPERTS)
    assert losses(run.outputs[-1]) == losses(expected.outputs[-1])
