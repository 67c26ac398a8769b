"""What an estimate takes for granted, one sentence each."""

from piper_megatron.layout.job import Job
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.reach import Order

_ORDERS: dict[Order, str] = {
    "megatron": "ranks fill nodes one after the other, in Megatron's order",
    "piper": "ranks are placed as --piper-placement does where a job has whole domains to itself",
}


def assumptions(
    job: Job,
    platform: Platform,
    stack: str | None,
    imbalance: float,
    order: Order = "megatron",
) -> tuple[str, ...]:
    """Sentences for a report; only those that concern the job.

    Args:
        job: what is trained and how.
        platform: where.
        stack: as the user gave it.
        imbalance: rows on the most loaded expert rank over the mean.
        order: of the ranks on the devices.
    """
    accelerator = platform.need_accelerator()
    chosen = accelerator.stack(stack)
    said = [
        f"software stack '{chosen.name}' of {platform.name}: kernels at {chosen.efficiency:g} of "
        "the accelerator's curves",
        _ORDERS[order],
    ]
    if job.model.experts is not None:
        said.append(
            "every expert rank receives equally many rows"
            if imbalance == 1
            else f"the most loaded expert rank receives {imbalance:g} times the mean"
        )
    if job.training.transformer_impl != "local":
        said.append(
            "Transformer Engine's layers; --attention-backend auto runs flash or fused attention"
            if job.training.attention_backend == "auto"
            else "Transformer Engine's layers"
        )
    if _upcasts_moments(job):
        said.append(
            "the optimizer makes fp32 copies of its 16- or 8-bit states while it steps; "
            "Transformer Engine from 2.13 on needs none for two bf16 moments"
        )
    return tuple(said)


def _upcasts_moments(job: Job) -> bool:
    training = job.training
    return training.use_precision_aware_optimizer and bool(
        {training.exp_avg_dtype, training.exp_avg_sq_dtype} - {"fp32"}
    )
