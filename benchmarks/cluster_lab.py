"""A cluster on one machine: hosts are network namespaces, joined by links with a price.

                                   namespace "switch"
    namespace "host0"            +--------------------+            namespace "host1"
      lo, free                   |                    |                  lo, free
      eth0 10.77.0.1 ==== tbf == port0 == br0 == port1 == tbf ==== eth0 10.77.0.2

Both ends of every link are rate-limited (token bucket on egress), so a host sends and receives at
the given rate at most. Traffic inside a host, also to its own eth0 address, takes the loopback
and is not limited. The lab is joined to nothing outside: labs neither meet each other nor the
machine's network. A namespace takes its links along when it goes.

As a library:

    with ClusterLab(hosts=2, ranks_per_host=4, mbit=200) as lab:
        results = lab.run([sys.executable, "script.py"], order="round-robin")

As a command (root, iproute2 and util-linux needed; exit code 2 and one line otherwise):

    python benchmarks/cluster_lab.py run --hosts 2 --ranks-per-host 4 --mbit 200 -- CMD...
    python benchmarks/cluster_lab.py check     measures a transfer within and between hosts
    python benchmarks/cluster_lab.py clean     removes what a killed lab left behind
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from piper_megatron.errors import PiperError

NAME_PREFIX = "piperlab"
SUBNET = "10.77.0"
MAX_HOSTS = 250
CONGESTION_CONTROL = "reno"  # part of every kernel
TOOLS = ("ip", "tc", "unshare", "hostname")
# how rank numbers are dealt out: (rank, hosts, ranks per host) -> (host, local rank)
ORDERS: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "block": lambda rank, hosts, per_host: (rank // per_host, rank % per_host),
    "round-robin": lambda rank, hosts, per_host: (rank % hosts, rank // hosts),
}
# A rank that fails leaves its peers in a collective; this long they may report why they stop.
GRACE_S = 5.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_serial = itertools.count()


class LabError(PiperError):
    """The machine does not let us build the lab, or the lab was asked for something impossible."""


@dataclass(frozen=True)
class RankResult:
    """What became of one rank; `returncode` is negative for a signal, `output` is both streams."""

    rank: int
    host: str
    local_rank: int
    returncode: int
    output: str


class ClusterLab:
    """Hosts that exist between `__enter__` and `__exit__`, and are removed on every way out.

    Exceptions, SIGINT, SIGTERM and SIGHUP remove the lab. After SIGKILL, `clean` does.
    """

    def __init__(self, hosts: int = 2, ranks_per_host: int = 4, mbit: float = 200.0) -> None:
        """Args:
            hosts: number of hosts, named `host0`, `host1`, ...
            ranks_per_host: processes that `run` starts on each.
            mbit: rate of a host's link in each direction, in 1e6 bits a second.

        Raises:
            LabError: sizes that make no cluster.
        """
        if not 1 <= hosts <= MAX_HOSTS or ranks_per_host < 1 or mbit <= 0:
            raise LabError(
                f"a lab has 1 to {MAX_HOSTS} hosts, at least 1 rank on each and a positive rate, "
                f"got {hosts} hosts, {ranks_per_host} ranks, {mbit} Mbit/s"
            )
        self.hosts = tuple(f"host{i}" for i in range(hosts))
        self.ranks_per_host = ranks_per_host
        self.mbit = mbit
        self._name = f"{NAME_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_serial)}"
        self._runs = itertools.count()

    def __enter__(self) -> "ClusterLab":
        require_rights()
        with ExitStack() as exits:
            exits.enter_context(_signals_as_exceptions())
            exits.callback(self._tear_down)
            self._build()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        order: str = "block",
        timeout_s: float | None = None,
        on_line: Callable[[int, str], None] | None = None,
    ) -> list[RankResult]:
        """Runs a command as every rank of the lab and waits for all of them.

        Each process finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
        and GLOO_SOCKET_IFNAME in its environment, as under torchrun. When one rank fails, the rest
        is ended after `GRACE_S`. Nothing that the command started outlives the run.

        Args:
            argv: the command.
            env: variables on top of this process's own.
            order: how ranks are numbered over the hosts, a key of `ORDERS`.
            timeout_s: ranks still running then are killed (return code -9).
            on_line: called with the rank and each line of its output as it comes.

        Returns:
            One result per rank, in rank order.
        """
        world = len(self.hosts) * self.ranks_per_host
        places = [ORDERS[order](r, len(self.hosts), self.ranks_per_host) for r in range(world)]
        shared = {
            **os.environ,
            **(env or {}),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": _address(places[0][0]),
            # a port of its own for every run: the last one's may linger in TIME_WAIT
            "MASTER_PORT": str(29500 + next(self._runs)),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        outputs: list[list[str]] = [[] for _ in range(world)]
        processes: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        try:
            for rank, (host, local_rank) in enumerate(places):
                own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
                processes.append(self._start(host, argv, shared | own))
                reader = threading.Thread(
                    target=_collect, args=(rank, processes[-1].stdout, outputs[rank], on_line)
                )
                reader.start()
                readers.append(reader)
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
            _end_processes([self._namespace(host) for host in self.hosts])
            for reader in readers:
                reader.join()
        return [
            RankResult(rank, self.hosts[host], local_rank, process.wait(), "".join(output))
            for rank, ((host, local_rank), process, output) in enumerate(
                zip(places, processes, outputs, strict=True)
            )
        ]

    def crossed_bytes(self) -> int:
        """Bytes that hosts have sent to each other since the lab was built, headers included."""
        switch = self._namespace("switch")
        ports = json.loads(_command("ip", "-n", switch, "-j", "-s", "link", "show", "type", "veth"))
        return sum(port["stats64"]["rx"]["bytes"] for port in ports)

    def _namespace(self, part: str) -> str:
        return f"{self._name}-{part}"

    def _build(self) -> None:
        switch = self._namespace("switch")
        _command("ip", "netns", "add", switch)
        _command("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _command("ip", "-n", switch, "link", "set", "br0", "up")
        for i, name in enumerate(self.hosts):
            host, port = self._namespace(name), f"port{i}"
            _command("ip", "netns", "add", host)
            _command("ip", "-n", host, "link", "set", "lo", "up")
            _command(
                *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", host),
            )
            _command("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _command("ip", "-n", host, "addr", "add", f"{_address(i)}/24", "dev", "eth0")
            _command("ip", "-n", host, "link", "set", "eth0", "up")
            self._set_congestion_control(host, _address(i))
            self._limit(switch, port)
            self._limit(host, "eth0")

    def _set_congestion_control(self, namespace: str, address: str) -> None:
        """Makes TCP share links evenly whatever the machine's default is.

        BBR lets one stream of an exchange end at half of the time of the others.
        """
        for route in ((f"{SUBNET}.0/24",), ("local", address, "table", "local")):
            _command(
                *("ip", "-n", namespace, "route", "replace", *route),
                *("dev", "eth0", "src", address, "congctl", CONGESTION_CONTROL),
            )

    def _limit(self, namespace: str, device: str) -> None:
        bits_per_s = round(self.mbit * 1e6)
        # 1 ms at full rate, and no less than the largest segment that TCP hands down at once; the
        # long queue makes the link slow rather than lossy, as a cluster's fabric is
        burst_bytes = max(1 << 16, bits_per_s // 8000)
        _command(
            *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
            *("rate", f"{bits_per_s}bit", "burst", str(burst_bytes), "latency", "400ms"),
        )

    def _start(
        self, host: int, argv: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        namespace, name = self._namespace(self.hosts[host]), self.hosts[host]
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name)
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *named, *argv],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the lab alone, which then ends the ranks
        )

    def _tear_down(self) -> None:
        with _signals_held():
            _remove([name for name in _namespaces() if name.startswith(f"{self._name}-")])


def require_rights() -> None:
    """Raises `LabError` in one line when this process plainly cannot build a lab."""
    lacks = [] if os.geteuid() == 0 else ["root"]
    lacks += [tool for tool in TOOLS if not shutil.which(tool)]
    if lacks:
        raise LabError(
            f"no {', no '.join(lacks)}: the lab builds network namespaces, "
            "run it as root with iproute2, util-linux and hostname installed"
        )


def clean() -> list[str]:
    """Removes namespaces of labs whose process is gone; returns their names."""
    require_rights()
    left = [name for name in _namespaces() if _is_orphan(name)]
    _remove(left)
    return left


def measure(lab: ClusterLab) -> dict[str, float]:
    """Mbit/s of one TCP stream within and between hosts, of a lab with at least 2 x 2 ranks.

    Returns:
        `within`: from a host to its own eth0 address; `in`: to host0 from the last host; `out`:
        back again.
    """
    one_second_bytes = round(lab.mbit * 1e6 / 8)
    probe = [sys.executable, str(Path(__file__).with_name("link_probe.py")), str(one_second_bytes)]
    results = lab.run(probe, timeout_s=60)
    failed = [result for result in results if result.returncode]
    if failed:
        raise LabError(f"the transfer failed on {failed[0].host}: {failed[0].output.strip()}")
    rates = json.loads(results[0].output)
    within, _ = rates[_address(0)]
    inward, outward = rates[_address(len(lab.hosts) - 1)]
    return {"within": within, "in": inward, "out": outward}


def _address(host: int) -> str:
    return f"{SUBNET}.{host + 1}"


def _command(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(
            f"{' '.join(argv)}: {reason}; the lab needs the rights for network namespaces and a "
            "kernel with veth, bridge and sch_tbf"
        )
    return done.stdout


def _namespaces() -> list[str]:
    lines = _command("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{NAME_PREFIX}-")]


def _end_processes(namespaces: Sequence[str]) -> None:
    for name in namespaces:
        for pid in _command("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _remove(namespaces: Sequence[str]) -> None:
    _end_processes(namespaces)
    for name in namespaces:
        _command("ip", "netns", "delete", name)


def _start_time(pid: int) -> str | None:
    """Ticks from boot to the start of a process, or None if there is none of that number."""
    with suppress(FileNotFoundError, ProcessLookupError):
        # the name in parentheses may hold blanks; start time is the 20th field after it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def _is_orphan(namespace: str) -> bool:
    _, pid, start, *_ = namespace.split("-")
    return _start_time(int(pid)) != start


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Signals end the program through its `finally` blocks.

    SIGINT too: a shell that starts the program in the background lets it inherit "ignore".
    """

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and it alone receives signals
        return
    before = {number: signal.signal(number, stop) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Keeps a second Ctrl-C from leaving half a lab behind."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(
    rank: int,
    stream: Iterator[str],
    lines: list[str],
    on_line: Callable[[int, str], None] | None,
) -> None:
    for line in stream:
        lines.append(line)
        if on_line:
            on_line(rank, line)


