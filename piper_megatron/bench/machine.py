"""What this job runs on: device, backend, ranks, their place in the network, versions."""

import os
import platform as host_platform
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.cuda import nccl

from piper_megatron.bench.profile import base_for_device
from piper_megatron.platform.discovery import known_platform, resolve_topology
from piper_megatron.platform.job_platform import platform_of_job
from piper_megatron.platform.observation import (
    JobObservation,
    NodeObservation,
    observe_job,
    observe_node,
)
from piper_megatron.platform.platform import Platform, load_platform
from piper_megatron.platform.topology import Location
from piper_megatron.runtime import cpu
from piper_megatron.switches import switched_on

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Levels:
    """Groups of ranks that meet at one network level.

    Attributes:
        rail: this rank's group of one member in each domain of the level inside; all such groups
            work at the same time.
        whole: this rank's domain.
        rails: that work at once in a domain.
        rail_index: this rank's among them.
    """

    rail: Any
    whole: Any
    rails: int
    rail_index: int


@dataclass(frozen=True)
class Machine:
    """A job that measures.

    Attributes:
        device: that this rank drives.
        backend: of the collectives; None in a single process.
        base: platform of which everything stays that is not measured.
        locations: of the ranks.
        domains: [ranks, levels] as `Topology.domains`.
        rank: of this process.
        context_gib: that a process of Megatron's holds beside its tensors; None if not known.
    """

    device: torch.device
    backend: str | None
    base: Platform
    locations: tuple[Location, ...]
    domains: np.ndarray
    rank: int
    context_gib: float | None

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.locations)

    @property
    def hosts(self) -> list[str]:
        """Of every rank."""
        return [location.host for location in self.locations]

    @property
    def ranks_per_host(self) -> int:
        """On the host that has most."""
        return max(self.hosts.count(host) for host in self.hosts)

    @property
    def description(self) -> str:
        """Device, ranks and versions, in words."""
        name = device_name(self.device)
        libraries = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        hosts = len(set(self.hosts))
        where = f"{hosts} x {self.world // hosts} ranks" if self.world > 1 else "1 rank"
        return f"{name}, {where}{f' over {self.backend}' if self.backend else ''}; {libraries}"

    @cached_property
    def versions(self) -> dict[str, str]:
        """Of what the figures depend on."""
        found = {"torch": str(torch.__version__)}
        if torch.version.hip:
            found["ROCm"] = torch.version.hip
        elif self.device.type == "cuda":
            found["CUDA"] = str(torch.version.cuda)
        if self.backend == "nccl":
            found["RCCL" if torch.version.hip else "NCCL"] = ".".join(map(str, nccl.version()))
        with suppress(PackageNotFoundError):
            found["megatron-core"] = version("megatron-core")
        return found

    def members(self, level: int) -> dict[str, int]:
        """Size of a rail, of a domain, and rails that work at once; a rail of 1 where the level
        cannot be measured, since domains are not equally filled.
        """
        outer = self.domains[:, level] == self.domains[self.rank, level]
        inner = self._inner(level)[outer]
        counts = np.unique(inner, return_counts=True)[1]
        everywhere = np.unique(self.domains[:, level], return_counts=True)[1]
        if len(set(counts)) > 1 or len(set(everywhere)) > 1:
            return {"members": 1, "whole": int(outer.sum()), "rails": 1}
        return {"members": len(counts), "whole": int(outer.sum()), "rails": int(counts[0])}

    def _inner(self, level: int) -> np.ndarray:
        return self.domains[:, level - 1] if level else np.arange(self.world)

    def groups(self, level: int) -> Levels:
        """Makes the groups of a level; collective."""
        outer = np.flatnonzero(self.domains[:, level] == self.domains[self.rank, level])
        inner = self._inner(level)
        by_inner = [
            [int(rank) for rank in outer if inner[rank] == domain]
            for domain in dict.fromkeys(inner[outer])
        ]
        place = next(ranks.index(self.rank) for ranks in by_inner if self.rank in ranks)
        rail = [ranks[place] for ranks in by_inner]
        whole = [int(rank) for rank in outer]
        return Levels(
            self._group(rail),
            self._group(whole),
            len(by_inner[0]),
            place,
        )

    def _group(self, ranks: list[int]) -> Any:
        group = dist.new_group(ranks, timeout=TIMEOUT, use_local_synchronization=True)
        dist.barrier(group)  # NCCL connects at the first call
        return group


