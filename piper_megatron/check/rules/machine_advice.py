"""What the platform lacks or needs, and settings that leave speed unused."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule


@rule("precision.hardware", source="data sheets: docs/platforms.md", late=True)
def the_device_has_the_format(c: Command) -> Problem | None:
    """A device without 8- or 4-bit arithmetic cannot train in it."""
    accelerator = c.platform.accelerator if c.platform else None
    if accelerator is None:
        return None
    for flag, used, peak in (
        ("--fp8-format", c.fp8, accelerator.tflops.fp8),
        ("--fp4-format", c.fp4, accelerator.tflops.fp4),
    ):
        if used and peak is None:
            return Problem(f"{accelerator.name} has no arithmetic for {flag}", f"drop {flag}")
    return None


@rule("precision.fp32", source="dense peaks of every data sheet", severity="warning")
def sixteen_bits_are_used(c: Command) -> Problem | None:
    """Training in fp32 is slow on every GPU."""
    if c.bf16 or c.fp16 or (c.platform and c.platform.name == "cpu-lab"):
        return None
    return Problem("neither --bf16 nor --fp16: weights and activations are fp32", "add --bf16")


@rule("platform.environment", source="the site's documentation: docs/platforms.md", severity="info")
def the_platforms_settings_are_made(c: Command) -> Problem | None:
    """Variables and lines of the job script without which a platform's network is slow."""
    if c.platform is None:
        return None
    variables = [f"{s.name}={s.value}" for s in c.platform.environment]
    lines = [line.line for line in c.platform.job_script]
    if not variables and not lines:
        return None
    parts = []
    if variables:
        parts.append(f"set {' '.join(variables)}")
    if lines:
        parts.append(f"job script: {'; '.join(lines)}")
    return Problem(
        f"{c.platform.name} needs settings of its own; without them communication can be 10 to 20 "
        "times slower",
        "; ".join(parts),
    )


@rule("optimizer.replicated", source="Megatron-LM, distributed optimizer guide", severity="info")
def data_parallel_ranks_share_the_optimizer(c: Command) -> Problem | None:
    """Without the distributed optimizer every data-parallel rank keeps all of its state."""
    if not c.dp or c.dp * c.cp == 1 or c.distributed_optimizer or c.use_torch_fsdp2:
        return None
    if c.emerging_optimizer or c.freeze_all_layers:
        return None
    return Problem(
        f"each of the {c.dp * c.cp} data-parallel ranks keeps the whole optimizer state",
        "add --use-distributed-optimizer",
    )


@rule("recompute.needless", "core/transformer/transformer_config.py:1807", severity="info")
def flash_attention_keeps_no_scores(c: Command) -> Problem | None:
    """Recomputing core attention is for unfused attention."""
    if c.recompute_granularity != "selective" or "core_attn" not in c.recompute_modules:
        return None
    if c.attention_backend == "unfused" or c.transformer_impl == "local":
        return None
    return Problem(
        "recomputing core_attn saves nothing with flash or fused attention, which keep no scores",
        "drop core_attn from --recompute-modules (it is the default of selective recomputation)",
    )


@rule("training.length", "training/training.py:1939", severity="info")
def the_run_has_a_length(c: Command) -> Problem | None:
    """A run has a number of iterations or samples."""
    trains = c.mock_data or c.data_path or c.train_data_path
    if trains and c.train_iters is None and c.train_samples is None and not c.skip_train:
        return Problem(
            "neither --train-iters nor --train-samples: Megatron stops when it sets up training",
            "add --train-iters",
        )
    return None
