"""Accelerators of the platform library, and those that users write."""

import copy
import json
import re
from importlib import resources
from pathlib import Path

import pytest
import yaml
from test_platforms import GOOD

from piper_megatron import strict
from piper_megatron.errors import PlatformError, TopologyError
from piper_megatron.platform import accelerator as accelerators
from piper_megatron.platform.accelerator import Accelerator, list_accelerators
from piper_megatron.platform.evidence import Stated
from piper_megatron.platform.platform import Platform, list_platforms, load_platform

OWN = load_platform("cpu-lab").need_accelerator().model_dump(mode="json")
H100 = load_platform("dgx-h100").need_accelerator()


@pytest.mark.parametrize("name", list_platforms())
def test_every_platform_says_what_an_estimate_needs(name):
    platform = load_platform(name)
    accelerator = platform.need_accelerator()
    for group in Accelerator.model_fields:
        part = getattr(accelerator, group)
        for stated in part if isinstance(part, tuple) else [part]:
            if isinstance(stated, Stated):
                assert len(stated.source) > 10
    for level in platform.levels:
        assert level.transfer, f"{name}: level {level.name} has no transfer"
        assert len(level.transfer.source) > 10
    assert set(platform.evidence().values()) <= {"measured", "published", "fitted", "assumed"}
    assert {"gemm", "memory", "node gbps", "node transfer"} <= set(platform.evidence())
    precisions = {p for p, peak in accelerator.tflops if isinstance(peak, float)}
    assert precisions == set(accelerator.gemm.efficiency), "a peak and what is reached of it"


def test_every_accelerator_file_is_used():
    used = set()
    for name in list_platforms():
        text = (Path(accelerators.__file__).parent / "library" / f"{name}.yaml").read_text()
        used.update(re.findall(r"^(?:accelerator:|  like:) (\S+)$", text, re.MULTILINE))
    assert used == set(list_accelerators())


def test_every_platform_of_the_published_runs_is_known():
    table = resources.files("piper_megatron.validation") / "measured_runs.jsonl"
    names = {json.loads(line)["platform"] for line in table.read_text().splitlines()}
    assert {"dgx-a100-80", "b200-8gpu", "frontier"} <= names
    for name in names:
        load_platform(name).need_accelerator()


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72", "dgx-a100-80", "lumi"])
def test_a_platform_is_read_from_at_most_two_files(name, monkeypatch):
    opened = []

    def counting(path, *args):
        opened.append(path.name)
        return read(path, *args)

    read = strict.read_yaml
    monkeypatch.setattr(strict, "read_yaml", counting)
    monkeypatch.setattr(accelerators, "read_yaml", counting)
    load_platform.cache_clear()
    load_platform(name)
    assert 1 <= len(opened) <= 2, opened


@pytest.mark.parametrize(
    ("platform", "capacity", "bf16"),
    [
        ("frontier", 63.98, 191.5),
        ("dgx-h100", 79.11, 989),
        ("dgx-h200", 139.8, 989),
        ("h20", 95.1, 148),
        ("gb300-nvl72", 277.5, 2500),
        ("mi355x", 287.9, 2500),
    ],
)
def test_capacities_and_peaks(platform, capacity, bf16):
    accelerator = load_platform(platform).need_accelerator()
    assert accelerator.memory.capacity_gib == capacity
    assert accelerator.peak_flops("bf16") == bf16 * 1e12


def test_what_a_platform_states_goes_before_what_it_is_like():
    h200 = load_platform("dgx-h200").need_accelerator()
    assert h200.hbm.gbps == 4800
    assert h200.gemm == H100.gemm
    assert load_platform("perlmutter-a100-80").accelerator == load_platform("dgx-a100").accelerator


def platform_with(accelerator) -> dict:
    return copy.deepcopy(GOOD) | {"accelerator": accelerator}


def own(**change) -> dict:
    changed = copy.deepcopy(OWN)
    for key, value in change.items():
        changed[key] = changed[key] | value if isinstance(value, dict) else value
    return platform_with(changed)


@pytest.mark.parametrize(
    "accelerator", ["h100", {"like": "b200", "name": "our B200"}, OWN], ids=["name", "like", "own"]
)
def test_a_platform_of_the_user(tmp_path, accelerator):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(platform_with(accelerator)))
    platform = load_platform(str(path))
    assert platform.need_accelerator().peak_flops("bf16") > 0
    assert Platform.model_validate_json(platform.model_dump_json()) == platform


