"""The tail of a block: operators whose results nobody needs when the block is run again for its backward pass.

What backward needs of a forward pass is what autograd has saved. After the last operator of a block whose result is
saved there may be more, which save nothing but what was there before them:

    x ── linear ── gelu ── linear ── + x ──►        saved: x, what goes into gelu, and what comes out of it
                             └── tail ──┘

Of these backward needs the nodes of the graph, and a node needs the form of what it made, not the values. So when a
block is run again its tail returns tensors that nothing was computed for. Of a transformer's layer that is a third of
the arithmetic, the last product of all. A tail without a product is computed: telling what form its results would have
takes the host about as long as adding two tensors. (torch.utils.checkpoint without reentry stops there,
too, by an exception in the hook of what is saved, which needs the graph of the forward pass to be kept instead of made
again.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from trainplan.profile.capture.code import in_region

_VALUES = ("call_function", "call_module", "call_method")  # nodes that make something


class Watched(fx.Interpreter):
    """Runs a block's operators one by one, and sees after which of them all that is saved has been made.

    `needed` is then the number of operators up to and with that one, and `tail_flops` what those after it compute.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.needed = 0
        self._place = 0
        self._flops = [0]  # before each operator, and at the end
        self._counter = FlopCounterMode(display=False)
        self._made: dict[int, int] = {}  # storage → the operator that wrote it last; others were there before
        self._known: dict[int, StorageWeakRef] = {}  # so that an address is not used again meanwhile

    def watch(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the block makes of these arguments."""
        for tensor in _tensors((args, list(self.module.buffers()))):
            self._see(tensor)
        with self._counter, saved_tensors_hooks(self._saved, lambda tensor: tensor):
            made: tuple[Any, ...] = self.run(*args)
        return made

    def run_node(self, node: fx.Node) -> Any:
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            for tensor in _tensors(self.fetch_args_kwargs_from_env(node)):  # what it writes into may be saved at once
                self._made[self._see(tensor)] = self._place
        made = super().run_node(node)
        if node.op in _VALUES:
            for tensor in _tensors(made):
                self._made[self._see(tensor)] = self._place
            self._place += 1
            self._flops.append(self._counter.get_total_flops())
        return made

    @property
    def tail_flops(self) -> int:
        return self._flops[-1] - self._flops[self.needed]

    def _saved(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in self._known:  # made on the way, inside of an operator
            self._made[self._see(tensor)] = self._place
        self.needed = max(self.needed, 1 + self._made.get(self._see(tensor), -1))
        return tensor.detach()  # without its graph: a node that holds its own output would never be freed

    def _see(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = StorageWeakRef(storage)
        return storage._cdata


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def without_tail(module: fx.GraphModule, needed: int) -> fx.GraphModule:
    """The same, of which only so many operators are computed."""
    tail = [node for node in module.graph.nodes if node.op in _VALUES][needed:]
    root, graph, copies = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
    root._modules, root._buffers = dict(module._modules), dict(module._buffers)

    def write(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        return graph.node_copy(node, copies.__getitem__)

    late = set(tail)
    for node in module.graph.nodes:
        if node not in late and node.op != "output":
            copies[node] = write(graph, node, copies)
    output = next(node for node in module.graph.nodes if node.op == "output")
    body = _with_modules(root, tail)
    in_region(graph, root, copies, Uncomputed(), tail, set(output.all_input_nodes), write, body)
    graph.output(fx.map_arg(output.args[0], copies.__getitem__))
    return fx.GraphModule(root, graph)


def _with_modules(root: nn.Module, nodes: list[fx.Node]) -> nn.Module:
    """What the operators call of the module that they come from."""
    found = nn.Module()
    for node in nodes:
        if node.op == "call_module":
            found.add_module(str(node.target), root.get_submodule(str(node.target)))
    return found


# -- operators that are not computed ----------------------------------------------------------------------------------


class Uncomputed:
    """A region of code whose operators give tensors of the right form, with nothing in them."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], Any] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        with _Formed(self._forms):
            yield


class _Formed(TorchDispatchMode):
    """Below autograd, which makes its nodes as ever. `forms` are those of every operator, in their order, by what comes
    into it: what they are is worked out once."""

    def __init__(self, forms: dict[tuple[Any, ...], Any]) -> None:
        super().__init__()
        self.forms, self.place = forms, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        leaves = pytree.tree_leaves((args, given))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # A view computes nothing. What writes into what is there (running statistics) is left to do so: whoever runs a
        # block again puts that back.
        if not tensors or function.is_view or function._schema.is_mutable:
            return function(*args, **given)
        self.place += 1
        key = self.place, *[_key(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if key not in self.forms:
            self.forms[key] = _form(function, args, given)
        # A number may be a tensor of a CPU beside those of a GPU.
        device = given.get("device") or next((t.device for t in tensors if t.dim()), tensors[0].device)
        return pytree.tree_map_only(Tensor, lambda form: _empty(form, device), self.forms[key])


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(form: Tensor, device: torch.device | str) -> Tensor:
    return torch.empty_strided(form.size(), form.stride(), dtype=form.dtype, device=device)


def _form(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operator returns, as tensors that have no memory."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: _empty(tensor, "meta"), (args, kwargs))
    if "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("meta")}
    return function(*args, **kwargs)
