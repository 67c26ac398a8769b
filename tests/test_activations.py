"""Activation memory against what autograd really keeps, and against memory while it runs."""

import itertools
from typing import Any

import numpy as np
import pytest
from real_activations import MICRO_BATCH, SEQUENCE, kept_by_autograd, kept_of_all, peak_of_all
from real_dispatch_memory import peaks_by_algorithm
from real_models import Case

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.job import Job
from piper_megatron.layout.pipeline import pipeline_layout
from piper_megatron.layout.sizes import Sizes
from piper_megatron.resources.activations import (
    buffers,
    chunk_activations,
    embedding_activations,
    head_activations,
    layer_activations,
    mtp_activations,
    stage_buffers,
)
from piper_megatron.resources.dispatch_rows import distinct_domains
from piper_megatron.workload.spec import (
    Attention,
    BatchSpec,
    Experts,
    LatentAttention,
    ModelSpec,
    TrainingSpec,
)

KEPT_TOLERANCE = 5e-3
PEAK_TOLERANCE = 0.07
ALONE = ParallelLayout(world=1)
TP2 = ParallelLayout(world=2, tp=2, etp=2)
PLAIN = Attention(heads=8, groups=8, head_dim=16)
GROUPED = Attention(heads=8, groups=2, head_dim=16)
LATENT = Attention(
    heads=8,
    groups=8,
    head_dim=24,
    qk_norm=True,
    latent=LatentAttention(q_rank=48, kv_rank=32, qk_head_dim=16, rope_head_dim=8, v_head_dim=16),
)
DIRECT_QUERY = Attention(
    heads=8,
    groups=8,
    head_dim=24,
    latent=LatentAttention(kv_rank=32, qk_head_dim=16, rope_head_dim=8, v_head_dim=16),
)
EXPERTS = Experts(count=8, topk=2, ffn=96)
SHARED = Experts(count=8, topk=2, ffn=96, shared_ffn=96, shared_gate=True)
SIGMOID = Experts(count=8, topk=2, ffn=96, score_function="sigmoid", expert_bias=True)
CAPACITY = Experts(count=8, topk=2, ffn=96, capacity_factor=1.5, pad_to_capacity=True)
FP32_ROUTER = {"moe_router_dtype": "fp32"}
AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}


def dense(attention: Attention = PLAIN, **settings: Any) -> ModelSpec:
    return ModelSpec(
        **{
            "hidden": 128,
            "ffn": 256,
            "gated": True,
            "attention": attention,
            "moe_layers": (False, False),
            "vocab": 500,
            "tied_embeddings": False,
            "position": "rope",
            "max_positions": SEQUENCE,
            "norm": "LayerNorm",
            "linear_bias": False,
            **settings,
        }
    )


def moe(experts: Experts = EXPERTS, attention: Attention = PLAIN, **settings: Any) -> ModelSpec:
    return dense(attention, moe_layers=(True, True), experts=experts, **settings)


def first_dense(**settings: Any) -> ModelSpec:
    shared = Experts(count=8, topk=2, ffn=96, shared_ffn=96)
    return dense(LATENT, moe_layers=(False, True), experts=shared, **settings)


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def full(method: str, layers: int) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


