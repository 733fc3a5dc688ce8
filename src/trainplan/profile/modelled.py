"""From a workload to what its model does, operator by operator.

A model is built without values, captured, and traced on fake tensors. Where it is a list of many equal layers, it is
captured with three of them and expanded (`repeated`), which is checked in two ways: with four layers the expanded model
must be equal to the captured one, in everything; and the forward pass of the whole model, run once on fake tensors,
must consist of the operators of the short one with those of one layer repeated. Where anything is in the way, the
model is captured whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainplan.errors import TrainplanError
from trainplan.profile.attention import Gpu
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.tensors import replaced, values_of
from trainplan.profile.repeated import TRACED, expanded, same
from trainplan.profile.structure import structure
from trainplan.profile.trace import trace, trace_update
from trainplan.profile.traced import Traced
from trainplan.profile.unpriced import note
from trainplan.profile.untraceable import traceable
from trainplan.workload.batch import each_tensor
from trainplan.workload.workload import Batch, Workload

MANY = 8  # layers from which on it is worth while
SMALL, LARGE = 2, 4  # samples: two traces are run, the others lie on the lines through them


def modelled(
    workload: Workload,
    sizes: Sequence[int],
    gpu: Gpu | None,
    say: Callable[[str, float], None],
    lower: torch.dtype | None = None,
) -> Traced:
    """What a workload's model does; `sizes` are those that are traced should the two not be alike.

    `gpu`: as that one would run it; None: a CPU. `lower`: under autocast to that type.
    """
    say("capturing the model", 0.0)
    model = Skeleton(workload.build).model
    example = workload.inputs(2, 0)
    layers = equal_layers(model)
    found = _of_few(model, workload, example, layers, gpu, lower) if layers else None
    if found is None:
        found = in_one_piece(model, workload, example, sizes, gpu, say, lower)
    say("done", 1.0)
    return found


def in_one_piece(
    model: nn.Module,
    workload: Workload,
    example: Batch,
    sizes: Sequence[int],
    gpu: Gpu | None,
    say: Callable[[str, float], None] = lambda what, share: None,
    lower: torch.dtype | None = None,
) -> Traced:
    """The model as it stands."""
    captured = capture(model, example, workload.loss)
    base = structure(captured, workload, example)
    say("tracing its operators", 0.5)
    with traceable(captured, "operator by operator"):
        small, large = (trace(captured, workload, size, gpu, lower) for size in (SMALL, LARGE))
    base = replace(base, notes=(*base.notes, *note(small.unpriced | large.unpriced)))
    update = trace_update(captured, workload, {p.name for p in base.parameters if p.trainable}, gpu is not None)
    if small.like(large):
        base = replace(base, parameters=tuple(replace(p, sliced=p.name in small.cut) for p in base.parameters))
        pair = (replace(small, cut=frozenset()), replace(large, cut=frozenset()))  # which has names of layers in it
        return Traced(base, pair, update, lines=True)
    # A model that does other things for other batches: then every size is traced.
    with traceable(captured, "operator by operator"):
        each = tuple(trace(captured, workload, size, gpu, lower) for size in sizes)
    return Traced(base, each, update, lines=False)


# -- equal layers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """A list of equal layers in a model."""

    path: str
    modules: tuple[nn.Module, ...]

    @contextmanager
    def only(self, model: nn.Module, count: int) -> Iterator[None]:
        """The model with fewer of them: the first ones and the last."""
        place = model.get_submodule(self.path)
        kept = [*self.modules[: count - 1], self.modules[-1]]
        before = dict(place._modules)
        try:
            place._modules.clear()
            place._modules.update({str(number): layer for number, layer in enumerate(kept)})
            yield
        finally:
            place._modules.clear()
            place._modules.update(before)


def equal_layers(model: nn.Module) -> Layers | None:
    """The longest list of layers that are alike in all that can be seen, if it is long enough."""
    found = [
        Layers(path, tuple(module.children()))
        for path, module in model.named_modules()
        if path and type(module) in (nn.ModuleList, nn.Sequential) and len(module) >= MANY
    ]
    shared = _shared(model)
    alike = [
        layers
        for layers in found
        if len({id(layer) for layer in layers.modules}) == len(layers.modules)
        and not any(id(p) in shared for layer in layers.modules for p in layer.parameters())
        # The first may be another (in T5 it alone has a table of distances).
        and all(_alike(layers.modules[1], layer, number) for number, layer in enumerate(layers.modules[1:]))
    ]
    return max(alike, key=lambda layers: len(layers.modules), default=None)


def _shared(model: nn.Module) -> set[int]:
    """Parameters that have several names."""
    seen: set[int] = set()
    again: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (again if id(parameter) in seen else seen).add(id(parameter))
    return again


def _alike(first: nn.Module, other: nn.Module, apart: int) -> bool:
    """Whether a layer is like another: its modules, its tensors, its settings; a number may count the layers."""
    ours, theirs = list(first.named_modules()), list(other.named_modules())
    if [(name, type(module)) for name, module in ours] != [(name, type(module)) for name, module in theirs]:
        return False
    return all(_settings_alike(a, b, apart) for (_, a), (_, b) in zip(ours, theirs, strict=True))


def _settings_alike(one: nn.Module, other: nn.Module, apart: int) -> bool:
    def tensors(module: nn.Module) -> list[Any]:
        held = [*module._parameters.items(), *module._buffers.items()]
        return [(n, None if t is None else (t.shape, t.dtype, t.requires_grad)) for n, t in held]

    def settings(module: nn.Module) -> dict[str, Any]:
        return {key: value for key, value in vars(module).items() if not key.startswith("_")}

    if tensors(one) != tensors(other) or one._forward_hooks or other._forward_hooks:
        return False
    ours, theirs = settings(one), settings(other)
    return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key], apart) for key in ours)


def _equal(one: Any, other: Any, apart: int) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if type(one) is int and other - one == apart:
        return True
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # arrays
        return False


# -- a few of them --------------------------------------------------------------------------------------------------


def _of_few(
    model: nn.Module, workload: Workload, example: Batch, layers: Layers, gpu: Gpu | None, lower: torch.dtype | None
) -> Traced | None:
    """The model from one with few layers; None where that is not the same."""
    count = len(layers.modules)
    try:
        found, streams = [], []
        for few in (TRACED, TRACED + 1):
            with layers.only(model, few):
                found.append(in_one_piece(model, workload, example, (), gpu, lower=lower))
                streams.append(_stream(model, example))
        if not found[0].lines or not same(expanded(found[0], layers.path, TRACED + 1), found[1]):
            return None
        if not _grows(streams[0], streams[1], _stream(model, example), count):
            return None
        return expanded(found[0], layers.path, count)
    except (TrainplanError, RuntimeError, IndexError, KeyError, ValueError, AttributeError):
        return None  # the model needs all its layers; should it be broken, capturing it whole says how


class _Names(TorchDispatchMode):
    """Writes down every operator with the shapes that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            # Whether to leave a layer out, which some models draw lots for. What is captured leaves out none.
            return False
        out = function(*args, **(kwargs or {}))
        shapes = tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))
        self.seen.append((str(function), shapes))
        return out


def _stream(model: nn.Module, batch: Batch) -> list[Any]:
    """The operators of a forward pass."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), torch.random.fork_rng(devices=[]):
        fakes: dict[str, Tensor] = {}
        for name, value in values_of(model).items():
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            fakes[name] = nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
        given = each_tensor(batch, mode.from_tensor)
        with replaced(model, fakes), _Names() as names:
            model(*given.args, **given.kwargs)
    return names.seen


def _grows(three: list[Any], four: list[Any], whole: list[Any], layers: int) -> bool:
    """Whether a list of operators grows by the same ones for every layer.

    >>> _grows(list("abbbc"), list("abbbbc"), list("abbbbbbc"), 6)
    True
    >>> _grows(list("abbbc"), list("abbbbc"), list("abbxbbbc"), 6)
    False
    """
    at = next((i for i, (a, b) in enumerate(zip(three, four, strict=False)) if a != b), len(three))
    layer = four[at : at + len(four) - len(three)]
    return whole == three[:at] + layer * (layers - TRACED) + three[at:]
