"""Platforms: what is known of a machine, with the evidence for every number.

A platform is one YAML file. The library next to this module holds the known ones; a path names any
other. `docs/topology.md` describes the network's part of the format, `docs/platforms.md` the rest.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from piper_megatron.errors import PlatformError, TopologyError
from piper_megatron.platform.accelerator import Accelerator
from piper_megatron.platform.dispatch_profile import DispatchProfile
from piper_megatron.platform.domains import XNAME, DomainPaths, assemble
from piper_megatron.platform.evidence import Evidence, Name, Text
from piper_megatron.platform.topology import NODE, Level, Topology
from piper_megatron.platform.transfer import BETWEEN_NODES, INSIDE_NODE, Transfer
from piper_megatron.strict import StrictModel, closest, nearest, read_model, read_yaml


class NetworkLevel(StrictModel):
    """One nesting level of the network.

    Attributes:
        name: unique in the platform.
        gbps: GB/s (1e9 bytes a second, one direction) for each rank when all ranks send to peers
            that they meet at this level.
        ranks: ranks in one domain; levels inside a node have it.
        nodes: nodes in one full domain; levels between the node and the outermost may have it.
        segment: nodes that a job on several domains takes of each (Slurm's `--segment`), where that
            is not all of them: so many that its groups are not cut.
        transfer: latencies and message-size curve; assumed where a file does not give them.
        evidence: of `gbps`.
        source: where the numbers come from, or how they follow from what is published.
    """

    name: Name
    gbps: PositiveFloat
    ranks: PositiveInt | None = None
    nodes: PositiveInt | None = None
    segment: PositiveInt | None = None
    transfer: Transfer | None = None
    evidence: Evidence
    source: Text

    def level(self) -> Level:
        """The part that a topology needs."""
        return Level(self.name, self.gbps, self.ranks, self.evidence, self.source)


class HostRule(StrictModel):
    r"""How something seen of a node tells the domains above it.

    Attributes:
        of: what is matched: the short host name, the HPE Cray xname, the Slurm block, or the
            NVLink domain.
        match: regular expression for the whole of it. A group named as a level gives that level's
            label. A group named `index`, of digits, numbers the nodes; levels without a group then
            take `(index - first) // nodes` for a label.
        first: the lowest index.
        translate: level -> {text of the group: label}, where the text itself is not the label.
        identifies: a match tells that the node belongs to this platform.
        evidence: `assumed` where the site does not say that the rule holds.
        source: who says so, or why it is assumed.
    """

    of: Literal["host", "xname", "block", "nvlink_domain"]
    match: re.Pattern[str]
    first: int = 0
    translate: dict[str, dict[str, str]] = Field(default_factory=dict)
    identifies: bool = False
    evidence: Evidence
    source: Text

    def path(self, seen: str, levels: Sequence[NetworkLevel]) -> tuple[str, ...] | None:
        """Labels of the given levels, in their order; None when the rule does not match.

        Args:
            seen: what the rule matches.
            levels: between the node and the outermost level, outermost first.
        """
        found = self.match.fullmatch(seen)
        if not found:
            return None
        groups = found.groupdict()
        labels = []
        for level in levels:
            label = groups.get(level.name)
            if label is None:
                assert level.nodes, "Platform checks that the level has a size"
                index = int(groups["index"]) - self.first
                if index < 0:
                    return None
                label = str(index // level.nodes)
            table = self.translate.get(level.name, {label: label})
            if label not in table:
                return None
            labels.append(table[label])
        return tuple(labels)


class Setting(StrictModel):
    """An environment variable that a job on the platform needs.

    Attributes:
        name: of the variable.
        value: its text.
        why: what it is for.
        source: who recommends it.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str
    why: Text
    source: Text


class ScriptLine(StrictModel):
    """A line that a job script on the platform needs, such as a module or a Slurm option.

    Attributes:
        line: as written in the script.
        why: what it is for.
        source: who recommends it.
    """

    line: Text
    why: Text
    source: Text


class Platform(StrictModel):
    """A machine.

    Attributes:
        name: unique in the library; also the name of its file.
        aliases: other names.
        description: one line.
        ranks_per_node: devices that a node has, each driven by one rank.
        cluster: regular expression for the batch system's name of the cluster (SLURM_CLUSTER_NAME,
            or the server in PBS_JOBID), by which a job recognises the machine.
        levels: nested network levels, innermost first; one is called `node`, the last one holds
            the whole machine.
        accelerator: what a rank drives; None where only the network is known.
        dispatch: measured times of the token dispatchers.
        hosts: rules for the domains above a node, in order of preference.
        environment: variables that every job should set.
        job_script: lines that every job script should have.
    """

    name: Name
    aliases: tuple[Name, ...] = ()
    description: Text
    ranks_per_node: PositiveInt
    cluster: re.Pattern[str] | None = None
    levels: tuple[NetworkLevel, ...]
    accelerator: Accelerator | None = None
    dispatch: tuple[DispatchProfile, ...] = ()
    hosts: tuple[HostRule, ...] = ()
    environment: tuple[Setting, ...] = ()
    job_script: tuple[ScriptLine, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> "Platform":
        Topology(self.name, self.network(), ())  # names, sizes inside the node
        for level in self.levels:
            if level.segment and level.segment > (level.nodes or 0):
                raise ValueError(
                    f"level {level.name}: segment {level.segment} is more than its nodes, "
                    f"{level.nodes}"
                )
            if self.ranks_per_node % (level.ranks or 1):
                raise ValueError(
                    f"level {level.name}: {level.ranks} ranks do not divide the "
                    f"{self.ranks_per_node} ranks of a node"
                )
        between = {level.name: level for level in self._labelled()}
        for rule in self.hosts:
            groups = set(rule.match.groupindex)
            if "index" in groups and r"(?P<index>\d" not in rule.match.pattern:
                raise ValueError(f"host rule {rule.match.pattern}: write index as (?P<index>\\d+)")
            for name in (groups - {"index"}) | set(rule.translate):
                if name not in between:
                    raise ValueError(
                        f"host rule {rule.match.pattern}: no level '{name}' between the node and "
                        f"the outermost; {nearest(name, [*between, 'index'])}"
                    )
            for name in set(between) - groups:
                if "index" not in groups or not between[name].nodes:
                    raise ValueError(
                        f"host rule {rule.match.pattern} gives no label for level {name}; add a "
                        f"group (?P<{name}>...), or a group 'index' and 'nodes' to the level"
                    )
        return self

    def need_accelerator(self) -> Accelerator:
        """The accelerator, for an estimate.

        Raises:
            PlatformError: the platform has none.
        """
        if self.accelerator is None:
            raise PlatformError(
                f"platform {self.name} has no key 'accelerator', which an estimate needs; name one "
                f"of the library (accelerator: h100) or write one, see docs/platforms.md"
            )
        return self.accelerator

    def evidence(self) -> dict[str, str]:
        """Evidence label of every group of numbers that an estimate uses."""
        labels = {}
        for level in self.levels:
            labels[f"{level.name} gbps"] = level.evidence
            if level.transfer:
                labels[f"{level.name} transfer"] = level.transfer.evidence
        return self.need_accelerator().evidence() | labels

    def network(self) -> tuple[Level, ...]:
        """Levels of a topology, innermost first."""
        return tuple(level.level() for level in self.levels)

    @property
    def node_level(self) -> int:
        """Index of the level `node`."""
        return [level.name for level in self.levels].index(NODE)

    def transfers(self) -> tuple[Transfer, ...]:
        """Latencies and message-size curve of every level, innermost first."""
        return tuple(
            level.transfer or (INSIDE_NODE if i <= self.node_level else BETWEEN_NODES)
            for i, level in enumerate(self.levels)
        )

    def _labelled(self) -> tuple[NetworkLevel, ...]:
        """Levels between the node and the outermost, outermost first."""
        return self.levels[self.node_level + 1 : -1][::-1]

    def domain_paths(self, seen: Mapping[str, Mapping[str, str]]) -> DomainPaths:
        """Domains of hosts by the rule that covers most of them, the first such rule.

        One rule for all, since labels of different rules cannot be compared.

        Args:
            seen: host -> what is seen of it, by the `of` of a rule.
        """
        labelled = self._labelled()
        names = tuple(level.name for level in reversed(labelled))
        best = DomainPaths(names, {}, f"platform {self.name}'s rules for host names")
        for rule in self.hosts:
            paths = {
                host: path
                for host, facts in seen.items()
                if (path := rule.path(facts.get(rule.of, ""), labelled))
            }
            if len(paths) > len(best.paths):
                source = f"platform {self.name}'s {rule.of} rule ({rule.evidence}: {rule.source})"
                best = DomainPaths(names, paths, source)
        return best

    def identified_by(self, hosts: Sequence[str]) -> bool:
        """Whether the names of all hosts say that they belong to this platform."""
        patterns = [rule.match for rule in self.hosts if rule.identifies and rule.of == "host"]
        return bool(hosts) and any(all(p.fullmatch(h) for h in hosts) for p in patterns)


def topology_of_hosts(platform: Platform, hosts: Sequence[str]) -> Topology:
    """The topology of hosts of which only the names are known.

    Args:
        platform: gives the levels, and the rules that read the names.
        hosts: short host names or xnames, each once.
    """
    seen = {host: {"host": host, "xname": host if XNAME.fullmatch(host) else ""} for host in hosts}
    return topology_of_seen(platform, seen)


def topology_of_seen(
    platform: Platform, seen: Mapping[str, Mapping[str, str]], notes: Sequence[str] = ()
) -> Topology:
    """The topology of hosts on a platform.

    Args:
        platform: gives the levels and rules.
        seen: host -> what is seen of it, by the `of` of a rule.
        notes: for the result.
    """
    domains = platform.domain_paths(seen)
    return assemble(platform.name, list(seen), platform.network(), domains, notes)


def _library() -> Path:
    return Path(str(resources.files("piper_megatron.platform") / "library"))


@cache
def list_platforms() -> tuple[str, ...]:
    """Names of the library's platforms, sorted."""
    return tuple(sorted(path.stem for path in _library().glob("*.yaml")))


def is_path(name_or_path: str) -> bool:
    """Whether this names a file and not a platform of the library."""
    return "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))


def is_platform_file(path: str) -> bool:
    """Whether a YAML file describes a platform, and not the nodes of a cluster.

    Raises:
        TopologyError: it cannot be read.
    """
    data = read_yaml(Path(path))
    return isinstance(data, dict) and "ranks_per_node" in data and "nodes" not in data


@cache
def load_platform(name_or_path: str) -> Platform:
    """A platform of the library, by name or alias (with - or _ between words), or of a file.

    Raises:
        TopologyError: no such platform (all names are listed), or a malformed file (one line with
            the file, the key and the fix).
    """
    if is_path(name_or_path):
        return read_model(Path(name_or_path), Platform)
    name_or_path = name_or_path.replace("_", "-")
    if name_or_path in list_platforms():
        return read_model(_library() / f"{name_or_path}.yaml", Platform)
    for name in list_platforms():
        # most files are only looked at, since parsing them all takes longer than an estimate
        text = (_library() / f"{name}.yaml").read_text(encoding="utf-8")
        if name_or_path in text and name_or_path in load_platform(name).aliases:
            return load_platform(name)
    platforms = [load_platform(name) for name in list_platforms()]
    hint = closest(name_or_path, [name for p in platforms for name in (p.name, *p.aliases)])
    raise TopologyError(
        f"unknown platform '{name_or_path}'{f', did you mean {hint}' if hint else ''}; platforms "
        f"are {', '.join(list_platforms())}; a file is named by its path (*.yaml)"
    )
