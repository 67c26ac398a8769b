"""What ranks tell each other through the key-value store before any process group exists.

Rank 0 publishes its arguments; every rank compares its own with them and reports where it runs and
what differs; rank 0 gathers the reports and publishes them as one blob. A rank reads two values,
whatever the world size.
"""

import argparse
import base64
import hashlib
import json
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from piper_megatron.errors import LaunchError

# what Megatron sets per process, and paths of the local machine that it only writes to
PER_RANK = frozenset({"rank", "local_rank", "data_cache_path", "tensorboard_dir", "wandb_save_dir"})
_KEYS_A_READ = 1024
_READERS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after `agree`.

    Attributes:
        reports: one JSON object per launcher rank, in rank order.
        job: rank 0's JSON object about the job.
    """

    reports: tuple[dict[str, Any], ...]
    job: dict[str, Any]


def comparable(args: argparse.Namespace) -> dict[str, str]:
    """Arguments as text, without those that may differ between ranks."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, default=_text)
        for name, value in sorted(vars(args).items())
        if name not in PER_RANK
    }


def agree(
    store: dist.Store,
    rank: int,
    world: int,
    report: Mapping[str, Any],
    arguments: Mapping[str, str],
    job: Mapping[str, Any],
    timeout: timedelta,
) -> Agreement:
    """Exchanges reports and makes sure that all ranks were given the same arguments.

    Args:
        store: reachable by all ranks.
        rank: the launcher's number of this process.
        world: number of ranks.
        report: what this rank says of itself.
        arguments: `comparable` arguments of this rank.
        job: what rank 0 says of the job; ignored on other ranks.
        timeout: how long to wait for the others.

    Raises:
        LaunchError: ranks disagree (the rank and the flag are named) or do not report in time.
    """
    store = dist.PrefixStore("piper", store)
    store.set_timeout(timeout)
    if rank == 0:
        store.set("arguments", _pack(dict(arguments)))
    theirs = _unpack(_get(store, "arguments", timeout))
    differs = {
        name: [arguments.get(name), theirs.get(name)]
        for name in sorted(arguments.keys() | theirs.keys())
        if arguments.get(name) != theirs.get(name)
    }
    store.set(f"report/{rank}", _pack({"report": dict(report), "differs": differs}))
    if rank == 0:
        store.set("verdict", _pack(_gather(store, world, job, timeout)))
    verdict = _unpack(_get(store, "verdict", timeout))
    store.add("read", 1)
    if rank == 0:
        _wait_for_readers(store, world)
    if "error" in verdict:
        raise LaunchError(verdict["error"])
    return Agreement(tuple(verdict["reports"]), verdict["job"])


def _gather(
    store: dist.Store, world: int, job: Mapping[str, Any], timeout: timedelta
) -> dict[str, Any]:
    answers: list[dict[str, Any]] = []
    for start in range(0, world, _KEYS_A_READ):
        keys = [f"report/{r}" for r in range(start, min(start + _KEYS_A_READ, world))]
        try:
            answers += [_unpack(blob) for blob in store.multi_get(keys)]
        except dist.DistStoreError:
            absent = next(k for k in keys if not store.check([k])).partition("/")[2]
            return {
                "error": f"rank {absent} did not report within {timeout}; it may have died, "
                "or been started without the --piper-* flags that rank 0 has"
            }
    for rank, answer in enumerate(answers):
        if answer["differs"]:
            name, (mine, first) = next(iter(answer["differs"].items()))
            flag = "--" + name.replace("_", "-")
            more = len(answer["differs"]) - 1
            return {
                "error": f"ranks disagree on {flag}: rank {rank} on {answer['report']['host']} "
                f"has {_shown(mine)}, rank 0 has {_shown(first)}"
                + (f" ({more} more flags differ)" if more else "")
                + "; give every rank the same command line"
            }
    return {"reports": [answer["report"] for answer in answers], "job": dict(job)}


def _shown(value: str | None) -> str:
    return "nothing" if value in (None, "null") else str(value)


def same_as_rank_0(store: dist.Store, rank: int, placement: np.ndarray, timeout: timedelta) -> None:
    """Makes sure that files which each node reads for itself led to one placement.

    Args:
        store: as in `agree`, after it.
        rank: the launcher's number of this process.
        placement: the logical rank of each launcher rank, as this rank computed it.
        timeout: how long to wait for rank 0.

    Raises:
        LaunchError: this rank came to another placement than rank 0.
    """
    store = dist.PrefixStore("piper", store)
    digest = hashlib.sha256(placement.tobytes()).hexdigest()
    if rank == 0:
        store.set("placement", digest)
    if _get(store, "placement", timeout).decode() != digest:
        raise LaunchError(
            f"rank {rank} computed another placement than rank 0; the topology or placement file "
            "on its node differs, so put it on a file system that all nodes share"
        )


def _wait_for_readers(store: dist.Store, world: int) -> None:
    """Keeps rank 0, and the store it may host, alive until every rank has read its verdict."""
    deadline = time.monotonic() + _READERS_TIMEOUT_S
    while store.add("read", 0) < world and time.monotonic() < deadline:
        time.sleep(0.01)


def _get(store: dist.Store, key: str, timeout: timedelta) -> bytes:
    try:
        return store.get(key)
    except dist.DistError:
        raise LaunchError(
            f"rank 0 died or did not publish its {key} within {timeout}; look at its output"
        ) from None


def _pack(value: dict[str, Any]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpack(blob: bytes) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(blob)))


def _text(value: object) -> str:
    """Dtypes, enums and functions as text that is equal in all processes (no addresses)."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def job_store(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store of the job, hosted by the launcher's rank 0 (or its agent) wherever that runs.

    It must outlive renumbering: `init_process_group` would otherwise let the *logical* rank 0 open
    the store, which may live on another host than MASTER_ADDR.
    """
    store, _, _ = next(iter(rendezvous("env://", rank, world, timeout=timeout)))
    return store
