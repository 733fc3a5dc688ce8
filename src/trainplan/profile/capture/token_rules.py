"""What becomes of an operator that reads tokens, on a slice of their sequence: one function a kind of operator.

A rule looks at where the tokens are in the arguments (`Along`), says where they are in the result and what must change
(`Step`), or refuses: `tokens.py` has the whole story.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from trainplan.errors import ModelError
from trainplan.profile.capture.cuts import Flow, packet


@dataclass(frozen=True)
class Along:
    """The dimension that the tokens are along: alone, or as the inner part of rows (samples × tokens)."""

    dim: int
    rows: bool = False


@dataclass(frozen=True)
class Step:
    """What becomes of one operator on a slice."""

    along: Along | None  # of its result; None: a mean over tokens
    narrow: dict[fx.Node, Along] = field(default_factory=dict)  # what is whole, and is narrowed for it
    kind: str = ""  # dropout, attention, mean or view; else it stays as it is
    size: int = 0  # of a view: the place of the tokens among its sizes


class Reader(Protocol):
    """What a rule may ask about the graph."""

    steps: dict[fx.Node, Step]
    flow: Flow
    length: int  # of a sequence

    def along(self, node: Any) -> Along:
        """Of an argument that must have tokens; else `Odd`."""

    def only(self, node: fx.Node, *allowed: Any) -> None:
        """Refuse where another argument than these has tokens."""

    def size(self, node: Any) -> tuple[int, ...]:
        """The sizes of a tensor, for very many samples."""

    def made_whole(self, node: fx.Node) -> bool:
        """Whether a value with tokens is made for the whole sequence, by whoever reads it."""

    def narrowed(self, sources: list[fx.Node]) -> dict[fx.Node, Along]:
        """Of the arguments with tokens, those that are made whole."""

    def mixes(self, node: fx.Node, what: str) -> ModelError:
        """The refusal of an operator."""


class Odd(Exception):
    """An argument that should have tokens has none."""


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, with the defaults of those that are not given."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema.arguments
    found = {a.name: a.default_value for a in schema if a.has_default_value()}
    return found | {a.name: value for a, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)


Rule = Callable[[Reader, fx.Node], Step]


def _first(node: fx.Node) -> Any:
    return node.args[0]


def same(reader: Reader, node: fx.Node) -> Step:
    """The first argument in another form, or a part of several."""
    source = node.all_input_nodes[0]
    return Step(reader.along(source), reader.narrowed([source]))


def pointwise(reader: Reader, node: fx.Node) -> Step:
    """Element by element: what is whole is narrowed where its dimension meets that of the tokens."""
    result = len(reader.size(node))
    tensors = [s for s in node.all_input_nodes if isinstance(s.meta.get("val"), Tensor)]
    places = {s: reader.along(s) for s in tensors if s in reader.steps}
    ends = {(along.dim - len(reader.size(s)), along.rows) for s, along in places.items()}  # counted from the right
    if len(ends) > 1:
        raise reader.mixes(node, "brings tokens together with other tokens")
    (end, rows) = ends.pop()
    narrow = reader.narrowed(tensors)
    for source in tensors:
        own = reader.size(source)
        if source not in reader.steps and len(own) + end >= 0 and own[len(own) + end] != 1:
            narrow[source] = Along(len(own) + end, rows)
    if reader.flow.facts[node].writes and tensors[0] in narrow:
        raise reader.mixes(node, "writes tokens into what is the same for all of them")
    return Step(Along(result + end, rows), narrow)


def _dropout(reader: Reader, node: fx.Node) -> Step:
    step = same(reader, node)
    return Step(step.along, step.narrow, "dropout") if reader.flow.facts[node].random else step


def _product(reader: Reader, node: fx.Node) -> Step:
    """Rows times a matrix that is the same for all of them."""
    given: Any = node.args[1:] if packet(node) == "addmm" else node.args
    first, other = given[:2]
    reader.only(node, first)
    along = reader.along(first)
    if along.dim == len(reader.size(first)) - 1 or len(reader.size(other)) > 2:
        raise reader.mixes(node, "sums over tokens")
    return Step(along, reader.narrowed([first]))


def _embedding(reader: Reader, node: fx.Node) -> Step:
    ids: Any = node.args[1]
    reader.only(node, ids)
    return Step(reader.along(ids), reader.narrowed([ids]))


def _norm(reader: Reader, node: fx.Node) -> Step:
    """Over the last dimensions."""
    source = _first(node)
    reader.only(node, source)
    along = reader.along(source)
    if along.dim >= len(reader.size(source)) - len(arguments(node)["normalized_shape"]):
        raise reader.mixes(node, "normalises over tokens")
    return Step(along, reader.narrowed([source]))


def _over(reader: Reader, node: fx.Node) -> Step:
    """Over one dimension (or several), which stays or goes."""
    source, given = _first(node), arguments(node)
    along, count = reader.along(source), len(reader.size(source))
    dims = given.get("dim")
    if dims is None or dims == []:
        raise reader.mixes(node, "goes over all tokens")
    over = {dim % count for dim in ([dims] if isinstance(dims, int) else dims)}
    if along.dim in over:
        raise reader.mixes(node, "goes over the tokens")
    if packet(node) == "squeeze":  # takes away dimensions of one element, and leaves others alone
        over = {dim for dim in over if reader.size(source)[dim] == 1}
    gone = len(reader.size(node)) < count if isinstance(node.meta["val"], Tensor) else packet(node) == "unbind"
    before = sum(dim < along.dim for dim in over) if gone else 0
    return Step(Along(along.dim - before, along.rows), reader.narrowed([source]))


def _slice(reader: Reader, node: fx.Node) -> Step:
    source, given = _first(node), arguments(node)
    along = reader.along(source)
    if given["dim"] % len(reader.size(source)) == along.dim:
        end = given["end"] if given["end"] is not None else reader.length
        whole = given["start"] in (0, None) and given["step"] == 1 and isinstance(end, int) and end >= reader.length
        if along.rows or not whole:
            raise reader.mixes(node, "takes some of the tokens")
    return Step(along, reader.narrowed([source]))


def _unsqueeze(reader: Reader, node: fx.Node) -> Step:
    source, dim = _first(node), arguments(node)["dim"] % len(reader.size(node))
    along = reader.along(source)
    return Step(Along(along.dim + (dim <= along.dim), along.rows), reader.narrowed([source]))


def _transpose(reader: Reader, node: fx.Node) -> Step:
    source = _first(node)
    along, count = reader.along(source), len(reader.size(source))
    given, order = arguments(node), list(range(count))
    if packet(node) == "permute":
        order = [dim % count for dim in given["dims"]]
    else:
        a, b = (0, count - 1) if packet(node) == "t" else (given["dim0"] % count, given["dim1"] % count)
        order[a], order[b] = order[b], order[a]
    return Step(Along(order.index(along.dim), along.rows), reader.narrowed([source]))


def _expand(reader: Reader, node: fx.Node) -> Step:
    source = _first(node)
    along = reader.along(source)
    dim = along.dim + len(reader.size(node)) - len(reader.size(source))
    return Step(Along(dim, along.rows), reader.narrowed([source]), "view", dim)


def _cat(reader: Reader, node: fx.Node) -> Step:
    """Side by side, along another dimension than the tokens'."""
    sources = list(node.all_input_nodes)
    places = {reader.along(source) for source in sources}  # all have tokens: else there is nothing to go by
    dim = arguments(node)["dim"] % len(reader.size(node))
    along = places.pop()
    if places or (packet(node) == "cat" and dim == along.dim):
        raise reader.mixes(node, "puts tokens beside other tokens")
    moved = packet(node) == "stack" and dim <= along.dim
    return Step(Along(along.dim + moved, along.rows), reader.narrowed(sources))


