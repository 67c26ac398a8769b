"""Orders are Megatron's own, run here with stand-ins for the passes and the network."""

import contextlib
import itertools
import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import combined_1f1b, schedules

from piper_megatron.errors import LayoutError
from piper_megatron.resources.schedule import (
    NOTHING,
    PassTimes,
    Schedule,
    in_flight,
    peak_activation_bytes,
    simulate,
)

RANDOM = random.Random(19)


class Handle:
    def wait(self):
        pass


class Network:
    """A communicator that loses everything it is given."""

    def __init__(self, schedule, rank):
        self.pp_group = SimpleNamespace(size=lambda: schedule.pp, rank=lambda: rank)
        self.virtual_pipeline_model_parallel_size = schedule.vpp if schedule.vpp > 1 else None
        self.config = None
        self.total_stages, self.current_stage = schedule.pp, rank
        self.is_pp_first_stage, self.is_pp_last_stage = rank == 0, rank == schedule.pp - 1

    def __getattr__(self, name):
        both = name == "send_forward_backward_recv_forward_backward"

        def call(*_, recv_prev=False, recv_next=False, overlap_p2p_comm=False, **__):
            if overlap_p2p_comm:
                wanted = {"recv_prev": recv_prev, "recv_next": recv_next}
                return None, {name: Handle() for name, asked in wanted.items() if asked}
            return (None, None) if both else None

        return call


def megatrons_order(schedule, rank):
    """(what, chunk, micro-batch) of every pass, and the passes that run beside each other."""
    order = []

    def forward_step(_step, _data, model, *_, current_microbatch, **__):
        order.append([("forward", model.chunk, current_microbatch)])
        return (model.chunk, current_microbatch), 0

    def backward_step(_input, output, _grad, _config):
        order.append([("backward", *output)])

    # arguments stand where combined_1f1b.combined_forward_backward_step has them
    def combined_step(_step, _data, f_model, _count, _input, _store, b_model, *rest, **named):
        _b_input, b_output, _b_grad, _config = rest
        passes, made = [], None
        if f_model is not None:
            made = (f_model.chunk, named["current_microbatch"])
            passes.append(("forward", *made))
            if named.get("post_forward"):
                named["pre_forward"](f_model.chunk)
                named["post_forward"](made, f_model.chunk)
        if b_model is not None:
            passes.append(("backward", *b_output))
            if named.get("post_backward"):
                named["pre_backward"](b_model.chunk)
                named["post_backward"]("gradient", b_model.chunk)
        order.append(passes)
        return made, 0, "gradient"

    virtual = schedule.vpp if schedule.vpp > 1 else None
    config = mock.MagicMock(
        timers=None,
        no_sync_func=None,
        grad_sync_func=None,
        param_sync_func=None,
        finalize_model_grads_func=None,
        deallocate_pipeline_outputs=False,
        num_microbatches_with_partial_activation_checkpoints=None,
        hybrid_context_parallel=False,
        moe_paged_stash=False,
        fine_grained_activation_offloading=False,
        cuda_graph_impl="none",
        hidden_size=8,
        overlap_p2p_comm=schedule.overlap_p2p,
        batch_p2p_comm=not schedule.overlap_p2p,
        overlap_p2p_comm_warmup_flush=schedule.overlap_warmup_flush,
        overlap_moe_expert_parallel_comm=schedule.beside,
        microbatch_group_size_per_vp_stage=schedule.group_size,
        virtual_pipeline_model_parallel_size=virtual,
        defer_embedding_wgrad_compute=False,
    )
    chunks = [torch.nn.Identity() for _ in range(schedule.vpp)]
    for number, chunk in enumerate(chunks):
        chunk.chunk = number
    groups = mock.MagicMock(spec=schedules.ProcessGroupCollection)
    groups.cp = groups.tp = SimpleNamespace(size=lambda: 1)
    arguments = {
        "forward_step_func": None,
        "data_iterator": [None] * schedule.vpp,
        "model": chunks,
        "num_microbatches": schedule.micro_batches,
        "seq_length": 8,
        "micro_batch_size": 1,
        "pg_collection": groups,
        "p2p_communicator": Network(schedule, rank),
    }
    run = schedules.get_forward_backward_func(
        schedule.pp, schedule.vpp if schedule.vpp > 1 else None
    )
    zeros = torch.zeros
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k)),
            (schedules, "get_model_config", lambda _: config),
            (schedules, "get_model_type", lambda _: None),
            (schedules, "forward_step", forward_step),
            (schedules, "backward_step", backward_step),
            (combined_1f1b, "set_streams", lambda **_: None),
            (combined_1f1b, "combined_forward_backward_step", combined_step),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        run(**arguments)
    return order


