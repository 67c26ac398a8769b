"""How close the resource model has to come to the published runs."""

# relative errors of peak memory, over runs of high and medium confidence
PEAK_MEDIAN = 0.025
PEAK_P90 = 0.07
# an error beyond this needs a reason below
PEAK_WITHOUT_REASON = 0.15

# relative errors of the time of a step
STEP_MEDIAN = 0.10
STEP_P90 = 0.25

# of runs that differ in layout alone, the one predicted to be best loses no more than this
ORDER_LOSS = 0.05

# run -> why its peak cannot be predicted better
REASONS: dict[str, str] = {}

# models so small that the host is slower than the device: their time says nothing of the model
LAUNCH_BOUND_FAMILIES = frozenset({"gpt512-moe", "mla-1024-moe"})

# Megatron-Bridge changed its count of floating-point operations of these between releases
OTHER_FLOP_COUNT = frozenset({"gpt-oss-20b", "gpt-oss-120b"})
