"""What the real Megatron says of a command when a job starts, at any world size, on this CPU.

Its own parser, `validate_args`, microbatch calculator, process groups (over torch's fake backend)
and `core_transformer_config_from_args` run in this process. What this machine lacks is stood in
for as a well-kept GPU job would have it: Hopper GPUs, a recent Transformer Engine with its fused
kernels, einops, and the environment variables that a command's features ask for.
"""

import argparse
import contextlib
import copy
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state, utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import gtp_api
from megatron.core.transformer.moe import moe_utils
from megatron.training import arguments, global_vars, initialize
from packaging.version import Version
from torch.testing._internal.distributed.fake_pg import FakeStore

TRANSFORMER_ENGINE = Version("2.19.0")
# each is asked for by some feature and harms no other
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_CPU_OFFLOAD_V1": "1",
    "CUDA_GRAPHS_USE_NODE_PRIORITY": "1",
    "NCCL_GRAPH_REGISTER": "0",
}
FUSED_ROPE = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")
FUSED_PERMUTE = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


@dataclass(frozen=True)
class Refusal:
    """Why Megatron will not start.

    Attributes:
        step: `parser`, `arguments`, `microbatches`, `groups` or `config`.
        message: its own words.
        at: file and line, as `megatron/core/parallel_state.py:823`.
    """

    step: str
    message: str
    at: str


@contextlib.contextmanager
def gpu_job() -> Iterator[None]:
    """Stands in for what this machine lacks."""
    with contextlib.ExitStack() as stack:
        replace = lambda target, name, value: stack.enter_context(  # noqa: E731
            mock.patch.object(target, name, value)
        )
        replace(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        replace(torch.cuda, "device_count", lambda: 1)
        replace(arguments, "get_device_arch_version", lambda: 9)
        replace(arguments, "is_flashinfer_min_version", lambda _: True)
        replace(arguments, "_print_args", lambda *_: None)
        replace(arguments, "add_megatron_arguments", _cached_parser())
        replace(utils, "_te_version", TRANSFORMER_ENGINE)
        replace(gtp_api, "HAVE_GTP", True)
        replace(parallel_state, "HAVE_EINOPS", True)
        stack.enter_context(
            mock.patch.object(
                parallel_state, "einops", SimpleNamespace(rearrange=_rearrange), create=True
            )
        )
        for name in FUSED_ROPE:
            replace(rope_utils, name, object())
        for name in FUSED_PERMUTE:
            replace(moe_utils, name, object())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        level = logging.root.manager.disable
        stack.callback(logging.disable, level)
        logging.disable(logging.CRITICAL)
        quiet = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(quiet))
        stack.enter_context(contextlib.redirect_stderr(quiet))
        yield


def judge(tokens: Sequence[str], world: int) -> Refusal | None:
    """Megatron's refusal of a command at a world size; None when it would start.

    To be called inside `gpu_job`.
    """
    environment = {**ENVIRONMENT, "WORLD_SIZE": str(world), "RANK": "0"}
    if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(tokens) or "ucc" in tokens:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    step = "parser"
    try:
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(sys, "argv", ["pretrain.py", *tokens]),
        ):
            args = copy.deepcopy(arguments.parse_args())
            step = "arguments"
            arguments.validate_args(args)
            step = "microbatches"
            _microbatches(args)
            step = "groups"
            _groups(args)
            step = "config"
            arguments.core_transformer_config_from_args(args)
    except (Exception, SystemExit) as error:
        return Refusal(step, f"{type(error).__name__}: {error}", _origin(error))
    finally:
        num_microbatches_calculator.unset_num_microbatches_calculator()
        global_vars.unset_global_variables()
        torch.use_deterministic_algorithms(False)
        if parallel_state.model_parallel_is_initialized() or dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return None


def _microbatches(args: argparse.Namespace) -> None:
    num_microbatches_calculator.init_num_microbatches_calculator(
        rank=args.rank,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size * args.gtp_weight_remat_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )


def _groups(args: argparse.Namespace) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    args.use_gloo_process_groups = False
    args.pipeline_model_parallel_comm_backend = None  # NCCL and UCC are not on a CPU
    global_vars.set_args(args)
    initialize._initialize_distributed(None, None, None)


def _origin(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/megatron/" in frame.filename]
    if not inside:
        return "?"
    path = Path(inside[-1].filename)
    start = len(path.parts) - path.parts[::-1].index("megatron") - 1
    return f"{'/'.join(path.parts[start:])}:{inside[-1].lineno}"


def _cached_parser():
    """`add_megatron_arguments` that builds Megatron's arguments once; it takes 0.1 s."""
    built: list[argparse.ArgumentParser] = []
    add = arguments.add_megatron_arguments

    def cached(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if not built:
            built.append(add(parser))
        return built[0]

    return cached


def _rearrange(ranks: np.ndarray, pattern: str, u: int, s: int, l: int) -> np.ndarray:  # noqa: E741
    """The one einops pattern that Megatron's groups need."""
    assert pattern == "(l s u) -> (l u) s"
    return ranks.reshape(l, s, u).transpose(0, 2, 1).reshape(l * u, s)
