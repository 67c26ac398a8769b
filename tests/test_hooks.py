"""Hooks are applied together or not at all, follow imported names, and leave no trace."""

import sys
import types

import pytest

from piper_megatron.errors import HookError
from piper_megatron.runtime.hooks import Hook, HookSet, installed_version, require_known_megatron


@pytest.fixture
def modules(monkeypatch):
    """A module with two functions and a class, and one that imported a function by name."""
    target = types.ModuleType("megatron_sample")
    exec(
        "def f(): return 'f'\ndef g(): return 'g'\nclass C:\n    def m(self): return 'm'",
        vars(target),
    )
    importer = types.ModuleType("megatron_sample_user")
    importer.renamed = target.f
    for module in (target, importer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return target, importer


def louder(original):
    return lambda *args: original(*args) + "!"


def hook(target, **kwargs):
    return Hook(target.rpartition(":")[2], target, louder, **kwargs)


def test_replaces_follows_imported_names_and_undoes(modules):
    target, importer = modules
    before = dict(vars(target)), target.C.__dict__["m"]
    hooks = HookSet("sample")
    hooks.apply([hook("megatron_sample:f"), hook("megatron_sample:C.m")])
    assert (target.f(), importer.renamed(), target.C().m()) == ("f!", "f!", "m!")
    assert [line.split()[0] for line in hooks.log] == ["applied", "applied"]
    late_importer = types.ModuleType("megatron_sample_late")
    late_importer.f = target.f
    sys.modules[late_importer.__name__] = late_importer
    hooks.undo()
    del sys.modules[late_importer.__name__]
    assert (dict(vars(target)), target.C.__dict__["m"]) == before
    assert importer.renamed is target.f is late_importer.f
    assert not hooks.applied


def test_a_missing_symbol_is_named_and_nothing_is_applied(modules):
    target, _ = modules
    hooks = HookSet("sample")
    with pytest.raises(HookError, match=r"lacks megatron_sample:C\.gone.*hook 'C.gone'"):
        hooks.apply([hook("megatron_sample:f"), hook("megatron_sample:C.gone")])
    with pytest.raises(HookError, match=r"lacks megatron_nowhere:f"):
        hooks.apply([hook("megatron_sample:f"), hook("megatron_nowhere:f")])
    assert target.f() == "f"
    assert not hooks.applied


def test_a_release_outside_the_range_skips_the_hook(modules):
    target, _ = modules
    hooks = HookSet("sample")
    hooks.apply([hook("megatron_sample:f", versions="<0.1"), hook("megatron_sample:g")])
    assert (target.f(), target.g()) == ("f", "g!")
    assert hooks.log[0].startswith("skipped f: megatron-core")
    hooks.undo()


def test_two_hooks_stack_on_one_symbol(modules):
    target, importer = modules
    hooks = HookSet("sample")
    hooks.apply([hook("megatron_sample:f"), hook("megatron_sample:f")])
    assert target.f() == importer.renamed() == "f!!"
    hooks.undo()
    assert target.f() == importer.renamed() == "f"


def test_a_created_symbol_disappears_again(modules):
    target, _ = modules
    hooks = HookSet("sample")
    hooks.apply([Hook("new", "megatron_sample:new", lambda _: lambda: "new", create=True)])
    assert target.new() == "new"
    hooks.undo()
    assert not hasattr(target, "new")


def test_a_missing_distribution_says_how_to_install_it():
    with pytest.raises(HookError, match=r"pip install 'piper-megatron\[train\]'"):
        installed_version("no-such-distribution")


@pytest.fixture
def megatron_tree(tmp_path, monkeypatch):
    """A source tree of some future release, first on the path and not installed."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text(
        "MAJOR = 0\nMINOR = 31\nPATCH = 4\nPRE_RELEASE = 'rc2'\n\nraise RuntimeError('imported')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "megatron", raising=False)


@pytest.mark.usefixtures("megatron_tree")
def test_the_version_of_a_source_tree_is_read_without_importing_it():
    assert str(installed_version("megatron-core")) == "0.31.4rc2"


@pytest.mark.usefixtures("megatron_tree")
def test_an_unknown_release_is_refused_unless_the_user_allows_it(monkeypatch):
    with pytest.raises(HookError, match=r"megatron-core 0\.31\.4rc2 is outside >=0\.17\.1,<0\.20"):
        require_known_megatron()
    monkeypatch.setenv("PIPER_ALLOW_UNKNOWN", "1")
    require_known_megatron()
