"""trainplan: the fastest way to train your PyTorch model on your machines that fits; predicted, explained, and run.

    trainplan.recommend("resnet50:cifar10", "4xTitanRTX", batch=256)
    trainplan.predict("profile.json", "dp=4", cluster="2x8xH100-SXM")

The functions are the commands, with the same names and arguments (`trainplan.api`); `trainplan.build` makes a trainer
for your own training loop, `trainplan.load` a `Workload` of your own model, and `trainplan.load_weights` gets the
trained model out of a checkpoint. Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainplan.version import VERSION as __version__

COMMANDS = (
    "profile", "cluster", "device", "roofline", "predict", "recommend", "budget", "explain", "run", "compare",
    "systems", "timeline", "study", "calibrate",
)  # fmt: skip
_ELSEWHERE = {  # name → where it is
    "load": "trainplan.workload.load",
    "load_weights": "trainplan.engine.trained",
    "Workload": "trainplan.workload.workload",
    "Batch": "trainplan.workload.workload",
    "Loss": "trainplan.workload.workload",
}
_ROOMS = ("profile", "cluster", "predict", "run")  # those that are modules too

if TYPE_CHECKING:
    from trainplan.api import (
        budget,
        build,
        calibrate,
        cluster,
        compare,
        device,
        explain,
        predict,
        profile,
        recommend,
        roofline,
        run,
        study,
        systems,
        timeline,
    )
    from trainplan.engine.trained import load_weights
    from trainplan.workload.load import load
    from trainplan.workload.workload import Batch, Loss, Workload


class _Room(ModuleType):
    """A room of the package that shares its name with a command: it can be called.

    `trainplan.predict` is the package in which predicting is done, and `trainplan.predict(…)` is the command.
    """

    @property
    def _command(self) -> Any:
        return getattr(importlib.import_module("trainplan.api"), self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._command)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._command(*args, **kwargs)


class _Package(ModuleType):
    """This package: gives the rooms that it is handed by the import system their callable form."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in COMMANDS and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"trainplan.{name}")
    if name in COMMANDS:
        return getattr(importlib.import_module("trainplan.api"), name)
    if name == "build":
        return importlib.import_module("trainplan.api").build
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *COMMANDS, *_ELSEWHERE, "build"})


__all__ = [
    "COMMANDS", "Batch", "Loss", "Workload", "__version__", "budget", "build", "calibrate", "cluster", "compare",
    "device", "explain", "load", "load_weights", "predict", "profile", "recommend", "roofline", "run", "study",
    "systems", "timeline",
]  # fmt: skip
