"""`--piper-*` flags become Megatron's sizes, or one line that says what to change."""

import argparse
import sys

import pytest

from piper_megatron.errors import LayoutError, PiperError, WorkloadError
from piper_megatron.runtime.arguments import (
    add_piper_group,
    layout_of,
    notes,
    resolve,
    uses_piper,
)
from piper_megatron.workload.dispatcher_flags import DispatcherFlags, dispatcher_flags


def parse(monkeypatch, *flags, world=8):
    """What Megatron's parser would hand to `resolve`, with the flags that matter here."""
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *flags])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{name}-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=int)
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    parser.add_argument("--moe-token-dispatcher-type", default="allgather")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--cuda-graph-impl", default="none")
    parser.add_argument("--cuda-graph-modules", nargs="*", default=[])
    args = add_piper_group(parser).parse_args(flags)
    args.world_size = world
    return args


def test_the_grid_sets_pipeline_and_expert_sizes(monkeypatch):
    args = parse(monkeypatch, "--piper-grid", "2x4", "--num-experts", "8")
    layout = layout_of(resolve(args))
    assert (layout.pp, layout.ep, layout.dp, layout.edp) == (2, 4, 4, 1)
    assert args.piper_placement is None
    assert vars(resolve(args)) == vars(args)


def test_a_topology_alone_turns_placement_on(monkeypatch):
    args = resolve(parse(monkeypatch, "--piper-topology=auto"))
    assert args.piper_placement == "auto"
    assert uses_piper(args)


def test_without_flags_nothing_is_touched(monkeypatch):
    args = parse(monkeypatch, "--num-experts", "7", "--expert-model-parallel-size", "3")
    before = dict(vars(args))
    assert not uses_piper(args)
    assert vars(resolve(args)) == before


def test_equal_sizes_given_twice_are_no_clash(monkeypatch):
    flags = ("--piper-grid", "2x4", "--expert-model-parallel-size", "4", "--num-experts", "4")
    assert layout_of(resolve(parse(monkeypatch, *flags))).ep == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--piper-grid", "2"], r"--piper-grid takes PPxEP.*got '2'"),
        (["--piper-grid", "0x4"], r"--piper-grid takes PPxEP"),
        (
            ["--piper-grid", "2x4", "--expert-model-parallel-size", "2", "--num-experts", "8"],
            r"--piper-grid 2x4 says EP 4 but --expert-model-parallel-size says 2",
        ),
        (
            ["--piper-grid", "2x4", "--pipeline-model-parallel-size=1", "--num-experts", "8"],
            r"says PP 2 but --pipeline-model-parallel-size says 1",
        ),
        (
            ["--piper-grid", "3x2", "--num-experts", "8"],
            r"world size 8 is not a multiple of TP 1 x CP 1 x PP 3 = 3; legal PPxEP grids: .*2x2",
        ),
        (
            ["--piper-grid", "1x8", "--tensor-model-parallel-size", "2", "--num-experts", "8"],
            r"world size 8 is not a multiple of ETP 2 x EP 8 x PP 1 = 16; legal PPxEP grids: 1x4",
        ),
        (
            ["--piper-grid", "2x4", "--num-experts", "6"],
            r"expert parallel size 4 does not divide --num-experts 6; its divisors: 1, 2, 3, 6",
        ),
        (["--piper-grid", "2x4"], r"expert parallel size 4 needs a model with experts"),
        (
            ["--piper-topology", "auto", "--use-tp-pp-dp-mapping"],
            r"--use-tp-pp-dp-mapping renumbers the ranks itself; remove it",
        ),
    ],
)
def test_bad_input_names_the_thing_and_the_fix(monkeypatch, flags, message):
    args = parse(monkeypatch, *flags)
    with pytest.raises(LayoutError, match=message) as caught:
        resolve(args)
    assert "\n" not in str(caught.value)


EXPERTS = ("--expert-model-parallel-size", "4", "--num-experts", "8")
GRAPHS = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules")


def test_a_dispatcher_sets_megatrons_type_and_says_so(monkeypatch):
    args = resolve(parse(monkeypatch, *EXPERTS, "--piper-dispatcher", "rail"))
    assert args.moe_token_dispatcher_type == "alltoall"
    assert notes(args) == [
        "piper_megatron: --moe-token-dispatcher-type alltoall in place of Megatron's default, for "
        "--piper-dispatcher rail"
    ]
    typed = ("--moe-token-dispatcher-type", "alltoall")
    args = resolve(parse(monkeypatch, *EXPERTS, "--piper-dispatcher", "rail", *typed))
    assert notes(args) == []
    assert notes(resolve(parse(monkeypatch, *EXPERTS))) == []


