"""A job that does not fit is told what is too large and what would really make it fit."""

import json
import re
import shlex
from pathlib import Path

import pytest

from piper_megatron.check.changes import changes, full_recomputation, scaled
from piper_megatron.check.command import Command
from piper_megatron.check.finding import verdict
from piper_megatron.check.run import check
from piper_megatron.layout.job import job_of
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.memory import memory
from piper_megatron.workload.arguments import read_arguments

LINES = (Path(__file__).with_name("data") / "check_cases.jsonl").read_text().splitlines()
CASES = {case["id"]: case for case in map(json.loads, LINES)}
TOO_LARGE = ("B41", "B12-memory")


def finding(tokens, gpus, platform):
    """What is said of the memory of a command."""
    found = check(read_arguments(tokens), gpus, load_platform(platform))
    return next(f for f in found if f.id.startswith("memory."))


@pytest.fixture(scope="module")
def told():
    """Findings of the cases that do not fit."""
    return {
        id: finding(CASES[id]["megatron_args"], CASES[id]["gpus"], "dgx-h100") for id in TOO_LARGE
    }


@pytest.mark.parametrize("id", TOO_LARGE)
def test_what_does_not_fit_is_an_error_with_its_largest_parts(told, id):
    case, said = CASES[id], told[id]
    assert (said.id, said.severity) == ("memory.does-not-fit", "error")
    found = memory(
        job_of(read_arguments(case["megatron_args"]).values, case["gpus"]),
        load_platform("dgx-h100"),
    )
    worst = max(found.stages, key=lambda stage: stage.needed_gib)
    assert f"{worst.needed_gib:.1f} GiB" in said.message
    assert f"optimizer states {worst.optimizer_gib:.1f} GiB" in said.message


def test_several_times_the_memory_is_said_first(told):
    assert re.match(r"[23]\.\d times the memory there is: ", told["B12-memory"].message)
    assert told["B41"].message.startswith("memory does not fit")


def test_states_that_no_recomputation_helps_are_called_so(told):
    assert "no change of recomputation helps" in told["B41"].fix
    assert "or more GPUs: 16 are the minimum with these sizes: " in told["B41"].fix


def proposals(case, said):
    """Every change that a fix names: tokens at the end of the command, ranks, GiB, seconds."""
    pattern = r"(?:sizes: |first: | \| )(.*?) \(([\d.]+) GiB, step ([\d.]+) s\)"
    for text, gib, step_s in re.findall(pattern, said.fix):
        ranks = re.search(r"(\d+) GPUs", text)
        flags = re.sub(r"( on | with |^)?\d+ GPUs| with ", " ", text)
        yield (
            shlex.split(flags),
            int(ranks[1]) if ranks else case["gpus"],
            float(gib),
            float(step_s),
        )


@pytest.mark.parametrize("id", TOO_LARGE)
def test_every_proposed_change_is_legal_and_fits_when_it_is_typed(told, id):
    case = CASES[id]
    proposed = list(proposals(case, told[id]))
    assert len(proposed) >= 3
    for flags, ranks, gib, _ in proposed:
        tokens = [*case["megatron_args"], *flags]
        found = check(read_arguments(tokens), ranks, load_platform("dgx-h100"))
        assert verdict(found) != "error", flags
        message = next(f.message for f in found if f.id == "memory.fits")
        assert f"needs {gib:.1f} GiB" in message


def test_cheaper_changes_come_first(told):
    case = CASES["B41"]
    text = told["B41"].fix.partition("cheapest first: ")[2].partition("; ")[0]
    costs = [
        float(step) * int(ranks[1] if (ranks := re.search(r"(\d+) GPUs", part)) else case["gpus"])
        for part in text.split(" | ")
        for step in re.findall(r"step ([\d.]+) s", part)
    ]
    assert costs == sorted(costs)


@pytest.mark.parametrize("id", ["B41", "B8", "B15", "B17-d", "B65", "B40-offload"])
def test_flags_of_a_change_set_what_it_tries(id):
    case = CASES[id]
    arguments = read_arguments(case["megatron_args"])
    command = Command(
        arguments.values, arguments.given, case["gpus"], platform=load_platform("dgx-h100")
    )
    some = [*changes(command), *scaled(command, 3), full_recomputation()]
    assert len(some) > 4
    for change in some:
        typed = re.sub(r"\d+ times the GPUs", "", change.text)
        values = read_arguments([*case["megatron_args"], *shlex.split(typed)]).values
        for destination, value in change.values.items():
            assert getattr(values, destination) == value, (change.text, destination)


def test_without_a_platform_memory_is_not_judged():
    found = check(read_arguments(CASES["B41"]["megatron_args"]), 8)
    assert not [f for f in found if f.id.startswith("memory.")]


def test_a_model_that_is_not_modelled_is_said_so():
    base = [t for t in CASES["B41-h200"]["megatron_args"] if t != "--qk-layernorm"]
    said = finding([*base, "--spec", "my.module", "spec"], 8, "dgx-h200")
    assert (said.id, said.severity) == ("memory.unknown", "info")
    assert "--spec" in said.message
