"""Where in the user's code an operator came from, in words."""

from __future__ import annotations

import re
from pathlib import PurePath

from torch import fx

from trainplan.profile.capture.exported import ROOT

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def place_of(node: fx.Node) -> str:
    """The module whose forward has an operator, and the last line of code on the way there that is not torch's own.

    A module is named as the user would write it, a file without its folders.
    """
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed([path for path, _ in stack.values()]), "").removeprefix(ROOT).lstrip(".")
    module = f"module {path!r}" if path else "the model's own forward"
    frames = [(PurePath(m["file"]), m["line"]) for m in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    own = [(file.name, line) for file, line in frames if "torch" not in file.parts]
    return f"{module} ({own[-1][0]}, line {own[-1][1]})" if own else module
