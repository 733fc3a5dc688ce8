"""What `torch.export` returns, tidied so that the cutter meets no special cases.

* Regions without gradients or with autocast are opened: their operators stand in line with the others.
* Sizes that depend on the batch are computed from one input, the number of samples.
* The parts of an operator with several outputs follow it at once.
* A buffer that forward replaces (`self.b = …`) is written as soon as that is right, not at the end of the graph.
* Tied weights are one input; checks that export wrote into the graph are gone.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from trainplan.errors import ModelError
from trainplan.profile.capture.exported import ROOT, VALUE, Constant, Exported, Input, Output, Returned
from trainplan.profile.capture.regions import open_regions, settle_regions
from trainplan.profile.capture.shape import SAMPLES, in_samples
from trainplan.profile.capture.tensors import Held

aten = torch.ops.aten
# Checks that export writes into the graph about its own assumptions. Shapes and types are checked at the border.
_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


def tidy(
    program: torch.export.ExportedProgram,
    known: dict[str, Held],
    inputs: list[Input],
    fixed: list[Constant],
    returned: Returned,
    **about: Any,
) -> Exported:
    """The graph of an exported program; `about` is what `Exported` says of the capture beside it."""
    graph, signature = program.graph_module.graph, program.graph_signature
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    first_name = {other: name for name, item in known.items() for other in (name, *item.aliases)}
    holds = {
        by_name[name]: first_name[target.removeprefix(f"{ROOT}.")]
        for name, target in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items()
    }
    _merge_aliases(graph, holds)
    open_regions(graph, program.graph_module)
    for node in reversed(graph.nodes):
        if node.target in _CHECKS and not node.users:
            graph.erase_node(node)
    settle_regions(graph)
    constants = {
        by_name[name]: _constant(program, target)
        for name, target in signature.inputs_to_lifted_tensor_constants.items()
    }
    taken = {by_name[str(name)]: item for name, item in zip(signature.user_inputs, inputs, strict=True)}
    symbols = frozenset(node.meta["val"].shape[0].node.expr for node, item in taken.items() if item.per_sample)
    samples = _compute_sizes_from_samples(graph, symbols)
    _gather_parts(graph)
    _write_buffers_early(graph, holds)
    return Exported(
        graph=graph,
        root=program.graph_module,
        held=known,
        holds=holds,
        constants=constants,
        inputs=taken,
        samples=samples,
        symbols=symbols,
        fixed=fixed,
        output=_output(graph, returned),
        **about,
    )


def _merge_aliases(graph: fx.Graph, holds: dict[fx.Node, str]) -> None:
    """Tied weights arrive as several placeholders, or as one with any of the names: keep one for each tensor."""
    first: dict[str, fx.Node] = {}
    for node, name in list(holds.items()):
        if name in first:
            node.replace_all_uses_with(first[name])
            graph.erase_node(node)
            del holds[node]
        else:
            first[name] = node


def _constant(program: torch.export.ExportedProgram, target: str) -> Tensor:
    value = program.constants[target]
    if not isinstance(value, Tensor) or value.is_meta:
        raise ModelError(
            f"capture of the constant {target.removeprefix(f'{ROOT}.')!r}",
            "it is a tensor on the meta device that is no parameter or buffer, so its values are not known",
            "register_buffer, or a model built by Skeleton, where only parameters are on the meta device",
        )
    return value.detach().clone()


def _output(graph: fx.Graph, returned: Returned) -> Output:
    node = next(iter(reversed(graph.nodes)))
    values = iter(node.args[0])
    leaves = [next(values) if leaf is VALUE else leaf for leaf in returned.leaves]
    if returned.spec is None or next(values, None) is not None:
        raise ModelError("capture of the output", "the graph returns other values than the model does")
    graph.erase_node(node)
    plain = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, fx.Node)
    opaque = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, plain)})
    leaves = [leaf if isinstance(leaf, plain) else None for leaf in leaves]
    if not any(isinstance(leaf, fx.Node) for leaf in leaves):
        raise ModelError(
            "capture of the output",
            f"the model returns no tensor ({', '.join(opaque) or 'nothing'})",
            "returning tensors, tuples, dicts, or a dataclass known to torch.export.register_dataclass",
        )
    return Output(returned.spec, leaves, opaque)


def _compute_sizes_from_samples(graph: fx.Graph, symbols: frozenset[sympy.Symbol]) -> fx.Node:
    """Replace every size that is a function of the batch by its formula in one input, `samples`."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        samples = graph.placeholder("samples_in_batch")
    tracer = fx.proxy.GraphAppendingTracer(graph)
    first = samples.next
    formulas: dict[sympy.Expr, fx.Node] = {SAMPLES: samples}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            continue
        expression = in_samples(value.node.expr, symbols)
        if expression.free_symbols != {SAMPLES}:
            continue
        if expression not in formulas:
            with graph.inserting_before(first):
                proxy = sympy_interp(PythonReferenceAnalysis, {SAMPLES: fx.Proxy(samples, tracer)}, expression)
            formulas[expression] = proxy.node
        node.replace_all_uses_with(formulas[expression])
        graph.erase_node(node)
    return samples


def _gather_parts(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or isinstance(node.meta.get("val"), Tensor):
            continue
        after = node
        for part in [user for user in node.users if user.target is operator.getitem]:
            after.append(part)
            after = part


def _write_buffers_early(graph: fx.Graph, holds: dict[fx.Node, str]) -> None:
    """Move `copy_(buffer, value)` from the end of the graph to just after the last use of the old value.

    Only where nothing but whole reads of the buffer are there: a view of it might be read later.
    """
    for node in list(graph.nodes):
        if node.target is not aten.copy_.default or node.args[0] not in holds or node.users:
            continue
        buffer, value = node.args[0], node.args[1]
        others = [user for user in buffer.users if user is not node]
        if not isinstance(value, fx.Node) or value.op != "call_function" or any(map(_may_alias, others)):
            continue
        if value.target is aten.detach.default and isinstance(value.args[0], fx.Node):
            value.args[0].append(value)
        order = {other: index for index, other in enumerate(graph.nodes)}
        latest = max([value, *others], key=order.__getitem__)
        latest.append(node)
        node.meta["nn_module_stack"] = latest.meta.get("nn_module_stack", {})


def _may_alias(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return True
    tagged = getattr(torch.Tag, "maybe_aliasing_or_mutating", None) in node.target.tags
    return tagged or any(part.alias_info is not None for part in node.target._schema.returns)
