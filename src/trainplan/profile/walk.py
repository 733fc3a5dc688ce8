"""One micro-batch through the chain of blocks and back, every block by itself.

Each block runs as the engine would run it if it were a stage: its inputs are cut from the graph of the block before,
its backward starts from the gradients of what it made. So anything can be done between two blocks (look at the clock,
count bytes), and blocks can be run alone.

    walk = Walk(captured, batch, loss)                     # or, of a slice of its sequences: part, and the walks before
    for block in range(n): walk.forward(stage, block)
    for block in reversed(range(n)): walk.backward(block)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.halves import Halfway, backward_input
from trainplan.profile.capture.sliced import Carry, Slice, carrying
from trainplan.profile.capture.stage import Stage
from trainplan.workload.workload import Batch, Loss


@dataclass
class Graph:
    """What the forward pass of a block leaves for its backward."""

    leaves: dict[str, Tensor]  # the crossings that it read
    made: dict[str, Tensor]  # the crossings that it made
    loss: Tensor | None  # of the last block
    carry: Carry | None = None  # of a slice: keys and values


class Walk:
    """A micro-batch on its way."""

    def __init__(
        self, captured: Captured, batch: Batch, loss: Loss, part: Slice | None = None, earlier: Sequence[Walk] = ()
    ) -> None:
        self.captured, self.batch, self.loss, self.part, self.earlier = captured, batch, loss, part, earlier
        self._carries: dict[int, Carry] = {}  # of every block
        self.crossings: dict[str, Tensor] = {}  # cut from their graphs, while somebody will still read them
        self.gradients: dict[str, Tensor] = {}  # of crossings, as far as they have been summed
        self.graphs: dict[int, Graph] = {}
        self._needs_grad = {crossing.name for crossing in captured.crossings if crossing.needs_grad}
        self._last_reader = {crossing.name: crossing.consumers[-1] for crossing in captured.crossings}

    def forward(self, stage: Stage, index: int) -> None:
        """Run a block; the last one computes the loss too. The crossings that it reads stay, until `leave`."""
        made = self._run(index, stage.run_block, stage)
        self.crossings.update({name: tensor.detach() for name, tensor in made.items()})

    def _run(self, index: int, run: Callable[..., None], ends: Stage | None = None) -> dict[str, Tensor]:
        """Run a block, with a graph from the crossings that it reads to those that it makes (`ends`: and the loss)."""
        block = self.captured.blocks[index]
        leaves = {name: self.crossings[name].detach().requires_grad_(name in self._needs_grad) for name in block.reads}
        env = dict(leaves)
        carry = Carry([walk._carries[index] for walk in self.earlier]) if self.part else None
        if carry:
            self._carries[index] = carry
        with carrying(carry):
            run(index, env, self.batch, self.part)
        made = {name: env[name] for name in block.makes}
        loss = None
        if ends is not None and index == len(self.captured.blocks) - 1:
            targets = self.part.targets(self.batch.targets) if self.part else self.batch.targets
            loss = self.loss.function(ends.output(env), targets)
        self.graphs[index] = Graph(leaves, made, loss, carry)
        return made

    def again(self, stage: Stage, index: int) -> None:
        """Run a block that is not the last once more, as for its backward pass. The crossings that it reads are still
        there, and so are those that it made."""
        self._run(index, stage.run_again)

    def leave(self, index: int) -> None:
        """Forget the crossings that no block after this one reads."""
        for name in [name for name in self.crossings if self._last_reader[name] <= index]:
            del self.crossings[name]

    def forget(self, index: int) -> None:
        """Forget what a block made, there and back, before it is run again."""
        for name in self.captured.blocks[index].makes:
            self.crossings.pop(name, None)
        self.gradients.clear()

    def backward(self, index: int) -> None:
        """Back through a block, from the gradients that the blocks after it have left."""
        graph = self.graphs.pop(index)
        roots, seeds = self._roots(graph)
        if roots:
            torch.autograd.backward(roots, seeds)
        self._hand_back(graph)

    def backward_input(self, index: int, weights: Sequence[nn.Parameter]) -> Halfway:
        """The first part of a backward pass in two."""
        graph = self.graphs.pop(index)
        halfway = backward_input(*self._roots(graph), graph.leaves.values(), weights)
        self._hand_back(graph)
        return halfway

    def _roots(self, graph: Graph) -> tuple[list[Tensor], list[Tensor | None]]:
        roots: list[Tensor] = [] if graph.loss is None or not graph.loss.requires_grad else [graph.loss]
        seeds: list[Tensor | None] = [None] * len(roots)
        for name, tensor in graph.made.items():
            gradient = self.gradients.pop(name, None)
            if gradient is not None and tensor.requires_grad:
                roots.append(tensor)
                seeds.append(gradient)
        if graph.carry is not None:
            carried, gathered = graph.carry.roots()
            return [*roots, *carried], [*seeds, *gathered]
        return roots, seeds

    def _hand_back(self, graph: Graph) -> None:
        for name, leaf in graph.leaves.items():
            if leaf.grad is not None:
                self.gradients[name] = self.gradients[name] + leaf.grad if name in self.gradients else leaf.grad

    def invent_gradients(self, index: int) -> None:
        """Small gradients of what a block made, for running its backward alone."""
        self.gradients = {
            name: torch.full_like(tensor, 1e-3)
            for name, tensor in self.graphs[index].made.items()
            if tensor.requires_grad
        }

    def through(self, stage: Stage) -> None:
        """All blocks forward and back."""
        blocks = range(len(self.captured.blocks))
        for index in blocks:
            self.forward(stage, index)
            self.leave(index)
        for index in reversed(blocks):
            self.backward(index)
