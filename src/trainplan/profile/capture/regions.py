"""Regions of forward that run without gradients or under autocast.

Export keeps such a region (`with torch.no_grad(): …`) as one operator with a graph of its own, so a model whose
forward is one autocast region would be one operator, and could not be cut. Here the operators of regions are put back
in line, each with a note of the region it runs in; `code.py` prints runs of operators of one region as a region again.

Export forgets `no_grad` inside of autocast. So the trace notes for itself whether gradients were on when an operator
was called (`noting`), and that is believed. (Where autocast itself was forgotten, the capture is refused.)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx.traceback
from torch import fx, nn

from trainplan.errors import ModelError

_NOTE = "trainplan"
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Region:
    """What is switched while an operator runs. The plain region switches nothing."""

    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype | None, bool, bool], ...] = ()  # (device, type, on, cache), outermost first

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if not self.grad:
                stack.enter_context(torch.no_grad())
            for device, dtype, on, cache in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=cache))
            yield

    def on(self, old: torch.device, new: torch.device) -> Region:
        """The region for a model that was captured on one device and runs on another."""
        if new.type == "meta" or new.type == old.type:  # there is no autocast for meta
            return self
        moved = tuple((new.type if device == old.type else device, *rest) for device, *rest in self.autocast)
        return replace(self, autocast=moved)  # type: ignore[arg-type]

    def autocasts(self, device: str) -> bool:
        return next((on for name, _, on, _ in reversed(self.autocast) if name == device), False)


PLAIN = Region()


def region_of(node: fx.Node) -> Region:
    return node.meta.get("region", PLAIN)


def noting() -> Any:
    """A context that marks the operators traced inside with what is switched now, where that is anything."""
    grad, on = torch.is_grad_enabled(), tuple(device for device in _DEVICES if torch.is_autocast_enabled(device))
    if grad and not on:
        return nullcontext()
    return torch.fx.traceback.annotate({_NOTE: (grad, on)})


def settle_regions(graph: fx.Graph) -> None:
    """Give every operator its region, from what is switched around it and what the trace noted."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        switches = node.meta.pop("switches", ())
        grad = next((value for kind, value in reversed(switches) if kind == "grad"), True)
        node.meta["region"] = Region(grad, tuple(value for kind, value in switches if kind == "autocast"))
        _believe_note(node)


def open_regions(graph: fx.Graph, root: nn.Module) -> None:
    """Put the operators of regions in line with the others, each with what is switched around it, outermost first."""
    higher = torch.ops.higher_order
    for node in list(graph.nodes):
        if node.target is higher.wrap_with_set_grad_enabled:
            grad, body, *args = node.args
            _put_in_line(graph, root, node, body, args, ("grad", bool(grad)))
        elif node.target is higher.wrap_with_autocast:
            device, dtype, on, cache, body, *args = node.args
            _put_in_line(graph, root, node, body, args, ("autocast", (device, dtype, bool(on), bool(cache))))


def _put_in_line(
    graph: fx.Graph, root: nn.Module, call: fx.Node, body: fx.Node, args: list[Any], switch: tuple[str, Any]
) -> None:
    inner = root.get_submodule(str(body.target))
    assert isinstance(inner, fx.GraphModule)
    open_regions(inner.graph, inner)
    given = iter(args)
    copies: dict[fx.Node, Any] = {}
    results: Any = ()
    for node in inner.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "output":
            results = fx.map_arg(node.args[0], copies.__getitem__)
        else:
            with graph.inserting_before(call):
                copies[node] = copy = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":  # a graph of another kind of operator: it moves along
                copy.target = f"{copy.name}_of_region"
                root.add_module(copy.target, inner.get_submodule(str(node.target)))
            copy.meta["switches"] = (switch, *node.meta.get("switches", ()))
    for user in list(call.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(call)
    if not body.users:
        graph.erase_node(body)


def _believe_note(node: fx.Node) -> None:
    note = (node.meta.get("custom") or {}).get(_NOTE)
    if note is None:
        return
    grad, on = note
    region = region_of(node)
    lost = [device for device in _DEVICES if region.autocasts(device) != (device in on)]
    if lost:
        raise ModelError(
            f"capture of {node.name} ({node.target})",
            f"it runs with autocast for {lost[0]} {'on' if lost[0] in on else 'off'}, and torch.export forgets that "
            "where regions are nested in this way",
            "one torch.autocast region, or none inside forward",
        )
    if region.grad != grad:
        node.meta["region"] = replace(region, grad=grad)
