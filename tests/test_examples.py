"""The examples: text preparation, the CPU scripts in training, the cluster scripts' arguments."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny import ROOT, SCRIPT, tiny_command

from piper_megatron.platform.platform import load_platform

EXAMPLES = ROOT / "examples"
GRIDS = {
    "cpu_gpt_moe.sh": "2x2",
    "cpu_deepseek.sh": "2x4",
    "mixtral_8x7b_dgx_h100.sh": "2x4",
    "deepseek_v2_frontier.sbatch": "15x8",
    "xmoe_small_frontier.sbatch": "1x8",
    "xmoe_medium_frontier.sbatch": "4x8",
    "xmoe_large_frontier.sbatch": "10x8",
    "xmoe_super_frontier.sbatch": "16x8",
}
# of the paper, in units of 2^30: arXiv:2508.13337
XMOE_SIZES = {"small": 10.06, "medium": 55.23, "large": 201.36, "super": 545.43}


@dataclass(frozen=True)
class Launch:
    """What a script would start: `argv` belongs to the training script."""

    world: int
    argv: list[str]
    srun: list[str]


class Recorder:
    """Runs example scripts with stand-ins for what they launch."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        (self.out / "text.idx").touch()  # the scripts prepare text only once
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.stand_in("module", "exit 0")
        self.stand_in("srun", f'echo "$@" > {folder}/srun; while [ "$1" != env ]; do shift; done')
        self.stand_in("srun", '"$@"', append=True)
        self.stand_in("piper-megatron", f"printf '%s\\n' \"$@\" > {folder}/argv")
        self._folder = folder

    def stand_in(self, name: str, body: str, append: bool = False) -> None:
        """Puts a command of that name first on PATH."""
        command = self._bin / name
        command.write_text((command.read_text() if append else "#!/bin/sh\n") + body + "\n")
        command.chmod(0o755)

    def run(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        """Runs a script with the stand-ins."""
        settings = {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "PIPER_DEMO_DIR": str(self.out),
            "VENV": str(self._folder),
            "DATA_PATH": "corpus" if "xmoe" not in name else "",
            "TOKENIZER": "tokenizer",
            "SLURM_JOB_ID": "1",
        }
        return subprocess.run(
            ["bash", f"examples/{name}", *more],
            cwd=ROOT,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
        )

    def launch(self, name: str, *more: str) -> Launch:
        """What a script launches."""
        ran = self.run(name, *more)
        assert ran.returncode == 0, ran.stderr
        typed = (self._folder / "argv").read_text().splitlines()
        script = typed.index("examples/pretrain_moe.py")
        nodes = re.search(r"^#SBATCH --nodes=(\d+)$", (EXAMPLES / name).read_text(), re.MULTILINE)
        srun = shlex.split((self._folder / "srun").read_text()) if nodes else []
        if nodes:
            assert typed[:script] == ["run"]
            world = int(nodes[1]) * int(srun[srun.index("--ntasks-per-node") + 1])
        else:
            world = int(typed[typed.index("--nproc", 0, script) + 1])
        return Launch(world, typed[script + 1 :], srun)


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path)


def start_on_a_fake_group(argv: list[str], world: int) -> dict:
    """What Megatron makes of arguments on rank 0 of a world that is not there."""
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.training import arguments, global_vars, initialize
    from megatron.training.argument_utils import gpt_config_from_args

    from piper_megatron.runtime import cpu
    from piper_megatron.runtime.arguments import add_piper_group, resolve

    os.environ["WORLD_SIZE"] = str(world)
    sys.argv = ["script", *argv, "--fake-process-group"]
    arguments.validate_args(resolve(arguments.parse_args(add_piper_group)))

    # the rest asks for Transformer Engine where a GPU is meant
    args = resolve(arguments.parse_args(add_piper_group))
    cpu.translate(args)
    arguments.validate_args(args)
    global_vars.set_args(args)
    script = runpy.run_path(str(SCRIPT))
    initialize._initialize_distributed(script["get_embedding_ranks"], None, None)
    args.padded_vocab_size = args.vocab_size or 32000  # what no file of a tokenizer says here
    config = gpt_config_from_args(args).transformer
    layers_on_stages = 0
    for stage in range(args.pipeline_model_parallel_size):
        mpu.set_pipeline_model_parallel_rank(stage)
        for chunk in range(args.virtual_pipeline_model_parallel_size or 1):
            layers_on_stages += get_num_layers_to_build(config, vp_stage=chunk)
    hidden, experts = args.hidden_size, args.num_experts
    width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    return {
        "grid": f"{mpu.get_pipeline_model_parallel_world_size()}"
        f"x{mpu.get_expert_model_parallel_world_size()}",
        "expert_group": dist.get_process_group_ranks(mpu.get_expert_model_parallel_group()),
        "micro_batches": args.global_batch_size // args.micro_batch_size // args.data_parallel_size,
        "layers": args.num_layers,
        "layers_on_stages": layers_on_stages,
        "paper_parameters": args.num_layers * (4 * hidden**2 + 2 * experts * hidden * width),
        "two_matrices": not config.gated_linear_unit and not config.add_bias_linear,
        "moe_layers": sum(config.moe_layer_freq)
        if isinstance(config.moe_layer_freq, list)
        else args.num_layers // config.moe_layer_freq,
    }