def our_order(schedule, rank):
    order = []
    slots = schedule.slots(rank)
    for numbers, chunks in zip(slots, schedule.chunks(slots), strict=True):
        passes = [
            (what, chunk, schedule.table[number, 0])
            for what, number, chunk in zip(("forward", "backward"), numbers, chunks, strict=True)
            if number != NOTHING
        ]
        order += [passes] if schedule.beside else [[one] for one in passes]
    return order


def random_schedule():
    pp = RANDOM.choice([1, 2, 3, 4, 5, 8])
    vpp = RANDOM.choice([1, 2, 3, 4]) if pp > 1 else 1
    if vpp == 1:
        beside = pp == 1 and RANDOM.random() < 0.5
        return Schedule(pp=pp, micro_batches=RANDOM.randint(1, 20), beside=beside)
    group = RANDOM.randint(pp, 2 * pp)
    rest = RANDOM.choice([0, *range(pp, group)])
    return Schedule(
        pp=pp,
        vpp=vpp,
        micro_batches=group * RANDOM.randint(1, 3) + rest,
        group=group,
        beside=RANDOM.random() < 0.5,
        overlap_p2p=True,
        overlap_warmup_flush=RANDOM.random() < 0.5,
    )


@pytest.mark.parametrize("schedule", [random_schedule() for _ in range(60)], ids=str)
def test_order_is_megatrons(schedule):
    for rank in range(schedule.pp):
        assert our_order(schedule, rank) == megatrons_order(schedule, rank)


def test_order_without_overlapped_p2p_is_megatrons():
    schedule = Schedule(pp=4, vpp=2, micro_batches=8)
    for rank in range(schedule.pp):
        assert our_order(schedule, rank) == megatrons_order(schedule, rank)


@pytest.mark.parametrize(("micro_batches", "group"), [(3, 4), (6, 3), (9, 4), (8, 4), (11, 7)])
def test_refuses_what_megatron_refuses(micro_batches, group):
    arguments = {"pp": 4, "vpp": 2, "micro_batches": micro_batches, "group": group}
    unchecked = SimpleNamespace(
        **arguments, group_size=group, beside=False, overlap_p2p=True, overlap_warmup_flush=False
    )
    try:
        megatrons_order(unchecked, 0)
    except (ValueError, RuntimeError):
        with pytest.raises(LayoutError, match="micro-batches"):
            Schedule(**arguments)
    else:
        Schedule(**arguments)


def uniform(schedule, forward_s=1.0, backward_s=2.0, p2p_s=0.0):
    def chunks(seconds):
        return [[seconds / schedule.vpp] * schedule.vpp] * schedule.pp

    return PassTimes(
        forward_s=chunks(forward_s), backward_s=chunks(backward_s), p2p_s=[p2p_s] * schedule.pp
    )


# number 11 of the acceptance list: alpha = micro-batches / PP
@pytest.mark.parametrize(("pp", "alpha", "bubble"), [(4, 4, 3 / 19), (16, 2, 15 / 47), (1, 4, 0)])
def test_acceptance_11_bubble(pp, alpha, bubble):
    timeline = simulate(schedule := Schedule(pp=pp, micro_batches=alpha * pp), uniform(schedule))
    assert timeline.idle_s == pytest.approx([bubble * timeline.step_s] * pp)


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(4, 2, 16), (8, 4, 16), (2, 3, 6)])
def test_interleaving_divides_the_bubble(pp, vpp, micro_batches):
    schedule = Schedule(pp=pp, vpp=vpp, micro_batches=micro_batches, overlap_p2p=True)
    timeline = simulate(schedule, uniform(schedule))
    assert timeline.step_s == pytest.approx(3 * (micro_batches + (pp - 1) / vpp))


