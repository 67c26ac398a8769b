"""Megatron's own MoE layer with its alltoall dispatcher, and the same layer with each of Piper's.

Runs where the CPU backend is in force (a fork of `ranks.RankServer`).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

ALGORITHMS = ("flat", "2dh", "halo", "rail", "rbd")
TIMEOUT = timedelta(minutes=1)


@dataclass(frozen=True)
class Layout:
    """Where the ranks are and how the experts lie on them.

    Attributes:
        hosts: a letter for the node of each rank.
        tp: tensor-parallel size, with sequence parallelism.
        etp: tensor-parallel size of an expert.
        ep: expert-parallel size; 0 for all ranks that `etp` leaves.
    """

    hosts: str
    tp: int = 1
    etp: int = 1
    ep: int = 0

    @property
    def world(self) -> int:
        return len(self.hosts)

    @property
    def expert_ranks(self) -> int:
        return self.ep or self.world // self.etp


@dataclass(frozen=True)
class Variant:
    """One of Piper's dispatchers."""

    algorithm: str
    chunks: int = 1

    @property
    def only_moves(self) -> bool:
        return self.algorithm in ("flat", "2dh", "halo")

    def __str__(self) -> str:
        return f"{self.algorithm} in {self.chunks}"


EACH = tuple(map(Variant, ALGORITHMS))


