"""`--piper-*` flags become Megatron's sizes, or one line that says what to change."""

import argparse
import sys

import pytest

from piper_megatron.errors import LayoutError, PiperError
from piper_megatron.runtime.arguments import add_piper_group, layout_of, resolve, uses_piper


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


def test_a_misspelt_flag_is_one_line_with_the_nearest_ones(monkeypatch):
    with pytest.raises(PiperError, match=r"unrecognized arguments: --piper-gird.*--piper-grid"):
        parse(monkeypatch, "--piper-gird", "2x4")


def test_a_flag_that_is_not_ours_keeps_megatrons_own_error(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--gird", "2x4")
    assert "usage:" in capsys.readouterr().err
