"""The example script, with a HybridModel in place of its GPTModel (megatron-core 0.19)."""

import runpy
from pathlib import Path

from megatron.training import argument_utils

argument_utils.gpt_config_from_args = argument_utils.hybrid_config_from_args
runpy.run_path(str(Path(__file__).parents[1] / "examples" / "pretrain_moe.py"), run_name="__main__")
