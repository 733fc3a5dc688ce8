"""How a workload is trained, apart from its model: batch, epoch, optimizer. These options every workload has.

>>> defaults = Training(batch=64, samples_per_epoch=50_000, optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4)
>>> table = defaults.options({"optimizer": "adamw"})
>>> {option.name: option.default for option in table if option.name in ("optimizer", "lr", "momentum")}
{'optimizer': 'sgd', 'lr': 0.001, 'momentum': 0.0}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError
from trainplan.workload import options
from trainplan.workload.call import Call, call
from trainplan.workload.options import Option

if TYPE_CHECKING:
    import torch

# (lr, momentum, weight_decay) where an optimizer is named and nothing else is said: torch's own defaults, and the
# usual momentum.
OPTIMIZERS = {"sgd": (0.01, 0.9, 0.0), "adam": (0.001, 0.0, 0.0), "adamw": (0.001, 0.0, 0.01)}


@dataclass(frozen=True)
class Training:
    """Defaults of a workload, or the values that hold for it."""

    batch: int
    samples_per_epoch: int
    optimizer: str = "adamw"
    lr: float = 3e-4
    momentum: float = 0.0
    weight_decay: float = 0.1
    clip_norm: float = 0.0  # 0: gradients are not clipped

    def options(self, given: Mapping[str, Any]) -> tuple[Option, ...]:
        """The table of options with their defaults, which depend on the optimizer where another one is named."""
        chosen = options.Option("optimizer", self.optimizer, choices=tuple(OPTIMIZERS))
        name = options.value(given.get("optimizer", self.optimizer), chosen, "the workload")
        own = (self.lr, self.momentum, self.weight_decay) if name == self.optimizer else OPTIMIZERS[name]
        return (
            Option("batch", self.batch, minimum=1),
            Option("samples_per_epoch", self.samples_per_epoch, minimum=1),
            chosen,
            Option("lr", own[0]),
            Option("momentum", own[1]),
            Option("weight_decay", own[2]),
            Option("clip_norm", self.clip_norm),
        )

    @staticmethod
    def of(values: Mapping[str, Any]) -> Training:
        """The values that `options.read` found, without those of other tables."""
        return Training(**{field.name: values[field.name] for field in fields(Training)})

    def factory(self) -> Call:
        """Makes the optimizer from (name, parameter) pairs."""
        if self.momentum and self.optimizer != "sgd":
            raise InputError(f"momentum={self.momentum} with {self.optimizer}", "only sgd has momentum", "momentum=0")
        extra = {"momentum": self.momentum} if self.optimizer == "sgd" else {}
        return call(make_optimizer, name=self.optimizer, lr=self.lr, weight_decay=self.weight_decay, **extra)


TRAINING_KEYS = tuple(field.name for field in fields(Training))
OPTIMIZER_KEYS = ("optimizer", "lr", "momentum", "weight_decay")


def named_optimizer(settings: Mapping[str, Any], where: str) -> tuple[Call, dict[str, Any], tuple[Option, ...]]:
    """The factory that `optimizer=`, `lr=` … describe, with their values and the table of the others' defaults.

    For workloads whose optimizer is a function of the user's: none of ours is their default, so the name of the one
    that replaces it is always spelled out.
    """
    table = Training(1, 1, optimizer="", lr=0.0, weight_decay=0.0).options(settings)
    values = options.read(settings, table, where)
    own = tuple(option for option in table if option.name in OPTIMIZER_KEYS)
    return Training.of(values).factory(), {option.name: values[option.name] for option in own}, own


def make_optimizer(parameters: Iterable[Any], name: str, **settings: float) -> torch.optim.Optimizer:
    import torch

    classes: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer: torch.optim.Optimizer = classes[name](parameters, **settings)
    return optimizer