def _view(reader: Reader, node: fx.Node) -> Step:
    """The same elements in another shape: the tokens must stay one dimension, or the inner part of one."""
    source, name = _first(node), packet(node)
    along, old, new = reader.along(source), reader.size(source), reader.size(node)
    inner = math.prod(old[along.dim + 1 :])  # elements of one token of one sample
    found = [dim for dim, size in enumerate(new) if math.prod(new[dim + 1 :]) == inner and size % reader.length == 0]
    if not found or -1 in (*old, *new):
        raise reader.mixes(node, "puts tokens and features into one dimension")
    dim, rows = found[0], new[found[0]] != reader.length
    if name == "flatten":
        return Step(Along(dim, rows), reader.narrowed([source]))
    given = arguments(node)
    sizes = next((given[key] for key in ("size", "shape", "sizes") if key in given), None)
    place = dim - (given["dim"] % len(old) if name == "unflatten" else 0)
    written = list(sizes) if isinstance(sizes, list | tuple) else []
    if not 0 <= place < len(written):
        return Step(Along(dim, rows), reader.narrowed([source]))
    if rows and any(size == -1 for at, size in enumerate(written) if at != place):
        raise reader.mixes(node, "leaves open a size beside that of the tokens")
    return Step(Along(dim, rows), reader.narrowed([source]), "view", place)


