"""Model sizes for the placement's cost, read from Megatron's validated arguments."""

import argparse

import torch

from piper_megatron.layout.traffic import ModelSizes

# the tokenizer, and with it the vocabulary, is built after the ranks are placed
_VOCABULARY_UNTIL_KNOWN = 50257


def model_sizes(args: argparse.Namespace) -> ModelSizes:
    """Sizes of the model and batch in `args`; `validate_args` has filled what the user left out."""
    experts = args.num_experts or 0
    heads = args.num_attention_heads
    latent = args.multi_latent_attention
    gradients_in_fp32 = args.accumulate_allreduce_grads_in_fp32
    element = torch.empty((), dtype=args.params_dtype).element_size()
    return ModelSizes(
        name="this job's arguments",
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=heads,
        kv_heads=args.num_query_groups if args.group_query_attention and not latent else heads,
        head_dim=args.v_head_dim if latent else args.kv_channels,
        vocab=args.padded_vocab_size or args.vocab_size or _VOCABULARY_UNTIL_KNOWN,
        seq=args.seq_length,
        micro_batch=args.micro_batch_size,
        micro_batches=max(
            args.global_batch_size // (args.micro_batch_size * args.data_parallel_size), 1
        ),
        moe_layers=_moe_layers(args) if experts else 0,
        moe_ffn=(args.moe_ffn_hidden_size or args.ffn_hidden_size) if experts else 0,
        shared_ffn=args.moe_shared_expert_intermediate_size or 0,
        experts=experts,
        topk=args.moe_router_topk if experts else 0,
        mlp_matrices=3 if args.swiglu else 2,
        virtual_stages=args.virtual_pipeline_model_parallel_size or 1,
        bytes_per_element=element,
        gradient_bytes=4 if gradients_in_fp32 else element,
    )


def _moe_layers(args: argparse.Namespace) -> int:
    """From a hybrid model's layer pattern, or `--moe-layer-freq`: every n-th, or a 0/1 pattern."""
    hybrid_pattern = getattr(args, "hybrid_layer_pattern", None)
    if hybrid_pattern:
        return hybrid_pattern.partition("/")[0].count("E")
    if isinstance(args.moe_layer_freq, int):
        return -(-args.num_layers // args.moe_layer_freq)
    return sum(args.moe_layer_freq)
