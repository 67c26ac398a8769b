"""The optimizer, its sharding and its checkpoints; FSDP."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"


@rule(
    "optimizer.overlap-gather",
    f"{ARGUMENTS}:991",
    fix="add --use-distributed-optimizer, or drop --overlap-param-gather",
)
def overlapped_gather_needs_a_sharded_optimizer(c: Command) -> bool:
    """--overlap-param-gather needs --use-distributed-optimizer, Megatron FSDP or dist_muon."""
    return c.overlap_param_gather and not (
        c.use_distributed_optimizer or c.use_megatron_fsdp or c.optimizer == "dist_muon"
    )


@rule("optimizer.overlap-both", f"{ARGUMENTS}:994", fix="add --overlap-grad-reduce")
def overlapped_gather_needs_overlapped_reduction(c: Command) -> bool:
    """--overlap-param-gather needs --overlap-grad-reduce."""
    return c.overlap_param_gather and not c.overlap_grad_reduce


@rule(
    "optimizer.overlap-step",
    f"{ARGUMENTS}:1033",
    f"{ARGUMENTS}:1035",
    f"{ARGUMENTS}:1037",
    f"{ARGUMENTS}:1039",
)
def gather_with_the_step_has_conditions(c: Command) -> Problem | None:
    """Gathering parameters during the optimizer step has conditions."""
    if not c.overlap_param_gather_with_optimizer_step:
        return None
    needs = {
        "--use-distributed-optimizer": c.use_distributed_optimizer,
        "--overlap-param-gather": c.overlap_param_gather,
        "virtual pipeline stages": c.vpp is not None,
        "--ckpt-format torch": not c.use_dist_ckpt,
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(
        f"--overlap-param-gather-with-optimizer-step needs {', '.join(missing)}",
        "drop --overlap-param-gather-with-optimizer-step, or add what it needs",
    )


@rule(
    "optimizer.offload",
    f"{ARGUMENTS}:1804",
    fix="add --use-precision-aware-optimizer",
)
def offloading_needs_the_precision_aware_optimizer(c: Command) -> bool:
    """--optimizer-cpu-offload needs --use-precision-aware-optimizer."""
    return c.optimizer_cpu_offload and not c.use_precision_aware_optimizer


@rule("optimizer.offload-fp8", f"{ARGUMENTS}:1808", fix="--fp8-recipe delayed, or no offload")
def offloading_fp8_weights_needs_delayed_scaling(c: Command) -> bool:
    """--optimizer-cpu-offload with --fp8-param-gather needs --fp8-recipe delayed, not \
    {c.fp8_recipe}."""
    gather = c.fp8_param_gather and not c.use_torch_fsdp2
    return c.optimizer_cpu_offload and gather and c.fp8_recipe != "delayed"


@rule(
    "optimizer.emerging-fsdp",
    f"{ARGUMENTS}:1684",
    f"{ARGUMENTS}:1685",
    f"{ARGUMENTS}:1127",
    fix="--optimizer adam, or drop FSDP",
)
def emerging_optimizers_exclude_fsdp(c: Command) -> bool:
    """--optimizer {c.optimizer} does not work with FSDP."""
    return c.emerging_optimizer and (c.use_torch_fsdp2 or c.use_megatron_fsdp)


@rule("optimizer.emerging-checkpoint", f"{ARGUMENTS}:1686", fix="--ckpt-format torch_dist")
def emerging_optimizers_need_a_checkpoint_format(c: Command) -> bool:
    """--optimizer {c.optimizer} needs --ckpt-format torch or torch_dist."""
    return c.emerging_optimizer and c.ckpt_format not in ("torch", "torch_dist")


@rule(
    "optimizer.gloo",
    f"{ARGUMENTS}:1695",
    fix="--ckpt-format torch_dist, or drop --disable-gloo-process-groups",
)
def legacy_checkpoints_need_gloo(c: Command) -> bool:
    """--disable-gloo-process-groups with the distributed optimizer needs a distributed \
    checkpoint, not --ckpt-format torch."""
    return not c.use_gloo_process_groups and _distributed(c) and not c.use_dist_ckpt


@rule("optimizer.gloo-reshard", f"{ARGUMENTS}:1698", fix="drop --disable-gloo-process-groups")
def lean_resharding_needs_gloo(c: Command) -> bool:
    """--distrib-optim-fully-reshardable-mem-efficient needs Gloo process groups."""
    return (
        not c.use_gloo_process_groups
        and _distributed(c)
        and c.dist_ckpt_optim_fully_reshardable
        and c.distrib_optim_fully_reshardable_mem_efficient
    )


def _distributed(c: Command) -> bool:
    """The distributed optimizer as validation leaves it."""
    return (c.use_distributed_optimizer or c.use_megatron_fsdp) and not c.emerging_optimizer


@rule(
    "fsdp2.excludes",
    f"{ARGUMENTS}:1000",
    f"{ARGUMENTS}:1002",
    f"{ARGUMENTS}:1004",
    f"{ARGUMENTS}:1006",
    f"{ARGUMENTS}:1008",
    f"{ARGUMENTS}:1010",
    f"{ARGUMENTS}:1012",
)
def torch_fsdp_has_conditions(c: Command) -> Problem | None:
    """Torch's FSDP2 excludes pipelines, experts and Megatron's own optimizer sharding."""
    if not c.use_torch_fsdp2:
        return None
    needs = {
        "--pipeline-model-parallel-size 1": c.pp == 1,
        "--expert-model-parallel-size 1": c.ep == 1,
        "no --use-distributed-optimizer": not c.use_distributed_optimizer,
        "--no-gradient-accumulation-fusion": not c.gradient_accumulation_fusion,
        "--ckpt-format torch_dist or torch_dcp": c.ckpt_format in ("torch_dist", "torch_dcp"),
        "--untie-embeddings-and-output-weights": c.untie_embeddings_and_output_weights,
        "no --fp16": not c.fp16,
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(f"--use-torch-fsdp2 needs {', '.join(missing)}", f"{', '.join(missing)}")


@rule(
    "fsdp.conditions",
    f"{ARGUMENTS}:1120",
    f"{ARGUMENTS}:1140",
    f"{ARGUMENTS}:1146",
    f"{ARGUMENTS}:1161",
)
def megatron_fsdp_has_conditions(c: Command) -> Problem | None:
    """Megatron FSDP needs its own checkpoint format and plain expert weights."""
    if not c.use_megatron_fsdp:
        return None
    strategy = c.data_parallel_sharding_strategy
    hashes = c.check_weight_hash_across_dp_replicas_interval is not None
    needs = {
        "--ckpt-format fsdp_dtensor": c.ckpt_format == "fsdp_dtensor",
        "no --moe-single-grouped-weight or -bias": not (
            c.moe_single_grouped_weight or c.moe_single_grouped_bias
        ),
        "no --check-weight-hash-across-dp-replicas-interval": not (
            strategy == "optim_grads_params" and hashes
        ),
        "no --init-model-with-meta-device with --data-parallel-sharding-strategy no_shard": not (
            strategy == "no_shard" and c.init_model_with_meta_device
        ),
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(f"--use-megatron-fsdp needs {', '.join(missing)}", f"{', '.join(missing)}")


@rule("fsdp.registration", f"{ARGUMENTS}:1167", f"{ARGUMENTS}:1168")
def manual_registration_has_conditions(c: Command) -> Problem | None:
    """Manual buffer registration needs Megatron FSDP and NCCL user buffers."""
    if not c.fsdp_manual_registration or (c.use_megatron_fsdp and c.nccl_ub):
        return None
    return Problem(
        "--fsdp-manual-registration needs --use-megatron-fsdp and --use-nccl-ub",
        "drop --fsdp-manual-registration",
    )


@rule("checkpoint.dcp", f"{ARGUMENTS}:1613", f"{ARGUMENTS}:1614", f"{ARGUMENTS}:1616")
def torch_dcp_has_conditions(c: Command) -> Problem | None:
    """The torch_dcp format is for torch's FSDP2."""
    if c.ckpt_format != "torch_dcp" or (c.use_torch_fsdp2 and c.tp == 1 and c.pp == 1):
        return None
    return Problem(
        "--ckpt-format torch_dcp needs --use-torch-fsdp2, TP 1 and PP 1",
        "--ckpt-format torch_dist",
    )


@rule("checkpoint.fsdp", f"{ARGUMENTS}:1621", fix="--ckpt-format torch_dist")
def fsdp_format_needs_fsdp(c: Command) -> bool:
    """--ckpt-format fsdp_dtensor needs --use-megatron-fsdp."""
    return c.ckpt_format == "fsdp_dtensor" and not c.use_megatron_fsdp
