"""Megatron's own GPT models on the meta device, in a process that is one of any number of ranks.

Runs where the CPU backend is in force (a fork of `ranks.RankServer`).
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.job import Job
from piper_megatron.layout.pipeline import pipeline_layout
from piper_megatron.workload.spec import BatchSpec, ModelSpec, TrainingSpec


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a layout.

    Attributes:
        model: what is built.
        layout: parallel sizes.
        vpp: chunks of a pipeline rank.
        split: arguments of `pipeline_layout` that share out the layers.
    """

    model: ModelSpec
    layout: ParallelLayout
    vpp: int = 1
    split: dict[str, Any] = field(default_factory=dict)

    def job(self, **training: Any) -> Job:
        """As the resource model sees it, with Megatron's own layers."""
        model, layout = self.model, self.layout
        return Job(
            model=model,
            batch=BatchSpec(seq=8, micro_batch=1, global_batch=layout.dp * layout.pp),
            training=TrainingSpec(**{"transformer_impl": "local", "precision": "bf16", **training}),
            layout=layout,
            pipeline=pipeline_layout(
                model.layers, layout.pp, self.vpp, mtp_layers=model.mtp_layers, **self.split
            ),
        )


def megatron_config(case: Case) -> Any:
    """The configuration with which Megatron builds the case's model."""
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model, layout, attention = case.model, case.layout, case.model.attention
    split_names = {
        "first": "num_layers_in_first_pipeline_stage",
        "last": "num_layers_in_last_pipeline_stage",
        "account_for_embedding": "account_for_embedding_in_pipeline_split",
        "account_for_loss": "account_for_loss_in_pipeline_split",
        "text": "pipeline_model_parallel_layout",
    }
    settings = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "gated_linear_unit": model.gated,
        "activation_func": F.silu if model.gated else F.gelu,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.groups,
        "kv_channels": attention.head_dim,
        "qk_layernorm": attention.qk_norm,
        "add_qkv_bias": attention.qkv_bias,
        "softmax_type": "learnable" if attention.sink else "vanilla",
        "attention_output_gate": attention.output_gate,
        "add_bias_linear": model.linear_bias,
        "normalization": model.norm,
        "mtp_num_layers": model.mtp_layers or None,
        "mtp_use_repeated_layer": model.mtp_repeated,
        "bias_dropout_fusion": False,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "transformer_impl": "local",
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        **{split_names[name]: value for name, value in case.split.items()},
    }
    if experts := model.experts:
        settings |= {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.topk,
            "moe_ffn_hidden_size": experts.ffn,
            "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
            "moe_shared_expert_gate": experts.shared_gate,
            "moe_layer_freq": [int(moe) for moe in model.moe_layers],
            "moe_router_enable_expert_bias": experts.expert_bias,
            "moe_router_score_function": "sigmoid" if experts.expert_bias else "softmax",
            "moe_latent_size": experts.latent,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    if latent := attention.latent:
        return MLATransformerConfig(
            multi_latent_attention=True,
            q_lora_rank=latent.q_rank,
            kv_lora_rank=latent.kv_rank,
            qk_head_dim=latent.qk_head_dim,
            qk_pos_emb_head_dim=latent.rope_head_dim,
            v_head_dim=latent.v_head_dim,
            rope_type="rope",
            **settings,
        )
    return TransformerConfig(**settings)


@contextmanager
def rank_of(layout: ParallelLayout, rank: int, vpp: int = 1) -> Any:
    """This process is that rank of a job of that layout, over torch's fake backend."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_chunks(case: Case) -> list[Any]:
    """The GPT models of this rank, one for each virtual stage, on the meta device."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    model = case.model
    config = GPTModelConfig(
        transformer=megatron_config(case),
        vocab_size=model.vocab,
        make_vocab_size_divisible_by=model.vocab_divisor,
        should_pad_vocab=True,
        seq_length=model.max_positions,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type={"learned": "learned_absolute"}.get(model.position, model.position),
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with torch.device("meta"):
        return [
            GPTModelBuilder(config).build_model(groups, vp_stage=stage)
            for stage in (range(case.vpp) if case.vpp > 1 else [None])
        ]
