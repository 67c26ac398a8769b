"""What a job can see of its nodes without privileges; nothing here raises or takes long."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from piper_megatron.errors import TopologyError
from piper_megatron.platform.domains import XNAME
from piper_megatron.platform.nodesets import expand
from piper_megatron.strict import StrictModel

XNAME_FILE = Path("/etc/cray/xname")
SCONTROL_TIMEOUT_S = 20.0


class _Observation(StrictModel):
    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls.model_validate(dict(data))


class NodeObservation(_Observation):
    """What a process sees of the node it runs on.

    Attributes:
        host: short host name.
        xname: HPE Cray component name, from /etc/cray/xname or where the host name is one.
        slurm_node: SLURMD_NODENAME, which may differ from the host name.
        slurm_address: SLURM_TOPOLOGY_ADDR.
        slurm_pattern: SLURM_TOPOLOGY_ADDR_PATTERN.
        nvlink_domain: PIPER_NVLINK_DOMAIN, which a site's prolog may set to the ClusterUUID that
            `nvidia-smi -q` prints; asking nvidia-smi itself takes seconds.
    """

    host: str
    xname: str | None = None
    slurm_node: str | None = None
    slurm_address: str | None = None
    slurm_pattern: str | None = None
    nvlink_domain: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _xname_of_host(cls, data: Any) -> Any:
        host = data.get("host") if isinstance(data, dict) else None
        if isinstance(host, str) and data.get("xname") is None and XNAME.fullmatch(host):
            return data | {"xname": host}
        return data


class JobObservation(_Observation):
    """What one process sees of the whole job.

    Attributes:
        hosts: nodes of the allocation (SLURM_JOB_NODELIST).
        slurm_topology: output of `scontrol show topology`, empty when there is none.
        cluster: the batch system's name of the cluster.
    """

    hosts: tuple[str, ...] = ()
    slurm_topology: str = ""
    cluster: str | None = None


def observe_node(environ: Mapping[str, str] = os.environ) -> NodeObservation:
    """Looks at this node: host name, one small file, the environment."""
    name = socket.gethostname()
    host = name if re.fullmatch(r"[\d.]+", name) else name.partition(".")[0]
    return NodeObservation(
        host=host,
        xname=_xname_of_file(),
        slurm_node=environ.get("SLURMD_NODENAME"),
        slurm_address=environ.get("SLURM_TOPOLOGY_ADDR"),
        slurm_pattern=environ.get("SLURM_TOPOLOGY_ADDR_PATTERN"),
        nvlink_domain=environ.get("PIPER_NVLINK_DOMAIN"),
    )


def _xname_of_file() -> str | None:
    try:
        xname = XNAME_FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return xname if XNAME.fullmatch(xname) else None


def observe_job(environ: Mapping[str, str] = os.environ) -> JobObservation:
    """Looks at the job; for one process of it, since it asks Slurm's controller."""
    try:
        hosts = expand(environ.get("SLURM_JOB_NODELIST", ""))
    except TopologyError:
        hosts = []
    # 123.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov
    server = environ.get("PBS_JOBID", "").partition(".")[2].partition(".")[0]
    return JobObservation(
        hosts=tuple(hosts),
        slurm_topology=_scontrol_show_topology(environ),
        cluster=environ.get("SLURM_CLUSTER_NAME") or server or None,
    )


def _scontrol_show_topology(environ: Mapping[str, str]) -> str:
    # SLURM_TOPO_LEN cuts the lines that scontrol prints
    environ = {name: value for name, value in environ.items() if name != "SLURM_TOPO_LEN"}
    try:
        return subprocess.run(
            ["scontrol", "show", "topology"],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=SCONTROL_TIMEOUT_S,
            encoding="utf-8",
            errors="replace",
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
