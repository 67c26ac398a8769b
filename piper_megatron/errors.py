"""Errors that are the user's to mend: one line that names the thing and the fix."""

# exit code of a command or job that stops with one of them
USAGE_ERROR = 2


class PiperError(ValueError):
    """Base of every error that a command or a training job reports in one line (exit code 2)."""


class TopologyError(PiperError):
    """The description of nodes and network levels is incomplete or contradicts the job."""


class LayoutError(PiperError):
    """Parallel sizes that cannot be combined."""


class PlacementError(PiperError):
    """A placement that does not fit the job it is meant for."""


class HookError(PiperError):
    """Megatron or torch lacks a symbol that a hook needs, or has an unsupported version."""


class CpuBackendError(PiperError):
    """A choice that needs a GPU and has no counterpart on the CPU."""


class LaunchError(PiperError):
    """The job's environment does not say which rank of how many this process is."""


class WorkloadError(PiperError):
    """A model, batch or Megatron argument that cannot be read or contradicts another one."""


class PlatformError(PiperError):
    """A platform does not say what an estimate needs of it."""


class CalibrationError(PiperError):
    """A training log that cannot correct a platform, or is not of the run it is said to be."""