def _wait(processes: Sequence[subprocess.Popen[str]], timeout_s: float | None) -> None:
    """Until all ended, or the time is up, or one has failed and `GRACE_S` passed."""
    deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes) and not failed:
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)


def _run_command(arguments: argparse.Namespace) -> int:
    with ClusterLab(arguments.hosts, arguments.ranks_per_host, arguments.mbit) as lab:
        results = lab.run(
            arguments.command,
            order=arguments.order,
            timeout_s=arguments.timeout,
            on_line=lambda rank, line: print(f"{rank}: {line}", end="", flush=True),
        )
    failed = [result for result in results if result.returncode]
    for result in failed:
        print(
            f"rank {result.rank} ({result.host}, local {result.local_rank}) ended with "
            f"{result.returncode}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _check_command(arguments: argparse.Namespace) -> int:
    with ClusterLab(hosts=2, ranks_per_host=2, mbit=arguments.mbit) as lab:
        mbit = measure(lab)
    limited = all(0.5 < mbit[way] / arguments.mbit < 1.1 for way in ("in", "out"))
    sound = limited and mbit["within"] > 3 * arguments.mbit
    print(
        f"limit {arguments.mbit:.0f} Mbit/s; between hosts {mbit['in']:.0f} in, "
        f"{mbit['out']:.0f} out; within a host {mbit['within']:.0f}: "
        + ("good" if sound else "NOT as it should be")
    )
    return 0 if sound else 1


def _clean_command(_: argparse.Namespace) -> int:
    removed = clean()
    print(f"removed {len(removed)} namespaces" + "".join(f"\n  {name}" for name in removed))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A cluster of network namespaces.")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run a command as every rank of a new lab")
    run.add_argument("--hosts", type=int, default=2)
    run.add_argument("--ranks-per-host", type=int, default=4)
    run.add_argument("--mbit", type=float, default=200.0, help="rate of a host's link")
    run.add_argument("--order", choices=ORDERS, default="block", help="rank numbering")
    run.add_argument("--timeout", type=float, help="seconds after which ranks are killed")
    run.add_argument("command", nargs="+", metavar="CMD")
    run.set_defaults(call=_run_command)
    check = commands.add_parser("check", help="measure a transfer within and between hosts")
    check.add_argument("--mbit", type=float, default=200.0)
    check.set_defaults(call=_check_command)
    remove = commands.add_parser("clean", help="remove what killed labs left behind")
    remove.set_defaults(call=_clean_command)
    return parser


def main() -> int:
    """Runs a subcommand; 2 for what the user can mend."""
    arguments = _parser().parse_args()
    try:
        return arguments.call(arguments)
    except LabError as error:
        print(f"cluster_lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
