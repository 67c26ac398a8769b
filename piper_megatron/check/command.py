"""The command that rules look at: Megatron's arguments, and what its validation makes of them.

Every derived value is defined for illegal commands too, as far as it can be: `None` where it
cannot. Names are Megatron's; `values` has them as they were typed.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from piper_megatron.errors import LayoutError
from piper_megatron.platform.platform import Platform
from piper_megatron.workload.layout_text import stages_of_text

# CUDA graph modules that stand for another flag (megatron/core/transformer/cuda_graph_config.py)
DEPRECATED_GRAPH_MODULES = {"full_iteration", "full_iteration_inference"}
BEFORE_BLACKWELL = 9


@dataclass(frozen=True)
class Command:
    """A training command.

    Attributes:
        values: arguments as Megatron's parser reads them.
        given: names of those that were typed.
        gpus: number of ranks.
        unknown: words that this release of Megatron does not know.
        platform: where it is to run, if that is known.
        environment: variables that the command is known to set.
    """

    values: Namespace
    given: frozenset[str]
    gpus: int
    unknown: tuple[str, ...] = ()
    platform: Platform | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.values, name)

    # --- sizes ---

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.values.tensor_model_parallel_size

    @property
    def cp(self) -> int:
        """Context parallel size."""
        return self.values.context_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline parallel size."""
        return self.values.pipeline_model_parallel_size

    @property
    def ep(self) -> int:
        """Expert parallel size."""
        return self.values.expert_model_parallel_size

    @property
    def etp(self) -> int:
        """Expert tensor parallel size: TP when it is not given."""
        given = self.values.expert_tensor_parallel_size
        return self.tp if given is None else given

    @property
    def gtp(self) -> int:
        """Ranks over which a tensor-parallel shard of a dense weight is split further."""
        return max((self.tensor_parallel_num_weight_shards or self.tp) // self.tp, 1)

    @property
    def egtp(self) -> int:
        """The same for experts."""
        return max((self.expert_tensor_parallel_num_weight_shards or self.etp) // self.etp, 1)

    @property
    def dense_grid(self) -> int:
        """Ranks that hold one copy of the dense weights."""
        return self.tp * self.pp * self.cp * self.gtp

    @property
    def expert_grid(self) -> int:
        """Ranks that hold one copy of the experts."""
        return self.etp * self.ep * self.pp * self.egtp

    @property
    def dp(self) -> int | None:
        """Data-parallel size of the dense weights; None when the world does not divide."""
        return None if self.gpus % self.dense_grid else self.gpus // self.dense_grid

    @property
    def edp(self) -> int | None:
        """Data-parallel size of the experts; None when the world does not divide."""
        return None if self.gpus % self.expert_grid else self.gpus // self.expert_grid

    # --- model ---

    @property
    def layers(self) -> int:
        """Decoder layers."""
        pattern = self.hybrid_pattern
        if pattern is not None:
            return len(pattern.partition("/")[0].replace("|", ""))
        return self.values.num_layers or self.values.encoder_num_layers

    @property
    def seq(self) -> int:
        """Tokens of a sequence."""
        return self.values.seq_length or self.values.encoder_seq_length

    @property
    def experts(self) -> int | None:
        """Routed experts of a layer; None in a dense model."""
        return self.values.num_experts or None

    @property
    def hybrid_pattern(self) -> str | None:
        """Layer pattern of a hybrid (Mamba) model."""
        pattern = self.values.hybrid_layer_pattern
        if pattern is None:
            pattern = self.values.hybrid_override_pattern
        mtp = self.values.mtp_hybrid_override_pattern
        if mtp is not None and self.values.mtp_num_layers and "/" not in (pattern or ""):
            return "/".join([pattern or "", *[mtp] * self.values.mtp_num_layers])
        return pattern

    @property
    def mtp(self) -> int | None:
        """Multi-token-prediction layers."""
        pattern = self.hybrid_pattern
        if pattern and pattern.partition("/")[2].strip("/"):
            return pattern.count("/")
        return self.values.mtp_num_layers

    @property
    def query_groups(self) -> int:
        """Key-value heads."""
        grouped = self.values.group_query_attention
        return self.values.num_query_groups if grouped else self.values.num_attention_heads

    @property
    def moe_layers(self) -> list[bool]:
        """Per decoder layer, whether it has experts (gpt_layer_specs.py)."""
        frequency = self.values.moe_layer_freq
        if not self.experts:
            return [False] * self.layers
        if isinstance(frequency, int):
            return [frequency > 0 and i % frequency == 0 for i in range(self.layers)]
        return [bool(moe) for moe in frequency]

    @property
    def moe_width(self) -> int | None:
        """Width of a routed expert, where it is given."""
        return self.values.moe_ffn_hidden_size

    @property
    def mla(self) -> bool:
        """Multi-latent attention."""
        latent = set("+D") & set(self.hybrid_pattern or "")
        return bool(self.values.multi_latent_attention or latent)

    @property
    def position(self) -> str:
        """Kind of position embedding."""
        return "rope" if self.use_rotary_position_embeddings else self.position_embedding_type

    @property
    def rope_fusion(self) -> bool:
        """Whether the fused rotary kernel is asked for."""
        return self.values.apply_rope_fusion and self.position == "rope"

    @property
    def capacity(self) -> float | None:
        """Expert capacity factor; negative means none."""
        factor = self.values.moe_expert_capacity_factor
        return None if factor is not None and factor < 0 else factor

    @property
    def balancing(self) -> list[str]:
        """Load balancing types of the router."""
        kinds = self.values.moe_router_load_balancing_type
        return [kinds] if isinstance(kinds, str) else list(kinds)

    @property
    def aux_coefficients(self) -> list[float]:
        """Coefficients of the auxiliary losses."""
        given = self.values.moe_aux_loss_coeff
        return list(given) if isinstance(given, list | tuple) else [given]

    @property
    def flex_backend(self) -> str | None:
        """Backend of the flex dispatcher, where that is used."""
        if self.values.moe_token_dispatcher_type != "flex":
            return None
        return "deepep" if self.values.moe_enable_deepep else self.moe_flex_dispatcher_backend

    # --- pipeline ---

    @cached_property
    def layout_stages(self) -> list[str] | None:
        """Stages of the layout text, unrolled; None without one that can be read."""
        text = self.values.pipeline_model_parallel_layout
        try:
            return None if text is None else stages_of_text(text)
        except LayoutError:
            return None

    @property
    def split_layers(self) -> int:
        """Layers to split evenly, with the embedding and the loss where they count as one."""
        return (
            self.layers
            + self.values.account_for_embedding_in_pipeline_split
            + self.values.account_for_loss_in_pipeline_split
        )

    @property
    def uneven(self) -> bool:
        """The first or the last stage has its own number of layers."""
        return (
            self.values.decoder_first_pipeline_num_layers is not None
            or self.values.decoder_last_pipeline_num_layers is not None
        )

    @property
    def vpp(self) -> int | None:
        """Virtual stages of a pipeline rank; None for one, or when they do not come out."""
        virtual = None
        if self.hybrid_pattern is not None:
            segments = self.hybrid_pattern.partition("/")[0].count("|") + 1
            if not (segments == 1 and self.pp > 1):
                virtual = segments // self.pp
        elif self.layout_stages is not None:
            virtual = len(self.layout_stages) // self.pp
        elif self.num_virtual_stages_per_pipeline_rank is not None:
            virtual = self.num_virtual_stages_per_pipeline_rank
        elif self.num_layers_per_virtual_pipeline_stage:
            stage = self.split_layers // self.pp
            virtual = stage // self.num_layers_per_virtual_pipeline_stage
        return None if virtual in (0, 1) else virtual

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a step on each data-parallel replica."""
        if not self.dp:
            return None
        batch = self.values.global_batch_size
        return 1 if batch is None else batch // (self.micro_batch_size * self.dp * self.gtp)

    # --- what validation switches on and off ---

    @property
    def sequence_parallel(self) -> bool:
        """Off where TP is 1."""
        return self.values.sequence_parallel and self.tp > 1

    @property
    def overlap_p2p_comm(self) -> bool:
        """Only the interleaved schedule overlaps its sends and receives."""
        return self.values.overlap_p2p_comm and self.vpp is not None

    @property
    def recompute_granularity(self) -> str | None:
        """Before the deprecated `--moe-layer-recompute` changes it."""
        return "selective" if self.recompute_activations else self.values.recompute_granularity

    @property
    def recompute_modules(self) -> list[str]:
        """Modules of selective recomputation."""
        modules = self.values.recompute_modules
        return ["core_attn"] if modules is None else modules

    @property
    def emerging_optimizer(self) -> bool:
        """Neither Adam nor SGD."""
        return self.optimizer not in ("sgd", "adam")

    @property
    def distributed_optimizer(self) -> bool:
        """The distributed optimizer as validation leaves it."""
        return (
            (self.use_distributed_optimizer or self.use_megatron_fsdp)
            and not self.emerging_optimizer
            and not self.freeze_all_layers
        )

    @property
    def gradients_in_fp32(self) -> bool:
        """Gradients are accumulated and reduced in fp32."""
        if not self.bf16 or self.grad_reduce_in_bf16:
            return self.accumulate_allreduce_grads_in_fp32 and not self.grad_reduce_in_bf16
        return self.accumulate_allreduce_grads_in_fp32 or self.main_grads_dtype == "fp32"

    @property
    def use_dist_ckpt(self) -> bool:
        """Checkpoints are distributed ones."""
        return self.ckpt_format != "torch"

    @property
    def graph_modules_typed(self) -> list[str]:
        """CUDA graph modules under either of their flags."""
        old = self.cuda_graph_scope_deprecated
        return list(self.values.cuda_graph_modules if old is None else old)

    @property
    def graph_modules(self) -> set[str]:
        """Modules that a per-layer CUDA graph captures; empty for the whole layer."""
        return set(self.graph_modules_typed) - DEPRECATED_GRAPH_MODULES - {"full"}

    @property
    def graph_impl(self) -> str:
        """Implementation of CUDA graphs."""
        if self.enable_cuda_graph:
            return "local"
        if self.external_cuda_graph:
            return "transformer_engine"
        if "full_iteration" in self.graph_modules_typed:
            return "full_iteration"
        return self.cuda_graph_impl

    @property
    def graph_scope(self) -> str:
        """Granularity of CUDA graphs in inference."""
        if "full_iteration_inference" in self.graph_modules_typed and self.graph_impl != "none":
            return "block"
        if self.inference_cuda_graph_scope is not None:
            return self.inference_cuda_graph_scope
        return "layer" if self.graph_impl == "local" else "none"

    # --- the environment ---

    @property
    def one_connection_is_wanted(self) -> bool:
        """TP or CP before Blackwell: kernels must start in order (training/arguments.py:1413)."""
        return (self.tp > 1 or self.cp > 1) and self.architecture <= BEFORE_BLACKWELL

    @property
    def one_connection_is_asserted(self) -> bool:
        """Megatron stops unless CUDA_DEVICE_MAX_CONNECTIONS is 1; else it warns at most."""
        fsdp = self.use_torch_fsdp2 or self.use_megatron_fsdp
        return self.one_connection_is_wanted and not (fsdp or self.overlap_moe_expert_parallel_comm)

    @property
    def architecture(self) -> int:
        """Major compute capability; without a platform, and on AMD, that of Hopper."""
        accelerator = self.platform.accelerator if self.platform else None
        blackwell = accelerator and self.is_nvidia and accelerator.tflops.fp4 is not None
        return BEFORE_BLACKWELL + 1 if blackwell else BEFORE_BLACKWELL

    @property
    def is_nvidia(self) -> bool:
        """The platform's GPUs are NVIDIA's; assumed where nothing is known of them."""
        accelerator = self.platform.accelerator if self.platform else None
        return accelerator is None or accelerator.name.startswith("NVIDIA")

    @property
    def fast_domain(self) -> int | None:
        """Ranks within the fastest network of the platform: a node, or a rack of NVLink."""
        if self.platform is None:
            return None
        widest = 1
        for level in self.platform.levels[:-1]:
            if level.gbps < self.platform.levels[0].gbps and widest >= self.platform.ranks_per_node:
                break
            nodes = self.platform.ranks_per_node * (level.nodes or 1)
            widest = max(widest, level.ranks or nodes)
        return widest

    def environment_is(self, name: str, value: str) -> bool | None:
        """Whether a variable is known to have a value; None when nothing is known of it."""
        known = self.environment.get(name)
        return None if known is None else known == value
