"""Operators of a graph, printed as one Python function (by `torch.fx`).

Running the function costs no more than running the module that the operators came from. It takes everything that it
needs as arguments: the model's tensors, values made elsewhere, tensors of the batch, the number of samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator

from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.exported import Input


class Code:
    """A function, and where its arguments come from: in this order, slots, reads, inputs, and the samples."""

    function: Callable[..., tuple[Any, ...]]
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
        for node in nodes:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in copies:
                    body = _moved(exported.root.get_submodule(str(source.target)), exported.device, device)
                    root.add_module(source.name, body)
                    copies[source] = graph.get_attr(source.name)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            _move_node(copies[node], exported.device, device)
        graph.output(tuple(copies[node] for node in outputs.values()))
        self.makes = tuple(outputs)
        self.function = fx.GraphModule(root, graph).forward


def _move_node(node: fx.Node, old: torch.device, new: torch.device) -> None:
    """Device arguments that meant where the model was captured now mean where it runs."""

    def move(leaf: Any) -> Any:
        return new if isinstance(leaf, torch.device) and leaf.type == old.type else leaf

    node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), move)
    if isinstance(node.target, HigherOrderOperator) and node.args and node.args[0] == old.type and new.type != "meta":
        node.args = (new.type, *node.args[1:])  # wrap_with_autocast("cpu", …); there is no autocast for meta


def _moved(body: nn.Module, old: torch.device, new: torch.device) -> nn.Module:
    """A copy of a region's graph (autocast, no_grad) for another device."""
    body = copy.deepcopy(body)
    for module in body.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function":
                    _move_node(node, old, new)
            module.recompile()
    return body.to(new)
