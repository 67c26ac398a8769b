"""Parameter counts against the models that Megatron really builds, tensor by tensor."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from real_models import Case

from piper_megatron.errors import LayoutError
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.pipeline import balanced_layout_string, pipeline_faults
from piper_megatron.layout.sizes import Sizes
from piper_megatron.resources.parameters import (
    active_parameters,
    chunk_tensors,
    count,
    layer_tensors,
    parameter_counts,
    separate_experts,
    total_parameters,
)
from piper_megatron.workload.spec import (
    Attention,
    Experts,
    LatentAttention,
    ModelSpec,
    TrainingSpec,
)

CASES = 300
TE = TrainingSpec(transformer_impl="transformer_engine", moe_grouped_gemm=True)


def real_tensors(case: Case, ranks: list[int]) -> list[Any]:
    """Of each rank and chunk: (name, elements, is a routed expert's, has an own bucket)."""
    from megatron.core.transformer.moe import moe_layer
    from real_models import build_chunks, rank_of

    moe_layer.HAVE_TE, moe_layer.TELinear = True, whole_linear
    found = []
    for rank in ranks:
        with rank_of(case.layout, rank, case.vpp):
            found.append(
                [
                    [
                        (
                            name,
                            parameter.numel(),
                            not getattr(parameter, "allreduce", True),
                            getattr(parameter, "shared_embedding", False),
                        )
                        for name, parameter in chunk.named_parameters()
                    ]
                    for chunk in build_chunks(case)
                ]
            )
    return found


def whole_linear(inputs: int, outputs: int, *, bias: bool, **_: Any) -> Any:
    """A linear layer that every tensor-parallel rank holds whole, as Transformer Engine's."""
    import torch

    return torch.nn.Linear(inputs, outputs, bias=bias)


def real_tensors_of_all(cases: list[tuple[Case, list[int]]]) -> list[Any]:
    return [real_tensors(case, ranks) for case, ranks in cases]


def predicted_tensors(case: Case, stage: int) -> list[Any]:
    """Of each chunk, in order: (elements, is a routed expert's, has an own bucket)."""
    job = case.job()
    apart = bool(separate_experts(job.sizes))
    return [
        [
            (tensor.elements, tensor.expert and apart, tensor.shared)
            for tensor in chunk_tensors(job.model, job.training, job.sizes, chunk)
        ]
        for chunk in job.pipeline.stages[stage]
    ]


def stage_of(layout: ParallelLayout, rank: int) -> int:
    return rank // (layout.world // layout.pp)


def some_ranks(layout: ParallelLayout) -> list[int]:
    """The first rank of every stage, and the job's last."""
    stage = layout.world // layout.pp
    return sorted({*range(0, layout.world, stage), layout.world - 1})


@st.composite
def layouts(draw, moe: bool) -> ParallelLayout:
    tp, cp, pp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 1, 2], [1, 1, 2, 3, 4]))
    ep = draw(st.sampled_from([1, 2, 4])) if moe else 1
    etp = draw(st.sampled_from([tp, tp, 1, 2])) if moe else tp
    smallest = pp * math.lcm(tp * cp, ep * etp)
    return ParallelLayout(
        world=smallest * draw(st.sampled_from([1, 1, 2])), tp=tp, cp=cp, pp=pp, ep=ep, etp=etp
    )


@st.composite
def attentions(draw) -> Attention:
    heads = draw(st.sampled_from([8, 16]))
    latent = None
    if draw(st.booleans()):
        latent = LatentAttention(
            q_rank=draw(st.none() | st.sampled_from([16, 24])),
            kv_rank=draw(st.sampled_from([16, 40])),
            qk_head_dim=draw(st.sampled_from([8, 12])),
            rope_head_dim=draw(st.sampled_from([4, 8])),
            v_head_dim=draw(st.sampled_from([8, 12])),
        )
    return Attention(
        heads=heads,
        groups=heads if latent else draw(st.sampled_from([1, 2, 4, 8])),
        head_dim=draw(st.sampled_from([8, 12])),
        latent=latent,
        # Megatron's own layers refuse a norm on queries that no low rank precedes
        qk_norm=(latent is None or latent.q_rank is not None) and draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        sink=draw(st.booleans()),
        output_gate=latent is None and draw(st.booleans()),
    )


@st.composite
def experts(draw, linear_bias: bool) -> Experts:
    shared = 0 if linear_bias else draw(st.sampled_from([0, 16, 48]))
    return Experts(
        count=draw(st.sampled_from([4, 8])),
        topk=2,
        ffn=draw(st.sampled_from([16, 40])),
        shared_ffn=shared,
        shared_gate=bool(shared) and draw(st.booleans()),
        latent=draw(st.sampled_from([None, None, 16])),
        expert_bias=draw(st.booleans()),
        router_bias=linear_bias,
    )


