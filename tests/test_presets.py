"""Models by name have their published sizes."""

import re

import pytest

from piper_megatron.check.run import check
from piper_megatron.errors import WorkloadError
from piper_megatron.resources.parameters import active_parameters, total_parameters
from piper_megatron.workload import flags
from piper_megatron.workload.arguments import read_arguments
from piper_megatron.workload.presets import load_preset, preset_arguments, preset_names
from piper_megatron.workload.reading import effective, model_spec
from piper_megatron.workload.spec import ModelSpec

BATCH = "--seq-length 32 --micro-batch-size 1 --global-batch-size 1".split()
BILLION, BINARY_BILLION = 1e9, 2**30


def preset(name: str, *more: str) -> ModelSpec:
    values, _, unknown = flags.parse([*preset_arguments(name), *BATCH, *more])
    assert not unknown
    return model_spec(effective(values, world=1))


def embedding(model: ModelSpec) -> int:
    return model.vocab * model.hidden


# total, active: model cards and technical reports
PUBLISHED_BILLIONS = {
    "arctic": (480, 17),
    "deepseek-v2": (236, 21),
    "deepseek-v2-lite": (15.7, None),
    "deepseek-v3": (671, 37),
    "gpt-oss-120b": (116.83, None),
    "gpt-oss-20b": (20.91, None),
    "kimi-k2": (1026, 32.9),
    "llama3-405b": (405.9, 405.9),
    "llama3-70b": (70.6, 70.6),
    "llama3-8b": (8.03, 8.03),
    "llama4-maverick": (400, 17),
    "llama4-scout": (107.8, 17),
    "mixtral-8x22b": (141, 39),
    "mixtral-8x7b": (46.7, 12.9),
    "moonlight-16b-a3b": (15.96, None),
    "qwen2-57b-a14b": (57.4, 14.2),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-30b-a3b": (30.5, 3.3),
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_sizes_are_those_of_the_model_card(name, billions):
    total, active = billions
    model = preset(name)
    assert total_parameters(model) / BILLION == pytest.approx(total, rel=0.004)
    if active:
        assert active_parameters(model) / BILLION == pytest.approx(active, rel=0.025)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        # Moonlight counts neither the embedding nor the output layer, the others the latter
        ("gpt-oss-120b", 5.13),
        ("gpt-oss-20b", 3.61),
        ("deepseek-v2-lite", 2.4),
        ("moonlight-16b-a3b", 2.24),
    ],
)
def test_active_sizes_without_the_embedding(name, active):
    model = preset(name)
    tables = 2 if name.startswith("moonlight") else 1
    counted = active_parameters(model) - tables * embedding(model)
    assert counted / BILLION == pytest.approx(active, rel=0.025)


# acceptance number 1: X-MoE's sizes are in units of 2^30 and leave out the embedding
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("xmoe-small", 10.1, 1.34),
        ("xmoe-medium", 55.2, 5.20),
        ("xmoe-large", 201.4, 11.48),
        ("xmoe-super", 545.4, 28.36),
    ],
)
def test_xmoe_sizes(name, total, active):
    model = preset(name)
    assert not model.gated
    counted = total_parameters(model) - embedding(model)
    assert counted / BINARY_BILLION == pytest.approx(total, rel=0.005)
    counted = active_parameters(model) - embedding(model)
    assert counted / BINARY_BILLION == pytest.approx(active, rel=0.005)


def test_xmoe_super_with_one_embedding_has_the_published_active_size():
    assert active_parameters(preset("xmoe-super")) / BINARY_BILLION == pytest.approx(
        28.7, rel=0.005
    )


# acceptance number 2: Piper's sizes are decimal, without embedding, router and norms
@pytest.mark.parametrize(
    ("name", "more", "billions"),
    [
        ("xmoe-super", "--num-layers 64", 614.4),
        ("m10b-dense", "", 10.07),
        ("m10b-e16", "", 110.7),
        ("m10b-e32", "", 218.1),
        ("m10b-e64", "", 432.9),
        ("m10b-e128", "", 862.3),
        ("m10b-e256", "", 1721.3),
    ],
)
def test_piper_sizes(name, more, billions):
    model = preset(name, *more.split())
    counted = total_parameters(model) - embedding(model)
    assert counted / BILLION == pytest.approx(billions, rel=0.001)


# acceptance number 2, models with grouped queries: Piper's rule counts them as full attention
@pytest.mark.parametrize(
    ("name", "more", "billions"),
    [
        ("mixtral-8x7b", "", 47.2),
        ("mixtral-8x22b", "", 143.7),
        ("mixtral-8x22b", "--num-layers 60", 154.0),
        ("llama4-scout", "", 101.7),
        ("kimi-k2", "", 1044),
        ("qwen3-235b-a22b", "", 233.4),
    ],
)
def test_piper_rule(name, more, billions):
    model = preset(name, *more.split())
    experts = model.experts
    assert experts is not None
    layer = 4 * model.hidden**2 + 3 * experts.count * model.hidden * experts.ffn
    assert model.layers * layer / BILLION == pytest.approx(billions, rel=0.001)


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_a_model_and_nothing_else(name):
    found = load_preset(name)
    assert found.name == name
    typed = re.findall(r"--([a-z0-9-]+)", found.arguments)
    assert len(typed) == len(set(typed)), "an argument is given twice"
    assert not [a for a in typed if re.search(r"parallel|batch|seq-length|dispatcher|bf16|fp16", a)]


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_legal(name):
    arguments = read_arguments([*preset_arguments(name), *BATCH, "--bf16"])
    assert not [found for found in check(arguments, 1) if found.severity == "error"]


def test_unknown_preset_names_the_nearest():
    with pytest.raises(
        WorkloadError, match=r"unknown model 'deepseek-v4'; did you mean 'deepseek-v"
    ):
        preset_arguments("deepseek-v4")
    with pytest.raises(WorkloadError, match=r"unknown model '\.\./x'; legal are arctic, "):
        preset_arguments("../x")
