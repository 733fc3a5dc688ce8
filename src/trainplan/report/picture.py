"""Pictures in files, by matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainplan import files
from trainplan.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".svg", ".png", ".pdf")


def check_picture(path: str, option: str = "--output") -> None:
    """Refuse a picture that cannot be drawn, before anything else is done for it."""
    if Path(path).suffix.lower() not in PICTURES:
        raise InputError(f"{option} {path}", f"pictures end in {', '.join(PICTURES)}", f"{path}.svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        why = "a picture needs matplotlib, which is not installed"
        raise InputError(f"{option} {path}", why, "pip install 'trainplan[plots]', or --json") from None


def blank(width: float, height: float) -> Figure:
    """A figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str, option: str = "--output") -> None:
    """Write the picture, whole or not at all."""
    with files.whole(path, option) as partial:
        figure.savefig(partial, format=Path(path).suffix[1:].lower())
