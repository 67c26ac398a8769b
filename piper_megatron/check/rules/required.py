"""What every other rule takes for granted: the model's sizes are there and above zero."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

REQUIRED = {
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "max_position_embeddings": "--max-position-embeddings",
    "micro_batch_size": "--micro-batch-size",
}
PARALLEL = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "num_distributed_optimizer_instances": "--num-distributed-optimizer-instances",
}


@rule("required.sizes", "training/arguments.py:675", "training/arguments.py:1924", first=True)
def sizes_of_the_model_are_given(c: Command) -> Problem | None:
    """A model has its sizes, and a run its micro-batch."""
    missing = [flag for name, flag in REQUIRED.items() if getattr(c.values, name) is None]
    if missing:
        return Problem(f"{', '.join(missing)} missing", f"add {' and '.join(missing)}")
    return None


@rule("required.layers", "training/arguments.py:1269", fix="add --num-layers", first=True)
def number_of_layers_is_given(c: Command) -> bool:
    """--num-layers is missing."""
    return c.num_layers is None and c.encoder_num_layers is None and c.hybrid_pattern is None


@rule("required.sequence", "training/arguments.py:1310", fix="add --seq-length", first=True)
def sequence_length_is_given(c: Command) -> bool:
    """--seq-length is missing."""
    return c.seq_length is None and c.encoder_seq_length is None


@rule("parallel.positive", "training/arguments.py:430", "core/parallel_state.py:823", first=True)
def parallel_sizes_are_positive(c: Command) -> Problem | None:
    """Parallel sizes start at 1."""
    wrong = [
        f"{flag} {value}"
        for name, flag in PARALLEL.items()
        if (value := getattr(c.values, name)) is not None and value < 1
    ]
    if wrong:
        return Problem(f"{', '.join(wrong)}: sizes start at 1", "give 1 or more")
    return None


@rule("batch.positive", "training/arguments.py:676", "training/arguments.py:687", first=True)
def batch_sizes_are_positive(c: Command) -> Problem | None:
    """Batches have at least one sequence."""
    sizes = {
        "--micro-batch-size": c.micro_batch_size,
        "--global-batch-size": c.values.global_batch_size,
        "--eval-micro-batch-size": c.values.eval_micro_batch_size,
    }
    wrong = [f"{flag} {size}" for flag, size in sizes.items() if size is not None and size < 1]
    if wrong:
        return Problem(f"{', '.join(wrong)}: a batch has at least 1 sequence", "give 1 or more")
    return None


@rule("model.positive", "training/arguments.py:1292", first=True)
def sizes_of_the_model_are_positive(c: Command) -> Problem | None:
    """Sizes of the model start at 1."""
    sizes = {
        "--num-layers": c.values.num_layers,
        "--hidden-size": c.values.hidden_size,
        "--num-attention-heads": c.values.num_attention_heads,
        "--seq-length": c.values.seq_length,
        "--ffn-hidden-size": c.values.ffn_hidden_size,
        "--kv-channels": c.values.kv_channels,
        "--moe-router-topk": c.values.moe_router_topk,
        "--moe-ffn-hidden-size": c.values.moe_ffn_hidden_size,
        "--num-layers-per-virtual-pipeline-stage": c.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": c.num_virtual_stages_per_pipeline_rank,
    }
    if c.values.group_query_attention:
        sizes["--num-query-groups"] = c.values.num_query_groups
    wrong = [f"{flag} {size}" for flag, size in sizes.items() if size is not None and size < 1]
    if wrong:
        return Problem(f"{', '.join(wrong)}: sizes start at 1", "give 1 or more")
    return None
