"""The test harness itself: jobs end, whatever their ranks do."""

import os
import socket
import sys
import time

import pytest
from ranks import GRACE_S, grad_norms, losses

LOG = """
| lm loss: 4.854197E+00 | loss scale: 1.0 | grad norm: 1.217 |
| lm loss: nan | grad norm: inf |
"""


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        sys.exit(3)
    time.sleep(1000)


def sleep() -> None:
    time.sleep(1000)


def where() -> tuple[str, str, str]:
    return socket.gethostname(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


def test_a_failed_rank_ends_the_others(ranks):
    run = ranks.call(fail_on_rank_1, world=3)
    assert run.codes == [-9, 3, -9]
    assert GRACE_S <= run.seconds < 10 * GRACE_S
    with pytest.raises(AssertionError, match="rank 1 exited with 3"):
        run.check()


def test_a_job_that_hangs_times_out(ranks):
    run = ranks.call(sleep, world=2, timeout_s=0.5)
    assert run.timed_out
    with pytest.raises(AssertionError, match="timed out"):
        run.check()


def test_ranks_are_numbered_within_their_host(ranks):
    run = ranks.call(where, world=3, hosts=("a", "b", "a")).check()
    assert run.values == [("a", "0", "2"), ("b", "0", "1"), ("a", "1", "2")]


def test_megatrons_log_is_read():
    assert losses(LOG)[0] == 4.854197
    assert len(losses(LOG)) == len(grad_norms(LOG)) == 2
    assert grad_norms(LOG) == [1.217, float("inf")]
