"""Hooks: named, version-guarded, undoable replacements of one symbol each.

A hook says which symbol it changes, in which releases that symbol is known, and how its replacement
is made from the original. A set is applied as a whole or not at all.
"""

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from piper_megatron.errors import HookError
from piper_megatron.switches import switched_on

MEGATRON = "megatron-core"
MEGATRON_VERSIONS = ">=0.17.1,<0.20"
_MISSING = object()


@dataclass(frozen=True)
class Hook:
    """One replacement.

    Attributes:
        id: short unique name, printed in the log and named in errors.
        target: `module:attribute`, `module:Class.attribute` or `module:dictionary.key`.
        replace: makes the replacement from the original object.
        why: half a sentence for the log.
        distribution: whose version `versions` speaks of.
        versions: releases in which the hook applies; outside of them it is skipped, so two hooks
            with disjoint ranges cover a symbol that moved.
        create: the symbol need not exist yet.
    """

    id: str
    target: str
    replace: Callable[[Any], Any]
    why: str = ""
    distribution: str = MEGATRON
    versions: str = MEGATRON_VERSIONS
    create: bool = False


def installed_version(distribution: str) -> Version:
    """Version of an installed distribution, or of the Megatron tree that comes first on the path.

    Raises:
        HookError: there is none; with the remedy.
    """
    if distribution == MEGATRON and (tree := _megatron_tree()) is not None:
        return tree
    try:
        return Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        raise HookError(
            f"{distribution} is not installed; install it with: pip install 'piper-megatron[train]'"
        ) from None


def _megatron_tree() -> Version | None:
    """Reads the version that Megatron's source says, without importing Megatron.

    A checkout on PYTHONPATH is not an installed distribution, and may hide one of another version.
    """
    spec = importlib.util.find_spec("megatron")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder) / "core" / "package_info.py"
        if source.is_file():
            parts = dict(re.findall(r"^([A-Z_]+) = ['\"]?(\w*)['\"]?$", source.read_text(), re.M))
            return Version("{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**parts))
    return None


def require_known_megatron() -> None:
    """Refuses releases that the hooks do not know, unless `PIPER_ALLOW_UNKNOWN=1` is set.

    Raises:
        HookError: Megatron is missing, or its release is outside `MEGATRON_VERSIONS`.
    """
    version = installed_version(MEGATRON)
    if version not in SpecifierSet(MEGATRON_VERSIONS, prereleases=True) and not switched_on(
        "PIPER_ALLOW_UNKNOWN"
    ):
        raise HookError(
            f"megatron-core {version} is outside {MEGATRON_VERSIONS}, the releases that "
            "piper_megatron knows; install one of them, set PIPER_ALLOW_UNKNOWN=1 to try this one, "
            "or PIPER_DISABLE=1 to train without piper_megatron"
        )


class HookSet:
    """Hooks that were applied together, and the log of what happened to each."""

    def __init__(self, name: str, rebind_in: tuple[str, ...] = ("megatron", "__main__")) -> None:
        """Args:
        name: what the log calls this set.
        rebind_in: module prefixes searched for names that were imported from a target before.
        """
        self.name = name
        self.log: list[str] = []
        self._rebind_in = rebind_in
        # owner, attribute, the owner's own old value, the value it showed, the new value
        self._replaced: list[tuple[Any, str, Any, Any, Any]] = []

    @property
    def applied(self) -> bool:
        """Whether any replacement is in force."""
        return bool(self._replaced)

    def apply(self, hooks: Iterable[Hook], in_source: Container[str] = ()) -> None:
        """Applies all hooks, or none: every target is looked up before the first is replaced.

        Args:
            hooks: what to apply, in this order.
            in_source: identifiers of hooks that the source applies. It may grow while targets
                are looked up, since that is what imports a patched source.

        Raises:
            HookError: a distribution or a symbol is missing.
        """
        assert not self.applied, f"{self.name} hooks are applied already"
        found = []
        for hook in hooks:
            version = installed_version(hook.distribution)
            known = SpecifierSet(hook.versions).contains(version, prereleases=True)
            if not known and not switched_on("PIPER_ALLOW_UNKNOWN"):
                self.log.append(
                    f"skipped {hook.id}: {hook.distribution} {version} is outside {hook.versions}"
                )
                continue
            owner, attribute, old = _look_up(hook, version)
            if hook.id not in in_source:
                found.append((hook, owner, attribute, old))
        for hook, owner, attribute, old in found:
            # two hooks may stack on one target: the second wraps what the first installed
            own, old = _own(owner, attribute), _read(owner, attribute)
            new = hook.replace(None if old is _MISSING else old)
            _write(owner, attribute, new)
            self._replaced.append((owner, attribute, own, old, new))
            self.log.append(
                f"applied {hook.id}: {hook.target}" + (f" ({hook.why})" if hook.why else "")
            )
        self._rebind({id(old): new for *_, old, new in self._replaced if callable(old)})

    def undo(self) -> None:
        """Restores every symbol, in modules that imported the replacement by name as well."""
        self._rebind({id(new): old for *_, old, new in self._replaced if callable(old)})
        for owner, attribute, own, _, _ in reversed(self._replaced):
            if own is _MISSING:
                _delete(owner, attribute)
            else:
                _write(owner, attribute, own)
        self._replaced.clear()
        self.log.clear()

    def _rebind(self, replacements: dict[int, Any]) -> None:
        """Follows `from module import symbol` in modules that ran before the hooks."""
        for name, module in list(sys.modules.items()):
            if module is None or not name.startswith(self._rebind_in):
                continue
            for attribute, value in list(vars(module).items()):
                if id(value) not in replacements:
                    continue
                while id(value) in replacements:  # hooks may stack
                    value = replacements[id(value)]
                setattr(module, attribute, value)


def _look_up(hook: Hook, version: Version) -> tuple[Any, str, Any]:
    module_name, _, path = hook.target.partition(":")
    *parents, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        old = _read(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise HookError(_missing(hook, version)) from error
    if old is _MISSING and not hook.create:
        raise HookError(_missing(hook, version))
    return owner, attribute, old


def _own(owner: Any, attribute: str) -> Any:
    """The value that the owner itself holds; what a class inherits does not count."""
    return (owner if isinstance(owner, dict) else vars(owner)).get(attribute, _MISSING)


def _read(owner: Any, attribute: str) -> Any:
    own = _own(owner, attribute)
    return own if own is not _MISSING else getattr(owner, attribute, _MISSING)


def _write(owner: Any, attribute: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[attribute] = value
    else:
        setattr(owner, attribute, value)


def _delete(owner: Any, attribute: str) -> None:
    if isinstance(owner, dict):
        del owner[attribute]
    else:
        delattr(owner, attribute)


def _missing(hook: Hook, version: Version) -> str:
    return (
        f"{hook.distribution} {version} lacks {hook.target}, which the hook '{hook.id}' needs; "
        f"use a release in {hook.versions} or set PIPER_DISABLE=1 to train without piper_megatron"
    )
