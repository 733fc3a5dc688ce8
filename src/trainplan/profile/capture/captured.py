"""A captured model: its chain of blocks, the tensors that pass between them, and what each block holds.

    captured = capture(model, batch, loss)
    stage = captured.stage(0, 5)                      # blocks 0 to 4, a module without values
    stage.bind(values_of(model), device)              # its parameters, by their names in the model
    made, output = stage(crossings, batch)            # made: what later stages read; output: of the last stage only

Every rank captures the same model for itself (on the meta device if it likes) and gets the same blocks, the same
names and the same `digest`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from trainplan.errors import ModelError
from trainplan.profile.capture.chain import Cut, Granularity, cut_chain, name_blocks
from trainplan.profile.capture.cuts import Flow
from trainplan.profile.capture.export import export
from trainplan.profile.capture.exported import Exported
from trainplan.profile.capture.outputs import unread_outputs
from trainplan.profile.capture.regions import region_of
from trainplan.profile.capture.shape import Shape
from trainplan.profile.capture.tensors import Held
from trainplan.workload.optimizer import stand_in
from trainplan.workload.workload import Batch, Loss

if TYPE_CHECKING:
    from trainplan.profile.capture.stage import Stage


# Every plan, dp too, runs the captured chain, so no plan is a way round these.
_REWRITE = "rewriting that part of forward with plain tensor operators"
_OF_PARTS = (
    "its loss mixes samples, so what is trained is the mean of the losses of a batch's parts: another one for another "
    "number of replicas or micro-batches"
)


@dataclass(frozen=True)
class Block:
    """One block of the chain."""

    name: str
    nodes: tuple[fx.Node, ...] = field(repr=False)  # its operators in order
    constants: tuple[str, ...]  # values that depend on the batch alone: every stage computes those that it reads
    reads: tuple[str, ...]  # crossings made by earlier blocks
    makes: tuple[str, ...]  # crossings read by later blocks
    inputs: tuple[str, ...]  # tensors of the batch that it reads
    holds: tuple[str, ...]  # tensors of the model that it uses, and those that nobody uses and it keeps
    writes: tuple[str, ...]  # buffers that it writes: running it twice changes them twice
    random: bool  # draws random numbers


@dataclass(frozen=True)
class Crossing:
    """A tensor made by one block and read by later ones. What the model returns is read by the last block."""

    name: str
    producer: int
    consumers: tuple[int, ...]  # ascending, all after the producer
    shape: Shape
    needs_grad: bool

    @property
    def bytes_per_sample(self) -> float:
        return self.shape.bytes_per_sample

    @property
    def fixed_bytes(self) -> int:
        return self.shape.fixed_bytes


@dataclass(frozen=True)
class Use:
    """A tensor of the model and the blocks that use it: more than one for tied weights."""

    held: Held
    blocks: tuple[int, ...]
    read: bool = True  # False: no operator reads it, and its block only keeps it

    @property
    def name(self) -> str:
        return self.held.name


@dataclass
class Captured:
    """A model as a chain of blocks."""

    exported: Exported = field(repr=False)
    flow: Flow = field(repr=False)
    blocks: tuple[Block, ...]
    crossings: tuple[Crossing, ...]
    parameters: tuple[Use, ...]  # in the order of model.named_parameters()
    buffers: tuple[Use, ...]  # and plain tensor attributes
    cuts: tuple[int, ...]  # positions among the operators where this chain is cut
    output_leaves: list[Any] = field(repr=False)  # nodes and plain values; None for what is not kept
    notes: tuple[str, ...] = ()  # what was captured in another form than it was written
    legal_cuts: tuple[int, ...] = ()  # all positions where it could be
    unread: dict[int, fx.Node] = field(default_factory=dict, repr=False)  # leaves that the loss does not read
    dropped_outputs: tuple[str, ...] = ()  # those of them that are not kept
    verified: bool = False

    @property
    def unused(self) -> tuple[str, ...]:
        """Parameters that no operator reads."""
        return tuple(use.name for use in self.parameters if not use.read)

    @property
    def tied(self) -> tuple[Use, ...]:
        """Parameters that several blocks use: their gradients are summed."""
        return tuple(use for use in self.parameters if len(use.blocks) > 1)

    def stand_ins(self) -> dict[str, nn.Parameter]:
        """The parameters that can be trained, without values: what an optimizer's factory sees of those elsewhere."""
        return {use.name: stand_in(use.held.shape, use.held.dtype) for use in self.parameters if use.held.trainable}

    @property
    def operators(self) -> int:
        return len(self.flow.ops)

    def stage(self, first: int, last: int) -> Stage:
        """Blocks first ≤ b < last as a module, without values until it is bound."""
        from trainplan.profile.capture.stage import Stage

        if not 0 <= first < last <= len(self.blocks):
            raise ModelError(
                f"stage of blocks {first} to {last}", f"the chain has {len(self.blocks)} blocks", "0 ≤ first < last"
            )
        return Stage(self, first, last)

    def recut(self, granularity: Granularity = "layer", cuts: Sequence[int] | None = None) -> Captured:
        """The same capture, cut elsewhere."""
        return _cut(self.exported, self.flow, self.unread, granularity, cuts)

    @property
    def digest(self) -> str:
        """A short name of all that was captured: two captures with one digest are interchangeable."""
        text = [repr(block) for block in self.blocks]
        text += [repr(given) for given in self.exported.inputs.values()]
        text += [f"{leaf}" for leaf in self.output_leaves]
        text += [repr(crossing) for crossing in self.crossings]
        text += [repr(use) for use in (*self.parameters, *self.buffers)]
        text += [
            f"{n.name} {n.target} {_without_device(n.args)} {_without_device(n.kwargs)} {region_of(n)}"
            for n in self.flow.ops
        ]
        for value in self.exported.constants.values():
            text += [str(value.dtype), str(value.cpu().tolist())]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _without_device(value: Any) -> Any:
    return fx.node.map_aggregate(value, lambda leaf: "device" if isinstance(leaf, torch.device) else leaf)