STACK = OWN["stacks"][0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (platform_with("h1000"), "accelerator: unknown accelerator 'h1000'; did you mean 'h100'?"),
        (platform_with({"like": "h1000"}), "unknown accelerator 'h1000'"),
        (platform_with({"like": "h100", "hmb": 1}), "unknown key 'hmb'; did you mean 'hbm'?"),
        (platform_with({"name": "a"}), "accelerator.memory: Field required"),
        (own(tflops={"bf61": 1}), "accelerator.tflops: unknown key 'bf61'; did you mean 'bf16'?"),
        (own(tflops={"bf16": 0}), "accelerator.tflops.bf16: Input should be greater than 0, got 0"),
        (own(hbm={"gbps": -5}), "accelerator.hbm.gbps"),
        (own(gemm={"efficiency": {"bf16": 1.5}}), "accelerator.gemm.efficiency.bf16"),
        (own(gemm={"efficiency": {"int8": 0.5}}), "accelerator.gemm.efficiency.int8"),
        (own(gemm={"source": ""}), "accelerator.gemm.source"),
        (own(gemm={"evidence": "guessed"}), "accelerator.gemm.evidence"),
        (own(host={"launch_s": "fast"}), "accelerator.host.launch_s"),
        (own(memory={"capacity_gib": 81}), "capacity_gib 81.0 is above nominal_gb 4.0"),
        (own(overheads={"reserved_ratio": 0.9}), "accelerator.overheads.reserved_ratio"),
        (own(stacks=[]), "accelerator.stacks"),
        (own(stacks=[STACK, STACK]), "stacks need distinct names"),
        (own(stacks=[STACK | {"match": "nemo"}]), "one stack is the default and has no match"),
        (own(stacks=[STACK | {"match": "("}]), "accelerator.stacks.0.match"),
    ],
)
def test_bad_accelerators_get_one_line(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(TopologyError) as caught:
        load_platform(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_estimate_without_an_accelerator_names_the_key():
    platform = Platform.model_validate(GOOD)
    with pytest.raises(PlatformError, match="platform mine has no key 'accelerator'") as caught:
        platform.need_accelerator()
    assert "\n" not in str(caught.value)


def test_a_precision_that_the_device_lacks():
    with pytest.raises(PlatformError, match="A100 SXM, 80 GB has no fp8 peak"):
        load_platform("dgx-a100").need_accelerator().peak_flops("fp8")


def test_stacks_are_found_by_name_by_description_or_by_default():
    stacks = [
        STACK | {"name": "nemo-26", "match": r"nemo 26\."},
        STACK | {"name": "nemo", "match": "nemo"},
        STACK | {"name": "other", "match": None},
    ]
    accelerator = Accelerator.model_validate(OWN | {"stacks": stacks})
    for text, name in {
        None: "other",
        "nemo": "nemo",
        "container nemo 26.04, Megatron-Bridge 0.4": "nemo-26",
        "NeMo 25.11": "nemo",
        "Primus": "other",
    }.items():
        assert accelerator.stack(text).name == name


DOCUMENTATION = (Path(__file__).parents[1] / "docs" / "platforms.md").read_text()


def test_the_documentations_example_is_a_platform(tmp_path):
    examples = re.findall(r"```yaml\n(.*?)```", DOCUMENTATION, re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(examples[-1])
    platform = load_platform(str(path))
    assert platform.need_accelerator().stack().name == "ours"
    assert platform.levels[1].transfer.efficiency.all_to_all == 0.9


def test_the_documentation_names_every_key_of_an_accelerator():
    for group, field in Accelerator.model_fields.items():
        if group == "name":
            continue
        assert f"`{group}`" in DOCUMENTATION
        keys = getattr(field.annotation, "model_fields", {})
        for key in set(keys) - set(Stated.model_fields):
            assert f"`{key}`" in DOCUMENTATION, f"{group}.{key}"


@pytest.mark.parametrize(("name", "transposes"), [("dgx-h100", True), ("dgx-b200", False)])
def test_8_bit_weights_in_two_orientations(name, transposes):
    assert load_platform(name).need_accelerator().transposes_8_bit is transposes
