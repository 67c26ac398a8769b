"""Words that Megatron does not know."""

from difflib import SequenceMatcher

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule
from piper_megatron.strict import closest
from piper_megatron.workload import flags

SAME_WORD = 0.88  # similarity from which a difference is a typing mistake


def _unknown_flags(c: Command) -> list[str]:
    return [word.partition("=")[0] for word in c.unknown if word.startswith("--")]


def _meant(flag: str) -> str | None:
    """The flag that a mistyped one comes close to."""
    near = closest(flag, flags.options())
    return near if near and SequenceMatcher(None, flag, near).ratio() >= SAME_WORD else None


def _releases(flag: str) -> list[str]:
    return [v for v in flags.supported_versions() if flag in flags.options(v)]


@rule("flags.mistyped", "training/arguments.py:138")
def flags_are_spelled_as_megatron_does(c: Command) -> Problem | None:
    """Flags that Megatron's parser refuses and that come close to ones it knows."""
    wrong = [flag for flag in _unknown_flags(c) if not _releases(flag) and _meant(flag)]
    if not wrong:
        return None
    return Problem(
        f"Megatron-Core {flags.NEWEST} does not know {', '.join(wrong)}",
        "; ".join(f"{_meant(flag)} instead of {flag}" for flag in wrong),
    )


@rule("flags.of-other-releases", "training/arguments.py:138")
def flags_are_of_this_release(c: Command) -> Problem | None:
    """Flags that only earlier releases know."""
    old = {flag: _releases(flag) for flag in _unknown_flags(c) if _releases(flag)}
    if not old:
        return None
    return Problem(
        f"Megatron-Core {flags.NEWEST} has no longer "
        + ", ".join(f"{flag} ({', '.join(sorted(known))})" for flag, known in old.items()),
        "drop it, or train with the release that has it",
    )


@rule("flags.own", "training/arguments.py:138", severity="warning")
def other_flags_are_the_scripts_own(c: Command) -> Problem | None:
    """Flags that only a training script of one's own can declare."""
    own = [flag for flag in _unknown_flags(c) if not _releases(flag) and not _meant(flag)]
    if not own:
        return None
    return Problem(
        f"{', '.join(own)}: not Megatron's, and not looked at here; Megatron's parser refuses them "
        "unless the training script declares them",
        "check that your script does",
    )
