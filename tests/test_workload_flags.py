"""The table of options: the same values and the same refusals as the parsers of each release."""

import json
import os
import random
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from random_commands import random_command
from test_register import INSTALLED, OTHER_RELEASES, wheel

from piper_megatron.errors import WorkloadError
from piper_megatron.workload import flags
from piper_megatron.workload.arguments import read_arguments

RELEASES = (INSTALLED, *OTHER_RELEASES)
TABLE = resources.files("piper_megatron.validation") / "measured_runs.jsonl"
RUNS = [
    json.loads(line)["megatron_args"] for line in TABLE.read_text(encoding="utf-8").splitlines()
]
# these make `parse_args` read a file or look for a package
DOES_MORE_THAN_PARSE = {"yaml_cfg", "enable_msc", "disable_msc_deprecated"}
WORDS = ("8", "-1", "0.5", "1e-3", "word", "", "127,0", "(64,-1)", "[0]*3+[1]", "([1]+[0]*2)*2")


def megatron_answers(release: str, commands: list[list[str]]) -> list[dict[str, Any]]:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("megatron_parser.py"))],
        env={**os.environ, "PYTHONPATH": str(wheel(release)), "OMP_NUM_THREADS": "1"},
        input=json.dumps(commands),
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(answer.stdout)


def our_answer(release: str, command: list[str]) -> dict[str, Any]:
    try:
        values, _, unknown = flags.parse(command, release)
    except WorkloadError as error:
        return {"refused": str(error)}
    if unknown:
        return {"refused": f"unrecognized arguments: {' '.join(unknown)}"}
    return {"values": json.loads(json.dumps(vars(values)))}


def random_words(rng: random.Random, options: list[flags.Option]) -> list[str]:
    """Up to eight options of any release, with values that often fit."""
    words: list[str] = []
    for option in rng.choices(options, k=rng.randint(1, 8)):
        spelling = rng.choice(option.options)
        values = [_random_value(rng, option) for _ in range(_number_of_values(rng, option))]
        if values and rng.random() < 0.2:
            words += [f"{spelling}={values[0]}", *values[1:]]
        else:
            words += [spelling, *values]
    return words


def _random_value(rng: random.Random, option: flags.Option) -> str:
    if rng.random() < 0.1:
        return rng.choice(WORDS)
    if option.choices:
        return str(rng.choice(option.choices))
    return {
        "int": str(rng.randint(-3, 64)),
        "float": rng.choice(("0.5", "1e-4", "3")),
        "pattern": rng.choice(("2", "[0]*3+[1]*4", "([0]+[1]*3)*2", "[1,0,(1)]")),
        "tuple": rng.choice(("128,0", "(127,-1)", "5")),
    }.get(option.type, "a/path")


def _number_of_values(rng: random.Random, option: flags.Option) -> int:
    if option.kind != "store":
        return int(rng.random() < 0.03)
    usual = {None: 1, "+": 2, "*": 2}.get(option.nargs, option.nargs)
    return rng.choice((usual, usual, usual, usual, 1, 0)) if rng.random() < 0.3 else usual


@pytest.mark.parametrize("release", RELEASES)
def test_values_and_refusals_are_those_of_megatrons_parser(release):
    rng = random.Random(20)
    known = {option for each in RELEASES for option in flags.options(each).values()}
    options = sorted((o for o in known if o.dest not in DOES_MORE_THAN_PARSE), key=repr)
    commands = [
        [],
        *RUNS,
        *(random_command(rng)[0] for _ in range(100)),
        *(random_words(rng, options) for _ in range(500)),
    ]
    accepted = 0
    for command, theirs in zip(commands, megatron_answers(release, commands), strict=True):
        ours = our_answer(release, command)
        accepted += "values" in theirs
        assert ours.keys() == theirs.keys(), (command, ours, theirs)
        if "values" in theirs:
            different = {
                dest: (value, ours["values"].get(dest, "missing"))
                for dest, value in theirs["values"].items()
                if ours["values"].get(dest, "missing") != value
            }
            assert not different, command
            assert ours["values"].keys() == theirs["values"].keys()
        elif theirs["refused"].startswith("unrecognized"):
            assert ours == theirs, command
    assert 200 < accepted < len(commands) - 100  # both verdicts are tested


def test_every_published_run_is_accepted_by_the_newest_release():
    assert all("values" in our_answer(INSTALLED, run) for run in RUNS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layers many", "--num-layers: takes a whole number, got 'many'"),
        ("--num-layers", "--num-layers: expected one argument"),
        ("--lr fast", "--lr: takes a number, got 'fast'"),
        ("--swiglu=yes", "--swiglu: ignored explicit argument 'yes'"),
        (
            "--moe-token-dispatcher-type alltoal",
            "--moe-token-dispatcher-type: 'alltoal' is not legal; did you mean 'alltoall'?",
        ),
        (
            "--moe-layer-freq [0]*3+x",
            "--moe-layer-freq: takes a whole number or a list such as ([0]*3+[1]*57), "
            "got '[0]*3+x'",
        ),
        (
            "--window-size wide",
            "--window-size: takes whole numbers such as 127,0, got 'wide'",
        ),
    ],
)
def test_a_bad_value_is_one_line_with_the_flag_and_the_fix(words, message):
    with pytest.raises(WorkloadError) as error:
        read_arguments(words.split())
    assert str(error.value) == message


@pytest.mark.parametrize("text", ["[0]*999999999", "[1]*9**9", "[0]*900*900", "[" * 500])
def test_a_pattern_too_long_for_any_model_is_refused_at_once(text):
    with pytest.raises(WorkloadError, match="--moe-layer-freq"):
        read_arguments(["--moe-layer-freq", text])


def test_an_unknown_release_names_the_known_ones():
    with pytest.raises(WorkloadError, match=r"0\.19\.1.*did you mean '0\.19\.2'"):
        read_arguments([], version="0.19.1")


def test_defaults_are_not_shared_between_readings():
    read_arguments([]).values.cp_comm_type.append("a2a")
    assert read_arguments([]).values.cp_comm_type == ["p2p"]