@pytest.mark.parametrize("name", GRIDS)
def test_megatron_accepts_the_arguments_at_the_scripts_world_size(ranks, recorder, name):
    launch = recorder.launch(name)
    started = ranks.call(start_on_a_fake_group, launch.argv, launch.world, world=1)
    accepted = started.check().values[0]
    pp, ep = map(int, GRIDS[name].split("x"))
    assert accepted["grid"] == GRIDS[name]
    assert accepted["expert_group"] == list(range(ep))
    assert launch.world % (pp * ep) == 0
    assert accepted["layers_on_stages"] == accepted["layers"]
    assert accepted["micro_batches"] >= pp
    if "xmoe" in name:
        size = XMOE_SIZES[name.split("_")[1]]
        assert round(accepted["paper_parameters"] / 2**30, 2) == size
        assert accepted["two_matrices"]
        assert accepted["moe_layers"] == accepted["layers"]


@pytest.mark.parametrize("name", [name for name in GRIDS if not name.startswith("cpu")])
def test_expert_groups_fit_on_a_node_of_the_scripts_platform(recorder, name):
    argv = recorder.launch(name).argv
    platform = load_platform(argv[argv.index("--piper-topology") + 1])
    ep = int(argv[argv.index("--piper-grid") + 1].partition("x")[2])
    assert platform.ranks_per_node % ep == 0


def test_every_script_is_known_to_the_tests():
    scripts = {path.name for pattern in ("*_*.sh", "*.sbatch") for path in EXAMPLES.glob(pattern)}
    assert scripts == set(GRIDS)


def test_frontier_tasks_see_their_nearest_device_under_their_local_rank(recorder):
    srun = recorder.launch("xmoe_small_frontier.sbatch").srun
    # hardware threads 1-7 belong to GCD 4, 9-15 to GCD 5, ...: Frontier user guide
    assert "ROCR_VISIBLE_DEVICES=4,5,2,3,6,7,0,1" in srun
    assert srun[srun.index("--gpu-bind") + 1] == "none"


def test_further_arguments_come_last(recorder):
    for name in GRIDS:
        assert recorder.launch(name, "--train-iters", "3").argv[-2:] == ["--train-iters", "3"]