def capture(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None = None,
    *,
    device: torch.device | str | None = None,
    granularity: Granularity = "layer",
    cuts: Sequence[int] | None = None,
) -> Captured:
    """Capture a model, in the mode (training or evaluation) in which it stands.

    `batch` is an example of 2 samples or more; other batches may have other numbers of samples, and nothing else may
    differ. With a `loss`, parts of the output that it does not read (a key-value cache) are not carried to the last
    block. `device` is where the model is pretended to be (default: where it is; for a meta model the CPU).
    `granularity="operator"` makes every piece between two legal cuts a block; `cuts` gives positions by hand.
    """
    exported = export(model, batch, _device_of(model, device))
    flow = Flow(exported)
    if loss is not None and loss.mixes_samples:
        exported.notes.append(_OF_PARTS)
    unread = unread_outputs(exported, batch, loss)
    for spot in unread:
        exported.output.leaves[spot] = None
    flow.drop_dead(_nodes(exported.output.leaves))
    if all(node in flow.constant for node in flow.ops):
        raise ModelError(
            f"capture of {type(model).__name__}",
            "no operator of its forward depends on a parameter",
            "a model with parameters",
        )
    return _cut(exported, flow, unread, granularity, cuts)


def _cut(
    exported: Exported,
    flow: Flow,
    unread: dict[int, fx.Node],
    granularity: Granularity,
    cuts: Sequence[int] | None,
) -> Captured:
    outputs = set(_nodes(exported.output.leaves))
    legal = flow.legal_cuts(outputs)
    if cuts is None:
        cut = cut_chain(flow, outputs, legal, granularity)
    else:
        wrong = sorted(set(cuts) - set(legal))
        if wrong:
            raise ModelError(
                f"cut at operator {wrong[0]} of {len(flow.ops)}",
                "an in-place write, or a value that is no tensor, reaches over it",
                f"{min(legal, key=lambda p: abs(p - wrong[0]), default=0)}, the nearest legal cut",
            )
        cut = name_blocks(flow, sorted(set(cuts)))
    # What the loss does not read, and the last block makes anyway, is returned all the same.
    last = cut.cuts[-1] if cut.cuts else 0
    late = {i: n for i, n in unread.items() if n.op == "placeholder" or flow.position.get(n, -1) >= last}
    leaves = [late.get(i, leaf) for i, leaf in enumerate(exported.output.leaves)]
    captured = _assemble(exported, flow, cut, leaves)
    captured.legal_cuts, captured.unread = tuple(legal), unread
    captured.dropped_outputs = (*(n.name for i, n in unread.items() if i not in late), *exported.output.opaque)
    _check_nothing_lost(captured)
    return captured


def _nodes(leaves: Iterable[Any]) -> list[fx.Node]:
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    found.discard(torch.device("meta"))
    if len(found) > 1:
        raise ModelError(
            f"capture of {type(model).__name__}",
            f"it is spread over {', '.join(sorted(map(str, found)))}",
            "a model on one device; trainplan places the stages itself",
        )
    return found.pop() if found else torch.device("cpu")


