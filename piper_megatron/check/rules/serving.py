"""Inference and reinforcement learning in the training script."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"


@rule("inference.pipelined", f"{ARGUMENTS}:1775", f"{ARGUMENTS}:1777")
def pipelined_inference_has_conditions(c: Command) -> Problem | None:
    """Splitting inference batches needs a pipeline and no CUDA graphs."""
    if c.inference_batch_times_seqlen_threshold <= -1:
        return None
    if c.pp > 1 and c.graph_impl == "none":
        return None
    return Problem(
        "--inference-batch-times-seqlen-threshold needs PP above 1 and no CUDA graphs",
        "drop --inference-batch-times-seqlen-threshold",
    )


@rule(
    "inference.layers",
    f"{CONFIG}:1473",
    f"{CONFIG}:1477",
    f"{CONFIG}:1479",
    f"{CONFIG}:1484",
    f"{CONFIG}:1490",
    f"{CONFIG}:2831",
    f"{CONFIG}:2832",
    f"{CONFIG}:2833",
    f"{CONFIG}:2834",
)
def inference_layers_have_conditions(c: Command) -> Problem | None:
    """Layers made for inference support few kinds of models."""
    if c.transformer_impl != "inference_optimized":
        return None
    needs = {
        "--normalization RMSNorm": c.normalization == "RMSNorm",
        "no --apply-layernorm-1p": not c.layernorm_zero_centered_gamma,
        "--disable-bias-linear": not c.add_bias_linear,
        "no --add-qkv-bias": not c.add_qkv_bias,
    }
    if c.experts is not None:
        padded = c.moe_router_padding_for_quantization
        needs |= {
            "--expert-tensor-parallel-size 1": c.etp <= 1,
            "no --moe-expert-capacity-factor": c.moe_expert_capacity_factor is None,
            "no --moe-router-padding-for-quantization": not padded,
            "--moe-router-dtype fp32": c.moe_router_dtype == "fp32",
            "no gated activation": not (c.swiglu or (c.quick_geglu and not c.squared_relu)),
        }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(
        f"--transformer-impl inference_optimized needs {', '.join(missing)}",
        "--transformer-impl transformer_engine for training",
    )


@rule("inference.fused", f"{CONFIG}:2855", f"{CONFIG}:2859", f"{CONFIG}:2864")
def fused_inference_communication_has_conditions(c: Command) -> Problem | None:
    """Fused tensor-parallel communication is for dense inference layers."""
    inference = c.transformer_impl == "inference_optimized"
    if c.inference_fuse_tp_communication and not (inference and c.experts is None):
        return Problem(
            "--inference-fuse-tp-communication needs --transformer-impl inference_optimized and a "
            "dense model",
            "drop --inference-fuse-tp-communication",
        )
    if c.inference_disable_triton_nvls_kernels and not inference:
        return Problem(
            "--inference-disable-triton-nvls-kernels needs --transformer-impl inference_optimized",
            "drop --inference-disable-triton-nvls-kernels",
        )
    return None


@rule(
    "rl.graphs",
    f"{ARGUMENTS}:479",
    f"{ARGUMENTS}:483",
    f"{ARGUMENTS}:499",
    f"{ARGUMENTS}:504",
    f"{ARGUMENTS}:509",
)
def graphs_of_reinforcement_learning_have_conditions(c: Command) -> Problem | None:
    """CUDA graphs and key-value caches of reinforcement learning depend on each other."""
    if not c.perform_rl_step:
        return None
    # validation looks before the deprecated flags change the implementation
    built = c.cuda_graph_impl != "none"
    offload = c.rl_kv_cache_management_mode == "offload"
    unified = c.inference_dynamic_batching_unified_memory_level > 0
    faults = {
        "--rl-persist-cuda-graphs needs --cuda-graph-impl": c.rl_persist_cuda_graphs and not built,
        "--rl-training-cuda-graphs needs --cuda-graph-impl": (
            c.rl_training_cuda_graphs and not built
        ),
        "--rl-kv-cache-management-mode offload needs --rl-persist-cuda-graphs": (
            offload and not c.rl_persist_cuda_graphs
        ),
        "--rl-kv-cache-management-mode offload excludes unified memory": offload and unified,
    }
    found = [fault for fault, there in faults.items() if there]
    return Problem("; ".join(found), "change that") if found else None


@rule(
    "rl.rollouts",
    f"{ARGUMENTS}:530",
    f"{ARGUMENTS}:533",
    f"{ARGUMENTS}:536",
    f"{ARGUMENTS}:538",
    f"{ARGUMENTS}:546",
    f"{ARGUMENTS}:1798",
)
def rollouts_have_conditions(c: Command) -> Problem | None:
    """Rollouts of reinforcement learning have conditions."""
    if not c.perform_rl_step:
        return None
    streamed = c.rl_partial_rollouts
    submitted, consumed = c.rl_submission_granularity, c.rl_consumption_granularity
    faults = {
        "--rl-generation-lag needs --rl-partial-rollouts": c.rl_generation_lag > 0 and not streamed,
        "--rl-submission-granularity R needs --rl-partial-rollouts": (
            submitted == "R" and not streamed
        ),
        "--rl-consumption-granularity R is not supported": consumed == "R",
        "--rl-submission-granularity B excludes --rl-consumption-granularity G": (
            submitted == "B" and consumed == "G"
        ),
        "--rl-use-sequence-packing needs --micro-batch-size 1": (
            c.rl_use_sequence_packing and c.micro_batch_size != 1
        ),
        "--rl-offload-optimizer-during-inference without an optimizer": bool(
            c.skip_train and c.no_load_optim and c.rl_offload_optimizer_during_inference
        ),
    }
    found = [fault for fault, there in faults.items() if there]
    return Problem("; ".join(found), "change that") if found else None


@rule("rl.batches", f"{ARGUMENTS}:703", f"{ARGUMENTS}:711", f"{ARGUMENTS}:714")
def rollouts_fill_global_batches(c: Command) -> Problem | None:
    """The samples of a collection are whole batches, and intervals whole collections."""
    if not c.perform_rl_step or not c.dp:
        return None
    samples = c.grpo_prompts_per_step * c.grpo_group_size * c.grpo_iterations
    batch = c.values.global_batch_size or c.micro_batch_size * c.dp
    if samples % batch:
        return Problem(
            f"--grpo-prompts-per-step x --grpo-group-size x --grpo-iterations = {samples} is not a "
            f"multiple of the global batch {batch}",
            f"--global-batch-size {samples}",
        )
    iterations = samples // batch
    for flag, interval in (
        ("--exit-interval", c.exit_interval),
        ("--save-interval", c.save_interval),
    ):
        if interval is not None and (iterations == 0 or interval % iterations):
            return Problem(
                f"{flag} {interval} is not a multiple of a collection's {iterations} iterations",
                f"{flag} {iterations}",
            )
    return None
