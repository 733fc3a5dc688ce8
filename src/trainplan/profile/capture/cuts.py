"""Where a graph may be cut, and what would cross each cut.

The graph is run once on fake tensors (shapes, strides and storages, no memory), which shows for every operator what
storage it touches and writes, whether its result needs a gradient, and whether it draws random numbers. From that:

**Constants.** An operator that depends on nothing but the batch, buffers that are never written, and sizes (masks,
position ids, rotary tables) is not sent across cuts: every block that reads it computes it again. Matrix products
and convolutions are exempt, unless they are as thin as the outer product of a rotary embedding.

**Legal cuts.** Cutting between a view and a later in-place write would lose the write without an error, and writing
in place into a tensor that was received from another stage is an error of autograd. So for every storage that is
written, no cut lies after the first operator that touches it and before (or at) its last write; for parameters and
buffers, its last use. An operator with several results stays with the operators that take them apart. Values that
are not tensors, or whose size is not a linear function of the batch, do not cross.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainplan.errors import ModelError
from trainplan.profile.capture.exported import Exported
from trainplan.profile.capture.regions import region_of
from trainplan.profile.capture.shape import Shape

aten = torch.ops.aten
Storage = int

# Operators whose arithmetic outweighs the tensors that they read: what a block is built around.
PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "bilinear", "einsum", "_grouped_mm",
    "_scaled_mm", "scaled_dot_product_attention", "_native_multi_head_attention",
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "cdist",
}  # fmt: skip
_THIN = 16  # a product over at most so many terms costs no more than the elementwise operators around it
_INNER = {"matmul", "mm", "bmm"}
# Random, though not tagged so in every version of torch that we support.
_RANDOM = {"random", "random_", "rrelu_", "rand", "randn", "randint", "randperm"}


def packet(node: fx.Node) -> str:
    """The operator's name without its overload: `conv2d`."""
    if isinstance(node.target, OpOverload):
        return str(node.target._schema.name).split("::")[-1]
    return getattr(node.target, "__name__", str(node.target))


@dataclass
class Facts:
    """What the fake run showed of one operator."""

    reads: set[Storage] = field(default_factory=set)  # storages of its arguments
    touches: set[Storage] = field(default_factory=set)  # of arguments and results
    writes: set[Storage] = field(default_factory=set)
    needs_grad: bool = False
    random: bool = False
    same_as: fx.Node | None = None  # it handed this argument on unchanged (`x.to(dtype)` that had nothing to do)


