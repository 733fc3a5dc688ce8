"""What a traced forward pass would get wrong without saying so, caught while the forward pass runs.

Tracing keeps tensor operators and loses everything else. Four things in a `forward` would then train a different
model, silently: a custom `autograd.Function` (its backward is dropped), a hook on a tensor (dropped too), Python or
numpy randomness (one draw is frozen for ever), and a branch on tensor values (one side is frozen; `torch.export`
itself notices this one). A `Watch` runs beside the trace, knows which module is running, and turns the first such
thing into a `ModelError` that names that module.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.traceback import preserve_node_meta
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainplan.errors import ModelError
from trainplan.profile.capture.regions import noting

# Autograd functions that torch itself puts below operators (its own, or a torch.library.custom_op) while tracing. The
# graph has the operator above them, so nothing is lost.
_TORCH_INTERNAL = (
    "torch._higher_order_ops", "torch._functorch", "torch._dynamo", "torch._subclasses", "torch._library",
)  # fmt: skip
# The module whose autograd functions change what is kept, not what is computed.
_CHECKPOINT = "torch.utils.checkpoint"
CHECKPOINTING, SAVING = "its own checkpointing", "its own way to save tensors for backward"
_OURS = {
    CHECKPOINTING: "all is saved unless the plan says recompute=full, which is trainplan's",
    SAVING: "all is saved as it is unless the plan says recompute=full or offload=activations, which are trainplan's",
}


class Watch:
    """Follows a forward pass: which module runs, and what cannot be captured.

    `notes` collects what was captured in another form than it was written; `dropped` what is not kept of how forward
    saves tensors for backward (`torch.utils.checkpoint`, `save_on_cpu`), with the module that does it first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name_of = {id(module): name for name, module in model.named_modules()}
        self.kind = type(model).__name__
        self.running: list[str] = []
        self.failed_in: str | None = None
        self.refusals: list[ModelError] = []
        self.notes: list[str] = []
        self.dropped: dict[str, str] = {}
        self.replaced: set[str] = set()  # buffers in whose place forward puts other tensors
        self.stateful = False  # forward changed some attribute of a module

    @property
    def module(self) -> str:
        """The innermost module that is running, or in which an exception was raised, as the user would write it."""
        return self._called(self.running[-1] if self.running else (self.failed_in or ""))

    def _called(self, name: str) -> str:
        return f"module {name!r}" if name else f"the model's own forward ({self.kind})"

    def told(self) -> list[str]:
        """The notes, with a line for each way of saving tensors that is not kept."""
        found = self.dropped.items()
        return [*self.notes, *(f"{what} is not kept (first in {where}): {_OURS[what]}" for what, where in found)]

    def refuse(self, what: str, why: str, instead: str, name: str | None = None) -> ModelError:
        """The error to raise, about the module that is running or the one that is named."""
        where = self.module if name is None else self._called(name)
        error = ModelError(f"capture of {what} in {where}", why, instead)
        self.refusals.append(error)
        return error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow whatever forward pass runs inside."""
        dice = _Dice()

        def enter(module: nn.Module, args: Any) -> None:
            self._roll(dice)
            if id(module) in self.name_of:
                self.running.append(self.name_of[id(module)])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._roll(dice)
            if id(module) in self.name_of and self.running:
                self.running.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            with self._functions(), self._saving(), preserve_node_meta(), _Calls(self):
                yield
                self._roll(dice)
        except BaseException:
            self.failed_in = self.running[-1] if self.running else None
            raise
        finally:
            self.running.clear()
            for handle in handles:
                handle.remove()

    def _roll(self, dice: _Dice) -> None:
        source = dice.rolled()
        if source:
            raise self.refuse(
                "randomness",
                f"forward draws from {source}, and a capture would repeat one draw for ever",
                "drawing with torch (torch.rand, nn.Dropout), or moving the draw out of forward",
            )

    @contextmanager
    def _functions(self) -> Iterator[None]:
        original = Function.__dict__["apply"]

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            if cls.__module__.startswith(_TORCH_INTERNAL):
                return original.__func__(cls, *args, **kwargs)
            if cls.__module__ == _CHECKPOINT and cls.__name__ == "CheckpointFunction":
                # The re-entrant form: the function inside is traced as if the wrapper were not there.
                self.dropped.setdefault(CHECKPOINTING, self.module)
                function, _preserve_random_state, *inputs = args
                return function(*inputs)
            if cls.__module__ == _CHECKPOINT:
                return original.__func__(cls, *args, **kwargs)
            if cls.__name__ == "BackwardHookFunction":
                raise self.refuse(
                    "a backward hook",
                    "tracing drops hooks that act on gradients, so gradients would be wrong",
                    "removing the hook, or putting it on a parameter",
                )
            raise self.refuse(
                f"the custom autograd function {cls.__name__}",
                "tracing keeps its forward and drops its backward, so its gradients would be wrong",
                "writing it with ordinary operators, or as a torch.library.custom_op with register_autograd",
            )

        Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Function.apply = original  # type: ignore[method-assign]

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Note where forward changes what is saved for backward."""
        original = saved_tensors_hooks.__enter__

        def enter(hooks: saved_tensors_hooks) -> None:
            what = CHECKPOINTING if type(hooks).__module__ == _CHECKPOINT else SAVING
            self.dropped.setdefault(what, self.module)
            original(hooks)

        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
        try:
            yield
        finally:
            saved_tensors_hooks.__enter__ = original  # type: ignore[method-assign]


class _Dice:
    """Whether Python's or numpy's global generator moved since last asked."""

    def __init__(self) -> None:
        self._python, self._numpy = self._states()

    @staticmethod
    def _states() -> tuple[Any, Any]:
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        return random.getstate(), (kind, keys.tobytes(), position, has_gauss, gauss)  # type: ignore[union-attr]

    def rolled(self) -> str:
        python, numpy = self._states()
        source = "Python's random" if python != self._python else "numpy.random" if numpy != self._numpy else ""
        self._python, self._numpy = python, numpy
        return source


class _Calls(TorchFunctionMode):
    """Sees every call of a torch function.

    Notes its region. Refuses hooks that forward puts on tensors: they act on gradients, and a trace does not have
    them. Answers `torch.rand([]) < 0.0`, which is false whatever is drawn: many transformers models ask it in every
    layer (layer drop with probability 0), and it would look like a branch on values.
    """

    UNIFORM: frozenset[Callable[..., Any]] = frozenset({torch.rand, torch.rand_like})
    LESS: frozenset[Callable[..., Any]] = frozenset({torch.Tensor.__lt__, torch.Tensor.lt, torch.lt})

    HOOKS: frozenset[Callable[..., Any]] = frozenset(
        {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
    )

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.drawn: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.HOOKS:
            raise self.watch.refuse(
                "a tensor hook",
                "forward registers a hook on a tensor, and tracing drops it, so gradients would be wrong",
                "registering the hook on a parameter outside forward",
            )
        if function in self.LESS and args[0] in self.drawn and isinstance(args[1], int | float) and args[1] <= 0:
            return False
        with noting():
            result = function(*args, **(kwargs or {}))
        if function in self.UNIFORM:
            self.drawn[result] = True
        return result