@st.composite
def splits(draw, layers: int, pp: int, vpp: int, mtp: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(["even", "accounting", "uneven", "text", "text"]))
    if kind == "accounting":
        return {name: draw(st.booleans()) for name in ("account_for_embedding", "account_for_loss")}
    if kind == "uneven":
        return {"first": draw(st.none() | st.integers(1, 3)), "last": draw(st.integers(1, 3))}
    if kind == "text" and pp > 1:
        assume(layers >= pp * vpp - 2)
        text = balanced_layout_string(layers, pp, vpp, mtp)
        if mtp and pp > 2 and vpp == 1 and draw(st.booleans()):
            text = f"Et*{layers - pp + 3}" + "|t" * (pp - 3) + f"|{'m' * mtp}|L"
        return {"text": text}
    return {}


@st.composite
def cases(draw) -> Case:
    moe = draw(st.sampled_from([True, True, True, False]))
    layout = draw(layouts(moe))
    vpp = draw(st.sampled_from([1, 1, 2])) if layout.pp > 1 else 1
    slots = layout.pp * vpp
    layers = max(1, slots * draw(st.integers(1, 2)) + draw(st.sampled_from([0, 0, 0, -2, -1, 1])))
    linear_bias = not (moe and layout.etp > 1) and draw(st.booleans())
    moe_layers = [moe and draw(st.booleans()) for _ in range(layers)]
    model = ModelSpec(
        hidden=draw(st.sampled_from([32, 48])),
        ffn=draw(st.sampled_from([32, 56])),
        gated=draw(st.booleans()),
        attention=draw(attentions()),
        moe_layers=moe_layers,
        experts=draw(experts(linear_bias)) if moe else None,
        mtp_layers=draw(st.sampled_from([0, 0, 1, 2])),
        mtp_repeated=draw(st.booleans()),
        vocab=draw(st.sampled_from([61, 128, 1000])),
        vocab_divisor=draw(st.sampled_from([1, 8, 128])),
        tied_embeddings=draw(st.booleans()),
        position=draw(st.sampled_from(["learned", "rope", "none"])),
        max_positions=40,
        norm=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        linear_bias=linear_bias,
    )
    case = Case(
        model=model,
        layout=layout,
        vpp=vpp,
        split=draw(splits(layers, layout.pp, vpp, model.mtp_layers)),
    )
    try:
        assume(not pipeline_faults(case.job().pipeline, layers))
    except LayoutError:
        assume(False)
    return case


