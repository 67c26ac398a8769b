"""Pictures: an empty one, and its file. matplotlib is optional."""

from pathlib import Path
from typing import TYPE_CHECKING

from piper_megatron.errors import PiperError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart
BLUE, SKY, GREEN, ORANGE, PURPLE, YELLOW, RED = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#F0E442",
    "#D55E00",
)
GREY, LIGHT = "#8C8C8C", "#F2F2F2"
_DOTS_PER_INCH = 150


def new_figure(path: Path, title: str, inches: tuple[float, float]) -> "Figure":
    """An empty picture for a file; the ending of the file's name is its format.

    Raises:
        PiperError: matplotlib is not installed or does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PiperError(
            "--plot needs matplotlib; install it with pip install 'piper-megatron[plot]'"
        ) from None

    figure = Figure(figsize=inches, dpi=_DOTS_PER_INCH, layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise PiperError(f"--plot {path}: the name must end in one of .{', .'.join(formats)}")
    figure.suptitle(title, fontsize=11)
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Writes the picture.

    Raises:
        PiperError: the file cannot be written.
    """
    try:
        figure.savefig(path)
    except OSError as error:
        raise PiperError(f"--plot cannot write {path}: {error.strerror}") from None
