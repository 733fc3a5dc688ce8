"""The modes in which a model is trained: those of its modules, as the user built it.

Who fine-tunes on a frozen backbone puts that into evaluation mode, and trains the rest. Such a model is trained as it
stands. One that is wholly in evaluation mode, as `from_pretrained` gives it, is not meant to be trained in that.
"""

from __future__ import annotations

from torch import nn


def in_training(model: nn.Module) -> nn.Module:
    """The model in the modes in which it is trained: as it stands if they are mixed, else all in training mode.

    >>> head = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    >>> in_training(head.eval())[0].training
    True
    >>> frozen = nn.Sequential(nn.BatchNorm1d(2).eval(), head)
    >>> [module.training for module in in_training(frozen)]
    [False, True]
    """
    if len({module.training for module in model.modules()}) == 1:
        model.train()  # also of a model in training mode: its own train() may keep some parts out of it
    return model


def kept_in_evaluation(model: nn.Module) -> list[str]:
    """The parts that stay in evaluation mode while others are trained, by the name of the outermost module of each.

    >>> kept_in_evaluation(nn.Sequential(nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).eval(), nn.Linear(2, 2)))
    ['0']
    """
    if not any(module.training for module in model.modules()):
        return []
    named = [(name, module) for name, module in model.named_modules() if not module.training]
    names = {name for name, _ in named}
    return [name for name, _ in named if not name or name.rpartition(".")[0] not in names]
