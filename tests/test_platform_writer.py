"""A platform that is written and read again is the same platform."""

import re
from pathlib import Path

import pytest

from piper_megatron.platform.dispatch_profile import DispatchProfile
from piper_megatron.platform.platform import Platform, list_platforms, load_platform
from piper_megatron.platform.writer import platform_yaml


def _read_again(platform: Platform, folder: Path) -> Platform:
    path = folder / "again.yaml"
    path.write_text(platform_yaml(platform), encoding="utf-8")
    return load_platform(str(path))


@pytest.mark.parametrize("name", list_platforms())
def test_every_platform_of_the_library_survives(name, tmp_path):
    platform = load_platform(name)
    assert _read_again(platform, tmp_path) == platform


def test_awkward_values_survive(tmp_path):
    platform = load_platform("frontier")
    profile = DispatchProfile(
        nodes=2,
        per_node=4,
        experts=16,
        topk=4,
        token_bytes=(1024.0, 1.5e9),
        seconds={"flat": (1e-7, 1 / 3), "rbd": (2e-7, 0.1 + 0.2)},
        evidence="measured",
        source="a source: with 'quotes', # signs and a long tail of words " + "word " * 40,
    )
    awkward = platform.model_copy(
        update={
            "description": "yes",
            "cluster": re.compile(r"(a|b)\d+: x"),
            "dispatch": (profile,),
        }
    )
    assert _read_again(awkward, tmp_path) == awkward


def test_the_text_has_the_order_of_the_library(tmp_path):
    text = platform_yaml(load_platform("frontier"))
    heads = [line.split(":")[0] for line in text.splitlines() if line[0].isalpha()]
    library = ["name", "description", "ranks_per_node", "cluster", "levels", "accelerator", "hosts"]
    assert [head for head in heads if head in library] == library
    assert "- name: pair\n    ranks: 2\n    gbps: 200\n    evidence: published\n    source:" in text
    assert "fan_out: {8: 1, 16: 0.55}" in text
    assert max(map(len, text.splitlines())) <= 120