class Flow:
    """The operators of a graph with what flows between them; positions count operators."""

    def __init__(self, exported: Exported) -> None:
        self.exported = exported
        self.facts, owners = _fake_run(exported)
        if any(_written(self.facts) & owners[node] for node in exported.inputs):
            # Forward writes into the batch. A stage may run twice on the same batch, so it gets a copy to write into.
            _clone_inputs(exported, [n for n in exported.inputs if _written(self.facts) & owners[n]])
            self.facts, owners = _fake_run(exported)
        self.ops = exported.operators
        self.position = {node: index for index, node in enumerate(self.ops)}
        self.owners = owners
        self.touched_by: dict[Storage, list[fx.Node]] = {}
        self.written_by: dict[Storage, list[fx.Node]] = {}
        for node in self.ops:
            for storage in self.facts[node].touches:
                self.touched_by.setdefault(storage, []).append(node)
            for storage in self.facts[node].writes:
                self.written_by.setdefault(storage, []).append(node)
        self.constant = self._constants()
        self.shape = {node: self._shape(node) for node in self.ops}

    def origin(self, node: fx.Node) -> fx.Node:
        """The operator that really made a value."""
        while node in self.facts and (before := self.facts[node].same_as) is not None:
            node = before
        return node

    # -- liveness and constants -----------------------------------------------------------------------------------

    def drop_dead(self, outputs: Iterable[fx.Node]) -> None:
        """Forget operators that neither reach `outputs`, nor write what the model holds, nor draw random numbers.

        Draws stay even where nobody reads them: every later draw depends on them.
        """
        held = self._held_storages()
        live: set[fx.Node] = set()
        queue = [node for node in outputs if node in self.position]
        queue += [n for n in self.ops if self.facts[n].writes & held or self.facts[n].random]
        while queue:
            node = queue.pop()
            if node in live:
                continue
            live.add(node)
            queue += [source for source in node.all_input_nodes if source in self.position]
            for storage in self.facts[node].touches:
                queue += self.written_by.get(storage, [])
        dead = [node for node in self.ops if node not in live]
        for node in reversed(dead):
            self.exported.graph.erase_node(node)
        self.ops = [node for node in self.ops if node in live]
        self.position = {node: index for index, node in enumerate(self.ops)}
        for table in (self.touched_by, self.written_by):
            for storage in table:
                table[storage] = [node for node in table[storage] if node in live]

    def _held_storages(self) -> set[Storage]:
        return {storage for node in self.exported.holds for storage in self.owners[node]}

    def _constants(self) -> set[fx.Node]:
        exported, written = self.exported, _written(self.facts)
        parameters = {n for n, name in exported.holds.items() if exported.held[name].kind == "parameter"}
        free = {
            node
            for node in [*exported.holds, *exported.constants, *exported.inputs, exported.samples]
            if node not in parameters and not (written & self.owners[node])
        }
        constant: set[fx.Node] = set()
        for node in self.ops:
            sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
            if not self.facts[node].random and _cheap(node) and all(s in free or s in constant for s in sources):
                constant.add(node)
        while True:  # a storage that anything else writes makes no constants
            spoilt = {
                node
                for storage, writers in self.written_by.items()
                if any(writer not in constant for writer in writers)
                for node in self.touched_by[storage]
            } & constant
            if not spoilt:
                return constant
            queue = list(spoilt)
            while queue:
                node = queue.pop()
                constant.discard(node)
                queue += [user for user in node.users if user in constant]

    def closure(self, wanted: Iterable[fx.Node]) -> set[fx.Node]:
        """The constants that must be computed to have `wanted`: what they read, and every write into it."""
        found: set[fx.Node] = set()
        queue = [node for node in wanted if node in self.constant]
        while queue:
            node = queue.pop()
            if node in found:
                continue
            found.add(node)
            queue += [source for source in node.all_input_nodes if source in self.constant]
            for storage in self.facts[node].touches:
                queue += self.written_by.get(storage, [])
        return found

    # -- cuts -----------------------------------------------------------------------------------------------------

    def spans(self, outputs: set[fx.Node]) -> Iterator[tuple[fx.Node, int, int]]:
        """(node, its position, position of its last reader) of every value that is not constant.

        What the model returns is read at the end.
        """
        end = len(self.ops)
        for node in self.ops:
            if node not in self.constant:
                readers = [self.position[user] for user in node.users if user in self.position]
                yield node, self.position[node], end if node in outputs else max(readers, default=self.position[node])

    def legal_cuts(self, outputs: set[fx.Node]) -> list[int]:
        """Positions p, 0 < p < number of operators, where operators before p may be apart from those from p on."""
        size = len(self.ops)
        shut = [0] * (size + 2)

        def forbid(after: int, until: int) -> None:
            if until > after:
                shut[after + 1] += 1
                shut[min(until, size) + 1] -= 1

        held = self._held_storages() | {s for node in self.exported.constants for s in self.owners[node]}
        for storage, writers in self.written_by.items():
            touching = [node for node in self.touched_by[storage] if node not in self.constant]
            if not touching or not writers:
                continue
            last = touching if storage in held else [node for node in writers if node not in self.constant]
            if last:
                forbid(self.position[touching[0]], self.position[last[-1]])
        for node, first, last_reader in self.spans(outputs):
            if self.shape[node] is None:
                forbid(first, last_reader)
        legal, depth = [], 0
        for position in range(size):
            depth += shut[position]
            if position > 0 and depth == 0:
                legal.append(position)
        return legal

    def crossing(self, outputs: set[fx.Node], samples: int) -> tuple[list[int], list[int]]:
        """How many tensors, and how many bytes, cross a cut at each position, for so many samples."""
        tensors, sizes = [0] * (len(self.ops) + 2), [0] * (len(self.ops) + 2)
        for node, first, last in self.spans(outputs):
            shape = self.shape[node]
            if shape is not None:
                for table, amount in ((tensors, 1), (sizes, shape.bytes(samples))):
                    table[first + 1] += amount
                    table[min(last, len(self.ops)) + 1] -= amount
        return list(accumulate(tensors)), list(accumulate(sizes))

    def _shape(self, node: fx.Node) -> Shape | None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        return Shape.of(value, self.exported.symbols)


def _cheap(node: fx.Node) -> bool:
    name = packet(node)
    if name in _INNER:
        first = node.args[0]
        value = first.meta.get("val") if isinstance(first, fx.Node) else None
        inner = value.shape[-1] if isinstance(value, Tensor) and value.ndim else None
        return isinstance(inner, int) and inner <= _THIN
    return name not in PRODUCTS


