"""Measured runs and what is made of them, with predictions made up for the purpose."""

import json
import re
from types import SimpleNamespace

import pytest

from piper_megatron.cli.main import main
from piper_megatron.errors import PiperError
from piper_megatron.layout.job import Job, job_of
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.estimate import Estimate, Memory, Parameters, StageMemory, Time
from piper_megatron.validation import limits, replay
from piper_megatron.validation.comparison import compare
from piper_megatron.validation.gate import criteria
from piper_megatron.validation.runs import Run, read_runs
from piper_megatron.validation.stack_factors import TimedRun, fitted_errors, held_out_errors
from piper_megatron.validation.statistics import summarise
from piper_megatron.workload.arguments import read_arguments

ARGUMENTS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 64 --bf16 "
    "--pipeline-model-parallel-size 4"
).split()
ROW = {
    "id": "one",
    "family": "tiny",
    "platform": "dgx-h100",
    "gpus": 8,
    "megatron_args": ARGUMENTS,
    "measured": {"step_s": 2.0},
    "routing": "unknown",
    "stack": {"framework": "Megatron-LM", "container": "NeMo 31.02", "env": {"A": 1}},
    "metric_notes": "",
    "confidence": "high",
    "source": "nowhere",
}
PEAKS = (10.0, 8.0, 6.0, 9.0)
STEP_S = 2.2


def estimate(job: Job, step_s: float = STEP_S) -> Estimate:
    """Peaks that tell the stages apart, and a given step."""
    stages = tuple(
        StageMemory(
            stage=stage,
            weights_gib=peak / 10,
            gradients_gib=peak / 10,
            optimizer_gib=peak / 5,
            activations_gib=0,
            logits_gib=0,
            dispatch_gib=0,
            buffers_gib=0,
            communicators_gib=2,
            resident_gib=0.4 * peak,
            peak_gib=peak,
            reserved_gib=peak + 1,
            needed_gib=peak + 2,
            peaks_gib={"step": peak},
        )
        for stage, peak in enumerate(PEAKS)
    )
    tokens = job.batch.global_batch * job.batch.seq / step_s / job.layout.world
    return Estimate(
        parameters=Parameters(total=1, active=1, per_stage=(1,) * 4),
        memory=Memory(stages=stages, peak_gib=10, worst_stage=0, capacity_gib=80, fits=True),
        time=Time(
            step_s=step_s,
            tflops_per_gpu=400,
            mfu=0.4,
            xmoe_tflops_per_gpu=1,
            tokens_per_s_per_gpu=tokens,
            parts={"all": step_s},
        ),
        assumptions=(),
        evidence={},
    )


def row(**changes) -> Run:
    return Run.model_validate(ROW | changes)


def compared(**changes) -> dict[str, float]:
    """Quantity and stage -> our error."""
    run = row(**changes)
    job = job_of(read_arguments(run.megatron_args).values, 8)
    found = compare(run, estimate(job), load_platform(run.platform))
    return {f"{each.quantity} {each.where}".strip(): round(each.error, 6) for each in found}


def write(tmp_path, *rows: dict):
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture
def made_up(monkeypatch):
    """Predictions without the resource model: steps shorten with tensor parallelism."""
    calls = []

    def predict(job, platform, *, stack=None, imbalance=1.0):
        calls.append((job.layout, platform.name, stack, imbalance))
        return estimate(job, STEP_S / job.layout.tp)

    monkeypatch.setattr(replay, "estimate", predict)
    monkeypatch.setattr(
        replay, "step_time", lambda job, *_, **__: SimpleNamespace(step_s=1.1 / job.layout.tp)
    )
    return calls


def test_packaged_runs_are_jobs_on_known_platforms():
    runs = read_runs()
    assert len(runs) >= 176
    for run in runs:
        load_platform(run.platform).need_accelerator().stack(run.stack_description)
        arguments = read_arguments(run.megatron_args)
        assert not arguments.unknown
        assert job_of(arguments.values, run.ranks).layout.world == run.ranks


def test_ranks_may_be_inferred():
    assert row(gpus=None, gpus_note="inferred=64 (by memory)").ranks == 64
    assert row(gpus=None).ranks is None
    assert row(gpus=8, gpus_note="taken from the sibling").ranks == 8


