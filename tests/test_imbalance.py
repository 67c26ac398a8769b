"""Imbalance of experts out of routing traces."""

import pytest

from piper_megatron.errors import WorkloadError
from piper_megatron.resources.imbalance import imbalance_of_trace


def trace(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return path


def test_the_worst_layer_and_its_fullest_rank(tmp_path):
    # ranks of 2 experts: 30 and 30, then 50 and 30
    path = trace(tmp_path, "[10, 20, 20, 10]\n\n[40, 10, 10, 20]\n")
    assert imbalance_of_trace(path, ep=2) == pytest.approx(50 / 40)
    assert imbalance_of_trace(path, ep=1) == 1
    assert imbalance_of_trace(path, ep=4) == pytest.approx(40 / 20)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no layer"),
        ("[1, 2, 3]", "line 1: 3 experts cannot be shared by EP 2"),
        ("[1, 2]\nnonsense", "line 2: a layer is an array of rows by expert"),
        ("[1, -2]", "line 1: a layer is an array"),
        ("[[1, 2]]", "line 1: a layer is an array"),
        ("[0, 0]", "line 1: no expert received a row"),
    ],
)
def test_bad_traces(tmp_path, text, says):
    with pytest.raises(WorkloadError, match=says):
        imbalance_of_trace(trace(tmp_path, text), ep=2)


def test_missing_trace(tmp_path):
    with pytest.raises(WorkloadError, match="cannot read the routing trace"):
        imbalance_of_trace(tmp_path / "none.jsonl", ep=2)
