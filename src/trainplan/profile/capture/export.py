"""A model and an example batch become one graph of operators.

`torch.export` (non-strict) runs the model's forward once on fake tensors, which have shapes and no memory, with the
number of samples as a symbol. So a model on the meta device is captured exactly as a real one is, and nothing is ever
computed here. The graph is the undecomposed training graph: `aten.batch_norm`, `aten.scaled_dot_product_attention`
and in-place operators stay what the user wrote.

The model is called through a wrapper that takes the tensors of the batch one by one; every other argument becomes
part of the graph, and is checked when the graph runs.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from trainplan.errors import ModelError
from trainplan.profile.capture.exported import ROOT, VALUE, Constant, Exported, Input, Returned
from trainplan.profile.capture.modules import refuse_modules
from trainplan.profile.capture.refuse import Watch
from trainplan.profile.capture.state import changed, python_state, settles
from trainplan.profile.capture.tensors import Held, held, replaced, values_of
from trainplan.profile.capture.tidy import tidy
from trainplan.workload.batch import per_sample
from trainplan.workload.modes import kept_in_evaluation
from trainplan.workload.workload import Batch


class _Flat(nn.Module):
    """The model, taking the tensors of a batch one by one and returning the tensors of its output."""

    def __init__(self, model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.train(model.training)
        self.add_module(ROOT, model)
        self.leaves, self.spec = leaves, spec
        self.returned = Returned()

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        fresh = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec
        )
        model = self.get_submodule(ROOT)
        before, python = _state(model), python_state(model)
        output = model(*args, **kwargs)
        self._settle_state(model, before)
        self.watch.stateful |= changed(python, python_state(model)) is not None
        leaves, self.returned.spec = pytree.tree_flatten(output)
        self.returned.leaves = [VALUE if _is_value(leaf) else leaf for leaf in leaves]
        return tuple(leaf for leaf in leaves if _is_value(leaf))

    def _settle_state(self, model: nn.Module, before: _State) -> None:
        """A buffer that forward replaced is written instead; other state that forward leaves behind is reported.

        (Export does the former only for buffers of the root, and drops the others without a word.)
        """
        for name, module in model.named_modules():
            buffers, attributes = before[name]
            for key, old in buffers.items():
                new = module._buffers.get(key)
                if new is not old and old is not None:
                    if new is None or new.shape != old.shape or new.dtype != old.dtype:
                        raise self.watch.refuse(
                            f"the buffer {key!r}",
                            f"forward replaces it by {_describe(new)}, and it was {_describe(old)}",
                            "a buffer that keeps its shape and type",
                            name,
                        )
                    old.copy_(new.detach())
                    module._buffers[key] = old
                    self.watch.replaced.add(f"{name}.{key}" if name else key)
            for key, value in vars(module).items():
                if key.startswith("_") or (key in attributes and attributes[key] is value):
                    continue
                if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                    raise self.watch.refuse(
                        f"the attribute {key!r}",
                        "forward keeps a tensor in it from one call to the next, and a capture would not",
                        "register_buffer, or returning it",
                        name,
                    )
                if key in attributes and isinstance(value, int | float | str) and value != attributes[key]:
                    self.watch.notes.append(
                        f"forward changes the attribute {key!r} of module {name!r}; "
                        f"its value {attributes[key]!r} at capture is part of the graph"
                    )


_State = dict[str, tuple[dict[str, Tensor | None], dict[str, Any]]]


def _state(model: nn.Module) -> _State:
    return {name: (dict(module._buffers), dict(vars(module))) for name, module in model.named_modules()}


def _describe(value: Tensor | None) -> str:
    return "None" if value is None else f"{tuple(value.shape)} {value.dtype}"


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def export(model: nn.Module, batch: Batch, device: torch.device) -> Exported:
    """Trace the model as it stands (training or not) on a batch like this one, as if it were on `device`."""
    if batch.samples < 2:
        raise ModelError(
            f"capture with {batch.samples} sample(s)",
            "with fewer than 2 samples the batch cannot be told from dimensions of size 1",
            "a batch of 2 samples or more",
        )
    refuse_modules(model)
    paths, spec = pytree.tree_flatten_with_path((batch.args, batch.kwargs))
    leaves = [leaf for _path, leaf in paths]
    given = [path for path, leaf in paths if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    splits = [per_sample(batch, _place(path), tensor) for path, tensor in zip(given, tensors, strict=True)]
    if not any(splits):
        raise ModelError(
            f"capture of {type(model).__name__}",
            f"no tensor of the batch has {batch.samples} (its number of samples) as first dimension",
            "a batch whose tensors have the samples first",
        )
    # Not one named dimension for all: that refuses the limits that operators set (32-bit indices on a GPU).
    shapes = tuple({0: torch.export.Dim.DYNAMIC} if split else None for split in splits)
    # A tensor that is passed twice (labels=input_ids) would be captured as one input, and a later batch where the two
    # differ would be read wrongly. So every argument is a tensor of its own.
    examples = tuple(torch.zeros_like(tensor, device=device) for tensor in tensors)

    known = held(model)
    fakes = _fakes(model, known, device)
    watch = Watch(model)
    flat = _Flat(model, leaves, spec, watch)
    grad_enabled = torch.is_grad_enabled()
    try:
        with (
            _quietly(),
            replaced(model, fakes, attributes_as_buffers=True),
            torch.enable_grad(),
            watch.watching(),
        ):
            program = torch.export.export(flat, examples, dynamic_shapes={"tensors": shapes}, strict=False)
    except Exception as error:
        if watch.refusals:
            raise watch.refusals[0] from None
        raise _explain(error, watch, model) from error
    finally:
        torch.set_grad_enabled(grad_enabled)
    if watch.refusals:  # raised inside forward, and swallowed there
        raise watch.refusals[0]
    if watch.stateful:
        watch.notes += _not_settled(model, fakes, tensors, leaves, spec, device)

    watch.notes += _in_evaluation(model)
    inputs = [
        Input(name, _keys(path), tuple(tensor.shape), tensor.stride(), tensor.dtype, split)
        for name, path, tensor, split in zip(_input_names(given), given, tensors, splits, strict=True)
    ]
    fixed = [Constant(_keys(path), leaf) for path, leaf in paths if not isinstance(leaf, Tensor)]
    return tidy(
        program,
        known,
        inputs,
        fixed,
        flat.returned,
        arguments=(len(batch.args), set(batch.kwargs)),
        device=device,
        example_samples=batch.samples,
        training=any(module.training for module in model.modules()),
        notes=watch.told(),
        replaced=frozenset(watch.replaced),
    )


def _in_evaluation(model: nn.Module) -> list[str]:
    """A note if parts are to learn in evaluation mode: whoever always calls `model.train()` may not have meant it."""
    parts = [
        repr(name) if name else "the model itself"
        for name in kept_in_evaluation(model)
        if any(parameter.requires_grad for parameter in model.get_submodule(name).parameters())
    ]
    if not parts:
        return []
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return [f"{', '.join(parts[:3])}{more}: trained in evaluation mode, as the model was given (else call its train())"]


def _not_settled(
    model: nn.Module,
    fakes: dict[str, Tensor],
    tensors: list[Tensor],
    leaves: list[Any],
    spec: pytree.TreeSpec,
    device: torch.device,
) -> list[str]:
    """Refuse a model whose Python state moves at every call; a note if that cannot be told without computing."""
    mode = next(fake.fake_mode for fake in fakes.values() if isinstance(fake, FakeTensor))

    def call() -> None:
        with mode:
            given = iter([torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors])
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], spec)
        with mode, replaced(model, fakes, attributes_as_buffers=True):
            model(*args, **kwargs)

    try:
        with _quietly(), torch.random.fork_rng(devices=[]):
            settles(model, call)
    except ModelError:
        raise
    except Exception as error:
        return [f"forward changes attributes; whether they come to rest only a real batch can tell ({error})"[:300]]
    return []


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the graphs and tracebacks that export prints before it raises: our errors say it in a sentence."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _fakes(model: nn.Module, known: dict[str, Held], device: torch.device) -> dict[str, Tensor]:
    """Tensors like the model's own, without memory."""
    fakes: dict[str, Tensor] = {}
    with FakeTensorMode():
        for name, tensor in values_of(model).items():
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            fakes[name] = nn.Parameter(fake, tensor.requires_grad) if known[name].kind == "parameter" else fake
    return fakes