def test_stack_is_described_in_words():
    assert row().stack_description == "framework Megatron-LM; container NeMo 31.02"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 1}, r"line 1: unknown key 'tokens'"),
        ({"measured": {"peak_gb": 3}}, r"line 1: .*unknown key 'peak_gb'; did you mean 'peak_gib'"),
        ({"measured": {"peak_gib_by_stage": {"1": 3}}}, r"line 1: measured.peak_gib_by_stage"),
        ({"measured": {"peak_rank": "all"}}, r"line 1: measured: nothing was measured"),
        ({"measured": {"step_s": -1}}, r"line 1: measured.step_s: .*greater than 0, got -1"),
        ({"gpus": 0}, r"line 1: gpus: .*greater than 0, got 0"),
        ({"routing": "even"}, r"line 1: routing: "),
        ({"megatron_args": []}, r"line 1: megatron_args: "),
        ({"confidence": None}, r"line 1: confidence: "),
    ],
)
def test_bad_row_is_one_line_with_its_number(tmp_path, change, message):
    with pytest.raises(PiperError, match=message) as error:
        read_runs(write(tmp_path, ROW | change))
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path):
    with pytest.raises(PiperError, match=r"cannot read .*none.jsonl: No such file"):
        read_runs(tmp_path / "none.jsonl")
    with pytest.raises(PiperError, match="holds no run"):
        read_runs(write(tmp_path))
    with pytest.raises(PiperError, match="id 'one' is given twice"):
        read_runs(write(tmp_path, ROW, ROW))
    (tmp_path / "runs.jsonl").write_text("\n\n{")
    with pytest.raises(PiperError, match="line 3: not valid JSON"):
        read_runs(tmp_path / "runs.jsonl")


def test_peak_is_compared_on_the_rank_that_was_measured():
    def peak(rank: str) -> dict[str, float]:
        return compared(measured={"peak_gib": 5.0, "peak_rank": rank})

    assert peak("last stage") == peak("last rank") == {"peak_gib last": 0.8}
    assert peak("rank 0") == {"peak_gib 0": 1.0}
    assert peak("max") == peak("unspecified (one rank)") == {"peak_gib worst": 1.0}


def test_stages_printed_apart_make_their_maximum_superfluous():
    by_stage = {"peak_gib_by_stage": {"0": 8.0, "last": 10.0}, "peak_gib": 10.0, "peak_rank": "max"}
    assert compared(measured=by_stage) == {"peak_gib 0": 0.25, "peak_gib last": -0.1}


def test_reserve_is_all_memory_in_use_on_amd():
    last = {"peak_rank": "last stage", "resident_gib": 4.0, "reserved_gib": 8.0}
    assert compared(measured=last) == {"resident_gib last": -0.1, "reserved_gib last": 0.25}
    amd = compared(measured=last, platform="mi355x")
    assert amd["reserved_gib last"] == 0.5


def test_errors_of_rates_are_errors_of_time():
    tokens = 64 * 32 / 8
    assert compared(measured={"step_s": 2.0}) == {"step_s": 0.1}
    assert compared(measured={"tokens_per_s_per_gpu": tokens / 2.0}) == {
        "tokens_per_s_per_gpu": 0.1
    }
    assert compared(measured={"tflops_per_gpu": 500}) == {"tflops_per_gpu": 0.25}
    assert compared(measured={"mfu_pct": 50}) == {"mfu_pct": 0.25}
    note = {"metric_notes": "MFU against 800 TFLOPS with the Megatron count."}
    assert compared(measured={"mfu_pct": 60}, **note) == {"mfu_pct": 0.2}


def test_a_run_counts_once_in_times(made_up):
    measured = {"mfu_pct": 40, "tflops_per_gpu": 440, "tokens_per_s_per_gpu": 100}
    done = replay.replay([row(measured=measured)])
    assert [c.quantity for c in done.comparisons if c.counts] == ["tokens_per_s_per_gpu"]
    oss = replay.replay([row(measured={"tflops_per_gpu": 440}, family="gpt-oss-20b")])
    assert not oss.timed
    small = replay.replay([row(family="gpt512-moe")])
    assert small.comparisons[0].excluded == "bound by the host"


