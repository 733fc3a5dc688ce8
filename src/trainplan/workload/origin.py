"""Where the user's model comes from: its file, and what that says now.

A name such as `net.py:build` means another model in another folder, and in the same one after the file has changed. So
a profile keeps where its model was, and a digest of the file and of all that it imports from beside it. (No torch: a
saved profile is held against its model without waiting for that.)

>>> origin("gpt:layers=2,hidden=8,heads=2") is None
True
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from trainplan.workload.datasets import plain
from trainplan.workload.zoo import NETWORKS


@dataclass(frozen=True)
class Origin:
    """The file of a model, and what it says."""

    path: str
    digest: str


def origin(name: str) -> Origin | None:
    """Where the model of a workload's name comes from; None where it is ours, or is not here."""
    path = _file(name.split(",", 1)[0])
    if path is None or not path.is_file():
        return None
    path = path.resolve()
    root = _root(path)
    digest = hashlib.sha256(path.read_bytes())
    for file in sorted(_imported(path, root) - {path}):
        digest.update(f"\0{file.relative_to(root).as_posix()}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return Origin(str(path), digest.hexdigest()[:16])


def _file(head: str) -> Path | None:
    """The file that a name without options refers to."""
    before, colon, _ = head.rpartition(".py:")
    if colon or head.endswith(".py"):
        return Path(f"{before}.py" if colon else head)
    first, _, rest = head.partition(":")
    if first == "hf":
        return Path(rest) if rest else None
    ours = plain(first) in (*NETWORKS, "gpt") or first == "module"  # whatever else has that name
    if ours or not rest or not all(part.isidentifier() for part in first.split(".")):
        return None
    try:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # as whoever loads it does
        found = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found is not None and found.origin else None


def _root(path: Path) -> Path:
    """The folder that its imports are found in: beside it, or beside the package that it is part of."""
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root


def _imported(path: Path, root: Path) -> set[Path]:
    """A file, and those below its root that it imports, or that these do."""
    found, left = set[Path](), [path]
    while left:
        file = left.pop()
        if file in found:
            continue
        found.add(file)
        if file.suffix == ".py":
            left += [p for module in _modules(file) for p in _places(module, file, root) if p.is_file()]
    return found


def _modules(file: Path) -> set[tuple[int, str]]:
    """What a file imports, as (level, dotted name): level 1 is relative to its folder, 2 to the one above it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # which whoever loads it tells
        return set()
    found: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found.add((node.level, base))
            found |= {(node.level, f"{base}.{alias.name}".lstrip(".")) for alias in node.names}
    return found


def _places(module: tuple[int, str], file: Path, root: Path) -> list[Path]:
    """Where a module may lie, with the packages on the way to it."""
    level, name = module
    bases = [root, file.parent] if not level else [file.parents[level - 1]]
    parts = name.split(".") if name else []
    found = list[Path]()
    for base in dict.fromkeys(bases):
        if not base.is_relative_to(root):
            continue
        for count in range(1, len(parts) + 1):
            at = base.joinpath(*parts[:count])
            found += [at / "__init__.py", at.with_name(f"{at.name}.py")]
    return found
