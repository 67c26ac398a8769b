"""`piper-megatron run`: how a job starts, and how it stops when the user's input is wrong."""

import os
import subprocess
import sys

import pytest
from tiny import SCRIPT, tiny_command

from piper_megatron.errors import LaunchError
from piper_megatron.runtime.launch import adopt_slurm

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PIPER_CPU")


def piper_megatron(*argv: str, **environ: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | environ
    command = [sys.executable, "-W", "ignore", "-m", "piper_megatron.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def assert_one_line(done: subprocess.CompletedProcess, *parts: str) -> None:
    errors = [line for line in done.stderr.splitlines() if "piper-megatron: error:" in line]
    assert len(errors) == 1, done.stderr
    assert all(part in errors[0] for part in parts), errors[0]
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_a_usage_error_of_many_workers_is_one_line():
    done = piper_megatron(
        "run", "--cpu", "--nproc", "2", str(SCRIPT), *tiny_command("--piper-grid", "3x2")
    )
    assert_one_line(done, "world size 2", "legal PPxEP grids: 1x2")


def test_lines_of_several_ranks_stay_whole(tmp_path):
    script = tmp_path / "chatter.py"
    script.write_text(
        "import os\nfor n in range(40000):\n    print(f'[{os.environ[\"RANK\"]} {n}]')\n"
    )
    lines = piper_megatron("run", "--cpu", "--nproc", "2", str(script)).stdout.splitlines()
    said = [line for line in lines if line.startswith("[")]
    assert sorted(said) == sorted(f"[{rank} {n}]" for rank in (0, 1) for n in range(40000))


def test_the_debug_switch_shows_the_traceback():
    done = piper_megatron(
        "run",
        "--cpu",
        str(SCRIPT),
        *tiny_command("--piper-grid", "two"),
        PIPER_DEBUG="1",
        RANK="0",
        WORLD_SIZE="1",
    )
    assert "Traceback" in done.stderr
    assert "LayoutError: --piper-grid takes PPxEP" in done.stderr


def test_without_a_gpu_and_without_cpu_it_stops_and_says_so():
    done = piper_megatron("run", str(SCRIPT), RANK="0", WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
    assert_one_line(done, "no GPU", "--cpu")


def test_without_a_gpu_no_worker_is_started():
    done = piper_megatron("run", str(SCRIPT), CUDA_VISIBLE_DEVICES="")
    assert_one_line(done, "no GPU", "--cpu")


def test_a_number_of_workers_that_is_none_is_refused():
    assert_one_line(piper_megatron("run", "--cpu", "--nproc", "0", str(SCRIPT)), "--nproc", "'0'")


def test_a_missing_script_is_named():
    assert_one_line(piper_megatron("run", "--cpu", "--nproc", "1", "nowhere.py"), "nowhere.py")


def test_half_a_launcher_environment_is_refused():
    assert_one_line(piper_megatron("run", "--cpu", str(SCRIPT), RANK="0"), "WORLD_SIZE")


def test_help_lists_our_options_and_torchruns():
    done = piper_megatron("run", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("piper-megatron run [--cpu] [--nproc N] [torchrun options]")
    assert "--rdzv-backend" in done.stdout


def disagree(argv: list[str], on_rank_1: list[str]) -> None:
    sys.argv = ["job", *argv, *(on_rank_1 if os.environ["RANK"] == "1" else [])]
    from megatron.training.arguments import parse_and_validate_args

    import piper_megatron

    piper_megatron.register()
    parse_and_validate_args()


def test_ranks_that_disagree_stop_before_the_first_collective(ranks):
    argv = tiny_command("--piper-grid", "1x2", "--seed", "1")
    run = ranks.call(disagree, argv, ["--seed", "2"], world=2)
    for code, output in zip(run.codes, run.outputs, strict=True):
        assert code == 2
        assert "ranks disagree on --seed: rank 1 on" in output
        assert "Traceback" not in output


def claim_device_0(argv: list[str]) -> None:
    os.environ["LOCAL_RANK"] = "0"
    disagree(argv, [])


def test_a_host_that_reports_twice_is_named(ranks):
    argv = tiny_command("--piper-grid", "1x2")
    run = ranks.call(claim_device_0, argv, world=2)
    assert all("reports twice: two ranks claim its local rank 0" in o for o in run.outputs)


def test_slurms_variables_become_torchs():
    environ = {
        "SLURM_PROCID": "9",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "frontier[00012,00010-00011]",
        "SLURM_JOB_ID": "1234567",
    }
    adopt_slurm(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("9", "16", "1")
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("frontier00010", "24567")


def test_the_users_own_rendezvous_address_wins_over_slurms():
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    environ |= {"SLURM_STEP_NODELIST": "a1", "SLURM_JOB_ID": "7", "MASTER_ADDR": "10.0.0.1"}
    adopt_slurm(environ)
    assert environ["MASTER_ADDR"] == "10.0.0.1"


def test_missing_slurm_variables_are_named():
    with pytest.raises(LaunchError, match="not SLURM_NTASKS"):
        adopt_slurm({"SLURM_PROCID": "0"})
