"""The chain of blocks: where, among the legal cuts, a person would cut this model.

A block is a layer: a residual block, a transformer layer, a convolution with its batch norm and activation. The
graph knows which module every operator came from, so we have the tree of calls, and we walk down from the root:

    model                        a list of different things        → walk down
    ├── conv1, bn1, relu         operators
    ├── layer1                   a container                       → walk down
    │   ├── layer1.0             reads its own input again at the
    │   │                        end (x + f(x)): a layer           → a piece
    │   └── layer1.1
    └── fc

A module is walked into if it is the root or a container, if it calls several modules of one class one after the
other (an encoder of many layers), or if no more than one tensor passes between its parts. It is a layer, and is left
whole, if its own forward reads its input again after calling its parts. Modules of one class are treated alike: if
one of them is a layer, all are.

Then pieces are joined to blocks. Every block is built around one anchor: a piece with a matrix product or a
convolution, or embedding tables that follow each other. What lies between two anchors (norms, activations, pooling,
additions) is divided at the legal cut with the fewest bytes, the last one if several are about equal: so pooling
and activations stay with the layer before them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from torch import fx

from trainplan.profile.capture.cuts import PRODUCTS, Flow, packet
from trainplan.profile.capture.exported import ROOT

Granularity = Literal["layer", "operator"]
ABOUT_EQUAL = 1.1
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
_TABLES = ("embedding", "embedding_bag")


@dataclass
class Call:
    """One call of a module: what it called and computed itself, in order."""

    key: str  # tells two calls of the same module apart
    name: str  # of the module; empty for the root
    kind: str  # its class
    parts: list[Call | int] = field(default_factory=list)  # calls, and positions of operators of its own forward

    def positions(self) -> Iterator[int]:
        for part in self.parts:
            if isinstance(part, Call):
                yield from part.positions()
            else:
                yield part

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]

    @property
    def is_container(self) -> bool:
        return self.kind.rpartition(".")[2] in _CONTAINERS and self.kind.startswith("torch.nn.")


@dataclass(frozen=True)
class Piece:
    """Operators first ≤ position ≤ last (constants apart) that stay together."""

    name: str
    first: int
    last: int
    weight: Literal["product", "table", "light"]


@dataclass(frozen=True)
class Cut:
    """A chain of blocks: their names, and the positions between them."""

    names: tuple[str, ...]
    cuts: tuple[int, ...]


def cut_chain(flow: Flow, outputs: set[fx.Node], legal: list[int], granularity: Granularity) -> Cut:
    """Choose cuts among the legal ones."""
    if granularity == "operator":
        return name_blocks(flow, legal)
    root = call_tree(flow)
    pieces = list(_Tree(flow, outputs, legal, root).pieces())
    tensors, weight = flow.crossing(outputs, flow.exported.example_samples)
    allowed = set(legal)
    cuts: list[int] = []
    anchors: list[Piece] = []
    before: Piece | None = None
    for piece in pieces:
        if piece.weight == "light":
            continue
        if before is None or (before.weight == piece.weight == "table"):
            anchors = anchors or [piece]
            before = piece
            continue
        between = [p for p in range(before.last + 1, piece.first + 1) if p in allowed]
        if between:
            best = min(between, key=lambda p: (weight[p], tensors[p]))
            cuts.append(
                max(p for p in between if weight[p] <= ABOUT_EQUAL * weight[best] and tensors[p] <= tensors[best])
            )
            anchors.append(piece)
        before = piece
    if not anchors:
        return name_blocks(flow, [])
    bounds = pairwise([0, *cuts, len(flow.ops)])
    names = [_widest_name(root, anchor, *bound) for anchor, bound in zip(anchors, bounds, strict=True)]
    return Cut(_unique(names), tuple(cuts))


def _widest_name(root: Call, anchor: Piece, start: int, end: int) -> str:
    """The outermost module around the anchor that lies in the block as a whole: `features.0`, not `features.0.0`."""
    place = root
    while True:
        inner = next((call for call in place.calls if anchor.first in call.positions()), None)
        if inner is None:
            return anchor.name
        positions = list(inner.positions())
        if start <= positions[0] and positions[-1] < end:
            return inner.name
        place = inner


def call_tree(flow: Flow) -> Call:
    """The calls of modules that made the operators; constants have no place in it."""
    root = Call("", "", _kind_of_root(flow))
    for position, node in enumerate(flow.ops):
        if node in flow.constant:
            continue
        place = root
        for key, name, kind in _stack(node):
            last = place.parts[-1] if place.parts else None
            if not (isinstance(last, Call) and last.key == key):
                last = Call(key, name, kind)
                place.parts.append(last)
            place = last
        place.parts.append(position)
    return root


def _stack(node: fx.Node) -> list[tuple[str, str, str]]:
    """(key, name, class) of the running modules below the root, outermost first."""
    stack = []
    for key, (path, kind) in node.meta.get("nn_module_stack", {}).items():
        name = path.removeprefix(f"{ROOT}.")
        if path.startswith(f"{ROOT}."):
            stack.append((key, name, kind if isinstance(kind, str) else kind.__qualname__))
    return stack


def _kind_of_root(flow: Flow) -> str:
    for node in flow.ops:
        for path, kind in node.meta.get("nn_module_stack", {}).values():
            if path == ROOT:
                return str(kind)
    return ""


class _Tree:
    """Decides which calls are walked into."""

    def __init__(self, flow: Flow, outputs: set[fx.Node], legal: list[int], root: Call) -> None:
        self.flow, self.root, self.legal = flow, root, legal
        self.spans = [(flow.position[n], first, last) for n, first, last in flow.spans(outputs)]
        self.heavy = {i for i, node in enumerate(flow.ops) if packet(node) in PRODUCTS}
        self.tables = {i for i, node in enumerate(flow.ops) if packet(node) in _TABLES}
        self.readers = [
            [flow.position[user] for user in node.users if user in flow.position] for node in flow.ops
        ]  # readers of each operator's result
        inner = [call for call in self._all(root) if call is not root and not call.is_container and call.calls]
        # Classes whose own forward adds (or otherwise joins) their input to what their parts made of it.
        self.layers = {call.kind for call in inner if self._bypassed(call)}
        self.whole = {call.kind for call in inner if not self._is_list(call)}

    def _all(self, call: Call) -> Iterator[Call]:
        yield call
        for part in call.calls:
            yield from self._all(part)

    def _weighty(self, call: Call) -> bool:
        return any(position in self.heavy or position in self.tables for position in call.positions())

    def _bypassed(self, call: Call) -> bool:
        """Whether an operator of the call's own forward reads, after a product, a tensor from before the call."""
        positions = list(call.positions())
        products = [position for position in positions if position in self.heavy]
        if not products:
            return False
        own = [part for part in call.parts if isinstance(part, int) and part > products[0]]
        return any(source < positions[0] for position in own for source in self._sources(position))

    def _sources(self, position: int) -> list[int]:
        """Positions of the operators that made what an operator reads, constants apart."""
        sources = [self.flow.origin(source) for source in self.flow.ops[position].all_input_nodes]
        return [self.flow.position[s] for s in sources if s in self.flow.position and s not in self.flow.constant]

    def _is_list(self, call: Call) -> bool:
        """Whether a call is a list of parts, by itself."""
        parts = [part for part in call.calls if self._weighty(part)]
        repeated = self._repeated(call, parts)
        if any(part.kind in self.layers for part in repeated):
            return True
        if call.kind in self.layers:
            return False
        return bool(repeated) or all(self._narrow(call, left, right) for left, right in pairwise(parts))

    def _repeated(self, call: Call, parts: list[Call]) -> list[Call]:
        """Parts of one class, with parts of their own, that each work on what the call made before."""
        start = next(call.positions())
        by_kind: dict[str, list[Call]] = {}
        for part in parts:
            if part.calls:
                by_kind.setdefault(part.kind, []).append(part)
        for same in by_kind.values():
            if len(same) > 1 and all(self._reads_from(part, start) for part in same[1:]):
                return same
        return []

    def _reads_from(self, part: Call, start: int) -> bool:
        positions = list(part.positions())
        return any(start <= source < positions[0] for position in positions for source in self._sources(position))

    def _narrow(self, call: Call, left: Call, right: Call) -> bool:
        """Whether there is a legal cut between two parts that only one of the call's tensors crosses."""
        own = list(call.positions())
        low, high = max(left.positions()) + 1, next(right.positions())
        for cut in (p for p in self.legal if low <= p <= high):
            crossing = 0
            for position, _first, last in self.spans:
                if position < cut <= last:
                    made_here = position >= own[0]
                    read_here = any(cut <= reader <= own[-1] for reader in self.readers[position])
                    crossing += made_here or read_here
            if crossing <= 1:
                return True
        return False

    def pieces(self) -> Iterator[Piece]:
        yield from self._pieces(self.root)

    def _pieces(self, call: Call) -> Iterator[Piece]:
        for part in call.parts:
            if isinstance(part, int):
                yield self._piece(call.name or str(self.flow.ops[part].name), [part])
            elif part.calls and (part.is_container or part.kind not in self.whole):
                yield from self._pieces(part)
            else:
                yield self._piece(part.name, list(part.positions()))

    def _piece(self, name: str, positions: list[int]) -> Piece:
        weight: Literal["product", "table", "light"] = "light"
        if any(position in self.heavy for position in positions):
            weight = "product"
        elif any(position in self.tables for position in positions):
            weight = "table"
        return Piece(name, positions[0], positions[-1], weight)


def name_blocks(flow: Flow, cuts: list[int]) -> Cut:
    """Blocks between given cuts, each named after the module of its first operator; none is empty."""
    used = [p for p in range(len(flow.ops)) if flow.ops[p] not in flow.constant]
    kept: list[int] = []
    for cut in cuts:
        left, right = bisect_left(used, kept[-1] if kept else 0), bisect_left(used, cut)
        if left < right < len(used):
            kept.append(cut)
    return Cut(_unique([_first_name(flow, start) for start in [0, *kept]]), tuple(kept))


def _first_name(flow: Flow, start: int) -> str:
    for node in flow.ops[start:]:
        if node not in flow.constant:
            stack = _stack(node)
            return f"{stack[-1][1]}.{packet(node)}" if stack else packet(node)
    return "model"


def _unique(names: list[str]) -> tuple[str, ...]:
    """
    >>> _unique(["h.0", "h.1", "h.0"])
    ('h.0', 'h.1', 'h.0#2')
    """
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(result)
