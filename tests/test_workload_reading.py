"""What is derived from arguments: equal to Megatron's own validation and configuration."""

import enum
import json
import os
import random
import re
import sys
from argparse import Namespace
from importlib import resources
from unittest import mock

import pytest
from megatron_judge import ENVIRONMENT, gpu_job, judge
from random_commands import random_command

from piper_megatron.errors import LayoutError, PiperError, WorkloadError
from piper_megatron.layout.job import job_of
from piper_megatron.workload.arguments import read_arguments
from piper_megatron.workload.reading import batch_spec, effective, model_spec, training_spec
from piper_megatron.workload.spec import TrainingSpec

TABLE = resources.files("piper_megatron.validation") / "measured_runs.jsonl"
RUNS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
}
# what `validate_args` derives or changes, and what a cost depends on
BY_VALIDATION = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size data_parallel_size world_size
    transformer_pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    gtp_weight_remat_size expert_gtp_weight_remat_size sequence_parallel global_batch_size
    micro_batch_size num_layers encoder_num_layers seq_length encoder_seq_length
    overlap_p2p_comm align_param_gather overlap_param_gather overlap_grad_reduce
    ffn_hidden_size kv_channels add_bias_linear add_qkv_bias position_embedding_type
    params_dtype main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
    accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32 fp8_param_gather
    optimizer use_distributed_optimizer use_layer_wise_distributed_optimizer
    reuse_grad_buf_for_mxfp8_param_ag bias_gelu_fusion bias_swiglu_fusion apply_rope_fusion
    num_experts moe_ffn_hidden_size moe_router_load_balancing_type moe_aux_loss_coeff
    cuda_graph_impl mtp_num_layers attention_backend
""".split()
# what the transformer configuration makes of it
BY_CONFIGURATION = """
    num_query_groups recompute_granularity recompute_method recompute_num_layers
    recompute_modules microbatch_group_size_per_vp_stage moe_flex_dispatcher_backend
    moe_expert_capacity_factor moe_router_padding_for_quantization moe_router_group_topk
    moe_router_num_groups num_layers hidden_size kv_channels q_lora_rank kv_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim softmax_type window_size window_attn_skip_freq
    moe_shared_expert_intermediate_size moe_latent_size cpu_offloading_num_layers
    cross_entropy_fusion_impl cross_entropy_loss_fusion sequence_parallel
    attention_softmax_in_fp32 apply_rope_fusion cuda_graph_impl cuda_graph_modules
