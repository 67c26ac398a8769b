"""The workload of a running job, for the placement's cost."""

import argparse
import copy

from piper_megatron.errors import PiperError
from piper_megatron.layout.traffic import Workload
from piper_megatron.workload.reading import batch_spec, effective, model_spec, training_spec

# the tokenizer, and with it the vocabulary, is built after the ranks are placed
_VOCABULARY_UNTIL_KNOWN = 50257


def workload_of(args: argparse.Namespace) -> Workload | None:
    """The model and batch in Megatron's validated arguments.

    A hybrid model is taken as a GPT with as many MoE layers, and layers of one's own as Megatron's.

    Returns:
        None for models whose traffic is not known; any legal placement is right for them, too.
    """
    values = copy.copy(args)
    values.spec = None
    values.vocab_size = args.padded_vocab_size or args.vocab_size or _VOCABULARY_UNTIL_KNOWN
    # a ramp-up may start with a batch that is no multiple of the replicas'
    at_once = args.micro_batch_size * args.data_parallel_size
    values.global_batch_size = max(args.global_batch_size // at_once, 1) * at_once
    if pattern := getattr(args, "hybrid_layer_pattern", None):
        moe_layers = pattern.partition("/")[0].count("E")
        values.hybrid_layer_pattern = values.hybrid_override_pattern = None
        values.is_hybrid_model = False
        values.moe_layer_freq = [1] * moe_layers + [0] * (args.num_layers - moe_layers)
    try:
        values = effective(values, args.world_size)
        model = model_spec(values).model_copy(update={"name": "this job's arguments"})
        return Workload(
            model=model,
            batch=batch_spec(values),
            training=training_spec(values),
            virtual_stages=values.virtual_pipeline_model_parallel_size or 1,
        )
    except PiperError:
        return None
