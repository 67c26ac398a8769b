import re
import sys

import pytest

from piper_megatron.errors import PiperError
from piper_megatron.report.pipeline_figure import draw
from piper_megatron.resources.estimate import Memory, StageMemory
from piper_megatron.resources.schedule import PassTimes, Schedule, simulate


def stage_memory(stage):
    return StageMemory(
        stage=stage,
        weights_gib=10,
        gradients_gib=8,
        optimizer_gib=12,
        activations_gib=20 - 4 * stage,
        logits_gib=6 * (stage == 3),
        dispatch_gib=4,
        communicators_gib=3,
        peak_gib=60,
        reserved_gib=63,
        buffers_gib=0,
        resident_gib=40,
        needed_gib=63,
        peaks_gib={"backward": 60},
    )


MEMORY = Memory(
    stages=tuple(stage_memory(stage) for stage in range(4)),
    peak_gib=60,
    worst_stage=0,
    capacity_gib=79.1,
    fits=True,
)


def timeline(micro_batches=8, **modes):
    schedule = Schedule(pp=4, micro_batches=micro_batches, **modes)
    chunk = [1.0] * schedule.vpp
    return simulate(
        schedule,
        PassTimes(
            forward_s=[chunk] * 4,
            backward_s=[[2.0] * schedule.vpp] * 4,
            wgrad_s=[[0.3] * schedule.vpp] * 4,
            p2p_s=[0.1] * 4,
            together_s=[[[2.5] * schedule.vpp] * schedule.vpp] * 4,
        ),
    )


def svg_text(path):
    """What the picture says; texts are drawn as curves, with a comment each."""
    return " ".join(re.findall("<!-- (.*?) -->", path.read_text()))


@pytest.mark.parametrize(
    "modes",
    [{}, {"vpp": 2}, {"vpp": 2, "overlap_p2p": True, "beside": True}],
    ids=["1F1B", "interleaved", "side by side"],
)
def test_renders(tmp_path, modes):
    path = tmp_path / "picture.png"
    draw(path, "title", timeline(**modes), {"optimizer": 0.5}, MEMORY)
    image = pytest.importorskip("matplotlib.image").imread(path)
    height, width, _ = image.shape
    assert width > height > 1000
    # every colour of a schedule and of the memory is there, so it is not an empty frame
    colours = {
        tuple((pixel * 255).round().astype(int)[:3]) for pixel in image[::7, ::3].reshape(-1, 4)
    }
    assert {(0, 114, 178), (230, 159, 0), (0, 158, 115)} <= colours


def test_a_long_step_shows_its_ends(tmp_path):
    draw(tmp_path / "picture.svg", "title", timeline(micro_batches=400), {}, MEMORY)
    assert "beginning and end of a step" in svg_text(tmp_path / "picture.svg")


def test_format_follows_from_the_name(tmp_path):
    draw(tmp_path / "picture.svg", "title", timeline(), {}, MEMORY)
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_unknown_format(tmp_path):
    with pytest.raises(PiperError, match=r"picture\.xyz.*\.png"):
        draw(tmp_path / "picture.xyz", "title", timeline(), {}, MEMORY)


def test_missing_folder(tmp_path):
    with pytest.raises(PiperError, match="cannot write"):
        draw(tmp_path / "missing" / "picture.png", "title", timeline(), {}, MEMORY)


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PiperError, match=r"piper-megatron\[plot\]"):
        draw(tmp_path / "picture.png", "title", timeline(), {}, MEMORY)
