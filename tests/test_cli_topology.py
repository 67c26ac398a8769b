"""`piper-megatron topology` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from piper_megatron.cli.main import main

COMMAND = Path(sys.executable).parent / "piper-megatron"
FILE = """\
name: mini
levels:
  - {name: node, gbps: 50}
  - {name: switch, gbps: 25}
  - {name: machine, gbps: 12.5}
nodes:
  - {hosts: "n[1-5]", switch: s0}
  - {hosts: "n[6-8]", switch: s1}
"""


def piper(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "80", **environment},
        timeout=60,
        check=False,
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mini.yaml"
    path.write_text(FILE)
    return path


def test_help_lists_the_commands():
    done = piper("--help")
    assert done.returncode == 0
    assert "topology" in done.stdout
    assert "run" in done.stdout


def test_help_is_quick_because_it_imports_little():
    check = (
        "import sys\n"
        "from piper_megatron.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'numpy', 'torch', 'megatron', 'pydantic', 'rich', 'yaml', 'ClusterShell'}\n"
        "sys.exit(str(slow & set(sys.modules)) if slow & set(sys.modules) else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_planning_never_imports_torch_or_megatron(file):
    check = (
        "import sys\n"
        "from piper_megatron.cli.main import main\n"
        f"main(['topology', '--topology', {str(file)!r}, '--ranks-per-node=8', '--grid=2x8'])\n"
        "sys.exit(len({'torch', 'megatron'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_version():
    assert piper("--version").stdout.startswith("piper-megatron 0.")


def test_network_of_a_platform_and_a_node_list():
    done = piper("topology", "--topology", "frontier", "--hosts", "frontier[00121-00133]")
    assert done.returncode == 0
    assert "Topology frontier: 13 nodes" in done.stdout
    assert "frontier[00121-00128]" in done.stdout
    assert "frontier[00129-00133]" in done.stdout


def test_platforms():
    done = piper("topology", "--list")
    assert done.returncode == 0
    assert "dgx-h100" in done.stdout
    platforms = json.loads(piper("topology", "--list", "--json").stdout)["platforms"]
    assert {p["name"]: p["ranks_per_node"] for p in platforms}["frontier"] == 8


def test_grid_map_of_a_platform():
    hosts = ("--topology", "dgx-h100", "--hosts", "n[1-4]")
    done = piper("topology", *hosts, "--grid", "2x8", "--launcher-order", "round-robin")
    assert done.returncode == 0
    assert "Piper grid 2x8 (PP x EP): 32 ranks on 4 nodes, topology dgx-h100" in done.stdout
    (expert,) = [line for line in done.stdout.splitlines() if line.startswith("expert (EP)")]
    assert expert.endswith("100% -> 0%")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_sizes_as_separate_flags_and_etp_as_megatron_defaults_it(file):
    where = ("topology", "--topology", file, "--ranks-per-node", "8", "--json")
    sizes = json.loads(piper(*where, "--pp", "2", "--ep", "4", "--tp", "2").stdout)["layout"]
    assert sizes == {
        "world": 64, "tp": 2, "cp": 1, "pp": 2, "ep": 4, "etp": 2, "dp": 16, "edp": 4,
    }  # fmt: skip


def test_saved_placement_is_read_back(file, tmp_path):
    saved = tmp_path / "placement.yaml"
    job = ("topology", "--topology", file, "--ranks-per-node", "4", "--grid", "1x8")
    job += ("--launcher-order", "round-robin", "--json")
    first = piper(*job, "--save", saved)
    assert str(saved) in first.stderr
    again = piper(*job, "--placement", saved)
    one, two = json.loads(first.stdout), json.loads(again.stdout)
    assert one["placement"]["hosts"] == two["placement"]["hosts"]
    assert two["placement"]["order"] == "placement file"
    assert one["cost"] == two["cost"]
    # five and three nodes in pairs: one of four expert groups has to span both switches
    assert two["crossing"]["after"]["tp_ep"] == {"node": 1.0, "switch": 0.25}


def test_some_nodes_of_a_file(file):
    done = piper(
        "topology", "--topology", file, "--hosts", "n[5-6]", "--ranks-per-node", 4, "--pp", 2
    )
    assert "8 ranks on 2 nodes" in done.stdout
    assert "n5" in done.stdout
    assert "n7" not in done.stdout


def test_nodes_of_the_slurm_allocation():
    allocation = {"SLURM_JOB_NODELIST": "x1000c0s0b0n[0-1]"}
    done = piper("topology", "--ranks-per-node", "4", "--grid", "2x4", **allocation)
    assert done.returncode == 0
    assert "8 ranks on 2 nodes" in done.stdout
    assert "x1000" in done.stdout


def test_all_nodes():
    job = ("topology", "--topology", "perlmutter-a100-80", "--hosts", "nid[001000-001047]")
    assert "32 more nodes" in piper(*job, "--grid", "4x4").stdout
    assert "more nodes" not in piper(*job, "--grid", "4x4", "--all-nodes").stdout


def test_an_error_is_one_line_and_exit_code_2():
    done = piper("topology", "--topology", "frontierr", "--hosts", "n1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("piper-megatron: error: unknown platform 'frontierr', did you")
    assert done.stderr.count("\n") == 1


DGX = "--topology dgx-h100 --hosts n[1-4]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name them, for instance --hosts 'n[001-016]'"),
        ("--topology frontier --hosts n[1", "not a node set"),
        ("--topology FILE --hosts n[1,9] --ranks-per-node 8 --pp 2", "does not list node n9"),
        ("--topology FILE --grid 2x8", "--ranks-per-node 8"),
        (f"{DGX} --grid 3x8", "legal PPxEP grids: 4x8"),
        (f"{DGX} --grid 2x8 --pp 4", "--grid 2x8 says PP 2, --pp says 4"),
        (f"{DGX} --grid 2-8", "PPxEP"),
        (f"{DGX} --save placement.yaml", "--save needs a layout"),
        (f"{DGX} --grid 2x8 --placement bset", "'bset' is none of auto, block, none"),
        (f"{DGX} --grid 2x8 --save /absent/placement.yaml", "cannot write placement /absent"),
        (f"{DGX} --grid 2x8 --ranks-per-node 0", "--ranks-per-node must be at least 1"),
    ],
)
def test_what_a_user_can_get_wrong(file, capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("PIPER_DEBUG", raising=False)
    assert main(["topology", *arguments.replace("FILE", str(file)).split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("piper-megatron: error: ")
    assert err.count("\n") == 1


def test_tracebacks_only_on_request():
    wrong = ("topology", "--topology", "nowhere", "--hosts", "n1")
    assert "Traceback" not in piper(*wrong).stderr
    assert "Traceback" in piper("--debug", *wrong).stderr
    assert "Traceback" in piper(*wrong, "--debug").stderr
    assert "Traceback" in piper(*wrong, PIPER_DEBUG="1").stderr


def test_a_reader_that_stops_early_is_no_error():
    job = "topology --topology frontier --hosts frontier[00001-09000] --all-nodes"
    shell = f"'{COMMAND}' {job} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stdout == "Topology frontier: 9,000 nodes\n0\n"
    assert done.stderr == ""