def device_name(device: torch.device) -> str:
    """Product that a rank drives."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = host_platform.processor() or host_platform.machine()
    threads = torch.get_num_threads()
    return f"CPU ({model}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)} a rank)"


@contextmanager
def machine(source: str | None, environ: Mapping[str, str]) -> Iterator[Machine]:
    """Joins the other ranks, if there are any, and looks around.

    Args:
        source: base platform, name or file; None for the one that the job is recognised to be on,
            or else one with this device.
        environ: with RANK, WORLD_SIZE and LOCAL_RANK where a launcher started several processes.

    Raises:
        PiperError: the platform is unknown, or none is known for the device.
    """
    local_rank = int(environ.get("LOCAL_RANK", 0))
    rehearsal = cpu.is_enabled() or switched_on("PIPER_CPU")
    on_gpu = torch.cuda.is_available() and not rehearsal
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(1)  # as torchrun's ranks have
    has_megatron = _import_megatron(on_gpu)
    several = int(environ.get("WORLD_SIZE", 1)) > 1
    backend = ("nccl" if on_gpu else "gloo") if several else None
    if backend:
        dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        found = _looked_around(source, device, backend, local_rank)
        context_gib = _context_gib(device) if has_megatron else None
        yield replace(found, context_gib=context_gib)
    finally:
        if backend:
            dist.destroy_process_group()


def _looked_around(
    source: str | None, device: torch.device, backend: str | None, local_rank: int
) -> Machine:
    rank = dist.get_rank() if backend else 0
    node = observe_node()
    job = observe_job() if rank == 0 else JobObservation()
    mine = {"node": node.to_json(), "local_rank": local_rank, "job": job.to_json()}
    reports: list[dict[str, Any]] = [mine]
    if backend:
        reports = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(reports, mine)
    nodes = [NodeObservation.from_json(report["node"]) for report in reports]
    locations = tuple(
        Location(seen.host, report["local_rank"])
        for seen, report in zip(nodes, reports, strict=True)
    )
    job = JobObservation.from_json(reports[0]["job"])
    topology = resolve_topology(source or "auto", nodes, job)
    known = load_platform(source) if source else known_platform("auto", topology, job)
    if known is None:
        hosts = [location.host for location in locations]
        base = base_for_device(device_name(device) if device.type == "cuda" else None)
        lent = platform_of_job(topology, locations, base)
        # guessed by its device alone: nothing else of it holds here
        known = lent.model_copy(
            update={
                "ranks_per_node": max(map(hosts.count, hosts)),
                "description": f"a machine with {base.need_accelerator().name}",
                **dict.fromkeys(("aliases", "hosts", "environment", "job_script", "dispatch"), ()),
                "cluster": None,
            }
        )
    else:
        known = platform_of_job(topology, locations, known)
    return Machine(device, backend, known, locations, topology.domains(locations), rank, None)


def _import_megatron(on_gpu: bool) -> bool:
    """What a training imports, which takes memory; False where there is no Megatron."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return False
    if not on_gpu and not cpu.is_enabled():
        cpu.enable()
    import megatron.training.training  # noqa: F401

    return True


def _context_gib(device: torch.device) -> float:
    if device.type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return (total - free - torch.cuda.memory_reserved(device)) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def capacity_gib(found: Machine) -> float:
    """Memory of a rank: its device's, or its share of the host's."""
    if found.device.type == "cuda":
        return torch.cuda.get_device_properties(found.device).total_memory / 2**30
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / found.ranks_per_host
