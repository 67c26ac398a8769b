"""Configurations of the Hugging Face hub, read as Megatron arguments."""

import json
import random

import pytest
from hf_configs import PUBLISHED

from piper_megatron.errors import WorkloadError
from piper_megatron.resources.parameters import total_parameters
from piper_megatron.workload import flags
from piper_megatron.workload.huggingface import FAMILIES, megatron_arguments
from piper_megatron.workload.presets import preset_arguments
from piper_megatron.workload.reading import effective, model_spec
from piper_megatron.workload.spec import ModelSpec

LLAMA = PUBLISHED["llama3-8b"]
BATCH = "--seq-length 32 --micro-batch-size 1 --global-batch-size 1".split()


def spec_of(arguments: list[str]) -> ModelSpec:
    values, _, unknown = flags.parse([*arguments, *BATCH])
    assert not unknown
    return model_spec(effective(values, world=1))


def without(config: dict, key: str) -> dict:
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration_is_the_preset(name):
    assert megatron_arguments(PUBLISHED[name]) == preset_arguments(name)


def random_configuration(family: str, draw: random.Random) -> dict:
    """A small model of a family; sizes differ so that no two matrices are alike by chance."""
    layers, heads = draw.choice([2, 4, 6]), draw.choice([4, 8])
    experts = {
        "num_experts_per_tok": draw.choice([1, 2]),
        "moe_intermediate_size": draw.choice([20, 24]),
    }
    local = {"num_local_experts": draw.choice([4, 8]), "num_experts_per_tok": 2}
    latent = {
        "first_k_dense_replace": draw.randint(0, layers - 1),
        "kv_lora_rank": draw.choice([12, 16]),
        "n_routed_experts": 8,
        "n_shared_experts": draw.choice([1, 2]),
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice([None, 20]),
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
    }
    qwen = {"num_experts": 4, "decoder_sparse_step": draw.choice([1, 2])}
    own = {
        "deepseek_v2": experts | latent,
        "deepseek_v3": experts | latent | {"n_group": 4, "topk_group": 2},
        "gpt_oss": local | {"head_dim": draw.choice([8, 12])},
        "llama": {"head_dim": draw.choice([None, 12])},
        "llama4_text": local
        | {
            "head_dim": draw.choice([8, 12]),
            "interleave_moe_layer_step": draw.choice([1, 2]),
            "intermediate_size_mlp": 40,
        },
        "mistral": {"sliding_window": draw.choice([None, 16])},
        "mixtral": local,
        "qwen2": {"use_sliding_window": draw.choice([True, False])},
        "qwen2_moe": experts | qwen | {"shared_expert_intermediate_size": 28},
        "qwen3": {"head_dim": draw.choice([8, 12])},
        "qwen3_moe": experts
        | qwen
        | {"head_dim": draw.choice([8, 12]), "mlp_only_layers": draw.choice([[], [1]])},
    }
    return {
        "hidden_size": draw.choice([32, 64]),
        "intermediate_size": 48,
        "max_position_embeddings": 4096,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": draw.choice([2, heads]),
        "tie_word_embeddings": draw.choice([True, False]),
        "vocab_size": draw.choice([96, 100]),
    } | own[family]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"kimi_k2"}))
def test_model_has_the_parameters_that_transformers_builds(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    draw = random.Random(family)
    for _ in range(4):
        config = transformers.AutoConfig.for_model(family, **random_configuration(family, draw))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        written = json.loads(json.dumps(config.to_dict()))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert total_parameters(spec_of(megatron_arguments(written))) == parameters, written


def test_windows_are_where_the_family_has_them():
    oss = spec_of(megatron_arguments(PUBLISHED["gpt-oss-20b"])).attention
    assert oss.window == 128
    assert oss.windowed == (True, False) * 12
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
    mistral = without(without(mistral, "attention_bias"), "mlp_bias")
    assert spec_of(megatron_arguments(mistral)).attention.windowed == (True,) * 32
    qwen = mistral | {"model_type": "qwen2", "max_window_layers": 30}
    assert spec_of(megatron_arguments(qwen)).attention.window is None
    late = spec_of(megatron_arguments(qwen | {"use_sliding_window": True})).attention
    assert late.windowed == (False,) * 30 + (True,) * 2


def test_layers_with_experts_are_where_the_family_has_them():
    assert spec_of(preset_arguments("deepseek-v3")).moe_layers == (False,) * 3 + (True,) * 58
    assert spec_of(preset_arguments("llama4-maverick")).moe_layers == (False, True) * 24


def test_file_and_folder_are_read_alike(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert (
        megatron_arguments(path) == megatron_arguments(str(tmp_path)) == megatron_arguments(LLAMA)
    )


def test_keys_not_understood_are_all_listed_unless_they_switch_nothing_on():
    odd = LLAMA | {"sparse_depth": 3, "gate_kind": "odd", "odd_norm": False, "layer_scale": None}
    with pytest.raises(WorkloadError, match=r"keys not understood: gate_kind, sparse_depth;"):
        megatron_arguments(odd)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba2"},
            r"unknown model_type 'mamba2'; legal are deepseek_v2, .*qwen3_moe",
        ),
        ({"model_type": "lama"}, r"unknown model_type 'lama'; did you mean 'llama'\?"),
        ({"model_type": None}, r"'model_type' is missing"),
        ({"hidden_size": None}, r"'hidden_size' is missing"),
        ({"hidden_size": -4}, r"'hidden_size' must be a positive whole number, got -4"),
        ({"hidden_size": True}, r"'hidden_size' must be a positive whole number, got True"),
        ({"num_hidden_layers": "32"}, r"'num_hidden_layers' must be a positive whole number"),
        ({"rms_norm_eps": "small"}, r"'rms_norm_eps' must be a number that is not negative"),
        ({"tie_word_embeddings": "no"}, r"'tie_word_embeddings' must be true or false"),
        ({"hidden_act": "relu2"}, r"'hidden_act' is \"relu2\"; .* cover \"silu\" alone"),
        ({"attention_bias": True}, r"'attention_bias' is true; .* cover false alone"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling.*'rope_type' is \"longrope\""),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling.*'factor' is missing"),
        ({"rope_scaling": 8}, r"'rope_scaling' must be an object, got 8"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(change, message):
    with pytest.raises(WorkloadError, match=message) as error:
        megatron_arguments(LLAMA | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config.json, line 1: not valid JSON"),
        ("[1]", r"config.json: holds no JSON object"),
        (None, r"cannot read .*config.json: No such file"),
    ],
)
def test_broken_file_is_named(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        megatron_arguments(path)


def test_unknown_family_says_which_keys_are_not_understood():
    mamba = LLAMA | {"model_type": "mamba2", "state_size": 128, "conv_kernel": 4, "use_bias": False}
    with pytest.raises(WorkloadError, match=r"keys not understood: conv_kernel, state_size$"):
        megatron_arguments(mamba)


def test_missing_experts_are_named():
    with pytest.raises(WorkloadError, match="number of experts is missing"):
        megatron_arguments(without(PUBLISHED["mixtral-8x7b"], "num_local_experts"))