def _attention(reader: Reader, node: fx.Node) -> Step:
    given = arguments(node)
    sources = [given[name] for name in ("query", "key", "value")]
    if {reader.along(s) for s in sources} != {Along(len(reader.size(sources[0])) - 2)}:
        raise reader.mixes(node, "does not have the tokens in the dimension before the last")
    mask = given["attn_mask"]
    narrow = reader.narrowed(sources)
    if isinstance(mask, fx.Node):
        why = _not_causal(reader, mask)
        if why:
            raise reader.mixes(node, why)
    elif not given["is_causal"]:
        raise reader.mixes(node, "lets every token attend to all others (is_causal=False, and no mask)")
    return Step(reader.along(sources[0]), narrow, "attention")


def _not_causal(reader: Reader, mask: fx.Node) -> str:
    """Why a mask does not keep every token from attending to later ones; empty: it does, whatever the batch."""
    flow, exported = reader.flow, reader.flow.exported
    needed = flow.closure([mask])
    sources = [mask, *(source for node in needed for source in node.all_input_nodes)]
    held = [exported.holds[source] for source in sources if source in exported.holds]
    if held:
        return f"has a mask made of {held[0]!r}, whose values are not in the graph"
    if any(source in exported.inputs for source in sources):
        return "has a mask that depends on the batch, and may let tokens attend to later ones"
    if mask not in needed and mask not in exported.constants:
        return "has a mask that the model computes"
    values: dict[fx.Node, Any] = {**exported.constants, exported.samples: 2}
    for node in flow.ops:
        if node in needed:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    made = values[mask]
    open_ = made if made.dtype == torch.bool else made > torch.finfo(made.dtype).min / 2
    if open_.shape[-2:] != (reader.length, reader.length) or bool(open_.triu(1).any()):
        return "has a mask that lets tokens attend to later ones"
    return ""


def _cross_entropy(reader: Reader, node: fx.Node) -> Step:
    """The mean over tokens that count, which the model computes itself."""
    given = arguments(node)
    logits, target = given["self"], given["target"]
    along, classes = reader.along(logits), 1 if len(reader.size(logits)) > 1 else 0
    plain = given["reduction"] == 1 and given["weight"] is None and reader.size(target) == tuple(
        size for dim, size in enumerate(reader.size(logits)) if dim != classes
    )  # fmt: skip
    if along.dim == classes or not plain:
        raise reader.mixes(node, "is no plain mean over tokens that count")
    dim = along.dim - (classes < along.dim)
    narrow = reader.narrowed([logits]) | {target: Along(dim, along.rows)}
    if target in reader.steps and not reader.made_whole(target):
        raise reader.mixes(node, "compares with targets that the model computes")
    return Step(None, narrow, "mean")


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("contiguous", "clone", "detach", "alias", "to", "_to_copy", "type_as", "zeros_like", "ones_like"), same
    ),
    **dict.fromkeys(("__and__", "__or__"), pointwise),
    "dropout": _dropout,
    **dict.fromkeys(("linear", "matmul", "mm", "addmm"), _product),
    "embedding": _embedding,
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(
        (
            "softmax", "log_softmax", "sum", "mean", "amax", "amin", "var", "cumsum", "split", "split_with_sizes",
            "chunk", "unbind", "select", "squeeze", "glu",
        ),
        _over,
    ),
    "slice": _slice,
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("transpose", "permute", "t"), _transpose),
    "expand": _expand,
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _view),
    "scaled_dot_product_attention": _attention,
    "cross_entropy_loss": _cross_entropy,
}  # fmt: skip
