"""How much of the device's memory a plan may need."""

from piper_megatron.platform.platform import Platform


def default_margin(platform: Platform) -> float:
    """Share of the device that stays free: what torch's allocator reserves beyond what is used."""
    return 1 - 1 / platform.need_accelerator().overheads.reserved_ratio


def limit_gib(platform: Platform, margin: float) -> float:
    """GiB that a plan may need."""
    return platform.need_accelerator().memory.capacity_gib * (1 - margin)