# -- blocks ---------------------------------------------------------------------------------------------------------


def _assemble(exported: Exported, flow: Flow, cut: Cut, leaves: list[Any]) -> Captured:
    edges = [0, *cut.cuts, len(flow.ops)]
    own = [[n for n in flow.ops[a:b] if n not in flow.constant] for a, b in pairwise(edges)]
    home = {node: index for index, nodes in enumerate(own) for node in nodes}
    returned = _nodes(leaves)
    last = len(own) - 1

    consumers: dict[fx.Node, set[int]] = {}
    for index, nodes in enumerate(own):
        for source in {source for node in nodes for source in node.all_input_nodes}:
            if source in home and home[source] != index:
                consumers.setdefault(source, set()).add(index)
    for node in returned:
        if node in home and home[node] != last:
            consumers.setdefault(node, set()).add(last)
    crossings = []
    for node in sorted(consumers, key=flow.position.__getitem__):
        shape = flow.shape[node]
        if shape is None:
            raise ModelError(f"cut after {node.name}", "it is no tensor, so it cannot cross", _REWRITE)
        crossings.append(
            Crossing(node.name, home[node], tuple(sorted(consumers[node])), shape, flow.facts[node].needs_grad)
        )

    blocks: list[Block] = []
    used_by: dict[str, list[int]] = {}
    storage_of = {name: flow.owners[node] for node, name in exported.holds.items()}
    for index, nodes in enumerate(own):
        ends = returned if index == last else []
        direct = {source for node in nodes for source in node.all_input_nodes} | set(ends)
        sources = direct | {source for node in flow.closure(direct) for source in node.all_input_nodes}
        holds = {exported.holds[source] for source in sources if source in exported.holds}
        for name in holds:
            used_by.setdefault(name, []).append(index)
        written = {storage for node in nodes for storage in flow.facts[node].writes}
        blocks.append(
            Block(
                name=cut.names[index],
                nodes=tuple(nodes),
                constants=tuple(node.name for node in flow.ops if node in direct and node in flow.constant),
                reads=tuple(c.name for c in crossings if index in c.consumers),
                makes=tuple(c.name for c in crossings if c.producer == index),
                inputs=tuple(item.name for node, item in exported.inputs.items() if node in sources),
                holds=tuple(name for name in exported.held if name in holds),
                writes=tuple(name for name in storage_of if name in holds and storage_of[name] & written),
                random=any(flow.facts[node].random for node in nodes),
            )
        )
    uses = _place_unused(exported.held, blocks, used_by)
    return Captured(
        exported=exported,
        flow=flow,
        blocks=tuple(blocks),
        crossings=tuple(crossings),
        parameters=tuple(use for use in uses if use.held.kind == "parameter"),
        buffers=tuple(use for use in uses if use.held.kind != "parameter"),
        cuts=cut.cuts,
        output_leaves=leaves,
        notes=tuple(exported.notes),
    )


def _place_unused(held: dict[str, Held], blocks: list[Block], used_by: dict[str, list[int]]) -> list[Use]:
    """Every tensor of the model with its blocks; what no operator reads goes to the first block of its module."""
    uses = []
    for name, item in held.items():
        if name in used_by:
            uses.append(Use(item, tuple(used_by[name])))
            continue
        index, module = 0, name.rpartition(".")[0]
        while module:
            near = [i for other, found in used_by.items() if other.startswith(f"{module}.") for i in found]
            if near:
                index = min(near)
                break
            module = module.rpartition(".")[0]
        kept = {*blocks[index].holds, name}
        blocks[index] = replace(blocks[index], holds=tuple(n for n in held if n in kept))
        uses.append(Use(item, (index,), read=False))
    return uses


def _check_nothing_lost(captured: Captured) -> None:
    """The blocks hold exactly what the model holds, and every operator is in exactly one block."""
    in_blocks = {name for block in captured.blocks for name in block.holds}
    if in_blocks != set(captured.exported.held):
        lost = sorted(set(captured.exported.held) - in_blocks)
        raise ModelError("capture", f"{len(lost)} tensors of the model are in no block, first {lost[:1]}", _REWRITE)
    flow = captured.flow
    counts = Counter(node for block in captured.blocks for node in block.nodes)
    if set(counts.values()) - {1} or set(counts) != {n for n in flow.ops if n not in flow.constant}:
        raise ModelError("capture", "an operator is in no block, or in two", _REWRITE)
