"""The cluster lab builds what it promises and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from cluster_lab import ClusterLab, LabError, clean, measure, require_rights  # noqa: E402

SCRIPT = [sys.executable, str(BENCHMARKS / "cluster_lab.py")]


@pytest.fixture(scope="module")
def rights():
    try:
        require_rights()
        with ClusterLab(hosts=1, ranks_per_host=1):
            pass
    except LabError as error:
        pytest.skip(str(error))


def namespaces_of(pid: int) -> list[str]:
    """Names of the namespaces that labs of a process have now."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    return [name for name in names if name.startswith(f"piperlab-{pid}-")]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def sleeping_lab() -> tuple[subprocess.Popen, int]:
    """A lab in a process of its own whose two ranks sleep; also the process id of a rank."""
    lab = subprocess.Popen(
        [*SCRIPT, "run", "--ranks-per-host", "1", "--", "sh", "-c", "echo $$; exec sleep 1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert lab.stdout
    return lab, int(lab.stdout.readline().split()[1])


@pytest.mark.parametrize("command", [["run", "true"], ["check"], ["clean"]])
def test_missing_rights_are_one_plain_line(command, tmp_path):
    done = subprocess.run(
        [*SCRIPT, *command],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no ip, no tc" in done.stderr


@pytest.mark.parametrize("sizes", [(0, 4, 200), (2, 0, 200), (2, 4, 0), (251, 1, 200)])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(LabError, match="a lab has"):
        ClusterLab(*sizes)


@pytest.mark.rights
@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("block", ["host0 0", "host0 1", "host0 2", "host1 0", "host1 1", "host1 2"]),
        ("round-robin", ["host0 0", "host1 0", "host0 1", "host1 1", "host0 2", "host1 2"]),
    ],
)
def test_ranks_know_their_host_and_number(rights, order, expected):
    report = (
        "import json, os, socket;"
        "print(json.dumps({'host': socket.gethostname(), 'interfaces': [n for _, n in "
        "socket.if_nameindex()]} | dict(os.environ)))"
    )
    with ClusterLab(hosts=2, ranks_per_host=3) as lab:
        results = lab.run([sys.executable, "-c", report], {"MINE": "kept"}, order=order)
    assert [f"{r.host} {r.local_rank}" for r in results] == expected
    for number, result in enumerate(results):
        seen = json.loads(result.output)
        assert seen["host"] == result.host
        assert seen["MINE"] == "kept"
        assert seen["RANK"] == str(number) == str(result.rank)
        assert seen["LOCAL_RANK"] == str(result.local_rank)
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("6", "3")
        assert seen["MASTER_ADDR"] == "10.77.0.1"
        assert set(seen["interfaces"]) >= {"lo", seen["GLOO_SOCKET_IFNAME"]}


GLOO_TRANSFERS = """
import json, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, data = dist.get_rank(), torch.zeros(1 << 20)
def mbit(source, target):
    took = []
    for _ in range(2):  # the first one connects
        dist.barrier()
        start = time.perf_counter()
        if rank == source: dist.send(data, target)
        if rank == target: dist.recv(data, source)
        dist.barrier()
        took.append(time.perf_counter() - start)
    return data.nbytes * 8e-6 / took[-1]
rates = {"within": [mbit(0, 1), mbit(3, 2)], "between": [mbit(0, 2), mbit(2, 0)]}
if rank == 0: print(json.dumps(rates))
dist.destroy_process_group()
"""


@pytest.mark.rights
def test_links_between_hosts_are_slow_and_hosts_are_fast_inside(rights):
    pytest.importorskip("torch")
    with ClusterLab(hosts=2, ranks_per_host=2, mbit=100) as lab:
        stream = measure(lab)
        crossed = lab.crossed_bytes()
        gloo = lab.run(
            [sys.executable, "-c", GLOO_TRANSFERS], {"OMP_NUM_THREADS": "1"}, timeout_s=60
        )
    # one second at full rate, there and back, for each of the two ranks of host1; host0's own
    # stream of the same size stays inside
    assert 4 * 12.5e6 < crossed < 1.2 * 4 * 12.5e6
    assert [r.returncode for r in gloo] == [0] * 4, gloo
    rates = json.loads(gloo[0].output.splitlines()[-1])
    for between, within in [
        (max(stream["in"], stream["out"]), stream["within"]),
        (max(rates["between"]), min(rates["within"])),
    ]:
        assert between < 110  # the bucket is full at first, so a little above the rate is right
        assert within > 3 * between


@pytest.mark.rights
def test_a_failing_rank_ends_the_run_and_its_children(rights, monkeypatch):
    monkeypatch.setattr("cluster_lab.GRACE_S", 0.2)
    command = "[ $RANK = 1 ] && { echo broken; exit 3; }; setsid sleep 1000 & echo $!; wait"
    with ClusterLab(hosts=2, ranks_per_host=1) as lab:
        results = lab.run(["sh", "-c", command])
    assert [r.returncode for r in results] == [-signal.SIGKILL, 3]
    assert results[1].output == "broken\n"
    assert not is_running(int(results[0].output))


@pytest.mark.rights
def test_time_out_kills_the_ranks(rights):
    with ClusterLab(hosts=1, ranks_per_host=2) as lab:
        results = lab.run(["sh", "-c", "echo begun; exec sleep 1000"], timeout_s=0.5)
    assert [r.returncode for r in results] == [-signal.SIGKILL] * 2


@pytest.mark.rights
def test_nothing_is_left_after_failure(rights):
    before = namespaces_of(os.getpid())

    def fail_inside():
        with ClusterLab(hosts=3, ranks_per_host=1) as lab:
            assert len(namespaces_of(os.getpid())) == len(before) + 4
            assert [r.returncode for r in lab.run(["false"])] == [1] * 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert namespaces_of(os.getpid()) == before


@pytest.mark.rights
def test_nothing_is_left_when_building_fails(rights, monkeypatch):
    monkeypatch.setattr(ClusterLab, "_limit", lambda *_: (_ for _ in ()).throw(LabError("no tbf")))
    before = namespaces_of(os.getpid())
    with pytest.raises(LabError, match="no tbf"), ClusterLab():
        pass
    assert namespaces_of(os.getpid()) == before


@pytest.mark.rights
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(rights, number):
    lab, rank_pid = sleeping_lab()
    assert len(namespaces_of(lab.pid)) == 3
    lab.send_signal(number)
    _, errors = lab.communicate(timeout=30)
    assert lab.returncode == 128 + number
    assert errors == ""
    assert namespaces_of(lab.pid) == []
    assert not is_running(rank_pid)


@pytest.mark.rights
def test_clean_removes_the_dead_lab_and_spares_the_living(rights):
    dead, rank_pid = sleeping_lab()
    dead.kill()
    dead.communicate()
    assert is_running(rank_pid)
    assert len(namespaces_of(dead.pid)) == 3
    with ClusterLab(hosts=1, ranks_per_host=1) as living:
        removed = clean()
        assert [r.output for r in living.run(["hostname"])] == ["host0\n"]
    assert len([name for name in removed if f"-{dead.pid}-" in name]) == 3
    assert namespaces_of(dead.pid) == []
    assert not is_running(rank_pid)


REACH_HOST1 = """
import errno, socket, sys
with socket.socket() as s:
    s.settimeout(0.5)
    sys.exit(s.connect_ex(("10.77.0.2", 1)) != errno.ECONNREFUSED)
"""


@pytest.mark.rights
def test_two_labs_do_not_meet(rights):
    reach = [sys.executable, "-c", REACH_HOST1]
    with ClusterLab(hosts=1, ranks_per_host=1) as small:
        with ClusterLab(hosts=2, ranks_per_host=1) as large:
            assert [r.returncode for r in large.run(reach)] == [0, 0]
            assert [r.returncode for r in small.run(reach)] == [1]
        assert [r.returncode for r in small.run(["true"])] == [0]


@pytest.mark.rights
def test_command_reports_output_and_exit_code(rights):
    command = ["sh", "-c", "echo on $(hostname); [ $RANK != 3 ]"]
    done = subprocess.run(
        [*SCRIPT, "run", "--order", "round-robin", "--ranks-per-host", "2", "--", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [f"{r}: on host{r % 2}" for r in range(4)]
    assert done.stderr == "rank 3 (host1, local 1) ended with 1\n"
