"""The example script, with writers for TensorBoard and W&B that need no packages.

Both append to a file: one JSON array [writer, name, value, iteration] a line.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType


def write(writer: str, name: str, value: float, iteration: int) -> None:
    with Path(os.environ["WRITTEN"]).open("a") as file:
        print(json.dumps([writer, name, float(value), iteration]), file=file)


class SummaryWriter:
    def __init__(self, log_dir: str, max_queue: int) -> None:
        pass

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        write("tensorboard", name, value, iteration)

    def add_text(self, *_args: object, **_kwargs: object) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def log(values: dict[str, float], iteration: int) -> None:
    for name, value in values.items():
        write("wandb", name, value, iteration)


tensorboard = ModuleType("torch.utils.tensorboard")
tensorboard.SummaryWriter = SummaryWriter
wandb = ModuleType("wandb")
wandb.init = lambda **_settings: None
wandb.config = {}
wandb.finish = lambda: None
wandb.log = log
sys.modules |= {"torch.utils.tensorboard": tensorboard, "wandb": wandb}
runpy.run_path(str(Path(__file__).parents[1] / "examples" / "pretrain_moe.py"), run_name="__main__")
