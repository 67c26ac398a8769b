"""GPU-only choices of a command line, turned into what the CPU has, or refused by name.

A user rehearses the command they mean to run on GPUs, so most choices are translated, and each
translation is told. Choices that change what is computed, and that Megatron's own layers cannot
do, are refused. Flags that a release of Megatron does not have are passed over.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from piper_megatron.errors import CpuBackendError

_TE = "Transformer Engine needs a GPU"
_KERNEL = "it is a CUDA kernel"
_GLOO = "all process groups use gloo"
_GRAPH = "CUDA graphs need a GPU"
_FLEX = "DeepEP, HybridEP and NCCL EP need a GPU"
_GROUPED = "grouped GEMM needs a GPU; experts run one after the other"
_LOW = "8- and 4-bit formats need a GPU; the model's own precision is used"
_OFFLOAD = "everything is on the host already"
_PRECISION = "the precision-aware optimizer is Transformer Engine's"
_TOOL = "it watches a GPU"


@dataclass(frozen=True)
class Translation:
    """One choice and what it becomes.

    Attributes:
        flag: as the user would write it; `--no-...` for a default that has to be switched off.
        cpu: the value on the CPU.
        why: half a sentence for the user.
        gpu: the values that need a GPU; None for all but `cpu`.
        attribute: its name in the parsed arguments, where the flag does not say it.
    """

    flag: str
    cpu: Any
    why: str
    gpu: tuple[Any, ...] | None = None
    attribute: str = ""

    def concerns(self, value: Any) -> bool:
        """Whether a value has to be translated."""
        return value in self.gpu if self.gpu is not None else value != self.cpu

    def told(self, value: Any) -> str:
        """The line for the user."""
        if self.flag.startswith("--no-"):
            change = f"{self.flag} added"
        elif self.cpu in (None, False, 0, []):
            change = f"{self.flag} dropped"
        else:
            change = f"{self.flag} {value} becomes {self.cpu}"
        return f"CPU backend: {change}: {self.why}"


@dataclass(frozen=True)
class Refusal:
    """One choice that the CPU cannot follow.

    Attributes:
        flag: as the user would write it.
        applies: whether a value of it is out of reach.
        why: half a sentence with the remedy.
        attribute: its name in the parsed arguments, where the flag does not say it.
    """

    flag: str
    applies: Callable[[Any], bool]
    why: str
    attribute: str = ""


def _given(value: Any) -> bool:
    return value is not None


TRANSLATIONS = (
    Translation("--transformer-impl", "local", _TE, gpu=("transformer_engine",)),
    Translation("--mla-down-proj-fusion", False, _TE),
    Translation("--cross-entropy-fusion-impl", "native", _TE),
    Translation("--use-te-activation-func", False, _TE),
    Translation("--use-transformer-engine-op-fuser", False, _TE),
    Translation("--fused-residual-rmsnorm", False, _TE),
    Translation("--te-rng-tracker", False, _TE),
    Translation("--te-precision-config-file", None, _TE),
    Translation("--delay-wgrad-compute", False, _TE),
    Translation("--overlap-dispatch-backward-with-experts-wgrad", False, _TE),
    Translation("--tp-comm-overlap", False, _TE),
    Translation("--use-flash-attn", False, _KERNEL),
    Translation("--flash-attention-version", None, _KERNEL),
    Translation("--use-kitchen-attention", False, _KERNEL),
    Translation("--no-masked-softmax-fusion", False, _KERNEL),
    Translation("--no-rope-fusion", False, _KERNEL, attribute="apply_rope_fusion"),
    Translation("--no-persist-layer-norm", True, _KERNEL, attribute="no_persist_layer_norm"),
    Translation("--no-gradient-accumulation-fusion", False, _KERNEL),
    Translation("--moe-permute-fusion", False, _KERNEL),
    Translation("--moe-router-fusion", False, _KERNEL),
    Translation("--moe-grouped-gemm", False, _GROUPED),
    Translation("--moe-single-grouped-weight", False, _GROUPED),
    Translation("--moe-single-grouped-bias", False, _GROUPED),
    Translation("--moe-paged-stash", False, _GROUPED),
    Translation("--use-grouped-gemm-for-shared-expert", False, _GROUPED),
    Translation("--use-grouped-gemm-for-dense-mlp", False, _GROUPED),
    Translation("--moe-token-dispatcher-type", "alltoall", _FLEX, gpu=("flex",)),
    Translation("--moe-flex-dispatcher-backend", "deepep", _FLEX, gpu=("ncclep",)),
    Translation("--moe-enable-deepep", False, _FLEX),
    Translation("--fp8-format", None, _LOW, attribute="fp8"),
    Translation("--fp8-param-gather", False, _LOW),
    Translation("--fp8-output-proj", False, _LOW),
    Translation("--fp4-format", None, _LOW, attribute="fp4"),
    Translation("--fp4-param-gather", False, _LOW),
    Translation("--first-last-layers-bf16", False, _LOW),
    Translation("--reuse-grad-buf-for-mxfp8-param-ag", False, _LOW),
    Translation("--moe-router-padding-for-fp8", False, _LOW),
    Translation("--moe-router-padding-for-quantization", False, _LOW),
    Translation("--use-precision-aware-optimizer", False, _PRECISION),
    Translation("--main-grads-dtype", "fp32", _PRECISION),
    Translation("--main-params-dtype", "fp32", _PRECISION),
    Translation("--exp-avg-dtype", "fp32", _PRECISION),
    Translation("--exp-avg-sq-dtype", "fp32", _PRECISION),
    Translation("--optimizer-cpu-offload", False, _OFFLOAD),
    Translation("--cpu-offloading-num-layers", 0, _OFFLOAD),
    Translation("--fine-grained-activation-offloading", False, _OFFLOAD),
    Translation("--offload-modules", [], _OFFLOAD),
    Translation("--distributed-backend", "gloo", _GLOO),
    Translation("--pipeline-model-parallel-comm-backend", None, _GLOO),
    Translation("--nccl-communicator-config-path", None, _GLOO),
    Translation("--use-nccl-ub", False, _GLOO, attribute="nccl_ub"),
    Translation("--use-sharp", False, _GLOO),
    Translation("--sharp-enabled-group", None, _GLOO),
    Translation("--high-priority-stream-groups", [], _GLOO),
    Translation("--enable-cuda-graph", False, _GRAPH),
    Translation("--external-cuda-graph", False, _GRAPH),
    Translation("--cuda-graph-impl", "none", _GRAPH),
    Translation("--cuda-graph-modules", [], _GRAPH),
    Translation("--cuda-graph-scope", [], _GRAPH),
    Translation("--cuda-graph-scope", None, _GRAPH, attribute="cuda_graph_scope_deprecated"),
    Translation("--optimizer-cuda-graph", False, _GRAPH),
    Translation("--nvtx-ranges", False, _TOOL),
    Translation("--record-memory-history", False, _TOOL),
    Translation("--gpu-sniff-test-interval", None, _TOOL),
    Translation("--log-straggler", False, _TOOL),
    Translation("--log-energy", False, _TOOL),
    Translation("--async-save", False, "the process that saves would not have the CPU backend"),
)
REFUSALS = (
    Refusal(
        "--transformer-impl",
        lambda value: value == "inference_optimized",
        "layers for inference need a GPU; choose local",
    ),
    Refusal("--use-megatron-fsdp", bool, "it needs a GPU"),
    Refusal("--use-torch-fsdp2", bool, "it needs a GPU"),
    Refusal("--tensor-parallel-num-weight-shards", _given, _TE),
    Refusal("--expert-tensor-parallel-num-weight-shards", _given, _TE),
    Refusal("--moe-latent-size", _given, _TE),
    Refusal("--experimental-attention-variant", _given, _TE),
    Refusal(
        "--position-embedding-type",
        lambda value: value == "relative",
        "relative positions are Transformer Engine's; choose rope or learned_absolute",
    ),
    Refusal(
        "--apply-layernorm-1p",
        bool,
        "torch's norms have no zero-centred weight",
        attribute="layernorm_zero_centered_gamma",
    ),
    Refusal("--qk-clip", bool, "it reads the logits of Transformer Engine's attention"),
    Refusal(
        "--log-max-attention-logit", bool, "it reads the logits of Transformer Engine's attention"
    ),
    Refusal("--sft", bool, "Megatron's own attention takes no packed sequences"),
    Refusal(
        "--dataloader-inter-document-masking",
        bool,
        "Megatron's own attention takes no packed sequences",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        lambda value: value is not None and bool(set(value) & set("MGD")),
        "layers M, G and D are CUDA kernels; use *, - and E",
    ),
    Refusal("--batch-invariant-mode", bool, _KERNEL),
)


def translate(args: argparse.Namespace) -> list[str]:
    """Replaces GPU-only choices in Megatron's parsed arguments, before they are validated.

    A second call on the same arguments changes nothing and tells nothing.

    Args:
        args: changed in place.

    Returns:
        One line for each change.

    Raises:
        CpuBackendError: a choice has no counterpart on the CPU; the message names the flag.
    """
    for refusal in REFUSALS:
        name = attribute_of(refusal)
        if hasattr(args, name) and refusal.applies(getattr(args, name)):
            raise CpuBackendError(f"{refusal.flag} has no CPU counterpart: {refusal.why}")
    _refuse_split_windows(args)
    told = []
    for translation in TRANSLATIONS:
        name = attribute_of(translation)
        if hasattr(args, name) and translation.concerns(value := getattr(args, name)):
            setattr(args, name, copy.copy(translation.cpu))
            told.append(translation.told(value))
    return told + _unfused_attention(args) + _recomputed_modules(args) + _profiler(args)


def attribute_of(choice: Translation | Refusal) -> str:
    """The name in the parsed arguments."""
    return choice.attribute or choice.flag.removeprefix("--no-").lstrip("-").replace("-", "_")


def _refuse_split_windows(args: argparse.Namespace) -> None:
    if getattr(args, "window_size", None) is not None and args.context_parallel_size > 1:
        raise CpuBackendError(
            "--window-size with --context-parallel-size has no CPU counterpart: windows over a "
            "split sequence are Transformer Engine's; choose one of the two"
        )


def _unfused_attention(args: argparse.Namespace) -> list[str]:
    backend = getattr(args, "attention_backend", None)
    if backend is None or backend.name not in ("flash", "fused"):
        return []
    args.attention_backend = type(backend)["unfused"]
    return [f"CPU backend: --attention-backend {backend.name} becomes unfused: {_KERNEL}"]


def _recomputed_modules(args: argparse.Namespace) -> list[str]:
    """Megatron recomputes the experts' activation only inside of grouped GEMM."""
    if "moe_act" not in (getattr(args, "recompute_modules", None) or ()):
        return []
    args.recompute_modules = [name for name in args.recompute_modules if name != "moe_act"]
    return [f"CPU backend: --recompute-modules moe_act dropped: {_GROUPED}"]


def _profiler(args: argparse.Namespace) -> list[str]:
    """Without torch's profiler, `--profile` steers Nsight."""
    if not getattr(args, "profile", False) or args.use_pytorch_profiler:
        return []
    args.profile = False
    return [f"CPU backend: --profile dropped: {_TOOL}; --use-pytorch-profiler works here"]
