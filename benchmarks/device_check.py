"""Checks the token dispatchers on this machine's GPU, in less than five minutes.

    python benchmarks/device_check.py
    python benchmarks/device_check.py --cpu    the same on the CPU backend, with smaller sizes

Exit code 0 when all agree, 1 when something does not, 2 without a GPU.

Needs what `pip install 'piper-megatron[train]'` brings, and one GPU: expert parallel size is 1, so
rows do not leave the device. Three parts, each against what is known to be right:

    kernels    gather, sum, packed bits and places of True elements against the CPU's results
    layer      an MoE layer, forward and backward, against Megatron's own dispatcher
    training   some steps of examples/pretrain_moe.py against Megatron's own dispatcher
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

# Megatron compiles small functions; a plain installation may have no compiler for them
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from moe_layer import LayerSizes, build_layer, expert_groups, train_layer, with_dispatcher

from piper_megatron.runtime import cpu
from piper_megatron.runtime.dispatch import rows
from piper_megatron.runtime.dispatch.stats import FILE_NAME

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_moe.py"
ALGORITHMS = ("flat", "2dh", "halo", "rail", "rbd")
BUDGET_S = 290.0
WARM_UP_STEPS, STEPS = 3, 9
REPEATS = 7
# the largest difference of losses that another order of sums explains, in fp32
LOSS_TOLERANCE = 1e-4
LAYER_TOLERANCE = 1e-4
PLAIN = "Megatron"
# what needs neither Transformer Engine nor Apex
MODEL = """
    --num-layers 2 --num-attention-heads 4 --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01 --micro-batch-size 2 --global-batch-size 2
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1024 --split 1,0,0 --num-workers 0
    --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0 --eval-interval 1000
"""
GPU_SIZES = """
    --hidden-size 1024 --num-experts 32 --moe-router-topk 8 --moe-ffn-hidden-size 512
    --seq-length 1024 --max-position-embeddings 1024
"""
CPU_SIZES = """
    --hidden-size 64 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64
    --seq-length 64 --max-position-embeddings 64
"""
GPU_LAYER = LayerSizes(hidden=2048, expert_ffn=512, experts=32, topk=8, tokens=4096)
CPU_LAYER = LayerSizes(hidden=64, expert_ffn=64, experts=8, topk=2, tokens=128)


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    what: str
    ok: bool
    detail: str


def check_kernels() -> Iterator[Result]:
    """Every kernel that the dispatchers are made of, on the device and on the CPU."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(1000, 192, generator=generator).to(dtype)
        index = torch.randint(300, (1000,), generator=generator)
        yield _equal(f"gather, {dtype}", lambda v, i: rows.take(i, v), values, index)
        yield _sums(f"sum, {dtype}", values, index)
        torch.use_deterministic_algorithms(True)
        try:
            yield _sums(f"sum, {dtype}, deterministic", values, index, repeatable=True)
        finally:
            torch.use_deterministic_algorithms(False)
    bits = torch.rand(777, 37, generator=generator) < 0.2
    yield _equal("packed bits", rows.pack_bits, bits)
    yield _equal("packed bits and back", lambda b: rows.unpack_bits(rows.pack_bits(b), 37), bits)
    count = int(bits.sum())
    yield _equal("places of True", lambda b: rows.true_places(b, count), bits)
    yield _equal("places of True, no rows", lambda b: rows.true_places(b, 0), bits[:0])


