"""`--piper-dispatcher` and its details: their values, and what in a command they contradict."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from piper_megatron.errors import WorkloadError
from piper_megatron.strict import nearest
from piper_megatron.workload.effective import cuda_graphs

ALGORITHMS = ("flat", "2dh", "halo", "rail", "rbd")
AUTO = "auto"
# these send to the other nodes in parts, where there is something to do with what arrived
CHUNKED = ("halo", "rail")
# these need nodes that hold equally many members of an expert group
TWO_HOPS = ("2dh", "halo", "rail", "rbd")
_ALLTOALL = "--moe-token-dispatcher-type alltoall"


@dataclass(frozen=True)
class DispatcherFlags:
    """What was asked for.

    Attributes:
        algorithm: one of `ALGORITHMS` or `auto`; None without `--piper-dispatcher`.
        chunks: parts of the traffic between nodes; None for as many as pay.
        node_size: members of an expert group that make a node; None for the true nodes.
        stats: traffic and times are logged.
    """

    algorithm: str | None = None
    chunks: int | None = None
    node_size: int | None = None
    stats: bool = False


@dataclass(frozen=True)
class Conflict:
    """What `--piper-dispatcher` contradicts, and the smallest change that mends it."""

    message: str
    fix: str


def dispatcher_flags(values: argparse.Namespace) -> DispatcherFlags:
    """Reads the flags.

    Args:
        values: arguments with the destinations of the `--piper-*` flags, as text.

    Raises:
        WorkloadError: an unknown algorithm, a number that is none, or a detail of an algorithm
            that has no use for it.
    """
    algorithm = values.piper_dispatcher
    if algorithm not in (None, AUTO, *ALGORITHMS):
        legal = nearest(algorithm, (*ALGORITHMS, AUTO))
        raise WorkloadError(f"--piper-dispatcher does not know '{algorithm}'; {legal}")
    chunks = _count("--piper-dispatcher-chunks", values.piper_dispatcher_chunks)
    for flag, given in (
        ("--piper-dispatcher-chunks", chunks is not None),
        ("--piper-dispatcher-stats", bool(values.piper_dispatcher_stats)),
    ):
        if given and algorithm is None:
            raise WorkloadError(
                f"{flag} says how --piper-dispatcher works, and that is not given; add "
                f"--piper-dispatcher auto or remove {flag}"
            )
    if chunks is not None and algorithm not in (AUTO, *CHUNKED):
        raise WorkloadError(
            f"--piper-dispatcher-chunks {chunks}: {algorithm} sends in one piece; remove it, or "
            f"use --piper-dispatcher {' or '.join(CHUNKED)}"
        )
    return DispatcherFlags(
        algorithm=algorithm,
        chunks=chunks,
        node_size=_count("--piper-node-size", values.piper_node_size),
        stats=bool(values.piper_dispatcher_stats),
    )


def _count(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise WorkloadError(f"{flag} takes a whole number of at least 1; got '{text}'")
    return int(text)


def apply_dispatcher(values: argparse.Namespace, typed: Callable[[str], bool]) -> None:
    """Has Megatron build its alltoall dispatcher, which Piper's replace, unless one was typed.

    Args:
        values: arguments; the dispatcher type is set where it is left to us.
        typed: whether an option stands on the command line.

    Raises:
        WorkloadError: as `dispatcher_flags`.
    """
    if dispatcher_flags(values).algorithm is not None and not typed("--moe-token-dispatcher-type"):
        values.moe_token_dispatcher_type = "alltoall"


def dispatcher_conflict(values: argparse.Namespace) -> Conflict | None:
    """The first thing in a command that its `--piper-*` dispatcher flags contradict.

    Args:
        values: arguments as Megatron's parser returns them, after `apply_dispatcher`.
    """
    flags = dispatcher_flags(values)
    conflicts = [_node_size_conflict(flags, values)]
    if flags.algorithm is not None:
        asked = f"--piper-dispatcher {flags.algorithm}"
        conflicts += [
            _type_conflict(asked, values.moe_token_dispatcher_type),
            _model_conflict(asked, values),
            _graph_conflict(flags.algorithm, values),
        ]
    return next(filter(None, conflicts), None)


def _node_size_conflict(flags: DispatcherFlags, values: argparse.Namespace) -> Conflict | None:
    size, ep = flags.node_size, values.expert_model_parallel_size
    if size is None or ep < 1 or ep % size == 0:
        return None
    divisors = [str(d) for d in range(1, ep + 1) if ep % d == 0]
    return Conflict(
        f"--piper-node-size {size} does not divide expert parallel size {ep}",
        f"its divisors: {', '.join(divisors)}",
    )


def _type_conflict(asked: str, dispatcher_type: str) -> Conflict | None:
    if dispatcher_type == "alltoall":
        return None
    return Conflict(
        f"{asked} replaces the exchange of Megatron's alltoall dispatcher, and "
        f"--moe-token-dispatcher-type says {dispatcher_type}",
        f"{_ALLTOALL}, or drop --piper-dispatcher",
    )


def _model_conflict(asked: str, values: argparse.Namespace) -> Conflict | None:
    if not values.num_experts:
        return Conflict(
            f"{asked} needs a model with experts", "add --num-experts, or drop --piper-dispatcher"
        )
    if values.transformer_impl == "inference_optimized":
        return Conflict(
            f"{asked} is for training, and --transformer-impl inference_optimized brings "
            "dispatchers of its own",
            "--transformer-impl transformer_engine, or drop --piper-dispatcher",
        )
    return None


def _graph_conflict(algorithm: str, values: argparse.Namespace) -> Conflict | None:
    """Row counts reach the host before rows are sent, which a graph cannot capture.

    `flat` needs the counts of Megatron's own dispatcher alone, which copies them behind the graph
    (token_dispatcher.py:MoEAlltoAllTokenDispatcher.__init__, cuda_dtoh_point, 0.19.2).
    """
    implementation, modules = cuda_graphs(values)
    if algorithm == "flat" or implementation == "none":
        return None
    if implementation != "full_iteration" and modules:
        captured = [module for module in ("moe", "moe_preprocess") if module in modules]
        if not captured:
            return None
        what, fix = f"of {captured[0]}", f"drop {captured[0]} from --cuda-graph-modules"
        if implementation == "local" and captured[0] == "moe_preprocess":
            fix = "drop moe_router and moe_preprocess from --cuda-graph-modules"
    elif implementation == "full_iteration":
        what, fix = "of the whole iteration", "--cuda-graph-impl none"
    else:
        what, fix = "of whole layers", "add --cuda-graph-modules attn"
    return Conflict(
        f"--piper-dispatcher {algorithm} tells the host how many rows go where, which a CUDA graph "
        f"{what} cannot capture",
        f"{fix}, or --piper-dispatcher flat",
    )