""".split()


def world_of(run: dict) -> int:
    """Published or inferred ranks; enough of them where nothing is known."""
    inferred = re.search(r"inferred=(\d+)", run.get("gpus_note") or "")
    return run["gpus"] or (int(inferred[1]) if inferred else 1024)


def megatrons(tokens: list[str], world: int) -> tuple[Namespace, object]:
    """Arguments that Megatron has validated, and its configuration; inside `gpu_job`."""
    from megatron.training import arguments

    environment = {**ENVIRONMENT, "WORLD_SIZE": str(world), "RANK": "0"}
    if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(tokens):
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["pretrain.py", *tokens]),
        mock.patch("torch.use_deterministic_algorithms"),
    ):
        args = arguments.parse_args()
        arguments.validate_args(args)
        return args, arguments.core_transformer_config_from_args(args)


def plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [plain(element) for element in value]
    return DTYPES.get(str(value), value)


def differences(tokens: list[str], world: int) -> dict[str, tuple]:
    """Destination -> (Megatron's value, ours), where they are not equal."""
    ours = effective(read_arguments(tokens).values, world)
    args, config = megatrons(tokens, world)
    pairs = [(args, dest) for dest in BY_VALIDATION]
    pairs += [(config, dest) for dest in BY_CONFIGURATION if hasattr(config, dest)]
    return {
        dest: (plain(getattr(source, dest)), getattr(ours, dest))
        for source, dest in pairs
        if plain(getattr(source, dest)) != plain(getattr(ours, dest))
    }


def accepted_by_validation(run: dict) -> list[str]:
    """Arguments of a published run without what 0.19.2 refuses although that run used it."""
    tokens = run["megatron_args"]
    if "--cross-entropy-fusion-impl" in tokens:
        tokens = [*tokens, "--cross-entropy-fusion-impl", "native"]
    if "--use-megatron-fsdp" in tokens:
        tokens = [*tokens, "--ckpt-format", "fsdp_dtensor"]
    if run["id"].startswith("A132"):  # beside full recomputation
        tokens = [token for token in tokens if token != "--overlap-moe-expert-parallel-comm"]
    return tokens


def test_published_runs_are_completed_as_megatron_completes_them():
    with gpu_job():
        wrong = {run["id"]: differences(accepted_by_validation(run), world_of(run)) for run in RUNS}
    assert not {name: found for name, found in wrong.items() if found}


def test_random_commands_are_completed_as_megatron_completes_them():
    rng = random.Random(3)
    compared, wrong, refused = 0, [], []
    with gpu_job():
        for _ in range(700):
            tokens, world = random_command(rng)
            if judge(tokens, world) is not None:
                continue
            try:
                found = differences(tokens, world)
            except WorkloadError as error:
                refused.append(str(error))
                continue
            compared += 1
            if found:
                wrong.append((tokens, found))
    assert not wrong
    assert compared > 200
    assert all("resource model does not know" in message for message in refused)


GPT = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1000
""".split()


def values_of(*more: str) -> Namespace:
    return read_arguments([*GPT, *more]).values


def test_reading_what_megatron_validated_gives_the_same_workload():
    with gpu_job():
        for run in RUNS[::8]:
            tokens, world = accepted_by_validation(run), world_of(run)
            ours = effective(read_arguments(tokens).values, world)
            theirs = effective(megatrons(tokens, world)[0], world)
            for spec in (model_spec, batch_spec, training_spec):
                assert spec(theirs) == spec(ours) == spec(effective(ours, world)), run["id"]


def test_an_older_releases_namespace_is_completed_with_the_newest_defaults():
    for version in ("0.17.1", "0.18.2"):
        old = read_arguments([*GPT, "--cuda-graph-scope", "attn"], version=version).values
        assert effective(old, 8).cuda_graph_modules == ["attn"]
        assert job_of(old, 8).model == job_of(values_of(), 8).model


def test_a_model_is_read_field_by_field():
    model = job_of(
        values_of(
            *"--num-experts 8 --moe-layer-freq [0]*1+[1]*3 --moe-router-topk 3".split(),
            *"--moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 96".split(),
            *"--moe-shared-expert-gate --moe-latent-size 16 --moe-router-num-groups 4".split(),
            *"--moe-router-group-topk 2 --moe-router-score-function sigmoid".split(),
            *"--moe-router-enable-expert-bias --moe-expert-capacity-factor 1.25".split(),
            *"--moe-pad-expert-input-to-capacity --mtp-num-layers 2 --swiglu".split(),
            *"--group-query-attention --num-query-groups 2 --kv-channels 24".split(),
            *"--window-size 31,0 --window-attn-skip-freq 2 --softmax-type learnable".split(),
            *"--attention-output-gate --qk-layernorm --normalization RMSNorm".split(),
            *"--position-embedding-type rope --untie-embeddings-and-output-weights".split(),
            *"--disable-bias-linear --add-qkv-bias --make-vocab-size-divisible-by 64".split(),
        ),
        8,
    ).model
    assert (model.layers, model.hidden, model.ffn, model.gated) == (4, 64, 128, True)
    attention = model.attention
    assert (attention.heads, attention.groups, attention.head_dim) == (4, 2, 24)
    assert (attention.window, attention.windowed) == (32, (True, False, True, False))
    assert attention.sink
    assert attention.output_gate
    assert attention.qk_norm
    assert attention.qkv_bias
    assert model.moe_layers == (False, True, True, True)
    assert model.mtp_layers == 2
    experts = model.experts
    assert (experts.count, experts.topk, experts.ffn, experts.latent) == (8, 3, 48, 16)
    assert (experts.shared_ffn, experts.shared_gate) == (96, True)
    assert (experts.groups, experts.topk_groups) == (4, 2)
    assert (experts.score_function, experts.expert_bias) == ("sigmoid", True)
    assert (experts.capacity_factor, experts.pad_to_capacity) == (1.25, True)
    assert not experts.router_bias
    assert (model.vocab, model.vocab_divisor, model.padded_vocab(4)) == (1000, 64, 1024)
    assert (model.position, model.norm) == ("rope", "RMSNorm")
    assert not model.tied_embeddings
    assert not model.linear_bias


def test_multi_latent_attention_has_megatrons_defaults():
    latent = job_of(values_of("--multi-latent-attention"), 8).model.attention.latent
    assert (latent.q_rank, latent.kv_rank) == (None, 32)
    assert (latent.qk_head_dim, latent.rope_head_dim, latent.v_head_dim) == (128, 64, 128)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--bf16", {"main_grads_dtype": "fp32", "grad_reduce_in_fp32": True}),
        ("--bf16 --grad-reduce-in-bf16", {"main_grads_dtype": "bf16"}),
        ("--fp16", {"main_grads_dtype": "fp16", "grad_reduce_in_fp32": False}),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", {"main_grads_dtype": "fp32"}),
        ("", {"main_grads_dtype": "fp32", "precision": "fp32"}),
        (
            "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16",
            {"main_grads_dtype": "bf16", "use_precision_aware_optimizer": True},
        ),
        ("--recompute-activations", {"recompute_modules": ("core_attn",)}),
        ("--recompute-modules moe", {"recompute_modules": (), "recompute_granularity": None}),
        (
            "--use-distributed-optimizer",
            {"fsdp": None, "data_parallel_sharding_strategy": "no_shard"},
        ),
        (
            "--use-megatron-fsdp",
            {"fsdp": "megatron", "data_parallel_sharding_strategy": "optim_grads_params"},
        ),
        ("--swiglu --no-bias-swiglu-fusion", {"bias_activation_fusion": False}),
        ("--disable-bias-linear", {"bias_activation_fusion": False}),
        ("--moe-enable-deepep", {"flex_backend": "deepep"}),
        ("--fp8-format hybrid --fp8-recipe mxfp8", {"fp8": "hybrid", "fp8_recipe": "mxfp8"}),
        (
            "--num-experts 8 --piper-dispatcher rail --piper-dispatcher-chunks 2",
            {"dispatcher": "rail", "dispatcher_chunks": 2},
        ),
        (
            "--num-experts 8 --piper-dispatcher rail --moe-token-dispatcher-type flex",
            {"dispatcher": "flex", "dispatcher_chunks": None},
        ),
        ("--num-experts 8 --moe-token-dispatcher-type alltoall", {"dispatcher": "alltoall"}),
        ("--optimizer dist_muon", {"use_layer_wise_distributed_optimizer": True}),
        ("--tensor-model-parallel-size 1 --sequence-parallel", {"sequence_parallel": False}),
    ],
)
def test_settings_are_read_as_they_take_effect(flags, expected):
    training = job_of(values_of(*flags.split()), 8).training
    assert {name: getattr(training, name) for name in expected} == expected


def test_every_other_setting_has_the_name_of_its_argument():
    values = vars(effective(values_of(), 8))
    assert TrainingSpec.model_fields.keys() - values.keys() == {
        "precision",
        "grad_reduce_in_fp32",
        "fsdp",
        "bias_activation_fusion",
        "cuda_graph_scope",
        "dispatcher",
        "dispatcher_chunks",
        "flex_backend",
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hybrid-layer-pattern M*M*", "--hybrid-layer-pattern: a hybrid model of Mamba"),
        (
            "--experimental-attention-variant gated_delta_net",
            "--experimental-attention-variant: an experimental attention variant",
        ),
        (
            "--heterogeneous-layers-config-path layers.json",
            "--heterogeneous-layers-config-path: layers of different shapes",
        ),
        ("--decoder-num-layers 4", "--decoder-num-layers: an encoder-decoder model"),
        ("--spec my.module layers", "--spec my.module layers: layers of one's own"),
        ("--yaml-cfg run.yaml", "--yaml-cfg: arguments in a YAML file"),
        ("--tensor-parallel-num-weight-shards 2", "--tensor-parallel-num-weight-shards"),
        ("--hidden-size 0", "--hidden-size must be at least 1, got 0"),
        ("--global-batch-size -8", "--global-batch-size must be at least 1, got -8"),
        ("--num-attention-heads 3", "--num-attention-heads 3 does not divide --hidden-size 64"),
        ("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
        ("--global-batch-size 12", "nearest: 8 or 16"),
        (
            "--num-experts 4 --moe-layer-freq [1]*3",
            "--moe-layer-freq is a pattern of 3 layers, but --num-layers is 4",
        ),
        ("--num-experts 4 --moe-layer-freq [2]*4", "--moe-layer-freq is a pattern of 0 and 1"),
        ("--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq must be at least 1, got 0"),
        ("--num-experts 4 --moe-expert-capacity-factor 0", "--moe-expert-capacity-factor 0"),
        ("--num-experts -4", "--num-experts is negative: -4"),
        (
            "--optimizer-offload-fraction 1.5",
            "--optimizer-offload-fraction: Input should be less than or equal to 1, got 1.5",
        ),
        ("--num-experts 4 --moe-expert-rank-capacity-factor 0", "--moe-expert-rank-capacity-f"),
        ("--num-experts 4 --moe-ffn-hidden-size -1", "--moe-ffn-hidden-size must be at least 1"),
    ],
)
def test_a_workload_that_cannot_be_is_one_line(flags, message):
    with pytest.raises(WorkloadError) as error:
        job_of(values_of(*flags.split()), 8)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "missing",
    [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
    ],
)
def test_a_missing_size_is_named(missing):
    index = GPT.index(missing)
    with pytest.raises(WorkloadError, match=f"{missing} is missing"):
        job_of(read_arguments(GPT[:index] + GPT[index + 2 :]).values, 8)


def test_sizes_that_do_not_fit_together_are_layout_errors():
    with pytest.raises(LayoutError, match="world size 8 is not a multiple of TP 3"):
        job_of(values_of("--tensor-model-parallel-size", "3"), 8)
    with pytest.raises(LayoutError, match="4 layers cannot be shared out evenly over PP 8"):
        job_of(values_of("--pipeline-model-parallel-size", "8"), 8)
    uneven = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3".split()
    with pytest.raises(LayoutError, match="legal are 1, 2"):
        job_of(values_of(*uneven), 8)


def test_the_vocabulary_comes_from_sizes_or_the_tokenizer():
    def model(*flags: str):
        without = GPT[: GPT.index("--vocab-size")]
        return job_of(read_arguments([*without, *flags]).values, 8).model

    assert model("--padded-vocab-size", "1536", "--vocab-size", "1000").padded_vocab(1) == 1536
    assert model("--tokenizer-type", "GPT2BPETokenizer").padded_vocab(1) == 50304
    assert model("--vocab-size", "1000", "--no-pad-vocab-size").padded_vocab(1) == 1000
    with pytest.raises(
        WorkloadError, match="of --tokenizer-type HuggingFaceTokenizer is not known"
    ):
        model("--tokenizer-type", "HuggingFaceTokenizer")
    with pytest.raises(PiperError, match="add --vocab-size"):
        model()


def test_virtual_stages_of_every_spelling():
    def vpp(*flags: str) -> int:
        pipeline = job_of(values_of("--pipeline-model-parallel-size", "2", *flags), 8).pipeline
        return pipeline.vpp

    assert vpp() == 1
    assert vpp("--num-virtual-stages-per-pipeline-rank", "2") == 2
    assert vpp("--num-layers-per-virtual-pipeline-stage", "1") == 2
    assert vpp("--pipeline-model-parallel-layout", "Et|t|t|tL") == 2
    assert vpp("--pipeline-model-parallel-layout", "Ett|ttL") == 1