def test_switches_are_off_unless_typed(monkeypatch):
    assert not uses_piper(parse(monkeypatch, *EXPERTS))
    args = parse(monkeypatch, *EXPERTS, "--piper-dispatcher=halo", "--piper-dispatcher-stats")
    assert dispatcher_flags(resolve(args)) == DispatcherFlags("halo", None, None, True)
    args = parse(
        monkeypatch, *EXPERTS, *"--piper-dispatcher auto --piper-dispatcher-chunks 3".split()
    )
    assert dispatcher_flags(resolve(args)) == DispatcherFlags("auto", 3, None, False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--piper-dispatcher rial", r"does not know 'rial'; did you mean 'rail'\?"),
        ("--piper-dispatcher x", r"does not know 'x'; legal are flat, 2dh, halo, rail, rbd, auto"),
        (
            "--piper-dispatcher halo --piper-dispatcher-chunks 0",
            r"--piper-dispatcher-chunks takes a whole number of at least 1; got '0'",
        ),
        ("--piper-dispatcher halo --piper-dispatcher-chunks two", r"whole number.*got 'two'"),
        (
            "--piper-dispatcher 2dh --piper-dispatcher-chunks 2",
            r"--piper-dispatcher-chunks 2: 2dh sends in one piece; remove it, or .*halo or rail",
        ),
        ("--piper-dispatcher-chunks 2", r"--piper-dispatcher-chunks says how --piper-dispatcher"),
        ("--piper-dispatcher-stats", r"add --piper-dispatcher auto or remove"),
        ("--piper-node-size -2", r"--piper-node-size takes a whole number of at least 1"),
        ("--piper-node-size 3", r"--piper-node-size 3 does not divide .* 4; its divisors: 1, 2, 4"),
        (
            "--piper-dispatcher rail --moe-token-dispatcher-type flex",
            r"rail replaces the exchange of Megatron's alltoall dispatcher, and .* says flex; "
            r"--moe-token-dispatcher-type alltoall, or drop",
        ),
        ("--piper-dispatcher flat --moe-token-dispatcher-type allgather", r"says allgather"),
        (
            "--piper-dispatcher flat --transformer-impl inference_optimized",
            r"for training, and --transformer-impl inference_optimized",
        ),
        (
            "--piper-dispatcher rail --cuda-graph-impl transformer_engine",
            r"which a CUDA graph of whole layers cannot capture; add --cuda-graph-modules attn",
        ),
        (
            "--piper-dispatcher auto --cuda-graph-impl local --cuda-graph-modules moe_router",
            r"graph of moe_preprocess cannot capture; drop moe_router and moe_preprocess",
        ),
        (
            "--piper-dispatcher 2dh --cuda-graph-impl full_iteration",
            r"graph of the whole iteration cannot capture; --cuda-graph-impl none, or --piper-d",
        ),
    ],
)
def test_a_dispatcher_that_the_job_cannot_use_is_refused(monkeypatch, flags, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        resolve(parse(monkeypatch, *EXPERTS, *flags.split()))
    assert "\n" not in str(caught.value)


def test_a_dispatcher_needs_experts(monkeypatch):
    with pytest.raises(WorkloadError, match=r"rail needs a model with experts; add --num-exp"):
        resolve(parse(monkeypatch, "--piper-dispatcher", "rail"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--piper-dispatcher", "flat", *GRAPHS, "moe_router", "moe_preprocess"),
        ("--piper-dispatcher", "rail", *GRAPHS, "attn", "moe_router"),
        ("--piper-node-size", "2"),
    ],
)
def test_what_a_dispatcher_can_live_with_is_let_through(monkeypatch, flags):
    resolve(parse(monkeypatch, *EXPERTS, *flags))


def test_a_misspelt_flag_is_one_line_with_the_nearest_ones(monkeypatch):
    with pytest.raises(PiperError, match=r"unrecognized arguments: --piper-gird.*--piper-grid"):
        parse(monkeypatch, "--piper-gird", "2x4")


def test_a_flag_that_is_not_ours_keeps_megatrons_own_error(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--gird", "2x4")
    assert "usage:" in capsys.readouterr().err
