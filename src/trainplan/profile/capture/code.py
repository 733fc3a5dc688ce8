"""Operators of a graph, printed as one Python function (by `torch.fx`).

Running the function costs no more than running the module that the operators came from. It takes everything that it
needs as arguments: the model's tensors, values made elsewhere, tensors of the batch, the number of samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import fx, nn

from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.exported import Input
from trainplan.profile.capture.regions import PLAIN, region_of
from trainplan.profile.capture.sliced import Copy, Slice, writer


class Code:
    """A function, and where its arguments come from: in this order, slots, reads, inputs, and the samples."""

    module: fx.GraphModule  # the operators
    function: Callable[..., tuple[Any, ...]]  # … as they are called
    slots: list[tuple[dict[str, Any], str]]  # the model's tensors: looked up on every call, for they may be replaced
    reads: tuple[str, ...]  # crossings and constants, by name
    inputs: list[Input]  # tensors of the batch
    counts: bool  # whether it takes the number of samples
    makes: tuple[str, ...]  # names of the values that it returns
    constants: tuple[str, ...] = ()  # those of `reads` that depend on the batch alone

    def __init__(
        self,
        captured: Captured,
        owner: Callable[[str], tuple[nn.Module, str]],
        device: torch.device,
        nodes: Iterable[fx.Node],
        outputs: dict[str, fx.Node],
        part: Slice | None = None,
    ) -> None:
        exported, nodes = captured.exported, list(nodes)
        inside = set(nodes)
        sources = {source for node in nodes for source in node.all_input_nodes} | set(outputs.values())
        graph, copies, root = fx.Graph(), {}, nn.Module()

        self.slots = []
        for node, name in exported.holds.items():
            if node in sources:
                module, key = owner(name)
                store: Any = module._parameters if key in module._parameters else module._buffers
                self.slots.append((store, key))
                copies[node] = graph.placeholder(node.name)
        outside = [n for n in captured.flow.ops if n in sources and n not in inside]
        self.reads = tuple(node.name for node in outside)
        for node in outside:
            copies[node] = graph.placeholder(node.name)
        self.inputs = [item for node, item in exported.inputs.items() if node in sources]
        for node in exported.inputs:
            if node in sources:
                copies[node] = graph.placeholder(node.name)
        self.counts = exported.samples in sources
        if self.counts:
            copies[exported.samples] = graph.placeholder(exported.samples.name)
        for node, constant in exported.constants.items():
            if node in sources:
                root.register_buffer(node.name, constant.to(device), persistent=False)
                copies[node] = graph.get_attr(node.name)
        for node in sources:
            if node.op == "get_attr":  # the graph of an operator such as torch.cond
                body = _moved(exported.root.get_submodule(str(node.target)), exported.device, device)
                root.add_module(node.name, body)
                copies[node] = graph.get_attr(node.name)

        def write(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
            return _moved_node(graph, node, copies, exported.device, device)

        copy_node = write if part is None else writer(part, write, captured.flow.constant.__contains__)
        for region, run in groupby(nodes, region_of):
            if region == PLAIN:
                for node in run:
                    copies[node] = copy_node(graph, node, copies)
            else:
                moved = region.on(exported.device, device)
                in_region(graph, root, copies, moved, list(run), set(outputs.values()), copy_node)
        graph.output(tuple(copies[node] for node in outputs.values()))
        self.makes = tuple(outputs)
        self.module = fx.GraphModule(root, graph)
        self.function = self.module.forward

    def of(self, module: fx.GraphModule) -> Code:
        """The same with another function."""
        found = copy.copy(self)
        found.module, found.function = module, module.forward
        return found


class Entered(Protocol):
    """Something that code can run in."""

    def entered(self) -> AbstractContextManager[None]: ...


class RegionCode(nn.Module):
    """Some operators, run without gradients, under autocast, or (`tail.py`) without being computed."""

    def __init__(self, region: Entered, body: fx.GraphModule) -> None:
        super().__init__()
        self.region, self.body = region, body

    def forward(self, *args: Any) -> tuple[Any, ...]:
        with self.region.entered():
            return self.body(*args)


def in_region(
    graph: fx.Graph,
    root: nn.Module,
    copies: dict[fx.Node, fx.Node],
    region: Entered,
    nodes: list[fx.Node],
    returned: set[fx.Node],
    write: Copy,
    called: nn.Module | None = None,
) -> None:
    """Print a run of operators as a module of its own, and call it; `called` has the modules that they call."""
    inside = set(nodes)
    inner, places = fx.Graph(), {}
    taken = [s for s in dict.fromkeys(s for node in nodes for s in node.all_input_nodes) if s not in inside]
    for source in taken:
        places[source] = inner.placeholder(source.name)
    for node in nodes:
        places[node] = write(inner, node, places)
    results = [node for node in nodes if node in returned or any(user not in inside for user in node.users)]
    inner.output(tuple(places[node] for node in results))
    name = f"region_{nodes[0].name}"
    root.add_module(name, RegionCode(region, fx.GraphModule(called or nn.Module(), inner)))
    call = graph.call_module(name, tuple(copies[source] for source in taken))
    for index, node in enumerate(results):
        copies[node] = graph.call_function(_part, (call, index))
        copies[node].name = node.name


def _part(values: tuple[Any, ...], index: int) -> Any:
    return values[index]


def _moved_node(
    graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], old: torch.device, new: torch.device
) -> fx.Node:
    """A copy in which device arguments that meant where the model was captured mean where it runs."""
    made = graph.node_copy(node, copies.__getitem__)
    _move(made, old, new)
    return made


def _move(node: fx.Node, old: torch.device, new: torch.device) -> None:
    def move(leaf: Any) -> Any:
        return new if isinstance(leaf, torch.device) and leaf.type == old.type else leaf

    node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), move)


def _moved(body: nn.Module, old: torch.device, new: torch.device) -> nn.Module:
    """A copy of an operator's own graph for another device."""
    body = copy.deepcopy(body)
    for module in body.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function":
                    _move(node, old, new)
            module.recompile()
    return body.to(new)