def _explain(error: Exception, watch: Watch, model: nn.Module) -> ModelError:
    """The error of `torch.export`, in our words."""
    text = " ".join(str(error).split())
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__ or ".item()" in text:
        return ModelError(
            f"capture of {watch.module}",
            f"its control flow depends on the values of tensors, so no one graph is right for all ({text[:200]})",
            "torch.where or torch.cond instead of the branch",
        )
    if "specialized" in text or "Constraints violated" in text:
        return ModelError(
            f"capture of {type(model).__name__}",
            f"its forward only works for certain batch sizes ({text[:200]})",
            "taking sizes from x.shape, or -1 in view and reshape, instead of a fixed batch size",
        )
    return ModelError(
        f"capture of {type(model).__name__}",
        f"torch.export failed in {watch.module}: {type(error).__name__}: {text[:300]}",
        "inputs of the shapes and types that forward takes, if that is what failed, or rewriting that part with tensor "
        "operators (every plan, dp too, runs the captured model)",
    )


def _keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path)


def _place(path: tuple[Any, ...]) -> str:
    """As `workload.batch.tensors` names it."""
    first, *rest = _keys(path)
    return "".join([("args", "kwargs")[first], *(f"[{key}]" for key in rest)])


def _input_names(paths: list[tuple[Any, ...]]) -> list[str]:
    """Readable and unique: keyword arguments by their keyword, others by position (`arg0`)."""
    names = []
    for path in paths:
        first, *rest = _keys(path)
        head = f"arg{rest[0]}" if first == 0 else str(rest[0])
        names.append(".".join([head, *(str(key) for key in rest[1:])]))
    return names
