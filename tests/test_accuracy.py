"""The resource model is as close to the published runs as `validation/limits.py` demands."""

from piper_megatron.validation.gate import criteria
from piper_megatron.validation.replay import replay
from piper_megatron.validation.runs import read_runs


def test_published_runs_are_predicted_within_the_limits():
    done = replay(read_runs())
    assert len({each.run for each in done.comparisons}) >= 176
    assert not [each for each in criteria(done) if not each.holds]
