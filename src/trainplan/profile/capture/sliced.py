"""Blocks on a slice of their sequences: operators rewritten as `tokens.py` says, and what they need while they run.

A slice is rewritten for its own place, so that sizes and offsets are plain numbers in its code. Keys and values are
carried in a `Carry`, one for every slice of a micro-batch on a stage:

    slice 0   F: makes k₀ v₀                 …  B: goes back from its output, and from k₀ v₀ with the gradients of their
    slice 1   F: attends to k₀ v₀ k₁ v₁      …     leaves, which the backward passes of later slices have summed

A slice that is recomputed keeps its keys and values in between, since later slices read them, and makes them a second
time for its own graph. They are the same: the leaf stays, and gathers gradients, and backward starts from the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from trainplan.profile.capture.token_rules import Along, Step, arguments
from trainplan.profile.capture.tokens import Tokens


@dataclass(frozen=True)
class Slice:
    """Some consecutive tokens of every sequence."""

    tokens: Tokens
    number: int
    start: int
    length: int

    def of(self, tensor: Tensor, along: Along) -> Tensor:
        """The slice's part of a tensor of whole sequences."""
        return part_of(tensor, along.dim, along.rows, self.tokens.length, self.start, self.length)

    def targets(self, whole: Any) -> Any:
        """What the loss compares a slice's output with; where the model returns a mean, it has compared itself."""
        if self.tokens.mean:
            return whole
        return pytree.tree_map_only(Tensor, lambda tensor: self.of(tensor, Along(1)), whole)

    def size(self, whole: Sequence[int], along: Along | None) -> tuple[int, ...]:
        """The sizes of a tensor on this slice."""
        if along is None:
            return tuple(whole)
        ratio = whole[along.dim] // self.tokens.length
        return (*whole[: along.dim], ratio * self.length, *whole[along.dim + 1 :])


def slices_of(tokens: Tokens, lengths: Sequence[int]) -> list[Slice]:
    """The slices with these numbers of tokens."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return [Slice(tokens, *row) for row in zip(range(len(lengths)), starts, lengths, strict=True)]


# -- carried keys and values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A key or value of one slice, and the leaf by which later slices read it."""

    made: Tensor | None  # in the graph of its pass; None: it will be made again
    leaf: Tensor


