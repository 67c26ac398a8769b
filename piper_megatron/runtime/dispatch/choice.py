"""What `--piper-dispatcher` leaves open: the algorithm of `auto`, and in how many parts it sends.

One rank of a tp-ep group decides for all of them, since they must agree whatever files and
processors their nodes have.
"""

import argparse
import json
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from piper_megatron.resources.dispatcher_choice import DispatcherChoice, choose_dispatcher
from piper_megatron.resources.reach import Reach
from piper_megatron.runtime.dispatch.groups import ExpertGroups
from piper_megatron.runtime.parallel_state import PlacedJob, placed_job
from piper_megatron.workload.dispatcher_flags import (
    ALGORITHMS,
    AUTO,
    CHUNKED,
    DispatcherFlags,
    dispatcher_flags,
)
from piper_megatron.workload.spec import Experts, TrainingSpec

_PRECISION = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def resolve_dispatcher(args: argparse.Namespace, groups: ExpertGroups) -> tuple[str, int]:
    """Algorithm and parts of this rank's dispatchers; collective over the tp-ep group.

    Args:
        args: Megatron's validated arguments, with `--piper-dispatcher`.
        groups: of this rank.

    Returns:
        One of `ALGORITHMS`, and 1 where it sends in one part.
    """
    flags, job = dispatcher_flags(args), placed_job()
    assert flags.algorithm is not None
    if flags.algorithm != AUTO and (flags.algorithm not in CHUNKED or flags.chunks):
        return flags.algorithm, flags.chunks or 1
    assert job is not None, "ranks are placed when a flag is given"
    ranks = dist.get_process_group_ranks(mpu.get_expert_tensor_and_model_parallel_group())
    store = dist.PrefixStore("piper", job.store)
    key = f"dispatcher/{ranks[0]}"
    if dist.get_rank() == ranks[0]:
        choice = _choose(args, flags, groups, job)
        if flags.algorithm == AUTO:
            _say_once(store, describe(choice))
        store.set(key, json.dumps([choice.algorithm, choice.chunks]))
    store.set_timeout(timedelta(minutes=args.distributed_timeout_minutes))
    algorithm, chunks = json.loads(store.get(key))
    return algorithm, chunks


def describe(choice: DispatcherChoice) -> str:
    """One line for the log."""
    what = choice.algorithm
    if choice.chunks > 1:
        what += f" in {choice.chunks} parts"
    ranked = sorted(choice.seconds.items(), key=lambda item: item[1])
    times = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in ranked)
    times = f"; ms of a dispatch and combine: {times}" if times else ""
    return f"piper_megatron: --piper-dispatcher auto takes {what}: {choice.why}{times}"


def _choose(
    args: argparse.Namespace, flags: DispatcherFlags, groups: ExpertGroups, job: PlacedJob
) -> DispatcherChoice:
    width = getattr(args, "moe_latent_size", None) or args.hidden_size
    ranks_of_a_sequence = args.context_parallel_size * args.tensor_model_parallel_size
    asked = flags.algorithm
    assert asked is not None
    return choose_dispatcher(
        job.platform,
        TrainingSpec.model_validate(
            {
                "precision": _PRECISION[str(args.params_dtype)],
                "moe_router_dtype": args.moe_router_dtype,
                "dispatcher": asked,
                "dispatcher_chunks": flags.chunks,
            }
        ),
        Experts(
            count=args.num_experts,
            topk=args.moe_router_topk,
            ffn=args.moe_ffn_hidden_size or args.ffn_hidden_size,
            groups=args.moe_router_num_groups,
            topk_groups=args.moe_router_group_topk,
        ),
        reach_of(groups, job),
        tokens=args.seq_length * args.micro_batch_size // ranks_of_a_sequence,
        row_bytes=width * args.params_dtype.itemsize,
        equal_shares=groups.rail is not None,
        among=ALGORITHMS if asked == AUTO else (asked,),
    )


def reach_of(groups: ExpertGroups, job: PlacedJob) -> Reach:
    """How the members of this rank's expert group spread over the levels of the network.

    Pretended nodes count as nodes, beside each other in whatever holds them.
    """
    members = dist.get_process_group_ranks(groups.ep)
    domains = job.topology.domains(job.locations)[members]
    spread = [len(np.unique(level)) for level in domains.T]
    node = job.platform.node_level
    inside = (max(count, groups.nodes) for count in spread[: node + 1])
    return Reach(len(members), (*inside, *spread[node + 1 :]))


def _say_once(store: dist.Store, line: str) -> None:
    """Groups of one shape come to one line."""
    if store.add(f"said/{line}", 1) == 1:
        print(line, flush=True)
