"""Runs a training script and prints the most memory that this rank held, at its end.

    piper-megatron run --cpu benchmarks/measured_training.py tensors|process SCRIPT ARGS...

`tensors`: bytes of storages alive at a time, counted at every operation, which slows the training;
what `torch.cuda.max_memory_allocated` would say. `process`: resident set of the process.
"""

import os
import resource
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from real_activations import living_storages

MARK = "peak GiB of rank"


def main() -> None:
    """The script finds its own arguments in `sys.argv`."""
    what, script = sys.argv[1:3]
    rank = os.environ["RANK"]
    sys.argv = sys.argv[2:]
    counted = living_storages() if what == "tensors" else nullcontext()
    with counted as living:
        runpy.run_path(script, run_name="__main__")
    held = living.peak if living else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\n{MARK} {rank}: {held / 2**30:.4f}", flush=True)


if __name__ == "__main__":
    main()
