"""Every rule cites what refuses in Megatron, and everything that refuses has a rule."""

import ast
import re
from functools import cache
from pathlib import Path

import megatron
import pytest
from test_register import wheel

from piper_megatron.check import run  # noqa: F401  (registers the rules)
from piper_megatron.check.rule import RELEASES, RULES, Rule

INSTALLED = Path(next(iter(megatron.__path__)))
# what stops Megatron there is a call or an operation that fails, not an assertion
CRASHES = {
    "core/transformer/moe/moe_utils.py:656",  # topk of a short row
    "core/transformer/moe/moe_utils.py:823",
    "core/utils.py:835",  # division by no layers
    "training/argument_utils.py:376",  # an unknown field
    "training/arguments.py:138",  # the parser
    "training/arguments.py:584",  # exit()
    "training/arguments.py:672",  # int()
}
# only advice is given there, as a warning
ADVICE = {
    "core/transformer/transformer_config.py:1807",
    "core/transformer/transformer_config.py:2797",
}
# functions that judge a command at start-up
JUDGES = {
    "training/arguments.py": ["validate_args"],
    "training/argument_utils.py": ["core_transformer_config_from_args"],
    "core/transformer/transformer_config.py": ["__post_init__"],
    "core/model_parallel_config.py": ["__post_init__", "resolve_tensor_parallel_weight_shards"],
    "core/parallel_state.py": ["initialize_model_parallel"],
    "core/num_microbatches_calculator.py": [
        "_build_num_microbatches_calculator",
        "__init__",
        "_parse_schedule",
        "_validate_schedule",
    ],
    "core/transformer/pipeline_parallel_layer_layout.py": [
        "__init__",
        "validate_layer_layout",
        "parse_str_to_list",
    ],
}
# what no command line can bring about, and why
UNREACHABLE = {
    "has been initialised before": r"is None, .*already|_GROUP(_GLOO)? is None|already initialized",
    "the parser has these choices only": (
        r"recompute_granularity not in|recompute_method not in|cuda_graph_impl in|"
        r"sharp_enabled_group in|flash_attention_version in|comm_backend == None|"
        r"inference_grouped_gemm_backend"
    ),
    "a flag cannot unset its default": r"self\.linear_\w+ is not None",
    "no flag sets it": (
        r"activation_func_fp8_input_store|fused_single_qkv_rope|variable_seq_lengths is True|"
        r"topk_limited_devices|use_kitchen|quant_recipe|cuda_graph_modules in \('full'|"
        r"self\.fp8 == 'mxfp8'|isinstance\(self\.cp_comm_type, str\)"
    ),
    "validation has settled it": (
        r"sequence_parallel.*tensor_model_parallel_size <= 1|pipeline_dtype is None|"
        r"self\.virtual_pipeline_model_parallel_size == detected|"
        r"activation_func == F\.gelu and|activation_func == quick_gelu and|"
        r"running_global_batch_size %|micro_batch_times_data_parallel_size > 0|"
        r"decrease_batch_size_if_needed|isinstance\(scope, CudaGraphModule\)|"
        r"pipeline_model_parallel_size > 0|is_initialized\(\)|global_batch_size is not None"
    ),
    "the layout text cannot say it": (
        r"isinstance\(row, list\)|isinstance\(layer_type|isinstance\(x, LayerType\)|"
        r"LayerType\.__members__|LayerType\.encoder"
    ),
    "of the machine, and met by every supported one": (
        r"is_torch_min_version|flashinfer|HAVE_PACKAGING|nccl_communicator_config|dc\[0\] >= 8"
    ),
    "a file of layer shapes is not read": r"heterogeneous",
}


@cache
def statements(folder: Path, file: str) -> dict[int, str]:
    """Line -> condition and text of everything that refuses in a file."""
    path = folder / file
    if not path.exists():
        return {}
    found: dict[int, str] = {}

    def walk(node: ast.AST, conditions: tuple[str, ...]) -> None:
        if isinstance(node, ast.Assert):
            found[node.lineno] = f"{' '.join(conditions[-1:])} | {ast.unparse(node.test)}"
        elif isinstance(node, ast.Raise) and node.exc is not None:
            found[node.lineno] = f"{' '.join(conditions[-2:])} | {ast.unparse(node.exc)}"
        inside = conditions
        if isinstance(node, ast.If):
            inside = (*conditions, ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(ast.parse(path.read_text()), ())
    return found


def place(citation: str) -> tuple[str, int]:
    file, _, line = citation.rpartition(":")
    return file, int(line)


@pytest.mark.parametrize("rule", [r for r in RULES if r.at], ids=lambda rule: rule.id)
def test_citations_are_places_that_refuse(rule: Rule):
    for citation in rule.at:
        file, line = place(citation)
        assert citation in CRASHES | ADVICE or line in statements(INSTALLED, file), citation
    assert rule.since in RELEASES


def judging_lines(file: str) -> list[int]:
    tree = ast.parse((INSTALLED / file).read_text())
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in JUDGES[file]
    ]
    return sorted(
        node.lineno
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Raise) and node.exc is not None)
    )


@pytest.mark.parametrize("file", JUDGES)
def test_everything_that_refuses_at_start_up_has_a_rule(file):
    cited = {place(citation) for rule in RULES for citation in rule.at}
    reasons = re.compile("|".join(UNREACHABLE.values()))
    missing = [
        f"{line}: {text}"
        for line in judging_lines(file)
        if (file, line) not in cited
        and not reasons.search(text := statements(INSTALLED, file)[line])
    ]
    assert missing == []


def words(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.rpartition(" | ")[2].lower())[:60]


# the same refusal in other words, or at another place, in the older release
REWORDED = {
    "0.17.1": {
        "batch.at-least-one",
        "dispatcher.shared-overlap",
        "graphs.modules",
        "graphs.recomputation",
        "hybrid.pattern",
    },
    "0.18.2": set(),
}


@pytest.mark.parametrize("release", RELEASES[:-1])
def test_releases_that_have_a_rule(release):
    folder = wheel(release) / "megatron"
    wrong = []
    for rule in RULES:
        if not rule.at or set(rule.at) & (CRASHES | ADVICE) or rule.id in REWORDED[release]:
            continue
        has = any(_refuses(folder, citation) for citation in rule.at)
        if has != (RELEASES.index(rule.since) <= RELEASES.index(release)):
            wrong.append(f"{rule.id} since {rule.since}, in {release}: {has}")
    # a check for a format that older releases have too, for weight shards that they have not
    assert [text for text in wrong if not text.startswith("shards.checkpoint")] == []


def _refuses(folder: Path, citation: str) -> bool:
    file, line = place(citation)
    wanted = words(statements(INSTALLED, file)[line])
    files = [file, "training/arguments.py"] if file == "training/argument_utils.py" else [file]
    return any(words(text) == wanted for f in files for text in statements(folder, f).values())