def test_runs_are_replayed_as_they_ran(made_up):
    runs = [
        row(id="a", routing="natural"),
        row(id="b", gpus=None),
        row(id="c", megatron_args=[*ARGUMENTS, "--pipeline-model-parallel-size", "3"]),
        row(id="d", platform="dgx-h1000"),
        row(id="e", megatron_args=[*ARGUMENTS, "--make-it-fast"]),
    ]
    done = replay.replay(runs)
    assert [(c.run, c.quantity) for c in done.comparisons] == [("a", "step_s")]
    assert done.unsized == ("b",)
    assert {each.run: each.reason.split(";")[0] for each in done.refusals} == {
        "c": "world size 8 is not a multiple of TP 1 x CP 1 x PP 3 = 3",
        "d": "unknown platform 'dgx-h1000', did you mean dgx-h100",
        "e": "arguments not understood: --make-it-fast",
    }
    ((layout, platform, stack, imbalance),) = made_up
    assert (layout.world, layout.pp, platform) == (8, 4, "dgx-h100")
    assert stack == load_platform("dgx-h100").need_accelerator().stack().name
    assert imbalance == replay.NATURAL_IMBALANCE
    timed = done.timed[0]
    assert (timed.measured_s, timed.plain_s) == (pytest.approx(2.0), STEP_S)


def test_stack_is_chosen_by_the_platforms_rules(made_up, monkeypatch):
    known = load_platform("dgx-h100")
    accelerator = known.need_accelerator()
    default = accelerator.stack()
    quick = default.model_copy(update={"name": "quick", "match": re.compile(r"NeMo 3\d")})
    stacks = (quick, *(stack for stack in accelerator.stacks if stack.match is None))
    software = accelerator.model_copy(update={"stacks": stacks})
    platform = known.model_copy(update={"accelerator": software})
    monkeypatch.setattr(replay, "load_platform", lambda name: platform)
    other = row(id="other", stack={"framework": "Megatron-Bridge"})
    done = replay.replay([row(), other])
    assert [call[2] for call in made_up] == ["quick", default.name]
    assert [run.plain_s for run in done.timed] == [1.1, STEP_S]