@dataclass
class Carry:
    """What the attentions of a stage keep of one slice, and those of the slices before it."""

    earlier: Sequence[Carry] = ()
    kept: dict[str, tuple[Kept, Kept]] = field(default_factory=dict)  # by attention: keys and values

    def extend(self, name: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far."""
        known = self.kept.get(name)
        self.kept[name] = (_kept(key), _kept(value)) if known is None else _again(known, key, value)
        if not self.earlier:
            return key, value
        before = [carry.kept[name] for carry in self.earlier]
        keys, values = ([pair[which].leaf for pair in before] for which in (0, 1))
        for leaves, own in ((keys, key), (values, value)):
            for leaf in leaves if own.requires_grad else ():
                leaf.requires_grad_()  # those of a slice that kept no graph were made without
        return torch.cat([*keys, key], dim=-2), torch.cat([*values, value], dim=-2)

    def roots(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where the backward pass of this slice starts beside its output: what later slices read, with the gradients
        that they gave it."""
        pairs = [(kept.made, kept.leaf.grad) for pair in self.kept.values() for kept in pair]
        found = [(made, gradient) for made, gradient in pairs if made is not None and gradient is not None]
        return [made for made, _ in found], [gradient for _, gradient in found]

    def gone_back(self) -> None:
        """Forget what has gone back: all that has a graph."""
        self.kept = {name: pair for name, pair in self.kept.items() if pair[0].made is None}


def _kept(tensor: Tensor) -> Kept:
    if torch.is_grad_enabled():
        return Kept(tensor, tensor.detach().requires_grad_(tensor.requires_grad))
    # Without a graph it is all that stays: not as a part of something larger, such as queries, keys and values in one.
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return Kept(None, tensor if alone else tensor.clone())


def _again(known: tuple[Kept, Kept], key: Tensor, value: Tensor) -> tuple[Kept, Kept]:
    """Made a second time, with a graph; later slices have read the first ones."""
    return Kept(key, known[0].leaf), Kept(value, known[1].leaf)


_OPEN: list[Carry | None] = []  # of the pass that runs now, innermost last


@contextmanager
def carrying(carry: Carry | None) -> Iterator[None]:
    """While blocks of a slice run: where their attentions keep and find keys and values. None: sequences are whole."""
    _OPEN.append(carry)
    try:
        yield
    finally:
        _OPEN.pop()


# -- code -----------------------------------------------------------------------------------------------------------

Copy = Callable[[fx.Graph, fx.Node, dict[fx.Node, fx.Node]], fx.Node]


def writer(part: Slice, plain: Copy, constant: Callable[[fx.Node], bool]) -> Copy:
    """Writes operators for a slice; `plain` writes those that stay as they are."""

    def write(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        step = part.tokens.steps.get(node)
        if step is None or constant(node):
            return plain(graph, node, copies)
        own = dict(copies)
        for source, along in step.narrow.items():
            place = (along.dim, along.rows, part.tokens.length, part.start, part.length)
            own[source] = graph.call_function(part_of, (copies[source], *place))
        special = _SPECIAL.get(step.kind)
        if special is not None:
            made = special(graph, node, step, part, own, copies)
            made.name = node.name
            return made
        made = plain(graph, node, own)
        if step.kind == "view":
            made.args = (*made.args[:-1], _resized(made.args[-1], step, part.length))
        return made

    return write


def _resized(sizes: Any, step: Step, length: int) -> list[Any]:
    """The sizes of a view with those of the slice's tokens: the number of them, or of rows as many as there are."""
    assert step.along is not None
    found = list(sizes)
    found[step.size] = -1 if step.along.rows else length
    return found


def _write_dropout(
    graph: fx.Graph, node: fx.Node, step: Step, part: Slice, own: dict[fx.Node, fx.Node], copies: dict[fx.Node, fx.Node]
) -> fx.Node:  # fmt: skip
    source: Any = node.args[0]
    assert step.along is not None
    strides = source.meta["val"].stride()
    order = sorted(
        range(len(strides)), key=lambda dim: -int(strides[dim]) if isinstance(strides[dim], int) else -(2**62)
    )
    place = (step.along.dim, step.along.rows, part.tokens.length, part.start, part.length)
    return graph.call_function(dropped, (own[source], arguments(node)["p"], order, *place))


def _write_attention(
    graph: fx.Graph, node: fx.Node, step: Step, part: Slice, own: dict[fx.Node, fx.Node], copies: dict[fx.Node, fx.Node]
) -> fx.Node:  # fmt: skip
    given = arguments(node)
    query, key, value = (own[given[name]] for name in ("query", "key", "value"))
    mask = copies[given["attn_mask"]] if isinstance(given["attn_mask"], fx.Node) else None
    scale, grouped = (fx.map_arg(given.get(name), own.__getitem__) for name in ("scale", "enable_gqa"))
    rest = (mask, given["dropout_p"], scale, bool(grouped), part.tokens.length, part.start)
    return graph.call_function(attended, (node.name, query, key, value, *rest))


def _write_mean(
    graph: fx.Graph, node: fx.Node, step: Step, part: Slice, own: dict[fx.Node, fx.Node], copies: dict[fx.Node, fx.Node]
) -> fx.Node:  # fmt: skip
    given = arguments(node)
    targets = (own[given["target"]], copies[given["target"]])
    return graph.call_function(
        share_of_mean, (own[given["self"]], *targets, given["ignore_index"], given["label_smoothing"])
    )


_SPECIAL = {"dropout": _write_dropout, "attention": _write_attention, "mean": _write_mean}


# -- what the code of a slice calls -----------------------------------------------------------------------------------


def part_of(tensor: Tensor, dim: int, rows: bool, whole: int, start: int, length: int) -> Tensor:
    """A slice's part of a tensor of whole sequences."""
    if rows:
        return tensor.unflatten(dim, (-1, whole)).narrow(dim + 1, start, length).flatten(dim, dim + 1)
    return tensor.narrow(dim, start, length)


def dropped(
    tensor: Tensor, p: float, order: list[int], dim: int, rows: bool, whole: int, start: int, length: int
) -> Tensor:
    """Dropout as the whole sequence would draw it: for all tokens, in the order of their memory, of which the slice
    takes its part."""
    sizes = list(tensor.shape)
    sizes[dim] = sizes[dim] // length * whole
    ones = torch.empty_permuted(sizes, order, dtype=tensor.dtype, device=tensor.device).fill_(1.0)
    # Cloned: autograd would keep the noise of the whole sequence otherwise.
    return tensor * part_of(F.dropout(ones, p, True), dim, rows, whole, start, length).clone()


def attended(
    name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None,
    grouped: bool, whole: int, start: int,
) -> Tensor:  # fmt: skip
    """Attention of a slice's tokens to themselves and to those before them."""
    carry = _OPEN[-1]
    assert carry is not None  # only the code of a slice calls this
    keys, values = carry.extend(name, key, value)
    length, reach = query.shape[-2], keys.shape[-2]
    if mask is not None:
        mask = mask[..., start : start + length, :reach]
    if not dropout:
        if mask is None and not start:
            return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
        if mask is None:
            mask = query.new_ones(length, reach, dtype=torch.bool).tril(start)
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)
    if grouped:
        keys, values = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (keys, values))
    if mask is None:
        mask = query.new_ones(length, reach, dtype=torch.bool).tril(start)
    scores = query @ keys.transpose(-2, -1) * (scale if scale is not None else query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    drawn = F.dropout(scores.new_ones(*scores.shape[:-2], whole, whole), dropout, True)
    noise = drawn[..., start : start + length, :reach].clone()
    return (scores.softmax(dim=-1) * noise) @ values


def share_of_mean(logits: Tensor, target: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """What a slice adds to the mean cross-entropy of the whole sequences; `targets` are theirs."""
    total = F.cross_entropy(logits, target, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing)
    return total / (targets != ignore_index).sum()