NAMED_CASES: dict[str, tuple[ModelSpec, ParallelLayout, dict[str, Any]]] = {
    "dense": (dense(), ALONE, {}),
    "RMSNorm": (dense(norm="RMSNorm"), ALONE, {}),
    "fused SwiGLU": (dense(), ALONE, {"bias_activation_fusion": True}),
    "GELU, biases, learned positions, tied": (
        dense(gated=False, linear_bias=True, position="learned", tied_embeddings=True),
        ALONE,
        {},
    ),
    "fused GELU": (
        dense(gated=False, linear_bias=True, position="learned"),
        ALONE,
        {"bias_activation_fusion": True},
    ),
    "grouped queries": (dense(GROUPED), ALONE, {}),
    "norms of queries and keys": (
        dense(Attention(heads=8, groups=2, head_dim=16, qk_norm=True)),
        ALONE,
        {},
    ),
    "attention sink": (
        dense(Attention(heads=8, groups=8, head_dim=16, sink=True)),
        ALONE,
        {},
    ),
    "softmax in bf16": (dense(), ALONE, {"attention_softmax_in_fp32": False}),
    "dropout": (dense(), ALONE, {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "fused cross entropy": (dense(), ALONE, {"cross_entropy_loss_fusion": True}),
    "TP2": (dense(), TP2, {}),
    "fewer groups than ranks": (dense(GROUPED), ParallelLayout(world=4, tp=4, etp=4), {}),
    "MLA": (dense(LATENT), ALONE, {}),
    "MLA, RMSNorm": (dense(LATENT, norm="RMSNorm"), ALONE, {}),
    "MLA without low-rank queries": (dense(DIRECT_QUERY), ALONE, {}),
    "MLA, TP2": (dense(LATENT), TP2, {}),
    "MTP": (dense(mtp_layers=1), ALONE, {}),
    "MTP twice, TP2": (dense(mtp_layers=2), TP2, {}),
    "MoE": (moe(), ALONE, {}),
    "MoE, fp32 router, auxiliary loss": (moe(), ALONE, FP32_ROUTER | AUX_LOSS),
    "MoE, softmax first": (moe(), ALONE, FP32_ROUTER | {"moe_router_pre_softmax": True}),
    "MoE, sigmoid with bias": (moe(SIGMOID), ALONE, FP32_ROUTER | AUX_LOSS),
    "MoE, all-gather": (moe(), ALONE, FP32_ROUTER | {"moe_token_dispatcher_type": "allgather"}),
    "MoE, shared expert with gate": (moe(SHARED), ALONE, FP32_ROUTER),
    "MoE, fused SwiGLU": (moe(), ALONE, FP32_ROUTER | {"bias_activation_fusion": True}),
    "MoE, GELU": (moe(gated=False), ALONE, FP32_ROUTER),
    "MoE, capacity": (
        moe(CAPACITY),
        ALONE,
        FP32_ROUTER | {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    ),
    "full recomputation": (dense(), ALONE, full("uniform", 1)),
    "full, two layers at once": (dense(), ALONE, full("uniform", 2)),
    "full, the first layer": (moe(), ALONE, full("block", 1)),
    "full, split over TP2": (
        dense(),
        TP2,
        full("uniform", 1) | {"distribute_saved_activations": True, "sequence_parallel": False},
    ),
    "full, MLA and MoE": (first_dense(), ALONE, full("uniform", 1)),
    "full, MTP": (dense(mtp_layers=1), ALONE, full("uniform", 1)),
    **{
        f"recomputed {' '.join(modules)}": (
            first_dense(),
            ALONE,
            FP32_ROUTER | selective(*modules),
        )
        for modules in (
            ("core_attn",),
            ("layernorm",),
            ("mla_up_proj",),
            ("mlp",),
            ("moe",),
            ("shared_experts",),
            ("layernorm", "shared_experts", "mla_up_proj"),
            ("core_attn", "layernorm", "mla_up_proj", "moe", "mlp"),
        )
    },
    "dense, recomputed layernorm": (dense(), ALONE, selective("layernorm")),
    "dense, recomputed core_attn mlp": (dense(), ALONE, selective("core_attn", "mlp")),
}
# discarded outputs are copied on the CPU when they come back, not shared
PEAK_CASES = [
    "dense",
    "grouped queries",
    "softmax in bf16",
    "MLA",
    "MoE",
    "MoE, capacity",
    "full recomputation",
    "full, two layers at once",
    "full, MLA and MoE",
    "recomputed core_attn",
    "recomputed mlp",
    "recomputed moe",
    "recomputed shared_experts",
    "dense, recomputed core_attn mlp",
]


def job_of(model: ModelSpec, layout: ParallelLayout, settings: dict[str, Any]) -> Job:
    """The same as the resource model sees it."""
    settings = {"attention_softmax_in_fp32": True, "bias_activation_fusion": False, **settings}
    listed = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    training = {
        "transformer_impl": "local",
        "precision": "bf16",
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "sequence_parallel": layout.tp > 1,
        "dispatcher": settings.get("moe_token_dispatcher_type", "alltoall"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **{name: v for name, v in settings.items() if name in TrainingSpec.model_fields},
        **{name: (settings[name],) for name in listed if name in settings},
    }
    return Job(
        model=model,
        batch=BatchSpec(seq=SEQUENCE, micro_batch=MICRO_BATCH, global_batch=8),
        training=TrainingSpec(**training),
        layout=layout,
        pipeline=pipeline_layout(model.layers, layout.pp, mtp_layers=model.mtp_layers),
    )


def real_case(model: ModelSpec, layout: ParallelLayout, settings: dict[str, Any]) -> Any:
    without_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return Case(model=model, layout=layout), without_dropout | settings


def predicted(job: Job, imbalance: float = 1.0) -> Any:
    return chunk_activations(job, job.pipeline.stages[0][0], imbalance=imbalance, cpu=True)


@pytest.fixture(scope="module")
def kept(ranks):
    """Bytes that autograd keeps in each case."""
    cases = [real_case(*case) for case in NAMED_CASES.values()]
    values = ranks.call(kept_of_all, cases, world=1).check().values[0]
    return dict(zip(NAMED_CASES, values, strict=True))


@pytest.fixture(scope="module")
def peaks(ranks):
    """The most bytes alive in each case; a small vocabulary leaves the peak to the layers."""
    cases = []
    for name in PEAK_CASES:
        model, layout, settings = NAMED_CASES[name]
        cases.append(real_case(model.model_copy(update={"vocab": 64}), layout, settings))
    values = ranks.call(peak_of_all, cases, world=1).check().values[0]
    return dict(zip(PEAK_CASES, values, strict=True))


@pytest.mark.parametrize("name", NAMED_CASES)
def test_saved_bytes_are_those_that_autograd_keeps(kept, name):
    job = job_of(*NAMED_CASES[name])
    assert predicted(job).total == pytest.approx(kept[name].bytes, rel=KEPT_TOLERANCE)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(world=2, ep=2),
        ParallelLayout(world=2, tp=2, ep=2),
        ParallelLayout(world=2, tp=2, etp=2),
    ],
    ids=["EP2", "TP2 EP2", "TP2 ETP2"],
)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_saved_bytes_follow_the_rows_that_arrive(ranks, layout, dispatcher):
    settings = FP32_ROUTER | {"moe_token_dispatcher_type": dispatcher}
    case, real_settings = real_case(moe(SHARED), layout, settings)
    run = ranks.call(kept_by_autograd, case, real_settings, world=2).check()
    job = job_of(moe(SHARED), layout, settings)
    ranks_tokens = SEQUENCE * MICRO_BATCH // layout.tp
    mean_rows = ranks_tokens * EXPERTS.topk * layout.etp
    for real in run.values:
        imbalance = real.rows / (mean_rows * job.model.layers)
        predicted_bytes = predicted(job, imbalance).total
        assert predicted_bytes == pytest.approx(real.bytes, rel=KEPT_TOLERANCE)


@pytest.mark.parametrize("name", PEAK_CASES)
def test_peak_is_the_most_that_lives_at_once(peaks, name):
    model, layout, settings = NAMED_CASES[name]
    job = job_of(model.model_copy(update={"vocab": 64}), layout, settings)
    chunk = predicted(job)
    peak = chunk.total + max(height for height, _ in chunk.beyond().values())
    assert peak == pytest.approx(peaks[name], rel=PEAK_TOLERANCE)


def test_peaks_of_pipers_dispatchers_are_those_of_real_ranks(ranks):
    """On two ranks, each a node of its own, relays hold what is counted as their most."""
    layout = ParallelLayout(world=2, ep=2)
    model = moe().model_copy(update={"vocab": 64})
    names = ["alltoall", "flat", "2dh", "halo", "rail", "rbd"]
    case = real_case(model, layout, FP32_ROUTER)
    run = ranks.call(peaks_by_algorithm, *case, names, ["a", "b"], world=2).check()
    for of_rank in run.values:
        found = {}
        for name, held in of_rank.items():
            job = job_of(model, layout, FP32_ROUTER | {"moe_token_dispatcher_type": name})
            even = SEQUENCE * MICRO_BATCH * EXPERTS.topk * model.layers
            chunk = predicted(job, held.rows / even)
            found[name] = chunk.total + max(height for height, _ in chunk.beyond().values())
            assert found[name] == pytest.approx(held.peak, rel=0.04), name
        assert found["rail"] > 1.05 * found["flat"]
        assert of_rank["rail"].peak > 1.05 * of_rank["flat"].peak


def test_relays_keep_rows_by_index_and_pass_on_whole_buffers():
    moved, relayed = (
        layer_activations(TE_MODEL, te(dispatcher=name), sizes(ep=8), moe=True)
        for name in ("flat", "rail")
    )
    tokens, pairs = 4096, 4096 * 6
    reached = tokens * float(distinct_domains(TE_MODEL.experts, 8))
    # tokens of sent rows, fan-out of rows; pairs sent, passed on, copied, and put in order
    assert relayed.saved["dispatch"] == pytest.approx(8 * (2 * reached + 4 * pairs))
    others = [part for part in moved.saved if part != "dispatch"]
    assert all(moved.saved[part] == relayed.saved[part] for part in others)
    two_hops = layer_activations(TE_MODEL, te(dispatcher="halo"), sizes(ep=8), moe=True)
    assert two_hops.saved == moved.saved
    assert two_hops.working_forward >= moved.working_forward


def test_a_layer_keeps_34_bytes_a_channel_and_5_a_score():
    """Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, eq. 1."""
    seq, batch, hidden, heads = 1024, 4, 2048, 16
    model = ModelSpec(
        hidden=hidden,
        ffn=4 * hidden,
        gated=False,
        attention=Attention(heads=heads, groups=heads, head_dim=hidden // heads),
        moe_layers=(False,),
        vocab=1000,
        position="learned",
        max_positions=seq,
    )
    training = TrainingSpec(transformer_impl="local", precision="fp16")
    kept = layer_activations(model, training, sizes(seq=seq, micro_batch=batch), moe=False).total
    paper = seq * batch * hidden * (34 + 5 * heads * seq / hidden)
    assert kept == pytest.approx(paper, rel=1e-2)
    recomputed = training.model_copy(
        update={"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
    )
    kept = layer_activations(model, recomputed, sizes(seq=seq, micro_batch=batch), moe=False).total
    # the paper keeps queries, keys and values; so does Megatron
    assert kept == pytest.approx(seq * batch * hidden * 34, rel=1e-2)


def sizes(**some: Any) -> Sizes:
    settings = dict.fromkeys(("world", "tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch"), 1)
    return Sizes(**{**settings, "global_batch": 8, "seq": 4096, **some})


TE_MODEL = moe(
    Experts(count=64, topk=6, ffn=1408, shared_ffn=2816),
    Attention(heads=16, groups=4, head_dim=128),
    hidden=2048,
    norm="RMSNorm",
    max_positions=4096,
)
TE = TrainingSpec(
    precision="bf16",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    sequence_parallel=True,
    dispatcher="alltoall",
    moe_grouped_gemm=True,
    moe_permute_fusion=True,
    moe_router_dtype="fp32",
    attention_backend="flash",
)


def te(**settings: Any) -> TrainingSpec:
    return TE.model_copy(update=settings)


def test_transformer_engine_keeps_what_its_source_says():
    """One layer, byte by byte (module/linear.py, layernorm_linear.py, attention backends)."""
    kept = layer_activations(TE_MODEL, te(), sizes(), moe=True).saved
    tokens, hidden, rows = 4096, 2048, 4096 * 6
    queries, groups = 16 * 128, 4 * 128
    assert kept["qkv"] == tokens * (2 * hidden + 2 * hidden + 4)  # input, norm, statistics
    assert kept["core_attention"] == tokens * (2 * (2 * queries + 2 * groups) + 4 * 16)
    assert kept["norms"] == tokens * (2 * hidden + 4)
    assert kept["router"] == tokens * 6 * (8 + 4)  # chosen experts and their scores
    experts = rows * (2 * hidden + 2 * 2 * 1408 + 2 * 1408 + 4)
    assert kept["experts"] == experts
    # the norm's output, both halves, the product of them
    assert kept["shared_experts"] == tokens * 2 * (hidden + 3 * 2816)
    assert kept["dispatch"] == tokens * (2 * 64 + 1) * 4 + 2 * rows * 4


def test_experts_in_8_bits_keep_their_inputs_in_8_bits():
    kept = layer_activations(TE_MODEL, te(fp8="hybrid"), sizes(), moe=True).saved
    rows = 64 * -(-4096 * 6 // 64 // 16) * 16
    assert kept["experts"] == rows * (2048 + 2 * 2 * 1408 + 1408) + 4096 * 6 * 4


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "flex", "rbd"])
def test_imbalance_multiplies_the_rows_of_experts_alone(dispatcher):
    even, hot = (
        layer_activations(TE_MODEL, te(dispatcher=dispatcher), sizes(ep=8), moe=True, imbalance=x)
        for x in (1.0, 1.5)
    )
    assert hot.saved["experts"] == pytest.approx(1.5 * even.saved["experts"])
    others = [part for part in even.saved if part not in ("experts", "dispatch")]
    assert all(hot.saved[part] == even.saved[part] for part in others)
    assert hot.working_forward + hot.total > even.working_forward + even.total


@pytest.mark.parametrize(
    ("modules", "training"),
    [
        (("moe_act",), {}),
        (("layernorm",), {}),
        (("moe",), {}),
        (("shared_experts",), {}),
        (("moe_act", "layernorm"), {"fp8": "hybrid", "fp8_recipe": "mxfp8"}),
    ],
)
def test_what_is_recomputed_is_not_saved_and_comes_back(modules, training):
    plain = layer_activations(TE_MODEL, te(**training), sizes(ep=8), moe=True)
    settings = {"recompute_granularity": "selective", "recompute_modules": modules, **training}
    less = layer_activations(TE_MODEL, te(**settings), sizes(ep=8), moe=True)
    assert less.total < plain.total
    assert less.total + less.working >= 0.95 * plain.total


def test_recomputing_flash_attention_keeps_more():
    """Its inputs are kept as views of one tensor with all queries, keys and values."""
    recomputed = te(recompute_granularity="selective", recompute_modules=("core_attn",))
    plain, more = (
        layer_activations(TE_MODEL, training, sizes(), moe=True) for training in (te(), recomputed)
    )
    assert more.total > plain.total


@pytest.mark.parametrize("module", ["core_attn", "expert_fc1", "moe_act", "mlp_norm"])
def test_offloaded_tensors_are_on_the_host(module):
    training = te(fine_grained_activation_offloading=True, offload_modules=(module,))
    plain = layer_activations(TE_MODEL, te(), sizes(ep=8), moe=True)
    less = layer_activations(TE_MODEL, training, sizes(ep=8), moe=True)
    moved = plain.total - less.total
    assert 0 < moved <= sum(less.offloaded.values())


def test_sizes_may_be_arrays():
    combinations = list(itertools.product([1, 2, 8], [1, 2], [1, 2, 8], [1, 2], [1, 4]))
    columns = np.array(combinations).T
    names = ("tp", "cp", "ep", "etp", "micro_batch")
    many = sizes(**dict(zip(names, columns, strict=True)))
    for training in (
        te(),
        te(dispatcher="flex", recompute_granularity="selective", recompute_modules=("moe_act",)),
        te(dispatcher="allgather", attention_backend="unfused", fp8="hybrid"),
    ):
        for place, combination in enumerate(combinations):
            one = sizes(**dict(zip(names, combination, strict=True)))
            for value, values in zip(
                all_figures(training, one), all_figures(training, many), strict=True
            ):
                assert value == pytest.approx(np.broadcast_to(values, len(combinations))[place])


def all_figures(training: TrainingSpec, sizes: Sizes) -> list[Any]:
    pieces = [
        layer_activations(TE_MODEL, training, sizes, moe=True),
        layer_activations(TE_MODEL, training, sizes, moe=False),
        embedding_activations(TE_MODEL, training, sizes),
        head_activations(TE_MODEL, training, sizes),
        mtp_activations(TE_MODEL, training, sizes),
    ]
    kept = buffers(TE_MODEL, training, sizes, 2**25, moe={True, False}, head=True)
    figures = [(p.total, p.working, p.working_forward, p.routed) for p in pieces]
    return [*itertools.chain(*figures), *kept.values()]


def test_one_placeholder_for_each_shape_of_a_weight():
    job = job_of(dense(GROUPED), ALONE, {}).__class__(
        model=dense(GROUPED),
        batch=BatchSpec(seq=SEQUENCE, micro_batch=1, global_batch=1),
        training=te(),
        layout=ALONE,
        pipeline=pipeline_layout(2, 1),
    )
    qkv, proj, head = (8 + 2 * 2) * 16 * 128, 8 * 16 * 128, 512 * 128
    mlp = 2 * 256 * 128 + 256 * 128
    # the output layer and the first product of the MLP have one shape
    assert stage_buffers(job, 0, 2**25)["placeholder weight gradients"] == 2 * (qkv + proj + mlp)
    assert head == 2 * 256 * 128
