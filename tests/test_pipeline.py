"""The pipeline layout against Megatron's own configuration and layer counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from piper_megatron.errors import LayoutError
from piper_megatron.layout.pipeline import (
    balanced_layout_string,
    pipeline_faults,
    pipeline_layout,
)

quick = settings(max_examples=400, deadline=None, derandomize=True)


def megatron_config(layers, pp, vpp, **split) -> TransformerConfig:
    names = {
        "first": "num_layers_in_first_pipeline_stage",
        "last": "num_layers_in_last_pipeline_stage",
        "account_for_embedding": "account_for_embedding_in_pipeline_split",
        "account_for_loss": "account_for_loss_in_pipeline_split",
        "text": "pipeline_model_parallel_layout",
    }
    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.bfloat16,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        mtp_num_layers=split.pop("mtp_layers", None),
        **{names[name]: value for name, value in split.items()},
    )


def megatrons_split(config, pp, vpp) -> list[list[tuple[int, ...]]]:
    """Layer numbers of every chunk, [PP][VPP], as Megatron builds them without a text."""
    return [
        [
            tuple(
                get_transformer_layer_offset(config, vp_stage, rank) + index
                for index in range(get_num_layers_to_build(config, vp_stage, rank))
            )
            for vp_stage in (range(vpp) if vpp > 1 else [None])
        ]
        for rank in range(pp)
    ]


@st.composite
def splits(draw):
    pp = draw(st.integers(1, 6))
    vpp = draw(st.sampled_from([1, 1, 2, 3])) if pp > 1 else 1
    near_even = pp * vpp * draw(st.integers(1, 4))
    split = {}
    kind = draw(st.sampled_from(["even", "accounting", "uneven"]))
    layers = near_even + draw(st.sampled_from([0, 0, 0, -1, 1]))
    if kind == "accounting":
        split["account_for_embedding"] = draw(st.booleans())
        split["account_for_loss"] = draw(st.booleans())
        layers = near_even - sum(split.values()) + draw(st.sampled_from([0, 0, 0, 1]))
    if kind == "uneven":
        ends = st.none() | st.integers(0, 3).map(lambda n: n * vpp) | st.integers(1, 12)
        split["first"], split["last"] = draw(ends), draw(ends)
        middle = pp - (split["first"] is not None) - (split["last"] is not None)
        if draw(st.booleans()):
            middle_layers = max(middle, 0) * vpp * draw(st.integers(1, 3))
            layers = middle_layers + (split["first"] or 0) + (split["last"] or 0)
    return {"layers": max(layers, 1), "pp": pp, "vpp": vpp, **split}


@quick
@given(splits())
def test_layers_of_every_chunk_are_megatrons(split):
    try:
        expected = megatrons_split(megatron_config(**split), pp := split["pp"], vpp := split["vpp"])
    except (AssertionError, ValueError, ZeroDivisionError):
        with pytest.raises(LayoutError) as error:
            pipeline_layout(**split)
        assert "\n" not in str(error.value)
        return
    layout = pipeline_layout(**split)
    assert (layout.pp, layout.vpp) == (pp, vpp)
    assert [[chunk.layers for chunk in stage] for stage in layout.stages] == expected
    ends = [(p, v) for p in range(pp) for v in range(vpp) if layout.stages[p][v].embedding]
    assert ends == [(0, 0)]
    ends = [(p, v) for p in range(pp) for v in range(vpp) if layout.stages[p][v].loss]
    assert ends == [(pp - 1, vpp - 1)]


@st.composite
def texts(draw):
    """A balanced text with up to two symbols changed, so that about half are legal."""
    pp = draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    layers = draw(st.integers(max(pp * vpp - 2, 1), 20))
    mtp_layers = draw(st.sampled_from([0, 0, 1, 2]))
    text = balanced_layout_string(layers, pp, vpp, mtp_layers)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        change = draw(st.sampled_from(["t", "m", "|", "L", "E", ",", "*2", "x", ""]))
        text = text[:at] + change + text[at + draw(st.integers(0, 1)) :]
    return {"layers": layers, "pp": pp, "vpp": 1, "mtp_layers": mtp_layers, "text": text}


@quick
@given(texts())
def test_texts_are_read_as_megatron_reads_them(arguments):
    try:
        config = megatron_config(**{**arguments, "mtp_layers": arguments["mtp_layers"] or None})
        expected = config.pipeline_model_parallel_layout
        # megatron/core/parallel_state.py:828, at the start of training
        assert expected.virtual_pipeline_model_parallel_size == 1 or arguments["pp"] > 1
    except (AssertionError, ValueError, IndexError):
        with pytest.raises(LayoutError) as error:
            pipeline_layout(**arguments)
        assert "\n" not in str(error.value)
        return
    layout = pipeline_layout(**arguments)
    number = 0
    for v in range(layout.vpp):
        for p in range(layout.pp):
            chunk, kinds = layout.stages[p][v], expected.layout[p][v]
            decoders = kinds.count(LayerType.decoder)
            assert chunk.layers == tuple(range(number, number + decoders))
            assert chunk.mtp_layers == kinds.count(LayerType.mtp)
            assert chunk.embedding == (LayerType.embedding in kinds)
            assert chunk.loss == (LayerType.loss in kinds)
            assert chunk.empty == (not kinds)
            number += decoders


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "mtp_layers", "text"),
    [
        (61, 16, 2, 0, "Et|(tt|)*30L"),
        (61, 16, 2, 0, "Ett|(tt|)*29t|L"),
        (61, 8, 4, 1, "Et*2|(tt|)*22t|(tt|)*7mL"),
        (61, 8, 4, 1, "Et|(tt|)*30mL"),
        (61, 2, 16, 0, "Et|t|(tt|)*29tL"),
        (14, 4, 2, 1, "Et*2|(tt|)*5t|tmL"),
        (27, 2, 1, 0, "E,(t)*13|(t)*14,L"),
        (60, 16, 2, 1, "E(|tt)*30,|mL"),
        (61, 16, 2, 1, "Et*3|(tt|)*29m|L"),
    ],
)
def test_published_texts_are_legal(layers, pp, vpp, mtp_layers, text):
    layout = pipeline_layout(layers, pp, vpp, mtp_layers=mtp_layers, text=text)
    assert (layout.pp, layout.vpp) == (pp, vpp)
    assert pipeline_faults(layout, layers) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 61, "pp": 16}, "legal PP: 1, 61; try .*layout 'E"),
        ({"layers": 64, "pp": 16, "vpp": 3}, "4 on a rank.*legal VPP: 1, 2, 4"),
        ({"layers": 8, "pp": 1, "vpp": 2}, "above 1"),
        ({"layers": 60, "pp": 4, "first": 13, "vpp": 2}, "13 is not a multiple .* 12 or 14"),
        ({"layers": 60, "pp": 4, "first": 14}, "46 of 60 .*leave 45 or 48"),
        ({"layers": 60, "pp": 4, "first": 0}, "at least 1"),
        ({"layers": 60, "pp": 2, "first": 30, "last": 28}, "leave 2 of 60 layers for 0 middle"),
        ({"layers": 8, "pp": 2, "vpp": 2, "first": 4, "last": 4}, "division by zero"),
        ({"layers": 60, "pp": 4, "first": 15, "account_for_loss": True}, "exclude"),
        ({"layers": 60, "pp": 4, "first": 15, "text": "Et|t|t|L"}, "keep the layout alone"),
        ({"layers": 61, "pp": 16, "text": "Et|(tt|)*29|L"}, "has 59 decoder layers.*model has 61"),
        ({"layers": 5, "pp": 2, "text": "Ett|tx|ttL"}, "has 'x'; legal are E"),
        ({"layers": 5, "pp": 2, "text": "Ett|t|ttL"}, "3 stages, not a multiple of PP 2"),
        ({"layers": 5, "pp": 2, "vpp": 3, "text": "Ett|t|t|tL"}, "VPP 2 on PP 2, but VPP 3"),
        ({"layers": 5, "pp": 1, "text": "Ett|tttL"}, "remove every '|'"),
        ({"layers": 5, "pp": 2, "text": "Ett|ttt"}, "end with its only L"),
        ({"layers": 5, "pp": 2, "text": "tt|tttL"}, "begin with its only E"),
        ({"layers": 3, "pp": 2, "mtp_layers": 1, "text": "Et|mttL"}, "behind an MTP layer"),
        ({"layers": 3, "pp": 2, "mtp_layers": 2, "text": "Et|ttmL"}, "has 1 MTP layers"),
        ({"layers": 3, "pp": 2, "mtp_layers": 2, "text": "Etttm|mL"}, "over several stages"),
        ({"layers": 3, "pp": 2, "mtp_layers": 1, "text": "Et|tt|m|L"}, None),
        ({"layers": 3, "pp": 2, "mtp_layers": 1, "text": "Et|ttm||L"}, "not its last"),
        ({"layers": 8, "pp": 2, "text": "Et*999999999|tL"}, "more than 100,000 symbols"),
        ({"layers": 3, "pp": 0}, "at least 1"),
    ],
)
def test_what_is_illegal_names_the_legal_neighbours(arguments, message):
    if message is None:
        pipeline_layout(**arguments)
        return
    with pytest.raises(LayoutError, match=message) as error:
        pipeline_layout(**arguments)
    assert "\n" not in str(error.value)


def test_faults_that_megatron_accepts():
    def faults(layers, pp, **arguments):
        return " ".join(pipeline_faults(pipeline_layout(layers, pp, **arguments), layers))

    assert "chunk 0 of rank 1" in faults(2, 2, text="Et||t|L")
    assert "first pipeline rank" in faults(2, 2, text="Et|t|m|L", mtp_layers=1)
    assert not faults(2, 1, text="EttmL", mtp_layers=1)
    assert "hold 8 decoder layers, the model has 9" in faults(9, 1, first=2, last=8)
    assert "hold 10 decoder layers, the model has 8" in faults(8, 3, first=6, last=4)
    assert not faults(8, 2, vpp=2)


@pytest.mark.parametrize("layers", [43, 61, 78, 94, 27, 3])
@pytest.mark.parametrize("mtp_layers", [0, 1, 2])
def test_balanced_texts_are_legal_and_balanced(layers, mtp_layers):
    for pp in range(1, 33):
        for vpp in range(1, 5 if pp > 1 else 2):
            if layers < pp * vpp - 2:
                with pytest.raises(LayoutError, match=f"at most {layers + 2}"):
                    balanced_layout_string(layers, pp, vpp, mtp_layers)
                continue
            text = balanced_layout_string(layers, pp, vpp, mtp_layers)
            layout = pipeline_layout(layers, pp, vpp, mtp_layers=mtp_layers, text=text)
            assert pipeline_faults(layout, layers) == []
            loads = [
                len(chunk.layers) + chunk.mtp_layers + chunk.loss
                for stage in layout.stages
                for chunk in stage
            ]
            even = -(-(layers + 1 + mtp_layers) // (pp * vpp))
            assert max(loads) <= max(even, 1 + mtp_layers)


def test_a_published_layout_is_what_balancing_gives():
    assert balanced_layout_string(61, 16, 2) == "Et|(tt|)*30L"
    assert balanced_layout_string(61, 8, 4, 1) == "Et|(tt|)*30mL"
    assert balanced_layout_string(94, 8) == "Et*11|(t*12|)*6t*11L"