def test_what_a_cluster_script_needs_is_asked_for(recorder):
    env = {k: v for k, v in os.environ.items() if k not in ("DATA_PATH", "TOKENIZER")}
    for name in ("mixtral_8x7b_dgx_h100.sh", "deepseek_v2_frontier.sbatch"):
        ran = subprocess.run(
            ["bash", f"examples/{name}"], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert ran.returncode != 0
        assert "DATA_PATH: prefix of the .bin and .idx files" in ran.stderr


def batch_of_a_context_parallel_rank() -> dict:
    import torch
    from megatron.training import arguments, global_vars, initialize

    os.environ["WORLD_SIZE"] = "2"
    sys.argv = ["script", *tiny_command("--context-parallel-size", "2", "--fake-process-group")]
    args = arguments.parse_args()
    args.apply_rope_fusion = False  # Transformer Engine's
    arguments.validate_args(args)
    global_vars.set_args(args)
    script = runpy.run_path(str(SCRIPT))
    initialize._initialize_distributed(script["get_embedding_ranks"], None, None)
    tokens = torch.arange(args.seq_length).expand(args.micro_batch_size, -1)
    mask = torch.ones(args.micro_batch_size, 1, args.seq_length, args.seq_length).bool()
    sample = dict.fromkeys(script["BATCH_DTYPES"], tokens) | {"attention_mask": mask}
    config = arguments.core_transformer_config_from_args(args)
    batch = script["get_batch"](iter([sample]), config, None)
    return {name: tensor.tolist() for name, tensor in batch.items()}


def test_a_context_parallel_rank_takes_the_first_and_the_last_quarter(ranks):
    batch = ranks.call(batch_of_a_context_parallel_rank, world=1).check().values[0]
    share = [*range(8), *range(24, 32)]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert batch[name] == [share]
    assert [len(row) for row in batch["attention_mask"][0][0]] == [32] * 16


def prepare_text(*argv: str) -> None:
    sys.argv = ["prepare_text.py", *argv]
    runpy.run_path(str(EXAMPLES / "prepare_text.py"), run_name="__main__")


def read_documents(prefix: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    assert len(dataset.document_indices) == len(dataset) + 1
    return [document.tolist() for document in dataset]


def test_prepared_text_is_the_bytes_of_the_files(ranks, tmp_path):
    corpus = tmp_path / "corpus"
    (corpus / "b").mkdir(parents=True)
    texts = ["first\n", "naïve Σ — \U0001f600\r\n", ""]
    for name, text in zip(("a.txt", "b/c.py", "d"), texts, strict=True):
        (corpus / name).write_bytes(text.encode())
    (corpus / "not_text").write_bytes(b"\x7fELF\0")
    alone = tmp_path / "alone"
    alone.write_bytes(bytes(range(256)))
    prefix = tmp_path / "new" / "text"
    argv = ["--output", str(prefix), "--input", str(corpus), str(alone)]

    said = ranks.call(prepare_text, *argv, world=1).check().outputs[0]
    documents = ranks.call(read_documents, str(prefix), world=1).check().values[0]
    files = [*(text.encode() for text in texts), bytes(range(256))]
    assert documents == [[*file, 256] for file in files]
    assert f"4 documents, {sum(map(len, files)) + 4} tokens" in said
    assert f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 257" in said

    written = [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")]
    ranks.call(prepare_text, *argv, world=1).check()
    assert [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")] == written


def test_text_that_is_not_there_is_a_usage_error(ranks, tmp_path):
    argv = ["--output", str(tmp_path / "text"), "--input", str(tmp_path / "nothing")]
    ran = ranks.call(prepare_text, *argv, world=1)
    assert ran.codes == [2]
    assert f"error: no file or folder {tmp_path / 'nothing'}" in ran.outputs[0]
    assert not (tmp_path / "text.bin").exists()


def test_the_gpt_script_learns(ranks, recorder):
    text = str(recorder.out / "text")
    ranks.call(prepare_text, "--output", text, world=1).check()
    launch = recorder.launch("cpu_gpt_moe.sh", "--train-iters", "12", "--num-workers", "0")
    run = ranks.run(SCRIPT, launch.argv, launch.world).check()
    assert len(run.losses) == 12
    assert run.losses[-1] < run.losses[0] - 1


def test_the_demo_trains_and_shows_the_grid_and_the_loss(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PIPER_DEMO_DIR": str(tmp_path)}
    ran = subprocess.run(
        ["bash", "examples/cpu_deepseek.sh", "--train-iters", "8"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Piper grid 2x4 (PP x EP): 8 ranks on 1 node" in ran.stdout
    assert re.search(r"expert \(EP\) +2 x 4", ran.stdout)
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", ran.stdout)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    assert "mtp_1 loss" in (tmp_path / "train.log").read_text()
    assert "arguments ---" not in ran.stdout


def test_a_demo_that_fails_says_why(recorder):
    recorder.stand_in("piper-megatron", "echo 'piper-megatron: error: no such thing' >&2; exit 2")
    ran = recorder.run("cpu_deepseek.sh")
    assert ran.returncode == 1
    assert "piper-megatron: error: no such thing" in ran.stderr
