"""Changes of a command that save memory: what they are called, and what they set.

A change that does not apply to the command, or that Megatron would refuse, is left out by whoever
tries it; here is only what could be meant.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from piper_megatron.check.command import Command


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        text: as flags.
        kind: changes of one kind exclude each other.
        values: destination -> value.
        gpus: how many times as many GPUs.
    """

    text: str
    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    gpus: int = 1

    def and_also(self, other: "Change") -> "Change":
        """Both changes."""
        return Change(
            f"{self.text} with {other.text}",
            f"{self.kind}+{other.kind}",
            self.values | other.values,
            self.gpus * other.gpus,
        )


def changes(c: Command) -> Iterator[Change]:
    """All changes of a command that save memory on one GPU."""
    yield from recomputation(c)
    yield from _batch(c)
    yield from _optimizer(c)
    yield from _sharding(c)
    yield from more_gpus(2, 4)


def recomputation(c: Command) -> Iterator[Change]:
    """More recomputation than the command has."""
    if c.recompute_granularity == "full":
        return
    for modules in _modules(c):
        new = [name for name in modules if name not in c.recompute_modules]
        if c.recompute_granularity is None or new:
            kept = c.recompute_modules if c.recompute_granularity else []
            names = list(dict.fromkeys([*(k for k in kept if k != "core_attn"), *modules]))
            yield Change(
                f"--recompute-granularity selective --recompute-modules {' '.join(names)}",
                "recompute",
                _recompute("selective", names),
            )
    yield full_recomputation()


def full_recomputation() -> Change:
    """Only the input of every layer is kept."""
    return Change(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "recompute",
        _recompute("full", None) | {"recompute_method": "uniform", "recompute_num_layers": 1},
    )


def _recompute(granularity: str, modules: list[str] | None) -> dict[str, Any]:
    return {
        "recompute_activations": False,
        "recompute_granularity": granularity,
        "recompute_modules": modules,
        "recompute_method": None,
        "recompute_num_layers": None,
    }


def _modules(c: Command) -> Iterator[list[str]]:
    """Sets of modules, the cheapest first."""
    light = ["layernorm"]
    if c.experts and c.moe_grouped_gemm:
        light.append("moe_act")
    if c.mla:
        light.append("mla_up_proj")
    for name in light:
        yield [name]
    if len(light) > 1:
        yield light
    if c.attention_backend == "unfused" or c.transformer_impl == "local":
        yield ["core_attn"]
    if not all(c.moe_layers):
        yield ["mlp"]
    if c.experts:
        yield ["moe"]
        yield ["layernorm", "moe", *(["mla_up_proj"] if c.mla else [])]


def _batch(c: Command) -> Iterator[Change]:
    size = c.micro_batch_size
    for smaller in sorted({size // 2, 1} - {0, size}, reverse=True):
        yield Change(f"--micro-batch-size {smaller}", "batch", {"micro_batch_size": smaller})


def _optimizer(c: Command) -> Iterator[Change]:
    shard = {} if c.distributed_optimizer else {"use_distributed_optimizer": True}
    flag = "--use-distributed-optimizer " if shard else ""
    if shard:
        yield Change(flag.strip(), "optimizer", shard)
    if not c.use_precision_aware_optimizer and c.bf16:
        states = {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": "bf16",
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
            "accumulate_allreduce_grads_in_fp32": False,
        }
        yield Change(
            f"{flag}--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
            "--exp-avg-sq-dtype bf16",
            "optimizer",
            shard | states,
        )
    if not c.optimizer_cpu_offload:
        for share in (0.5, 1.0):
            yield Change(
                f"{flag}--use-precision-aware-optimizer --optimizer-cpu-offload "
                f"--optimizer-offload-fraction {share:g}",
                "optimizer",
                shard
                | {
                    "use_precision_aware_optimizer": True,
                    "optimizer_cpu_offload": True,
                    "optimizer_offload_fraction": share,
                },
            )


def _sharding(c: Command) -> Iterator[Change]:
    """Other parallel sizes on the same GPUs."""
    if c.tp > 1 and not c.sequence_parallel:
        yield Change("--sequence-parallel", "sequence", {"sequence_parallel": True})
    for factor in (2, 4):
        yield from _divided(c, factor)
        yield from _tensor(c, factor)


def _divided(c: Command, factor: int) -> Iterator[Change]:
    """Experts or layers over more ranks."""
    if c.experts:
        size = {"expert_model_parallel_size": c.ep * factor}
        yield Change(f"--expert-model-parallel-size {c.ep * factor}", "ep", size)
    if c.layout_stages is None and not c.uneven:
        size = {"pipeline_model_parallel_size": c.pp * factor}
        yield Change(f"--pipeline-model-parallel-size {c.pp * factor}", "pp", size)


def _tensor(c: Command, factor: int) -> Iterator[Change]:
    """Every matrix over more ranks of the fast network."""
    tp = c.tp * factor
    if c.fast_domain is None or tp > c.fast_domain:
        return
    sizes = {"tensor_model_parallel_size": tp, "sequence_parallel": True}
    flags = f"--tensor-model-parallel-size {tp} --sequence-parallel"
    if c.experts and c.expert_tensor_parallel_size is None:  # it would grow with TP
        sizes["expert_tensor_parallel_size"] = c.etp
        flags += f" --expert-tensor-parallel-size {c.etp}"
    yield Change(flags, "tp", sizes)


def more_gpus(*factors: int) -> Iterator[Change]:
    """More data-parallel replicas, which share the optimizer's states among them."""
    for factor in factors:
        yield Change(f"{factor} times the GPUs", "gpus", {}, factor)


def scaled(c: Command, factor: int) -> Iterator[Change]:
    """A multiple of the GPUs, spent on replicas, on experts or on stages."""
    yield from more_gpus(factor)
    for change in _divided(c, factor):
        yield replace(change, kind="gpus", gpus=factor)
