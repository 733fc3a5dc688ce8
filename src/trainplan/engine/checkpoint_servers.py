"""What parameter servers have of a checkpoint: the optimizer's state, which is nowhere else, in pieces.

Workers have the weights, and save them as under any other plan. A server saves the state of the parameters that it has
whole; of those that are split over all servers, one server after the other puts the pieces together, so that nobody
holds more than the mean of them. Whoever loads as a server takes load by load what it has pieces of, and keeps these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainplan.engine.checkpoint_state import Portion, by_name, state_wanted
from trainplan.engine.world import groups_of
from trainplan.errors import RunError
from trainplan.plan import text as plan_text
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS

if TYPE_CHECKING:
    from trainplan.engine.serving import Shard
    from trainplan.engine.trainer import Trainer
    from trainplan.program.lower.service import Load

State = dict[str, dict[str, Any]]  # parameter → entry → what an optimizer keeps


def refuse_asynchronous(plan: Plan) -> None:
    """Refused where workers and servers are never all at the same step."""
    if plan.exchange in ASYNCHRONOUS:
        why = (
            f"under exchange={plan.exchange} workers are at different steps, so there is no moment that could be saved"
        )
        raise RunError(f"a checkpoint under {plan_text.brief(plan)!r}", why, "exchange=ps-bsp")


def served_state(trainer: Trainer) -> State:
    """The optimizer's state that this rank is to save, of whole parameters; all ranks call this."""
    service, shard = trainer.part.layout.service, trainer.part.shard
    if service is None or service.at_root:
        return {}
    split = sorted({piece.name for load in service.loads for piece in load.pieces if not piece.whole})
    (group,) = groups_of((tuple(map(service.rank, service.servers)),)) if split else (None,)
    if shard is None:
        return {}
    state = shard.optimizer.state
    found: State = {
        piece.name: dict(state.get(shard.parameters[str(piece)], {}))
        for load in shard.loads
        for piece in load.pieces
        if piece.whole
    }
    own = {p.name: str(p) for load in shard.loads for p in load.pieces if not p.whole}
    for number, name in enumerate(split):
        to = service.rank(number % len(service.servers))
        gathered: list[Any] | None = [None] * len(service.servers) if trainer.rank == to else None
        dist.gather_object(dict(state.get(shard.parameters[own[name]], {})), gathered, dst=to, group=group)
        if gathered is not None:
            shape = trainer.captured.exported.held[name].shape
            found[name] = {key: _joined([one[key] for one in gathered], shape) for key in gathered[0]}
    if group is not None:
        dist.destroy_process_group(group)
    return found


def _joined(pieces: list[Any], shape: tuple[int, ...]) -> Any:
    """An entry of a whole parameter, out of those of its pieces: side by side, or the same in all of them."""
    first = pieces[0]
    return torch.cat(pieces).view(shape) if isinstance(first, Tensor) and first.dim() > 0 else first


def portions_of_server(trainer: Trainer, saved: dict[str, Any]) -> list[Portion]:
    """What a server loads, load by load: the parameters that it has pieces of, whole, and their state."""
    shard, held = trainer.part.shard, trainer.captured.exported.held
    found: list[Portion] = []
    if shard is None:
        return found
    for load in shard.loads:

        def wanted(load: Load = load) -> dict[str, Any]:
            names = [piece.name for piece in load.pieces]
            weights = {f"model.{n}": torch.empty(held[n].shape, dtype=held[n].dtype) for n in names}
            own = {piece.name: shard.parameters[str(piece)] for piece in load.pieces}
            return {**weights, **state_wanted(shard.optimizer, own, saved)}

        def take(places: dict[str, Any], load: Load = load) -> None:
            weights = {key.removeprefix("model."): v for key, v in places.items() if key.startswith("model.")}
            _take(shard, load, weights, by_name(places))

        found.append((wanted, take))
    return found


def _take(shard: Shard, load: Load, weights: Mapping[str, Tensor], found: Mapping[str, Mapping[str, Any]]) -> None:
    """A server's pieces of weights and of state that are given whole."""
    state = shard.optimizer.state
    for piece in load.pieces:
        parameter, whole = shard.parameters[str(piece)], weights[piece.name]
        with torch.no_grad():
            parameter.copy_(whole.reshape(-1)[piece.first : piece.last].view_as(parameter))
        state.pop(parameter, None)
        for key, value in found.get(piece.name, {}).items():
            each = isinstance(value, Tensor) and value.shape == whole.shape and value.dim() > 0
            own = value.reshape(-1)[piece.first : piece.last].view_as(parameter).clone() if each else value
            state[parameter][key] = own
