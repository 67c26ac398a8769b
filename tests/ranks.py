"""Runs jobs of several ranks in a few seconds: ranks are forked from a process that has imported.

Importing torch and Megatron takes longer than training a tiny model. A `RankServer` is a process
that imports them once (with the CPU backend in force, unless `cpu=False`); every rank of every job
is a fork of it. `python tests/ranks.py` is that process; tests use the `ranks` fixture.
"""

import contextlib
import functools
import gc
import inspect
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

TESTS = Path(__file__).resolve().parent
GRACE_S = 5.0  # for the other ranks, once one has failed
_NUMBER = r"([-+0-9.Ee]+|nan|inf)"


def losses(output: str) -> list[float]:
    """The `lm loss` of every iteration in Megatron's log, to its seven digits."""
    return [float(text) for text in re.findall(rf"lm loss: {_NUMBER}", output)]


def grad_norms(output: str) -> list[float]:
    """The gradient norm of every iteration in Megatron's log, to its three decimals."""
    return [float(text) for text in re.findall(rf"grad norm: {_NUMBER}", output)]


@dataclass(frozen=True)
class Job:
    """What the server is to run: a script, or a function with arguments."""

    world: int
    folder: str
    env: dict[str, str]
    hosts: tuple[str, ...]
    timeout_s: float
    script: str | None = None
    argv: tuple[str, ...] = ()
    function: bytes = b""


@dataclass(frozen=True)
class Run:
    """What came of a job; every list has one entry a rank.

    Attributes:
        codes: exit codes; negative for a signal.
        outputs: stdout and stderr together.
        values: what the function returned; None for scripts.
        iterations: one `{"iteration", "losses", "grad_norm"}` for each training iteration, exact.
            Losses are known on the last pipeline stage.
        seconds: how long it took.
    """

    codes: list[int]
    outputs: list[str]
    values: list[Any]
    iterations: list[list[dict[str, Any]]]
    seconds: float
    timed_out: bool = field(default=False)

    def check(self) -> "Run":
        """This run; an assertion with the output of the ranks that failed, if any did."""
        if any(self.codes) or self.timed_out:
            failed = [
                f"--- rank {rank} exited with {code}:\n{output[-4000:]}"
                for rank, (code, output) in enumerate(zip(self.codes, self.outputs, strict=True))
                if code
            ]
            raise AssertionError(
                f"{'timed out' if self.timed_out else 'failed'} after {self.seconds:.0f} s\n"
                + "\n".join(failed)
            )
        return self

    @property
    def losses(self) -> list[float]:
        """The exact `lm loss` of every iteration."""
        return [step["losses"]["lm loss"] for step in self._last_stage()]

    @property
    def grad_norms(self) -> list[float]:
        """The exact gradient norm of every iteration."""
        return [step["grad_norm"] for step in self._last_stage()]

    def _last_stage(self) -> list[dict[str, Any]]:
        """Iterations of a rank that knows the losses; a placement moves it about."""
        return next(steps for steps in self.iterations if steps and steps[0]["losses"])


class RankServer:
    """A process whose forks are ranks."""

    def __init__(self, cpu: bool = True, python_path: str = "") -> None:
        """Args:
        cpu: whether the CPU backend is in force in the ranks.
        python_path: put before the installed packages, for another release of Megatron.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "cpu" if cpu else "torch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, (python_path, str(TESTS)))),
                "OMP_NUM_THREADS": "1",
                "PIPER_CPU": "1" if cpu else "0",
            },
        )

    def run(self, script: str | Path, argv: list[str], world: int, **options: Any) -> Run:
        """Runs a script under the plug-in, as `piper-megatron run` would.

        Args:
            script: path of the script.
            argv: its arguments.
            world: number of ranks.
            options: `env` (dict of variables), `hosts` (what each rank takes for its host name) and
                `timeout_s`.
        """
        return self._submit(world, script=str(script), argv=tuple(argv), **options)

    def call(self, function: Callable, *args: Any, world: int, **options: Any) -> Run:
        """Calls a module-level function on every rank; `options` are those of `run`."""
        return self._submit(world, function=pickle.dumps((function, args)), **options)

    def close(self) -> None:
        """Ends the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _submit(
        self,
        world: int,
        env: dict[str, str] | None = None,
        hosts: tuple[str, ...] = (),
        timeout_s: float = 120,
        **work: Any,
    ) -> Run:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            free.close()
            started = time.monotonic()
            job = Job(world, folder, {**port, **(env or {})}, hosts, timeout_s, **work)
            pickle.dump(job, self._process.stdin)
            self._process.stdin.flush()
            codes, timed_out = pickle.load(self._process.stdout)
            return Run(
                codes,
                [_log(folder, rank).read_text(errors="replace") for rank in range(world)],
                [_read_value(folder, rank) for rank in range(world)],
                [_read_iterations(folder, rank) for rank in range(world)],
                time.monotonic() - started,
                timed_out,
            )


