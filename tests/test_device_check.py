"""The check for a machine with a GPU: right on the CPU backend, sees errors, needs a GPU."""

import subprocess
import sys

import pytest
import torch
from tiny import ROOT

SCRIPT = ROOT / "benchmarks" / "device_check.py"


def check_kernels_and_layer() -> tuple[list[bool], list[str]]:
    """Whether each result is right, then the names of those that a wrong gather makes wrong."""
    sys.path.insert(0, str(SCRIPT.parent))
    import device_check

    results = [*device_check.check_kernels(), *device_check.check_layer(device_check.CPU_LAYER)]

    class WrongOnDevice:
        """The CPU's result the first time, another one after that."""

        calls = 0

        def __call__(self, index_R, rows):
            self.calls += 1
            return rows[index_R] * self.calls

    device_check.rows.take = WrongOnDevice()
    wrong = [result.what for result in device_check.check_kernels() if not result.ok]
    return [result.ok for result in results], wrong


def test_all_agree_on_the_cpu_backend_and_a_wrong_kernel_shows(ranks):
    (right, wrong) = ranks.call(check_kernels_and_layer, world=1).check().values[0]
    assert len(right) == 16
    assert all(right)
    assert wrong == ["gather, torch.float32", "gather, torch.bfloat16"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_one_line_and_exit_code_2():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "torch sees no GPU here" in done.stderr
