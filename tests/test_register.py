"""The plug-in in real jobs: silent without a flag, visible in --help, undone on request."""

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks import RankServer
from tiny import ROOT, SCRIPT, tiny_command

from piper_megatron.runtime.register import HOOKS

OTHER_RELEASES = ("0.17.1", "0.18.2")
INSTALLED = "0.19.2"
PACKAGE = ROOT / "piper_megatron"


def wheel(release: str) -> Path:
    """Folder that holds `megatron/` of a release."""
    if release == INSTALLED:
        return Path(find_spec("megatron.training").origin).parents[2]
    folder = ROOT / ".wheels" / release
    assert (folder / "megatron").is_dir(), f"'make test' puts megatron-core {release} into {folder}"
    return folder


def test_without_a_flag_losses_and_gradient_norms_are_bit_identical(ranks):
    command = tiny_command(
        *"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2".split(),
        # what the plug-in would translate for the CPU, since plain Megatron runs without it
        *"--transformer-impl local --distributed-backend gloo --no-persist-layer-norm".split(),
        *"--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-rope-fusion".split(),
    )
    plain = ranks.run(SCRIPT, command, 4, env={"PIPER_DISABLE": "1"}).check()
    registered = ranks.run(SCRIPT, command, 4).check()
    assert "piper_megatron: applied" not in plain.outputs[0]
    assert registered.outputs[0].count("piper_megatron: applied") == len(HOOKS)
    assert "Piper grid" not in "".join(registered.outputs)
    assert len(plain.losses) == 5
    assert plain.losses == registered.losses
    assert plain.grad_norms == registered.grad_norms
    assert plain.losses[-1] < plain.losses[0]


def test_help_of_the_unmodified_script_has_the_group(ranks):
    output = ranks.run(SCRIPT, ["--help"], 1).check().outputs[0]
    group = output[output.index("piper:") :]
    for flag in ("--piper-grid", "--piper-topology", "--piper-placement"):
        assert flag in group


def register_and_undo() -> list[bool]:
    import megatron.training.arguments as arguments
    import megatron.training.initialize as initialize
    import megatron.training.training as training
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe.moe_layer import MoELayer

    import piper_megatron

    def symbols():
        return [
            arguments.add_megatron_arguments,
            arguments.parse_args,
            arguments.validate_args,
            initialize._initialize_distributed,
            MoELayer.__init__,
            tensor_parallel.checkpoint,
            training.training_log,
        ]

    before = symbols()
    piper_megatron.register()
    piper_megatron.register()  # a second call changes nothing
    during = symbols()
    piper_megatron.unregister()
    return [
        all(new is not old for new, old in zip(during, before, strict=True)),
        all(new.__wrapped__ is old for new, old in zip(during, before, strict=True)),
        symbols() == before,
    ]


def test_unregister_restores_every_symbol(ranks):
    assert ranks.call(register_and_undo, world=1).check().values[0] == [True, True, True]


def lose_a_symbol() -> str:
    import megatron.training.initialize as initialize

    import piper_megatron
    from piper_megatron.errors import HookError

    del initialize._initialize_distributed
    try:
        piper_megatron.register()
    except HookError as error:
        return str(error)
    return "no error"


def test_a_missing_symbol_is_an_error_that_names_it(ranks):
    message = ranks.call(lose_a_symbol, world=1).check().values[0]
    assert "lacks megatron.training.initialize:_initialize_distributed" in message
    assert "PIPER_DISABLE=1" in message


@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_a_grid_trains_on_other_releases(release):
    server = RankServer(python_path=str(wheel(release)))
    try:
        command = tiny_command("--piper-grid", "2x2", "--piper-placement", "auto", iterations=2)
        run = server.run(SCRIPT, command, 4, hosts=("n0", "n1") * 2).check()
    finally:
        server.close()
    output = "".join(run.outputs)
    assert "Piper grid 2x2" in output
    assert "piper_megatron: applied initialize.distributed" in output
    assert len(run.losses) == 2


@pytest.mark.parametrize("release", [*OTHER_RELEASES, INSTALLED])
def test_the_source_patch_applies_and_does_what_the_hooks_do(release, tmp_path):
    """The patched files shadow those of the wheel; the rest of Megatron is linked."""
    tree = patched_tree(
        wheel(release), ROOT / "patches" / f"megatron-core-{release}.patch", tmp_path
    )
    server = RankServer(python_path=str(tree))
    try:
        command = tiny_command("--piper-grid", "2x2", iterations=2)
        run = server.run(SCRIPT, command, 4).check()
    finally:
        server.close()
    output = "".join(run.outputs)
    assert "Piper grid 2x2" in output
    assert output.count("piper_megatron: in the source: ") == len(HOOKS)
    assert "piper_megatron: applied" not in output


def test_registering_before_a_patched_megatron_is_imported_hooks_nothing_twice(tmp_path):
    patch = ROOT / "patches" / f"megatron-core-{INSTALLED}.patch"
    tree = patched_tree(wheel(INSTALLED), patch, tmp_path)
    output = subprocess.run(
        [sys.executable, "-c", "import piper_megatron; piper_megatron.register()"],
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.count("piper_megatron: in the source: ") == len(HOOKS)
    assert "piper_megatron: applied" not in output


def patched_tree(source: Path, patch: Path, folder: Path) -> Path:
    """A tree of links to a wheel, with patched copies of the files that the patch names."""
    patched = re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.MULTILINE)
    link_all_but(patched, source / "megatron", folder / "megatron", "megatron")
    for entry in source.glob("megatron_core-*.dist-info"):
        (folder / entry.name).symlink_to(entry)
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    return folder


def link_all_but(copied: list[str], source: Path, target: Path, name: str) -> None:
    """Links what a folder holds; files to copy, and the folders on the way to them, are real."""
    target.mkdir()
    for entry in source.iterdir():
        path = f"{name}/{entry.name}"
        if path in copied:
            (target / entry.name).write_bytes(entry.read_bytes())
        elif any(file.startswith(f"{path}/") for file in copied):
            link_all_but(copied, entry, target / entry.name, path)
        else:
            (target / entry.name).symlink_to(entry)


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, in its functions too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


def test_planning_parts_import_neither_torch_nor_megatron():
    files = [path for path in PACKAGE.rglob("*.py") if not {"runtime", "bench"} & set(path.parts)]
    assert len(files) > 20
    for path in files:
        assert not {name.partition(".")[0] for name in imports(path)} & {"torch", "megatron"}, path
    assert "torch.distributed" in imports(PACKAGE / "runtime" / "parallel_state.py")


def test_arrows_between_layers_go_down_only():
    layers = (
        "cli report validation calibration tuning check resources layout platform workload"
    ).split()
    for depth, layer in enumerate(layers):
        above = tuple(f"piper_megatron.{name}" for name in layers[:depth])
        for path in (PACKAGE / layer).rglob("*.py"):
            assert not [name for name in imports(path) if name.startswith(above)], path
