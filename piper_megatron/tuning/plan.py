"""A plan: the arguments that the user did not give, and what a job with them will need."""

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt, ValidationError

from piper_megatron.errors import PiperError
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.estimate import Estimate
from piper_megatron.strict import StrictModel, first_problem
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

VERSION: Literal[1] = 1
Confidence = Literal["high", "medium", "low"]


class PlanLayout(StrictModel):
    """Sizes and settings of a plan, those that the user gave among them.

    Attributes:
        tp, cp, pp, vpp, ep, etp, dp, edp: parallel sizes; dp without context parallelism.
        micro_batch, micro_batches: sequences of a micro-batch; micro-batches of a step on each
            replica.
        pipeline: text of `--pipeline-model-parallel-layout`; None where layers are split evenly.
        recompute, dispatcher, optimizer: in short.
    """

    tp: PositiveInt
    cp: PositiveInt
    pp: PositiveInt
    vpp: PositiveInt
    ep: PositiveInt
    etp: PositiveInt
    dp: PositiveInt
    edp: PositiveInt
    micro_batch: PositiveInt
    micro_batches: PositiveInt
    pipeline: str | None
    recompute: str
    dispatcher: str
    optimizer: str


class Plan(StrictModel):
    """One way to run a job.

    Attributes:
        version: of this format.
        rank: place among the plans of a search, 1 is the best.
        platform, gpus, model, global_batch, seq: what it was made for.
        spec: the model itself.
        megatron_args: arguments to add to those that the user gave.
        layout: what they amount to.
        training: the settings that go with it, those that the user gave among them.
        estimate: what the job will need.
        confidence: how well the numbers are founded that the estimate rests on.
        notes: what the plan needs beside its arguments.
    """

    version: Literal[1] = VERSION
    rank: PositiveInt
    platform: str
    gpus: PositiveInt
    model: str
    global_batch: PositiveInt
    seq: PositiveInt
    spec: ModelSpec
    megatron_args: tuple[str, ...]
    layout: PlanLayout
    training: TrainingSpec
    estimate: Estimate
    confidence: Confidence
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Of what is to run; predictions do not count, since their last digits vary with CPUs."""
        text = self.model_dump_json(exclude={"rank", "estimate", "confidence", "notes"})
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_plan(path: Path) -> Plan:
    """A plan from its file.

    Raises:
        PiperError: the file cannot be read, is of another version, or is no plan.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise PiperError(f"cannot read {path}: {reason}") from None
    except json.JSONDecodeError as error:
        raise PiperError(f"{path}: not valid JSON: {error.msg}") from None
    found = data.get("version") if isinstance(data, dict) else None
    if found is not None and found != VERSION:
        raise PiperError(
            f"{path} is a plan of format {found}, and this release reads format {VERSION}; make "
            "it again with piper-megatron tune"
        )
    try:
        return Plan.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise PiperError(f"{path}: {first_problem(error)}") from None


def confidence(platform: Platform, farthest: int) -> Confidence:
    """From the evidence of the numbers that an estimate rests on.

    High where kernels and links are measured or fitted to measured runs, low where one of them is
    assumed; published peaks are between.

    Args:
        platform: has the numbers.
        farthest: index of the outermost level that the plan's frequent exchanges cross.
    """
    accelerator = platform.need_accelerator()
    labels = {getattr(accelerator, name).evidence for name in ("kernels", "gemm", "attention")}
    for level in platform.levels[: farthest + 1]:
        labels.add(level.evidence)
        if level.transfer:
            labels.add(level.transfer.evidence)
    if "assumed" in labels:
        return "low"
    return "medium" if "published" in labels else "high"