def _equal(what: str, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Result:
    expected = function(*inputs)
    try:
        got = function(*(tensor.cuda() for tensor in inputs)).cpu()
    except RuntimeError as error:
        return Result(what, False, _first_line(error))
    return Result(what, torch.equal(got, expected), "equal to the CPU's")


def _sums(what: str, values: torch.Tensor, index: torch.Tensor, repeatable: bool = False) -> Result:
    count = int(index.max()) + 1
    exact = torch.zeros(count, values.shape[1], dtype=torch.float64)
    exact.index_add_(0, index, values.double())
    try:
        got, again = (rows.add_up(index.cuda(), count, values.cuda()).cpu() for _ in range(2))
    except RuntimeError as error:
        return Result(what, False, _first_line(error))
    # rounded once to the rows' type, after sums in fp32
    allowed = torch.finfo(values.dtype).eps * exact.abs() + 1e-5
    close = bool(((got.double() - exact).abs() <= allowed).all())
    same = torch.equal(got, again)
    detail = f"largest error {(got.double() - exact).abs().max():.1e}"
    return Result(
        what,
        close and (same or not repeatable),
        f"{detail}; twice the same: {'yes' if same else 'no'}",
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def check_layer(sizes: LayerSizes) -> Iterator[Result]:
    """An MoE layer on this one rank, with each dispatcher."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        "gloo" if cpu.is_enabled() else "nccl",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel()
    groups = expert_groups(nodes=1)
    tokens = torch.randn(sizes.tokens, sizes.hidden, generator=torch.Generator().manual_seed(2))
    tokens = tokens.cuda()
    plain = build_layer(sizes)
    output, gradients = train_layer(plain, tokens)
    plain_ms = _layer_ms(plain, tokens)
    yield Result(f"layer, {PLAIN}", True, f"{plain_ms:.2f} ms forward and backward")
    for algorithm in ALGORITHMS:
        layer = with_dispatcher(plain, algorithm, groups)
        own_output, own_gradients = train_layer(layer, tokens)
        difference = max(
            _difference(own_output, output),
            *(_difference(own_gradients[name], gradients[name]) for name in gradients),
        )
        ratio = _layer_ms(layer, tokens) / plain_ms
        yield Result(
            f"layer, {algorithm}",
            difference <= LAYER_TOLERANCE,
            f"difference {difference:.1e}, {ratio:.2f} of {PLAIN}'s time",
        )
    torch.distributed.destroy_process_group()


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest number."""
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _layer_ms(layer: Any, tokens: torch.Tensor) -> float:
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        train_layer(layer, tokens)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return median(times)


@dataclass(frozen=True)
class Training:
    """What a training printed: loss and milliseconds of every step; what its statistics name."""

    losses: list[float]
    step_ms: list[float]
    algorithms: set[str]

    @property
    def ms(self) -> float:
        """Median over the steps after warm-up."""
        return median(self.step_ms[WARM_UP_STEPS:])


def check_training(sizes: str, deadline: float) -> Iterator[Result]:
    """Some steps of the example with each dispatcher, each in a process of its own."""
    plain = train(sizes, [], deadline)
    if isinstance(plain, str):
        yield Result(f"training, {PLAIN}", False, plain)
        return
    losses = f"loss {plain.losses[0]:.4f} to {plain.losses[-1]:.4f}"
    yield Result(f"training, {PLAIN}", True, f"{plain.ms:.1f} ms a step, {losses}")
    for algorithm in ALGORITHMS:
        flags = ["--piper-dispatcher", algorithm, "--piper-dispatcher-stats"]
        own = train(sizes, flags, deadline)
        if isinstance(own, str):
            yield Result(f"training, {algorithm}", False, own)
            continue
        if own.algorithms != {algorithm}:
            yield Result(f"training, {algorithm}", False, f"statistics tell of {own.algorithms}")
            continue
        difference = max(abs(a - b) / abs(b) for a, b in zip(own.losses, plain.losses, strict=True))
        yield Result(
            f"training, {algorithm}",
            difference <= LOSS_TOLERANCE,
            f"losses differ by {difference:.1e}, {own.ms / plain.ms:.2f} of {PLAIN}'s time",
        )


def train(sizes: str, flags: list[str], deadline: float) -> Training | str:
    """Trains the example on one rank; what went wrong if it did."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    steps = WARM_UP_STEPS + STEPS
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "piper_megatron.runtime.launch", str(SCRIPT)),
                    *(*MODEL.split(), *sizes.split(), "--train-iters", str(steps), *flags),
                ],
                cwd=folder,
                env={**os.environ, **rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=max(deadline - time.monotonic(), 1.0),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not finished within {BUDGET_S:.0f} s of the whole check"
        statistics = Path(folder) / FILE_NAME
        lines = statistics.read_text().splitlines() if statistics.exists() else []
    losses = [float(text) for text in re.findall(r"lm loss: (\S+)", done.stdout)]
    step_ms = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", done.stdout)
    if done.returncode or not len(losses) == len(step_ms) == steps:
        print(done.stdout[-4000:], file=sys.stderr)
        return f"ended with exit code {done.returncode}; its output is above"
    algorithms = {json.loads(line)["algorithm"] for line in lines}
    return Training(losses, [float(ms) for ms in step_ms], algorithms)


def main() -> int:
    """Exit code 0 when all agree, 1 when something does not, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="run on the CPU backend")
    arguments = parser.parse_args()
    deadline = time.monotonic() + BUDGET_S
    if arguments.cpu:
        os.environ["PIPER_CPU"] = "1"
        cpu.enable()
        layer, training, device = CPU_LAYER, CPU_SIZES, "the CPU backend"
    elif torch.cuda.is_available():
        layer, training, device = GPU_LAYER, GPU_SIZES, torch.cuda.get_device_name()
    else:
        print(
            "device_check: torch sees no GPU here; start it on a node with one, or add --cpu",
            file=sys.stderr,
        )
        return 2
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    print(f"{device}, {versions}", flush=True)
    ok = True
    for result in chain(check_kernels(), check_layer(layer), check_training(training, deadline)):
        ok &= result.ok
        print(f"{'ok  ' if result.ok else 'FAIL'}  {result.what:<36}  {result.detail}", flush=True)
    print(
        f"{'all agree' if ok else 'NOT all agree'}, {BUDGET_S - deadline + time.monotonic():.0f} s"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