def _written(facts: dict[fx.Node, Facts]) -> set[Storage]:
    return {storage for fact in facts.values() for storage in fact.writes}


def _clone_inputs(exported: Exported, inputs: list[fx.Node]) -> None:
    for node in inputs:
        with exported.graph.inserting_after(exported.samples):
            copy = exported.graph.call_function(aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)  # type: ignore[misc]
        exported.output.leaves = [copy if leaf is node else leaf for leaf in exported.output.leaves]


# -- the fake run ---------------------------------------------------------------------------------------------------


class _Writes(TorchDispatchMode):
    """Collects the storages that operators write into, below whatever they are composed of."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[Storage] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(function, OpOverload):
            for value in written_arguments(function, args, kwargs):
                self.written |= _storages(value)
        return function(*args, **kwargs)


def written_arguments(function: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes into: by its schema, and the running statistics of batch norm.

    (Batch norm's schema does not say that it writes them.)
    """
    schema = function._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    trains = given.get("training", given.get("use_input_stats", False))
    return [
        given[argument.name]
        for argument in schema
        if argument.name in given
        and (
            (argument.alias_info is not None and argument.alias_info.is_write)
            or (trains and argument.name in ("running_mean", "running_var"))
        )
    ]


def _storages(value: Any) -> set[Storage]:
    return {
        leaf.untyped_storage()._cdata
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    }


def _fake_run(exported: Exported) -> tuple[dict[fx.Node, Facts], dict[fx.Node, set[Storage]]]:
    """Facts of every operator, and the storages of every placeholder."""
    values: dict[fx.Node, Any] = {}  # all of them are kept until the end, so that no storage is used twice
    facts: dict[fx.Node, Facts] = {}
    device = exported.device
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with torch.enable_grad(), fake as mode, _Writes() as recorder:
        for node, name in exported.holds.items():
            item = exported.held[name]
            empty = torch.empty_strided(item.shape, node.meta["val"].stride(), dtype=item.dtype, device=device)
            values[node] = nn.Parameter(empty, item.trainable) if item.kind == "parameter" else empty
        for node, constant in exported.constants.items():
            values[node] = mode.from_tensor(constant)
        for node, given in exported.inputs.items():
            values[node] = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=device)
        values[exported.samples] = exported.example_samples
        owners = {node: _storages(value) for node, value in values.items()}
        for node in exported.graph.nodes:
            if node.op == "get_attr":
                values[node] = exported.root.get_submodule(str(node.target))
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                recorder.written = set()
                with region_of(node).entered(), _explained(node):
                    values[node] = result = node.target(*args, **kwargs)
                reads = _storages((args, kwargs))
                facts[node] = Facts(
                    reads=reads,
                    touches=reads | _storages(result),
                    # A composite operator may write a temporary of its own, or a copy of its argument.
                    writes=recorder.written & (reads | _storages(result)),
                    needs_grad=isinstance(result, Tensor) and result.requires_grad,
                    random=draws(node, exported.root),
                    same_as=next((source for source in node.all_input_nodes if values[source] is result), None),
                )
    return facts, owners


@contextmanager
def _explained(node: fx.Node) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise ModelError(
            f"capture of the operator {node.name} ({node.target})",
            f"its result cannot be described without values ({type(error).__name__}: {line})",
            "operators whose shapes do not depend on values",
        ) from error


def draws(node: fx.Node, root: nn.Module) -> bool:
    """Whether an operator draws random numbers (where in doubt: yes)."""
    if isinstance(node.target, HigherOrderOperator):
        bodies = [root.get_submodule(str(a.target)) for a in node.all_input_nodes if a.op == "get_attr"]
        return any(
            draws(inner, body)
            for body in bodies
            if isinstance(body, fx.GraphModule)
            for inner in body.graph.nodes
            if inner.op == "call_function"
        )
    if not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags and packet(node) not in _RANDOM:
        return False
    schema = node.target._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= {a.name: value for a, value in zip(schema, node.args, strict=False)} | node.kwargs
    if given.get("train", given.get("training", True)) is False:
        return False
    # Dropout of nothing: `dropout(x, p=0.0)`, attention with `dropout_p=0.0`, a recurrent layer with `dropout=0.0`.
    rates = [given[name] for name in ("dropout_p", "dropout") if name in given]
    rates += [given["p"]] if "dropout" in packet(node) and "p" in given else []
    return not (rates and all(rate == 0.0 for rate in rates))
