"""Pretrain a mixture-of-experts GPT with Megatron's own training loop.

An ordinary Megatron script: the model, the parallel sizes and the schedule all come from Megatron's
flags. The same file trains a Mixtral-like model (`--num-experts`, `--moe-router-topk`, `--swiglu`)
and a DeepSeek-like one (`--multi-latent-attention`, `--moe-shared-expert-intermediate-size`,
`--moe-layer-freq`, `--moe-router-score-function sigmoid`, `--moe-router-group-topk`,
`--mtp-num-layers`). It runs on megatron-core 0.17.1 to 0.19 without a checkout of Megatron-LM.

Run it with `torchrun` or with `piper-megatron run [--cpu] --nproc 8 examples/pretrain_moe.py ...`.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_model_config,
)
from megatron.training import argument_utils, arguments, get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# megatron-core 0.18 split pretrain() into parsing, a config container and the loop
HAS_CONFIG_CONTAINER = hasattr(arguments, "parse_and_validate_args")

BATCH_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
    "attention_mask": torch.bool,
}


def model_provider(
    pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
):
    """Builds this rank's part of the model, or of one virtual pipeline stage of it.

    Args:
        pre_process: whether this part owns the input embedding.
        post_process: whether this part owns the output layer and the loss.
        vp_stage: which of this rank's virtual stages; None without interleaving.
        config: the transformer configuration, made from the arguments when None.
        pg_collection: the process groups, Megatron's global ones when None.
    """
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    layer_choice = {
        "config": config,
        "use_transformer_engine": args.transformer_impl == "transformer_engine",
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
        "vp_stage": vp_stage,
    }
    mtp_block_spec = None
    if args.mtp_num_layers:
        mtp_block_spec = get_gpt_mtp_block_spec(
            config,
            get_gpt_decoder_layer_specs(**layer_choice)[-1],
            layer_choice["use_transformer_engine"],
            vp_stage=vp_stage,
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(**layer_choice),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=mtp_block_spec,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def stage_reads_data(config, vp_stage):
    """Whether this stage embeds tokens or computes a loss; multi-token prediction does both."""
    pipeline = torch.distributed.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    return is_first_or_last_pipeline_stage(vp_stage) or (
        torch.distributed.get_rank() in get_mtp_ranks(pipeline, config)
    )


def get_embedding_ranks(pipeline_ranks):
    """Ranks of a pipeline that hold the word embedding: first, last if tied, those with MTP."""
    args = get_args()
    ranks = {pipeline_ranks[0]}
    if len(pipeline_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline_ranks[-1])
        ranks.update(get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def get_batch(data_iterator, config, vp_stage):
    """The next micro-batch: read on the first rank of the tensor group, broadcast, cut by context.

    Returns:
        A dict with the keys of `BATCH_DTYPES`: tensors [micro-batch, sequence / CP], the attention
        mask [micro-batch, 1, sequence / CP, sequence] where True hides. All are None on stages that
        read no data; the mask is None where the attention makes its own.
    """
    batch = dict.fromkeys(BATCH_DTYPES)
    if not stage_reads_data(config, vp_stage):
        return batch
    args = get_args()
    tensor_group = mpu.get_tensor_model_parallel_group()
    sample = next(data_iterator) if tensor_group.rank() == 0 else None
    for key, dtype in BATCH_DTYPES.items():
        shape = (args.micro_batch_size, args.seq_length)
        if key == "attention_mask":
            if not args.create_attention_mask_in_dataloader:
                continue
            shape = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
        if sample is None:
            batch[key] = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        else:
            batch[key] = sample[key].cuda(non_blocking=True)
        if tensor_group.size() > 1:
            torch.distributed.broadcast(
                batch[key], mpu.get_tensor_model_parallel_src_rank(), group=tensor_group
            )
    hybrid_flag = {"is_hybrid_cp": False} if HAS_CONFIG_CONTAINER else {}
    return get_batch_on_this_cp_rank(
        batch, cp_group=mpu.get_context_parallel_group(), **hybrid_flag
    )


def loss_func(loss_mask, output_tensor):
    """Sums the token losses that the mask keeps.

    Returns:
        The sum, the number of tokens in it, and both of them for the log: Megatron divides the one
        by the other over all micro-batches and data-parallel ranks.
    """
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask)
    num_tokens = loss_mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for is_bad, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator, model, return_schedule_plan=False):
    """Runs the model on one micro-batch; with `return_schedule_plan`, plans the run instead.

    Megatron asks for the plan with `--overlap-moe-expert-parallel-comm`.
    """
    batch = get_batch(
        data_iterator, get_model_config(model), get_attr_wrapped_model(model, "vp_stage")
    )
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    """Builds the three datasets on the ranks that read them.

    Args:
        num_samples: sequences for training, validation and test.
        vp_stage: which of this rank's virtual stages; None without interleaving.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        tokenizer=build_tokenizer(args),
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        mmap_bin_files=args.mmap_bin_files,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
    transformer_config = core_transformer_config_from_args(args)

    def is_built_on_rank():
        return mpu.get_tensor_model_parallel_rank() == 0 and stage_reads_data(
            transformer_config, vp_stage
        )

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, is_built_on_rank, config).build()


# every rank builds its own datasets, rather than the first of each tensor group for the others
train_valid_test_datasets_provider.is_distributed = True


def main():
    """Hands the functions above to `pretrain`, whose entry changed between releases."""
    loop = partial(
        pretrain,
        train_valid_test_dataset_provider=train_valid_test_datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )
    if not HAS_CONFIG_CONTAINER:
        loop()
        return
    args = arguments.parse_and_validate_args()
    # since 0.19 Megatron builds a GPT from its config; the provider is then not called
    config_from_args = getattr(argument_utils, "gpt_config_from_args", lambda args: None)
    loop(argument_utils.pretrain_cfg_container_from_args(args, config_from_args(args)))


if __name__ == "__main__":
    main()
