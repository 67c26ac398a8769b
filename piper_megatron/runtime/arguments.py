"""The `--piper-*` flags: declared in one group, resolved into Megatron's own arguments."""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from piper_megatron.errors import LayoutError, PiperError, WorkloadError
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.workload.dispatcher_flags import apply_dispatcher, dispatcher_conflict
from piper_megatron.workload.piper_flags import PIPER_FLAGS, apply_grid


def add_piper_group(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the `piper` group; its values stay strings so that checkpoints load without the plug-in.

    When a `--piper-*` flag was typed, a parsing error is one line instead of Megatron's usage text.
    """
    group = parser.add_argument_group("piper", "Grids, placement and token dispatch")
    for flag in PIPER_FLAGS:
        if flag.metavar:
            group.add_argument(flag.name, metavar=flag.metavar, help=flag.help)
        else:
            group.add_argument(flag.name, action="store_true", default=None, help=flag.help)
    _escape_percent_signs(parser)
    if _typed("--piper-", sys.argv):
        parser.error = _error_in_one_line(parser)  # type: ignore[method-assign]
    return parser


def _escape_percent_signs(parser: argparse.ArgumentParser) -> None:
    """Lets `--help` print: argparse dies of a bare '%', and a help text of 0.19.2 has one."""
    for action in parser._actions:
        if isinstance(action.help, str):
            action.help = re.sub(r"%%|%(?!\()", "%%", action.help)


def uses_piper(args: argparse.Namespace) -> bool:
    """Whether any `--piper-*` flag was given."""
    return any(value is not None for name, value in vars(args).items() if name.startswith("piper_"))


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """Turns `--piper-*` flags into Megatron's arguments, before Megatron validates them.

    Idempotent, since Megatron parses its command line more than once in some jobs.

    Raises:
        LayoutError: the grid is malformed, clashes with Megatron's flags, or does not divide the
            world or the experts.
        WorkloadError: the dispatcher's flags are malformed or contradict Megatron's.
    """
    if not uses_piper(args):
        return args
    if args.piper_topology is not None or args.piper_placement is not None:
        args.piper_placement = args.piper_placement or "auto"
    apply_grid(args, lambda flag: _typed(flag, sys.argv))
    apply_dispatcher(args, lambda flag: _typed(flag, sys.argv))
    _check_order(args)
    layout_of(args)
    _check_experts(args)
    if conflict := dispatcher_conflict(args):
        raise WorkloadError(f"{conflict.message}; {conflict.fix}")
    return args


def notes(args: argparse.Namespace) -> list[str]:
    """What `resolve` set in place of a default of Megatron's."""
    dispatcher = getattr(args, "piper_dispatcher", None)
    if dispatcher is None or _typed("--moe-token-dispatcher-type", sys.argv):
        return []
    return [
        "piper_megatron: --moe-token-dispatcher-type alltoall in place of Megatron's default, for "
        f"--piper-dispatcher {dispatcher}"
    ]


def layout_of(args: argparse.Namespace) -> ParallelLayout:
    """The parallel sizes that Megatron will use (ETP defaults to TP: parallel_state.py:871)."""
    tp = args.tensor_model_parallel_size
    return ParallelLayout(
        world=args.world_size,
        tp=tp,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or tp,
    )


def _check_experts(args: argparse.Namespace) -> None:
    experts, ep = args.num_experts, args.expert_model_parallel_size
    if experts is None and ep > 1:
        raise LayoutError(
            f"expert parallel size {ep} needs a model with experts; add --num-experts"
        )
    if experts is not None and experts % ep:
        divisors = [str(d) for d in range(1, experts + 1) if experts % d == 0]
        raise LayoutError(
            f"expert parallel size {ep} does not divide --num-experts {experts}; "
            f"its divisors: {', '.join(divisors)}"
        )


def _check_order(args: argparse.Namespace) -> None:
    if getattr(args, "use_tp_pp_dp_mapping", False):
        raise LayoutError(
            "--use-tp-pp-dp-mapping renumbers the ranks itself; remove it, since "
            "--piper-placement puts data parallelism outermost"
        )
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if getattr(args, name, 1) > 1:
            raise LayoutError(
                f"{name.replace('_', ' ')} above 1 adds a grid axis that --piper-* flags do not "
                "know; remove it or the --piper-* flags"
            )


def _typed(flag: str, argv: Sequence[str]) -> bool:
    """Whether a flag, or any flag of a prefix that ends in `-`, stands on the command line."""
    names = [token.partition("=")[0] for token in argv]
    return any(n.startswith(flag) if flag.endswith("-") else n == flag for n in names)


def _error_in_one_line(parser: argparse.ArgumentParser):
    def error(message: str) -> NoReturn:
        unknown = re.findall(r"--[\w-]+", message) if "unrecognized" in message else []
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0], known, 3) if unknown else []
        raise PiperError(message + (f"; did you mean {' or '.join(near)}?" if near else ""))

    return error