@dataclass(frozen=True)
class Problem:
    """A layer and its input.

    Attributes:
        layout: of the ranks.
        local_experts: experts of a rank.
        topk: experts of a token.
        tokens: of each rank.
        maps: the experts of each rank's tokens, boolean [T, E]; None for those that Megatron's
            router picks.
        hidden: width of a token.
        dtype: of rows and weights.
        settings: more of Megatron's configuration.
        late: of the configuration, what Megatron would ask Transformer Engine for.
        variants: to compare with Megatron's own.
    """

    layout: Layout
    local_experts: int
    topk: int
    tokens: tuple[int, ...]
    maps: tuple[np.ndarray, ...] | None = None
    hidden: int = 16
    dtype: str = "float64"
    settings: dict[str, Any] = field(default_factory=dict)
    late: dict[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = EACH

    @property
    def experts(self) -> int:
        return self.local_experts * self.layout.expert_ranks


# of each variant, by tensor, the largest difference to Megatron's own dispatcher
Differences = dict[str, dict[str, float]]


def compare_all(problems: list[Problem]) -> list[Differences]:
    """Of every problem on this rank. Neighbours with one layout share their process groups."""
    import torch.distributed as dist

    results: list[Differences] = []
    layout = None
    for problem in problems:
        if problem.layout != layout:
            layout = problem.layout
            groups = start(layout)
        results.append(_compare(problem, groups))
    dist.barrier()  # rank 0 takes the store with it
    return results


def _compare(problem: Problem, groups: Any) -> Differences:
    layer = build_layer(problem)
    truth = train(layer, problem)
    return {
        str(variant): differences(truth, train(with_dispatcher(layer, variant, groups), problem))
        for variant in problem.variants
    }


def differences(truth: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """Largest difference by tensor, as a share of the largest number in it.

    Infinite where one lacks the tensor, or has it in another shape or type.
    """
    return {name: _difference(truth.get(name), found.get(name)) for name in truth | found}


def _difference(truth: Any, found: Any) -> float:
    if truth is None or found is None:
        return float("inf")
    if truth.shape != found.shape or truth.dtype != found.dtype:
        return float("inf")
    if not truth.numel():
        return 0.0
    largest = (truth.double() - found.double()).abs().max().nan_to_num(float("inf"))
    return float(largest / (truth.double().abs().max() or 1))


def start(layout: Layout, timeout: timedelta = TIMEOUT) -> Any:
    """Makes Megatron's process groups; returns this rank's expert group on its nodes.

    Args:
        layout: of the ranks.
        timeout: of the node and rail groups.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from piper_megatron.runtime.dispatch.groups import split_group

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.expert_ranks,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=TIMEOUT.total_seconds() / 60,
    )
    model_parallel_cuda_manual_seed(1)
    group = parallel_state.get_expert_model_parallel_group()
    hosts = [layout.hosts[rank] for rank in dist.get_process_group_ranks(group)]
    return split_group(group, hosts, timeout)


def build_layer(problem: Problem) -> Any:
    """A layer of real experts with Megatron's own dispatcher, the same for equal problems."""
    import torch
    import torch.nn.functional as F
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    layout = problem.layout
    settings = {
        "num_layers": 1,
        "hidden_size": problem.hidden,
        "num_attention_heads": 2,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_dropout_fusion": False,
        "num_moe_experts": problem.experts,
        "init_method_std": problem.hidden**-0.5,
        "moe_router_topk": problem.topk,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp64" if problem.dtype == "float64" else "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_ffn_hidden_size": 8,
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "expert_model_parallel_size": layout.expert_ranks,
        "expert_tensor_parallel_size": layout.etp,
        **problem.settings,
    }
    spec = get_moe_module_spec(use_te=False, num_experts=problem.experts, moe_grouped_gemm=False)
    parts = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    config = TransformerConfig(**settings)
    for name, value in problem.late.items():
        setattr(config, name, value)
    layer = MoELayer(config, parts, layer_number=1)
    layer.to(getattr(torch, problem.dtype))
    layer.set_layer_number(1)
    if problem.maps is not None:
        layer.router = _given_routing(problem)
    return layer


def _given_routing(problem: Problem) -> Any:
    """In place of the router: the problem's map, with probabilities that are a parameter."""
    import torch

    class GivenRouting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = torch.from_numpy(problem.maps[_rank()].copy())
            wide = torch.float64 if problem.dtype == "float64" else torch.float32
            random = torch.rand(self.map.shape, generator=_generator(), dtype=wide)
            self.probabilities = torch.nn.Parameter((random + 0.1) * self.map)

        def forward(self, *_args: Any) -> tuple[Any, Any]:
            # router padding writes into the map
            return self.probabilities * self.map, self.map.clone()

    return GivenRouting()


def with_dispatcher(
    layer: Any, variant: Variant, groups: Any, where: str = "layer 1", recorder: Any = None
) -> Any:
    """The layer with one of Piper's dispatchers, and the same weights."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from piper_megatron.runtime.dispatch.dispatcher import DispatcherSpec

    other = copy.copy(layer)
    spec = DispatcherSpec(variant.algorithm, groups, variant.chunks)
    other.token_dispatcher = spec.build(
        layer.num_local_experts,
        layer.local_expert_indices,
        layer.config,
        get_default_pg_collection(),
        where=lambda: where,
        recorder=recorder,
    )
    if layer.token_dispatcher.shared_experts is not None:
        other.token_dispatcher.set_shared_experts(layer.shared_experts)
    return other


def train(layer: Any, problem: Problem) -> dict[str, Any]:
    """Forward and backward once.

    Returns:
        The output, the gradients of the input ("hidden") and of every parameter by name, the
        number of rows of each local expert and, of each of them, rows and probabilities in order
        of size: experts take their rows in any order.
    """
    import torch

    layer.zero_grad(set_to_none=True)
    hidden = hidden_states(problem).requires_grad_()
    with _seen_by_experts(layer) as seen:
        output = layer(hidden)[0]
    # numbers that differ from place to place, so that rows in wrong places show
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    (output * weights).sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "hidden": hidden.grad, **gradients, **seen}


def evaluate(layer: Any, problem: Problem) -> Any:
    """The output alone, without autograd."""
    import torch

    with torch.no_grad():
        return layer(hidden_states(problem))[0]


def hidden_states(problem: Problem) -> Any:
    """This rank's tokens, [T, 1, H]."""
    import torch

    tokens = problem.tokens[_rank()]
    dtype = getattr(torch, problem.dtype)
    return torch.randn(tokens, 1, problem.hidden, generator=_generator(), dtype=torch.float64).to(
        dtype
    )


@contextmanager
def _seen_by_experts(layer: Any) -> Iterator[dict[str, Any]]:
    import torch

    seen: dict[str, Any] = {}

    def look(_module: Any, arguments: tuple[Any, ...]) -> None:
        rows, counts, probabilities = (argument.detach() for argument in arguments)
        assert len(rows) == len(probabilities) == int(counts.sum())
        for name, tensor in (("rows", rows), ("probabilities", probabilities)):
            parts = [part.sort(0).values for part in tensor.split(counts.tolist())]
            seen[f"{name} of experts"] = torch.cat(parts)
        seen["rows of each expert"] = counts

    hook = layer.experts.register_forward_pre_hook(look)
    yield seen
    hook.remove()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _generator() -> Any:
    import torch

    return torch.Generator().manual_seed(17 + _rank())


def random_map(rank: int, tokens: int, experts: int, topk: int) -> np.ndarray:
    """Distinct experts for each token, uniform."""
    scores = np.random.default_rng([rank, experts, topk]).random((tokens, experts))
    return scores.argsort(1).argsort(1) < topk


def maps_of(tokens: tuple[int, ...], experts: int, choose: Callable) -> tuple[np.ndarray, ...]:
    """A map for each rank; `choose(rank, tokens, experts)` makes it."""
    return tuple(choose(rank, count, experts).astype(bool) for rank, count in enumerate(tokens))


def modes_of(problem: Problem) -> Differences:
    """Evaluation without autograd, and torch's deterministic mode.

    Returns:
        Of each variant: what evaluation's output differs from training's ("evaluated"), what two
        deterministic runs differ ("twice") and one of them from Megatron's own dispatcher
        ("deterministic"), and how often index_add_ ran in them ("index_add").
    """
    import torch

    groups = start(problem.layout)
    layer = build_layer(problem)
    truth = train(layer, problem)
    found: Differences = {}
    for variant in problem.variants:
        ours = with_dispatcher(layer, variant, groups)
        trained = {"output": train(ours, problem)["output"]}
        evaluated = {"output": evaluate(ours, problem)}
        with _index_add_counted() as calls:
            torch.use_deterministic_algorithms(True)
            once, again = train(ours, problem), train(ours, problem)
            torch.use_deterministic_algorithms(False)
        found[str(variant)] = {
            "evaluated": max(differences(trained, evaluated).values()),
            "twice": max(differences(once, again).values()),
            "deterministic": max(differences(truth, once).values()),
            "index_add": len(calls),
        }
    return found


@contextmanager
def _index_add_counted() -> Iterator[list[None]]:
    """Its order on a GPU is not fixed."""
    import torch

    calls: list[None] = []
    index_add = torch.Tensor.index_add_

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return index_add(*args, **kwargs)

    torch.Tensor.index_add_ = counted
    yield calls
    torch.Tensor.index_add_ = index_add


def sums_of_ones(count: int) -> list[list[float]]:
    """Sums of so many bf16 ones, in torch's usual mode and in the deterministic one."""
    import torch

    from piper_megatron.runtime.dispatch.rows import add_up

    ones, places = torch.ones(2 * count, dtype=torch.bfloat16), torch.arange(2 * count) % 2
    usual = add_up(places, 3, ones)
    torch.use_deterministic_algorithms(True)
    return [usual.tolist(), add_up(places, 3, ones).tolist()]
