"""The states of a stage that replicas share out: where they lie, how they get whole, and who steps which.

The weights of a unit (`program/lower/units.py`) are views of one flat tensor, and a rank's share is a run of its
elements. The optimizer gets that run weight by weight, as parameters of their own, so that groups, per-parameter
options and schedulers are torch's own business. That is right for optimizers that treat every element alone, and only
for those.

Under zero=3 the flat tensor has memory only while it is gathered: its storage is emptied and filled again, because
graphs hold views of it (a transposed weight) that must find the same storage on their way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainplan.engine.transport import all_gather
from trainplan.errors import PlanError
from trainplan.plan.optimizers import ELEMENTWISE
from trainplan.program.lower.units import Unit

# What they keep of a whole weight: of one without dimensions (a temperature), all else looks alike.
_OF_A_WEIGHT = ("step", "eta", "mu", "mu_product")


def check_elementwise(optimizer: torch.optim.Optimizer, zero: int) -> None:
    """Refused where an optimizer needs more of a weight than the elements that a rank has."""
    name = type(optimizer).__name__
    if type(optimizer) not in {getattr(torch.optim, known) for known in ELEMENTWISE}:
        why = f"each rank steps a run of elements, and {name} is not known to treat every element of a weight alone"
        raise PlanError(f"zero={zero} with {name}", why, f"zero=0, or one of {', '.join(ELEMENTWISE)}")


class Shards:
    """What one rank has of one stage."""

    def __init__(
        self, units: Sequence[Unit], parameters: Mapping[str, nn.Parameter], place: int, zero: int,
        group: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        self.units, self.place, self.zero, self.group = units, place, zero, group
        self.names = {name for unit in units for name in unit.names}
        self.weights = [[parameters[name] for name in unit.names] for unit in units]
        self.flat: list[Tensor] = []  # whole units, of which the weights are views
        self.own: list[Tensor] = []  # this rank's share of each
        self.gradients: list[Tensor] = []  # of whole units under zero=1, otherwise of the shares
        self._views: list[list[Tensor]] = []  # under zero=1, of those: by unit, the gradient of every weight
        self.pieces: dict[str, nn.Parameter] = {}  # what is stepped here
        self._at: dict[str, tuple[int, int, int]] = {}  # weight → unit, and its elements of the share: from … to
        for number, (unit, weights) in enumerate(zip(units, self.weights, strict=True)):
            self._lay_out(number, unit, weights)
        if zero == 1:
            for weights, views in zip(self.weights, self._views, strict=True):
                for weight, view in zip(weights, views, strict=True):
                    weight.register_post_accumulate_grad_hook(lambda weight, view=view: _settle(weight, view))
        self.zero_gradients()
        self.close()

    def _lay_out(self, number: int, unit: Unit, weights: Sequence[nn.Parameter]) -> None:
        like = weights[0]
        flat = torch.zeros(unit.share * unit.sharers, dtype=like.dtype, device=like.device)
        begin = 0
        for weight in weights:
            view = flat[begin : begin + weight.numel()].view(weight.shape)
            view.copy_(weight.detach())
            weight.data = view
            begin += weight.numel()
        own = flat[self.place * unit.share : (self.place + 1) * unit.share]
        self.flat.append(flat)
        self.own.append(own.clone() if self.zero == 3 else own)
        self.gradients.append(torch.zeros_like(flat if self.zero == 1 else own))
        if self.zero == 1:
            parts = self.gradients[-1].split([*unit.counts, _spare(unit)])
            self._views.append([part.view(weight.shape) for part, weight in zip(parts, weights, strict=False)])
        starts = _starts(unit)
        for name, (first, last) in unit.parts(self.place).items():
            start = starts[name] + first - self.place * unit.share
            self._at[name] = number, start, start + last - first
            self.pieces[name] = nn.Parameter(self.own[number][start : start + last - first])

    # -- weights ----------------------------------------------------------------------------------------------------

    def open(self, unit: int) -> Tensor:
        """The memory that a unit is gathered into."""
        flat = self.flat[unit]
        if self.zero == 3:
            flat.untyped_storage().resize_(flat.numel() * flat.element_size())
        return flat

    def release(self, unit: int) -> None:
        """Give up the weights of a unit that were gathered."""
        if self.zero == 3:
            self.flat[unit].untyped_storage().resize_(0)

    def close(self) -> None:
        """Give up all that were gathered."""
        for unit in range(len(self.units)):
            self.release(unit)

    def gather(self) -> None:
        """All weights, whole, until they are given up; all who share them out call this."""
        for number, own in enumerate(self.own):
            all_gather(self.open(number), own.clone(), group=self.group)

    # -- gradients --------------------------------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Empty the gradients. Those of whole units are not written: what comes first takes their place."""
        if self.zero == 1:
            for weight in (weight for weights in self.weights for weight in weights):
                weight.grad = None
        else:
            for gradients in self.gradients:
                gradients.zero_()
        for name, piece in self.pieces.items():
            number, start, end = self._at[name]
            piece.grad = self.own_gradient(number)[start:end]

    def own_gradient(self, unit: int) -> Tensor:
        """This rank's share of the gradients of a unit."""
        whole, share = self.gradients[unit], self.units[unit].share
        return whole[self.place * share : (self.place + 1) * share] if self.zero == 1 else whole

    def to_scatter(self, unit: int) -> Tensor:
        """The gradients of a unit that a backward pass has made; from zero=2 on they are taken away."""
        weights = self.weights[unit]
        if self.zero == 1:
            for weight, view in zip(weights, self._views[unit], strict=True):
                _settle(weight, view)
            return self.gradients[unit]
        found = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        for weight in weights:
            weight.grad = None
        spare = found[0].new_zeros(_spare(self.units[unit]))
        return torch.cat([*(gradient.reshape(-1) for gradient in found), spare])

    # -- whole tensors, for checkpoints and comparisons ---------------------------------------------------------------

    def whole(self, unit: int, of: Callable[[str, nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        """Of every weight of a unit a tensor in its shape, from what each rank has `of` its own part; all who share it
        out call this."""
        description, own = self.units[unit], self.own[unit]
        share = torch.zeros_like(own)
        for name in description.parts(self.place):
            value = of(name, self.pieces[name])
            _, start, end = self._at[name]
            if value is not None:
                share = share.to(value.dtype)
                share[start:end] = value
        flat = share.new_empty(share.numel() * description.sharers)
        all_gather(flat, share, group=self.group)
        return self.apart(unit, flat)

    def apart(self, unit: int, flat: Tensor) -> dict[str, Tensor]:
        """The weights of a unit, in their shapes, out of a flat tensor."""
        description = self.units[unit]
        parts = flat.split([*description.counts, _spare(description)])
        named = zip(description.names, self.weights[unit], parts, strict=False)
        return {name: part.view(weight.shape) for name, weight, part in named}

    def whole_gradients(self) -> dict[str, Tensor]:
        return {n: g for unit in range(len(self.units)) for n, g in self.whole(unit, lambda _, p: p.grad).items()}

    def whole_weights(self, unit: int) -> dict[str, Tensor]:
        return self.whole(unit, lambda _, piece: piece.detach())

    def whole_state(self, unit: int, state: Mapping[Any, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """What an optimizer keeps of every weight of a unit, as it would if it stepped whole weights."""
        own = {name: state.get(self.pieces[name], {}) for name in self.units[unit].parts(self.place)}
        kinds = {n: {k: None if _elementwise(v, self.pieces[n]) else v for k, v in s.items()} for n, s in own.items()}
        gathered: list[Any] = [None] * self.units[unit].sharers
        dist.all_gather_object(gathered, kinds, group=self.group)
        found: dict[str, dict[str, Any]] = {name: {} for name in self.units[unit].names}
        for one in gathered:
            for name, entries in one.items():
                found[name] |= entries
        for key in sorted({k for entries in found.values() for k, v in entries.items() if v is None}):
            tensors = self.whole(unit, lambda name, _, key=key: own[name].get(key))  # type: ignore[misc]
            for name, entries in found.items():
                if key in entries:
                    entries[key] = tensors[name].clone()
        return found

    def take_weights(self, unit: int, whole: Mapping[str, Tensor]) -> None:
        """This rank's part of weights that are given whole."""
        with torch.no_grad():
            for name, (first, last) in self.units[unit].parts(self.place).items():
                self.pieces[name].copy_(whole[name].reshape(-1)[first:last])

    def take_state(self, unit: int, whole: Mapping[str, Mapping[str, Any]], state: dict[Any, Any]) -> None:
        """This rank's part of an optimizer's state that is given whole."""
        shapes = {name: w.shape for name, w in zip(self.units[unit].names, self.weights[unit], strict=True)}
        for name, (first, last) in self.units[unit].parts(self.place).items():
            for key, value in whole.get(name, {}).items():
                part = isinstance(value, Tensor) and value.shape == shapes[name] and key not in _OF_A_WEIGHT
                state[self.pieces[name]][key] = value.reshape(-1)[first:last].clone() if part else value


def _settle(weight: nn.Parameter, view: Tensor) -> None:
    """Put the gradient of a weight where it belongs; passes after the first then add to it there."""
    if weight.grad is view:
        return
    if weight.grad is None:
        view.zero_()
    else:
        view.copy_(weight.grad)
    weight.grad = view


def _elementwise(value: Any, piece: nn.Parameter) -> bool:
    """Whether a part of an optimizer's state has an entry for every element."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == piece.shape


def _starts(unit: Unit) -> dict[str, int]:
    """Where each weight begins in the flat tensor."""
    found, begin = {}, 0
    for name, count in zip(unit.names, unit.counts, strict=True):
        found[name] = begin
        begin += count
    return found


def _spare(unit: Unit) -> int:
    """Elements that fill up the last share."""
    return unit.share * unit.sharers - sum(unit.counts)
