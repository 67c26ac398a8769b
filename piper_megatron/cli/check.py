"""Finds what Megatron would refuse, what will not fit, and what will be slow, before a run."""

import argparse
import json
import shutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from piper_megatron.cli.job_options import add_job_options, job_arguments, job_platform
from piper_megatron.errors import USAGE_ERROR, LayoutError, WorkloadError

if TYPE_CHECKING:
    from piper_megatron.check.finding import Finding
    from piper_megatron.platform.platform import Platform

NAME = "check"
HELP = "say what is wrong with a training command before it runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_job_options(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code: 2 when there is an error, else 0."""
    from piper_megatron.check.run import check, unreadable

    platform = job_platform(args)
    try:
        arguments, gpus = job_arguments(args)
    except (WorkloadError, LayoutError) as error:
        return _show(args, [unreadable(error)], None, platform, {"error": str(error)})
    return _show(args, check(arguments, gpus, platform), gpus, platform)


def _show(
    args: argparse.Namespace,
    findings: "list[Finding]",
    gpus: int | None,
    platform: "Platform | None",
    more: Mapping[str, str] = MappingProxyType({}),
) -> int:
    from piper_megatron.check.finding import verdict
    from piper_megatron.report.check import render_check

    if args.json:
        found = [finding.model_dump(mode="json") for finding in findings]
        print(json.dumps({"verdict": verdict(findings), "findings": found, **more}))
    else:
        width = max(shutil.get_terminal_size((100, 24)).columns, 80)
        print(render_check(findings, gpus, platform, width))
    return USAGE_ERROR if verdict(findings) == "error" else 0
