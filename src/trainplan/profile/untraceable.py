"""A model whose operators cannot be followed without values: refused by the operator, and where it is in the code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

from torch import fx
from torch._ops import OpOverload

from trainplan.errors import ModelError, TrainplanError
from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.where import place_of

_TORCHS_OWN = ("aten", "prims", "prim")
_OURS = PurePath(__file__).parents[1]
_INSTEAD = (
    "operators whose shapes and arguments are known without values, backward too (for experts: a fixed capacity of "
    "each, torch.bmm over all), or a model without them (hf:llama)"
)


@contextmanager
def traceable(captured: Captured, doing: str) -> Iterator[None]:
    """Whatever a model's operators raise in here, without values, becomes a refusal with names. `doing`: a pass of it.

    An operator that somebody registered is named first: its rules for shapes are the likeliest to be missing, and
    those of a backward pass are often left out. Torch's own are named by the last line that is not torch's.
    """
    try:
        yield
    except TrainplanError:
        raise
    except Exception as error:
        if PurePath(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(_OURS):
            raise  # a mistake of ours is none of the model's
        asked, why = _named(captured, error)
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            asked, f"{doing} it needs values ({type(error).__name__}: {first}); {why}", _INSTEAD
        ) from error


def _named(captured: Captured, error: Exception) -> tuple[str, str]:
    """(What is refused, where it failed.)"""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _others(frame.filename)]
    line = f"{PurePath(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "torch's own code"
    for block in captured.blocks:
        for node in block.nodes:
            if (name := _registered(node)) is not None:
                return f"operator {name} in {place_of(node)}", f"it failed in {line}"
    return "tracing the model", f"it failed in {line}"


def _registered(node: fx.Node) -> str | None:
    """The name of an operator that is not torch's."""
    target = node.target
    if isinstance(target, OpOverload) and target.namespace not in _TORCHS_OWN:
        return f"{target.namespace}.{target.overloadpacket.__name__}"
    return None


def _others(file: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    path = PurePath(file)
    return "torch" not in path.parts and not path.is_relative_to(_OURS)