def random_cases() -> list[Case]:
    found: list[Case] = []

    @settings(
        max_examples=CASES,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def test_every_tensor_of_random_models_is_megatrons(ranks):
    tried = [(case, some_ranks(case.layout)) for case in random_cases()]
    assert len(tried) >= CASES
    run = ranks.call(real_tensors_of_all, tried, world=1, timeout_s=300).check()
    for (case, held), found in zip(tried, run.values[0], strict=True):
        counts = parameter_counts(case.job())
        for rank, chunks in zip(held, found, strict=True):
            stage = stage_of(case.layout, rank)
            expected = [[tensor[1:] for tensor in chunk] for chunk in chunks]
            assert predicted_tensors(case, stage) == expected, (case, rank, chunks)
            assert [c.total for c in counts[stage]] == [
                sum(tensor[1] for tensor in chunk) for chunk in chunks
            ]
    kinds = [case for case, _ in tried]
    assert sum(bool(case.model.attention.latent) for case in kinds) > 50
    assert sum(case.model.mtp_layers > 0 for case in kinds) > 50
    assert sum(case.vpp > 1 for case in kinds) > 30
    assert sum(case.model.attention.groups < case.layout.tp for case in kinds) > 5


DEEPSEEK_V3 = ModelSpec(
    name="DeepSeek-V3",
    hidden=7168,
    ffn=18432,
    gated=True,
    attention=Attention(
        heads=128,
        groups=128,
        head_dim=128,
        latent=LatentAttention(
            q_rank=1536, kv_rank=512, qk_head_dim=128, rope_head_dim=64, v_head_dim=128
        ),
        qk_norm=True,
    ),
    moe_layers=(False,) * 3 + (True,) * 58,
    experts=Experts(
        count=256, topk=8, ffn=2048, shared_ffn=2048, score_function="sigmoid", expert_bias=True
    ),
    mtp_layers=1,
    vocab=129280,
    vocab_divisor=1280,
    tied_embeddings=False,
    position="rope",
    max_positions=4096,
    norm="RMSNorm",
    linear_bias=False,
)
QWEN3_235B = ModelSpec(
    name="Qwen3-235B-A22B",
    hidden=4096,
    ffn=12288,
    gated=True,
    attention=Attention(heads=64, groups=4, head_dim=128, qk_norm=True),
    moe_layers=(True,) * 94,
    experts=Experts(count=128, topk=8, ffn=1536),
    vocab=151936,
    tied_embeddings=False,
    position="rope",
    max_positions=4096,
    norm="RMSNorm",
    linear_bias=False,
)
LARGE = {
    "DeepSeek-V3 on 2,048": Case(
        model=DEEPSEEK_V3,
        layout=ParallelLayout(world=2048, tp=2, pp=16, ep=64, etp=1),
        vpp=2,
        split={"text": "Et*3|(tt|)*29m|L"},
    ),
    "Qwen3-235B on 256": Case(
        model=QWEN3_235B,
        layout=ParallelLayout(world=256, tp=4, cp=2, pp=8, ep=8, etp=1),
        split={"account_for_embedding": True, "account_for_loss": True},
    ),
}


@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
def test_every_tensor_of_large_models_is_megatrons(ranks, case):
    stage = case.layout.world // case.layout.pp
    held = [*range(stage - 1, case.layout.world, stage)]
    run = ranks.call(real_tensors, case, held, world=1).check()
    for rank, chunks in zip(held, run.values[0], strict=True):
        expected = [[tensor[1:] for tensor in chunk] for chunk in chunks]
        assert predicted_tensors(case, stage_of(case.layout, rank)) == expected


@pytest.mark.parametrize(
    ("model", "total_billions", "active_billions"),
    [(DEEPSEEK_V3, 671.0, 37.6), (QWEN3_235B, 235.1, 22.2)],
)
def test_whole_models_are_as_large_as_published(model, total_billions, active_billions):
    assert round(total_parameters(model) / 1e9, 1) == total_billions
    assert round(active_parameters(model) / 1e9, 1) == active_billions


def sizes_of(layout: ParallelLayout, **more) -> Sizes:
    axes = {axis: getattr(layout, axis) for axis in ("world", "tp", "cp", "pp", "ep", "etp")}
    return Sizes(**{**axes, "vpp": 1, "micro_batch": 1, "global_batch": 1, "seq": 1, **more})


def test_transformer_engine_repeats_only_the_down_projections_of_latent_attention():
    local = TrainingSpec(transformer_impl="local")
    for model, repeated in ((DEEPSEEK_V3, 7168 * (1536 + 512 + 64)), (QWEN3_235B, 0)):
        for tp in (1, 2, 8):
            sizes = sizes_of(ParallelLayout(world=8, tp=tp))
            for moe in (False, True):
                te, own = (
                    count(layer_tensors(model, training, sizes, moe=moe), sizes)
                    for training in (TE, local)
                )
                assert te.dense - own.dense == repeated - repeated // tp
                assert te.expert == own.expert


def test_transformer_engine_registers_norms_with_the_linear_layer_and_experts_by_matrix():
    case = Case(model=QWEN3_235B, layout=ParallelLayout(world=64, ep=64))
    job = case.job(transformer_impl="transformer_engine", moe_grouped_gemm=True)
    names = [
        t.name for t in chunk_tensors(job.model, job.training, job.sizes, job.pipeline.stages[0][0])
    ]
    assert [name.removeprefix("decoder.layers.0.") for name in names[1:12]] == [
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.experts.linear_fc1.weight.0",
        "mlp.experts.linear_fc1.weight.1",
        "mlp.experts.linear_fc2.weight.0",
        "mlp.experts.linear_fc2.weight.1",
    ]


def test_many_layouts_at_once_are_each_layout():
    layouts = [ParallelLayout(world=64, tp=t, ep=e, etp=x) for t, e, x in ((1, 8, 1), (2, 4, 4))]
    many = Sizes(
        **{
            axis: np.array([getattr(layout, axis) for layout in layouts])
            for axis in ("world", "tp", "cp", "pp", "ep", "etp")
        },
        vpp=1,
        micro_batch=1,
        global_batch=1,
        seq=1,
    )
    for model in (DEEPSEEK_V3, QWEN3_235B):
        for moe in (False, True):
            together = count(layer_tensors(model, TE, many, moe=moe), many)
            for place, layout in enumerate(layouts):
                sizes = sizes_of(layout)
                alone = count(layer_tensors(model, TE, sizes, moe=moe), sizes)
                assert together.dense[place] == alone.dense
                assert together.expert[place] == alone.expert