def test_fault_of_ours_refuses_one_run(made_up, monkeypatch):
    monkeypatch.setattr(replay, "compare", lambda *_: 1 // 0)
    done = replay.replay([row()])
    assert done.refusals[0].reason.startswith("internal error: ZeroDivisionError")


def test_layouts_of_one_training_are_a_group(made_up):
    tp2 = [*ARGUMENTS, "--tensor-model-parallel-size", "2"]
    other_batch = [*ARGUMENTS, "--global-batch-size", "128"]
    runs = [
        row(id="tp1", measured={"step_s": 3.0}),
        row(id="tp2", measured={"step_s": 4.0}, megatron_args=tp2),
        row(id="again", measured={"step_s": 3.1}),
        row(id="batch", megatron_args=other_batch),
        row(id="stack", stack={"framework": "Megatron-Bridge"}),
    ]
    (group,) = replay.replay(runs).groups
    assert {run.run for run in group.runs} == {"tp1", "tp2", "again"}
    assert (group.best_measured.run, group.best_predicted.run) == ("tp1", "tp2")
    assert group.loss == pytest.approx(1 / 3)


def timed(run: str, family: str, ratio: float, stack: str = "s", platform: str = "p") -> TimedRun:
    return TimedRun(
        run=run,
        family=family,
        platform=platform,
        stack=stack,
        measured_s=ratio,
        predicted_s=1.0,
        plain_s=1.0,
    )


def test_factors_are_fitted_by_platform_and_stack():
    runs = [timed("a", "x", 2.0), timed("b", "y", 4.0), timed("c", "z", 8.0, platform="q")]
    assert fitted_errors(runs) == pytest.approx([0.5, -0.25, 0.0])


def test_held_out_family_has_no_say_in_its_factor():
    runs = [
        timed("a", "x", 2.0),
        timed("b", "x", 3.0),
        timed("c", "y", 4.0),
        timed("d", "z", 1.0, stack="t"),
    ]
    # a, b: by c; c: median of a and b; d: nobody else on its stack, so all of the platform
    assert held_out_errors(runs) == pytest.approx([1.0, 1 / 3, 2.5 / 4 - 1, 3.0 - 1])
    # nobody else on the platform: the factor of all platforms
    alone = [timed("a", "x", 2.0), timed("e", "w", 5.0, platform="q")]
    assert held_out_errors(alone) == pytest.approx([1.5, -0.6])
    assert held_out_errors(alone[:1]) == []


def test_summary():
    summary = summarise([-0.4, 0.1, 0.2])
    assert (summary.count, summary.median, summary.worst, summary.bias) == (3, 0.2, 0.4, 0.1)
    assert summary.p90 == pytest.approx(0.36)


def test_limits_are_held_or_not(made_up, monkeypatch):
    measured = {"peak_gib": 9.9, "peak_rank": "rank 0", "step_s": 2.1}
    runs = [row(measured=measured), row(id="far", measured={"peak_gib": 5.0})]
    found = {each.name: each for each in criteria(replay.replay(runs))}
    assert found["time of a step, median error"].holds
    assert not found["peak memory, 90th percentile"].holds
    unexplained = "peaks off by more than 15% without a reason"
    assert found[unexplained].value == 1
    monkeypatch.setitem(limits.REASONS, "far", "because")
    assert {each.name: each for each in criteria(replay.replay(runs))}[unexplained].holds
    low = [row(confidence="low", measured={"peak_gib": 1.0})]
    assert [each.name for each in criteria(replay.replay(low))] == ["runs refused"]


def rows_for_command(tmp_path):
    measured = {"peak_gib": 9.9, "peak_rank": "rank 0", "tokens_per_s_per_gpu": 120.0}
    tp2 = {"id": "two", "megatron_args": [*ARGUMENTS, "--tensor-model-parallel-size", "2"]}
    lost = {"id": "lost", "platform": "mi355x", "gpus": None}
    return write(tmp_path, ROW | {"measured": measured}, ROW | tp2, ROW | lost)


def test_command_prints_tables(made_up, tmp_path, capsys):
    assert main(["validate", "--data", str(rows_for_command(tmp_path))]) == 0
    text = capsys.readouterr().out
    assert text.isascii()
    assert text.startswith("2 runs predicted, 3 figures compared, 0 runs refused\n")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "one dgx-h100 peak_gib 0 9.9 10 +1.0%" in lines
    assert "all 1 1.0% 1.0% 1.0% +1.0%" in lines
    assert "loss by the predicted best layout 0.0% 5.0% holds" in lines
    assert "GPUs unknown lost" in lines


def test_command_prints_json(made_up, tmp_path, capsys):
    path = rows_for_command(tmp_path)
    assert main(["validate", "--json", "--platform", "dgx-h100", "--data", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["run"] for each in found["rows"]] == ["one", "one", "two"]
    assert found["rows"][0]["error"] == pytest.approx(0.1 / 9.9)
    assert found["statistics"]["peak memory"]["all"]["count"] == 1
    assert found["statistics"]["time by family"]["tiny"]["count"] == 2
    assert found["order"][0]["runs"] == ["one", "two"]
    assert found["unsized"] == []
    assert all(isinstance(each["holds"], bool) for each in found["criteria"])


def test_command_says_what_is_wrong(tmp_path, capsys):
    path = write(tmp_path, ROW | {"gpu": 8})
    assert main(["validate", "--json", "--data", str(path)]) == 2
    assert "unknown key 'gpu'" in json.loads(capsys.readouterr().out)["error"]
    assert main(["validate", "--platform", "dgx-h10"]) == 2
    assert "no run of it; did you mean 'dgx-h100'?" in capsys.readouterr().err


def test_picture(made_up, tmp_path, capsys):
    image = pytest.importorskip("matplotlib.image")
    picture = tmp_path / "accuracy.png"
    data = str(rows_for_command(tmp_path))
    assert main(["validate", "--data", data, "--plot", str(picture)]) == 0
    assert image.imread(picture).std() > 0.01
    assert main(["validate", "--data", data, "--plot", str(tmp_path / "accuracy.xyz")]) == 2
    assert "the name must end in one of" in capsys.readouterr().err


def test_rows_beyond_the_limit_carry_their_reason(made_up, monkeypatch):
    from piper_megatron.report.accuracy import accuracy_json

    monkeypatch.setitem(limits.REASONS, "one", "because")
    assert accuracy_json(replay.replay([row()]))["rows"][0]["reason"] == "because"
