"""Where the tokens of a sequence are, value by value: can a model be run on a slice of its sequences?

Every value of the graph is one of two kinds. One that comes from the tokens of the batch has them along a dimension
(`Along`), and on a slice it is as much shorter. All others (position tables, masks, parameters) are the same for every
slice: they are made whole, and narrowed to the slice where they meet a value that has tokens.

So the rules below are about operators that read tokens. One that treats each token alone runs on a slice as it is, but
for sizes that are written into views. Causal attention reads earlier tokens: it gets their keys and values, which are
carried from slice to slice. Dropout draws for the whole sequence and takes its part, so that the slices draw what the
sequence would. Whatever else would mix tokens is refused, by its name and its place in the user's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from trainplan.errors import ModelError
from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.cuts import packet
from trainplan.profile.capture.shape import Shape
from trainplan.profile.capture.token_rules import RULES, Along, Odd, Step, arguments, pointwise, same
from trainplan.profile.capture.where import place_of
from trainplan.workload.workload import Batch, Loss

_MANY = 10_007  # samples for which shapes are compared: a prime, which no other size is a multiple of
_WHOLE = "schedule=1f1b or gpipe, which take sequences whole"


@dataclass(frozen=True, eq=False)
class Tokens:
    """What a model does with the tokens of its sequences, where it can be run on slices of them."""

    length: int  # of a sequence
    steps: dict[fx.Node, Step] = field(repr=False)  # operators that have tokens; the others are the same for all slices
    mean: bool  # the model returns the mean over tokens, and not a value for each
    carried: dict[int, float]  # block → bytes a sample of the keys and values that later tokens attend to

    def along(self, node: fx.Node) -> Along | None:
        step = self.steps.get(node)
        return step.along if step else None

    def named(self, name: str) -> Along | None:
        """Of a crossing."""
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, Along | None]:
        return {node.name: step.along for node, step in self.steps.items()}


def tokens_of(captured: Captured, length: int, loss: Loss, example: Batch) -> Tokens:
    """Where the tokens of a model are; a `ModelError` that says why it cannot be run on slices, where it cannot."""
    if length < 2:
        raise _refused(f"its samples are no sequences: it has {length} tokens a sample (tokens_per_sample)")
    if loss.mean_over != "tokens":
        raise _refused(f"its loss is a mean over {loss.mean_over}, which is no sum over slices of tokens")
    reader = _Reader(captured, length)
    reader.read()
    mean = reader.check_output()
    if not mean:
        for leaf in pytree.tree_leaves(example.targets):
            if isinstance(leaf, Tensor) and (leaf.dim() < 2 or leaf.shape[1] != length):
                raise _refused(f"a target has the shape {tuple(leaf.shape)}, and no entry for each of {length} tokens")
    written = [name for block in captured.blocks for name in block.writes]
    if written:
        raise _refused(f"it writes the buffer {written[0]!r} in every pass, and a slice is a pass")
    for crossing in captured.crossings:
        if reader.steps.get(reader.named[crossing.name]) is None or crossing.fixed_bytes:
            raise _refused(f"{crossing.name}, which passes between blocks, is the same for all tokens")
    return Tokens(length, reader.steps, mean, reader.carried())


def _refused(why: str) -> ModelError:
    return ModelError("running it on slices of its sequences", why, _WHOLE)


class _Reader:
    """Goes through the operators in order."""

    def __init__(self, captured: Captured, length: int) -> None:
        self.captured, self.flow, self.exported, self.length = captured, captured.flow, captured.exported, length
        self.steps: dict[fx.Node, Step] = {}
        self.named = {node.name: node for node in self.flow.ops}
        for node, given in self.exported.inputs.items():
            if given.per_sample and len(given.shape) > 1 and given.shape[1] == length:
                self.steps[node] = Step(Along(1))
        if not self.steps:
            raise _refused(f"none of its inputs has {length} tokens a sample")

    def read(self) -> None:
        for node in self.flow.ops:
            if not any(source in self.steps for source in node.all_input_nodes):
                continue
            try:
                self.steps[node] = self._step(node)
            except ModelError:
                # What depends on the batch alone every stage makes for itself, whole.
                if node not in self.flow.constant:
                    raise

    def check_output(self) -> bool:
        """Whether what the loss reads is a mean over tokens; else it is something for each token."""
        captured = self.captured
        unread = set(captured.unread.values())
        read = [leaf for leaf in captured.output_leaves if isinstance(leaf, fx.Node) and leaf not in unread]
        found = {self.steps[leaf].along if leaf in self.steps else "whole" for leaf in read}
        if found not in ({None}, {Along(1)}):
            raise _refused("what the loss reads of its output is not one value for each token of each sample")
        return found == {None}

    def carried(self) -> dict[int, float]:
        home = {node: index for index, block in enumerate(self.captured.blocks) for node in block.nodes}
        found: dict[int, float] = {}
        for node, step in self.steps.items():
            if step.kind == "attention":
                given = arguments(node)
                shapes = [self.flow.shape[given[name]] for name in ("key", "value")]
                size = sum(shape.bytes_per_sample for shape in shapes if shape)
                found[home[node]] = found.get(home[node], 0.0) + size
        return found

    # -- one operator -----------------------------------------------------------------------------------------------

    def _step(self, node: fx.Node) -> Step:
        name = packet(node)
        if any(self.steps[s].along is None for s in node.all_input_nodes if s in self.steps):
            raise self.mixes(node, "works on the mean over tokens")
        rule = RULES.get(name)
        if rule is None and isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
            rule = pointwise
        if name == "getitem":
            rule = same
        if rule is None:
            raise self.mixes(node, "may mix tokens")
        if self.flow.facts[node].random and name not in ("dropout", "scaled_dot_product_attention"):
            raise self.mixes(node, "draws random numbers in a way that slices cannot repeat")
        try:
            return rule(self, node)
        except Odd:
            raise self.mixes(node, "brings tokens together with what is the same for all of them") from None

    def along(self, node: Any) -> Along:
        """Of an argument that must have tokens."""
        step = self.steps.get(node) if isinstance(node, fx.Node) else None
        if step is None or step.along is None:
            raise Odd
        return step.along

    def only(self, node: fx.Node, *allowed: Any) -> None:
        """No other argument than these may have tokens."""
        if any(source in self.steps for source in node.all_input_nodes if source not in allowed):
            hint = "attention can be sliced where it is F.scaled_dot_product_attention(…, is_causal=True)"
            raise self.mixes(node, f"multiplies tokens with each other ({hint})")

    def size(self, node: Any) -> tuple[int, ...]:
        """The sizes of a tensor, for very many samples."""
        value = node.meta["val"]
        shape = Shape.of(value, self.exported.symbols)
        return shape.at(_MANY) if shape else tuple(-1 for _ in value.shape)

    def made_whole(self, node: fx.Node) -> bool:
        """Whether a value with tokens is made for the whole sequence, by whoever reads it."""
        return node in self.exported.inputs or node in self.flow.constant

    def narrowed(self, sources: list[fx.Node]) -> dict[fx.Node, Along]:
        """Of the arguments with tokens, those that are whole."""
        steps = ((source, self.steps[source].along) for source in sources if source in self.steps)
        return {source: along for source, along in steps if along is not None and self.made_whole(source)}

    def mixes(self, node: fx.Node, what: str) -> ModelError:
        return _refused(f"{packet(node)} in {place_of(node)} {what}")