def test_a_group_above_pp_loses_nothing_on_the_way_up():
    schedule = Schedule(pp=2, vpp=2, micro_batches=8, group=4, overlap_p2p=True)
    # warm-up waits for rank 0's second chunk, so the bubble is that of the default group
    default = Schedule(pp=2, vpp=2, micro_batches=8, overlap_p2p=True)
    grouped, plain = (simulate(s, uniform(s)).step_s for s in (schedule, default))
    assert grouped == pytest.approx(plain)


def random_times(schedule, p2p=True):
    rng = np.random.default_rng(0)
    shape = (schedule.pp, schedule.vpp)
    return PassTimes(
        forward_s=rng.uniform(0.5, 1.5, shape).tolist(),
        backward_s=rng.uniform(1, 3, shape).tolist(),
        p2p_s=(rng.uniform(0, 0.3, schedule.pp) * p2p).tolist(),
        together_s=rng.uniform(2, 4, (*shape, schedule.vpp)).tolist(),
    )


FEW = [
    Schedule(pp=1, micro_batches=3),
    Schedule(pp=1, micro_batches=3, beside=True),
    Schedule(pp=5, micro_batches=2),
    Schedule(pp=5, micro_batches=9),
    Schedule(pp=4, vpp=3, micro_batches=9, group=5),
    Schedule(pp=4, vpp=3, micro_batches=9, group=5, overlap_p2p=True),
    Schedule(pp=4, vpp=2, micro_batches=8, overlap_p2p=True, overlap_warmup_flush=True),
    Schedule(pp=4, vpp=2, micro_batches=8, overlap_p2p=True, beside=True),
]


@pytest.mark.parametrize("schedule", FEW, ids=str)
def test_passes_wait_for_their_inputs(schedule):
    times = random_times(schedule)
    timeline = simulate(schedule, times)
    chain = [(p, v) for v in range(schedule.vpp) for p in range(schedule.pp)]
    for (sender, sent), (receiver, received) in itertools.pairwise(chain):
        travel = times.p2p_s[sender]
        forward, backward = timeline.forward_s, timeline.backward_s
        arrival = forward[1, sender, sent] + travel
        assert np.all(forward[0, receiver, received] >= arrival - 1e-9)
        arrival = backward[1, receiver, received] + travel
        assert np.all(backward[0, sender, sent] >= arrival - 1e-9)
    own = timeline.forward_s[1, -1, -1]
    assert np.all(timeline.backward_s[0, -1, -1] >= own)
    busy = timeline.working_s + timeline.sending_s
    assert np.all(busy <= timeline.end_s + 1e-9)


@pytest.mark.parametrize("schedule", FEW, ids=str)
def test_a_rank_does_one_slot_at_a_time_and_never_waits_without_a_reason(schedule):
    """Without travel, a slot starts when the rank is free or when its last input was made."""
    times = random_times(schedule, p2p=False)
    timeline = simulate(schedule, times)
    made = {0.0, *timeline.forward_s[1].ravel(), *timeline.backward_s[1].ravel()}
    for rank in range(schedule.pp):
        now = 0.0
        for passes in our_order(schedule, rank):
            spans = [
                (timeline.forward_s if what == "forward" else timeline.backward_s)[:, rank, v, m]
                for what, v, m in passes
            ]
            (start, end), *others = spans
            assert all(np.array_equal(other, (start, end)) for other in others)
            assert start >= now
            assert start in made
            now = end


def test_held_sends_cost_what_they_take():
    schedule = Schedule(pp=3, micro_batches=4)
    timeline = simulate(schedule, uniform(schedule, p2p_s=0.1))
    # ranks at the ends send one tensor for a micro-batch, the middle one two
    assert timeline.sending_s == pytest.approx([0.4, 0.8, 0.4])


