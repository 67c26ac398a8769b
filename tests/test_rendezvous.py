"""Ranks agree through the store, and disagreement is named before any process group exists."""

import argparse
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, TCPStore

from piper_megatron.errors import LaunchError
from piper_megatron.runtime import rendezvous
from piper_megatron.runtime.rendezvous import agree, comparable, same_as_rank_0

ARGUMENTS = {"seed": "1234", "num_layers": "4"}


def meet(arguments_of_rank, absent=(), seconds=30.0):
    """Runs `agree` on one thread a rank; returns each rank's agreement or error."""
    world, timeout = len(arguments_of_rank), timedelta(seconds=seconds)
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number):
        store = TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
        report = {"host": f"n{number // 2}", "local_rank": number % 2}
        try:
            return agree(
                store, number, world, report, arguments_of_rank[number], {"from": number}, timeout
            )
        except LaunchError as error:
            return str(error)

    present = [number for number in range(world) if number not in absent]
    with ThreadPoolExecutor(len(present)) as pool:
        return list(pool.map(rank, present))


def test_every_rank_learns_all_reports_and_rank_0s_view_of_the_job():
    agreements = meet([ARGUMENTS] * 6)
    assert all(agreement == agreements[0] for agreement in agreements)
    assert [report["host"] for report in agreements[0].reports] == [
        "n0",
        "n0",
        "n1",
        "n1",
        "n2",
        "n2",
    ]
    assert agreements[0].job == {"from": 0}


def test_a_different_value_is_named_with_its_rank_and_flag_on_all_ranks():
    arguments = [ARGUMENTS, ARGUMENTS, ARGUMENTS | {"num_layers": "8"}, ARGUMENTS]
    errors = set(meet(arguments))
    assert errors == {
        "ranks disagree on --num-layers: rank 2 on n1 has 8, rank 0 has 4; "
        "give every rank the same command line"
    }


def test_a_flag_that_only_rank_0_has_is_named():
    arguments = [ARGUMENTS | {"piper_grid": "2x2"}, ARGUMENTS]
    assert "--piper-grid: rank 1 on n0 has nothing, rank 0 has 2x2" in meet(arguments)[1]


def test_a_rank_that_never_reports_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "_READERS_TIMEOUT_S", 0.1)
    first, *_ = meet([ARGUMENTS] * 3, absent={2}, seconds=1.0)
    assert "rank 2 did not report" in first


def test_a_value_that_one_rank_leaves_out_is_shown_as_nothing():
    arguments = [ARGUMENTS | {"load": "/ckpt"}, ARGUMENTS | {"load": "null"}]
    assert "--load: rank 1 on n0 has nothing, rank 0 has /ckpt" in meet(arguments)[0]


def test_a_rank_that_computed_another_placement_stops():
    store, timeout = HashStore(), timedelta(seconds=5)
    same_as_rank_0(store, 0, np.array([0, 1, 2]), timeout)
    same_as_rank_0(store, 2, np.array([0, 1, 2]), timeout)
    with pytest.raises(LaunchError, match="rank 1 computed another placement than rank 0"):
        same_as_rank_0(store, 1, np.array([1, 0, 2]), timeout)


def test_comparable_ignores_what_differs_by_rank_and_addresses():
    def arguments(rank):
        return argparse.Namespace(
            rank=rank, local_rank=rank, seed=1, params_dtype=torch.bfloat16, f=lambda: rank
        )

    assert comparable(arguments(0)) == comparable(arguments(1))
    assert comparable(arguments(0))["params_dtype"] == '"torch.bfloat16"'