def serve(cpu: bool) -> None:
    """Runs jobs from stdin, one after the other, until it is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the imports print
    if cpu:
        _preload_megatron()
    else:
        import torch  # noqa: F401
    gc.collect()
    gc.freeze()
    for job in _jobs(sys.stdin.buffer):
        pickle.dump(_run_job(job), answers)
        answers.flush()


def _preload_megatron() -> None:
    """Imports what a training would import, some of it late: a second or more in every rank."""
    from piper_megatron.runtime import cpu

    cpu.enable()
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.tokenizers.text
    import megatron.training.training  # noqa: F401
    import torch._dynamo  # noqa: F401

    import piper_megatron.runtime.dispatch.attach  # noqa: F401


def _jobs(stream: BinaryIO) -> Iterator[Job]:
    while True:
        try:
            yield pickle.load(stream)
        except EOFError:
            return


def _run_job(job: Job) -> tuple[list[int], bool]:
    """Exit codes of the ranks, and whether time ran out."""
    running = {_fork(job, rank): rank for rank in range(job.world)}
    codes: dict[int, int] = {}
    deadline = time.monotonic() + job.timeout_s
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.01)
            continue
        code = codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        _kill_session(pid)  # its data loader's workers
        if code:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    timed_out = bool(running) and not any(codes.values())
    for pid, rank in running.items():
        _kill_session(pid)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[rank] for rank in range(job.world)], timed_out


def _fork(job: Job, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _become_rank(job, rank)
        _work(job, rank)
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _become_rank(job: Job, rank: int) -> None:
    """Gives a fork its log, its session and the environment that torchrun would."""
    os.setsid()
    log = os.open(_log(job.folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    hosts = job.hosts or ("one host",) * job.world
    os.environ.update(
        job.env,
        RANK=str(rank),
        WORLD_SIZE=str(job.world),
        LOCAL_RANK=str(hosts[:rank].count(hosts[rank])),
        LOCAL_WORLD_SIZE=str(hosts.count(hosts[rank])),
    )
    if job.hosts:
        socket.gethostname = lambda: hosts[rank]


def _work(job: Job, rank: int) -> None:
    """Does the job's work on this rank."""
    if job.script is None:
        function, args = pickle.loads(job.function)
        _value(job.folder, rank).write_bytes(pickle.dumps(function(*args)))
        return
    from piper_megatron.runtime.launch import run_script
    from piper_megatron.runtime.user_errors import one_line_errors

    if "megatron.training.training" in sys.modules:
        _record_iterations(_iterations(job.folder, rank))
    with one_line_errors():
        run_script(job.script, list(job.argv))


def _record_iterations(path: Path) -> None:
    """Writes down, exactly, what Megatron's `training_log` is told after each iteration."""
    from piper_megatron.runtime.hooks import Hook, HookSet

    def record(training_log: Callable) -> Callable:
        signature = inspect.signature(training_log)

        @functools.wraps(training_log)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            told = signature.bind(*args, **kwargs).arguments
            step = {
                "iteration": told["iteration"],
                "losses": {name: float(loss) for name, loss in told["loss_dict"].items()},
                "grad_norm": None if told["grad_norm"] is None else float(told["grad_norm"]),
            }
            with path.open("a") as file:
                print(json.dumps(step), file=file)
            return training_log(*args, **kwargs)

        return recorded

    HookSet("test").apply([Hook("test.record", "megatron.training.training:training_log", record)])


def _log(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.log"


def _value(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.value"


def _iterations(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.jsonl"


def _read_value(folder: str, rank: int) -> Any:
    path = _value(folder, rank)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _read_iterations(folder: str, rank: int) -> list[dict[str, Any]]:
    path = _iterations(folder, rank)
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


if __name__ == "__main__":
    # pickled jobs name the classes of this module as the client knows it
    import ranks

    ranks.serve(cpu=sys.argv[1] == "cpu")