def test_overlapped_p2p_is_faster():
    steps = []
    for modes in ((), ("overlap_p2p",), ("overlap_p2p", "overlap_warmup_flush")):
        schedule = Schedule(pp=4, vpp=2, micro_batches=16, **dict.fromkeys(modes, True))
        steps.append(simulate(schedule, uniform(schedule, p2p_s=0.1)))
    assert steps[0].step_s > steps[1].step_s
    assert steps[1].sending_s.sum() > steps[2].sending_s.sum()


def test_a_gradient_leaves_before_the_weight_gradients():
    schedule = Schedule(pp=4, vpp=2, micro_batches=8, overlap_p2p=True, beside=True)
    times = random_times(schedule)
    plain = simulate(schedule, times).step_s
    early = PassTimes(**(vars(times) | {"wgrad_s": [[0.5, 0.5]] * 4}))
    assert simulate(schedule, early).step_s < plain


def test_the_first_forward_pass_waits_for_parameters():
    schedule = Schedule(pp=2, micro_batches=4)
    plain = uniform(schedule)
    late = PassTimes(**(vars(plain) | {"gathered_s": [[1.5], [2.25]]}))
    timeline = simulate(schedule, late)
    assert timeline.forward_s[1, :, 0, 0] == pytest.approx([1.5, 2.5])
    assert timeline.gathering_s == pytest.approx([0.5, 0])


def walked_peaks(schedule, chunk_bytes):
    """Live bytes of a rank after every pass, by walking Megatron's order."""
    peaks = []
    for rank in range(schedule.pp):
        live = peak = 0
        for passes in megatrons_order(schedule, rank):
            for what, chunk, _ in passes:
                live += chunk_bytes[rank][chunk] * (1 if what == "forward" else -1)
                peak = max(peak, live)
        peaks.append(peak)
        assert live == 0
    return peaks


@pytest.mark.parametrize("schedule", [s for s in FEW if not s.beside], ids=str)
def test_peak_activations_follow_the_order(schedule):
    chunk_bytes = np.random.default_rng(1).integers(1, 9, (schedule.pp, schedule.vpp)).tolist()
    peaks = peak_activation_bytes(schedule, chunk_bytes)
    assert peaks.tolist() == walked_peaks(schedule, chunk_bytes)


def test_passes_side_by_side_keep_one_micro_batch_more_between_slots():
    modes = {"pp": 4, "vpp": 2, "micro_batches": 16, "overlap_p2p": True}
    plain, beside = Schedule(**modes), Schedule(**modes, beside=True)
    ones = [[1, 1]] * 4
    assert peak_activation_bytes(plain, ones).tolist() == [11, 9, 7, 5]
    # the extra forward pass of the warm-up takes the place of the one within a steady slot
    assert peak_activation_bytes(beside, ones).tolist() == [11, 9, 7, 5]
    assert in_flight(beside)[0].tolist() == [8, 4]
    alone = Schedule(pp=1, micro_batches=4, beside=True)
    assert in_flight(alone).tolist() == [[1]]


# number 8: Eqs. 1-5 of the paper, with M micro-batches of b / M sequences
def test_acceptance_8_eq_4_and_5():
    d, f, heads, s, k, experts, layers = 1024, 2816, 16, 2048, 4, 32, 32
    pp, ep, b, m = 8, 4, 64, 32
    tokens = b / m * s
    states = layers / pp * (64 * d**2 + 48 * experts / ep * d * f)
    activations = 12 * tokens * d + 4 * heads * tokens * s + 2 * tokens * k / ep * (3 * f + d)

    def memory(schedule):
        chunks = [[layers / pp * activations]] * pp
        return states + peak_activation_bytes(schedule, chunks)

    stages = memory(Schedule(pp=pp, micro_batches=m))
    # (5), and the ratio of activations
    assert stages[0] - stages[-1] == pytest.approx(layers * (pp - 1) / pp * activations)
    assert (stages[0] - states) / (stages[-1] - states) == pytest.approx(pp)
    # (3): GPipe keeps all M micro-batches, as 1F1B's first stage does when M = PP
    gpipe = states + layers / pp * activations * pp
    assert memory(Schedule(pp=pp, micro_batches=pp))[0] == pytest.approx(gpipe)
