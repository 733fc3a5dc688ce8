"""Checkpoints that do not know the layout: saved under one plan, resumed under another.

Tensors are saved by torch's distributed checkpoint under the model's own parameter names, the optimizer's state under
the name of the parameter that it belongs to, so any rank of any plan finds what it needs. The optimizer's groups and
the scheduler are the same on every rank (`workload.optimizer`), so rank 0 writes them.

A checkpoint appears whole or not at all: it is written to a folder beside its place (`checkpoint_folder.py`), and
renamed. Whatever is killed meanwhile, the one that was there before is found again.
"""

from __future__ import annotations

import io
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainplan import files
from trainplan.engine.checkpoint_folder import (
    ABOUT,
    TRAINING,
    About,
    broken,
    line_of,
    old_place,
    put_back,
    quiet,
    read_about,
    reason,
    saved_tensors,
)
from trainplan.engine.checkpoint_servers import portions_of_server, refuse_asynchronous, served_state
from trainplan.engine.checkpoint_state import Portion, by_name, entries, state_wanted
from trainplan.errors import InputError, RunError
from trainplan.plan import text as plan_text
from trainplan.workload.optimizer import Groups

if TYPE_CHECKING:
    from trainplan.engine.held import Held
    from trainplan.engine.serving import Shard
    from trainplan.engine.trainer import Trainer

# -- saving -----------------------------------------------------------------------------------------------------------


def save(trainer: Trainer, path: str | Path) -> None:
    """Write a checkpoint; all ranks call this. The folder appears whole or not at all."""
    refuse_asynchronous(trainer.plan)
    trainer.settle()
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    instead = "a folder that every rank can write to"
    writes_settings = trainer.rank == trainer.plan.workers if trainer.plan.servers else trainer.rank == 0
    training = _training(trainer) if writes_settings else b""
    try:
        if trainer.rank == 0:
            put_back(path)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        if trainer.plan.servers:
            _barrier()  # the folder is there
        if writes_settings:
            (partial / TRAINING).write_bytes(training)
    except OSError as error:
        raise RunError(f"saving {path}", str(error.strerror), instead) from None
    _barrier()
    # Copies of a stage are the same, apart from running statistics, which are those of the first.
    tensors = _tensors([held for held in trainer.part.held.values() if held.is_first_copy])
    for held in trainer.part.held.values():
        tensors |= _shared_out(trainer, held)
    for name, state in served_state(trainer).items():
        tensors |= entries(name, state)
    try:
        with quiet():
            dcp.save(tensors, checkpoint_id=str(partial), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise RunError(f"saving {path}", reason(error), instead) from None
    if trainer.rank == 0:
        sizes = {found.name: found.stat().st_size for found in sorted(partial.iterdir())}
        files.write(partial / ABOUT, "checkpoint", files.to_json(_about(trainer, sizes)))
        old = old_place(path)
        if path.exists():
            os.replace(path, old)
        os.replace(partial, path)
        shutil.rmtree(old, ignore_errors=True)
    _barrier()


def _about(trainer: Trainer, sizes: dict[str, int]) -> About:
    optimizer, scheduler = _optimizer(trainer)
    return About(
        workload=trainer.workload.name, plan=plan_text.text(trainer.plan), optimizer=type(optimizer).__name__,
        scheduler=_kind(scheduler), step=trainer.steps_done, seed=trainer.seed, place=trainer.place, files=sizes,
    )  # fmt: skip


def _kind(scheduler: Any) -> str:
    return "" if scheduler is None else type(scheduler).__name__


def _training(trainer: Trainer) -> bytes:
    """The optimizer's groups with their settings, and the scheduler's state."""
    optimizer, scheduler = _optimizer(trainer)
    groups = [
        {"names": list(names), "settings": {k: v for k, v in group.items() if k not in ("params", "param_names")}}
        for names, group in zip(trainer.optimizer_groups, optimizer.param_groups, strict=True)
    ]
    state = _without_functions(scheduler.state_dict()) if scheduler is not None else None
    stream = io.BytesIO()
    try:
        torch.save({"groups": groups, "scheduler": state}, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)  # what cannot be read again is found now, not on the day it is needed
    except Exception as error:
        what = "saving the settings of the optimizer and the state of its scheduler"
        why = f"they hold more than numbers, words, tensors, and lists or dicts of those ({line_of(error)})"
        raise RunError(what, why, "a state_dict of the scheduler that leaves it out") from None
    return stream.getvalue()


def _without_functions(value: Any) -> Any:
    """Functions are the factory's to make again, as torch's own schedulers have it.

    >>> import math; from collections import Counter
    >>> _without_functions({"last_epoch": 3, "shape": math.cos, "parts": [{"fn": math.sin, "steps": Counter([2, 2])}]})
    {'last_epoch': 3, 'parts': [{'steps': Counter({2: 2})}]}
    """
    if type(value) is dict:
        return {key: _without_functions(item) for key, item in value.items() if not callable(item)}
    return [_without_functions(item) for item in value] if type(value) is list else value


def _optimizer(trainer: Trainer) -> tuple[torch.optim.Optimizer, Any]:
    """Those of a stage of this rank, or of a server: groups and scheduler are the same in all of them."""
    if trainer.part.shard is not None:
        return trainer.part.shard.optimizer, trainer.part.shard.scheduler
    held = next(iter(trainer.part.held.values()))
    return held.optimizer, held.scheduler


def _model(held: Held) -> dict[str, Tensor]:
    """Weights and buffers, but for what replicas share out."""
    tensors = {**dict(held.stage.named_parameters()), **dict(held.stage.named_buffers())}
    apart = held.shards.names if held.shards is not None else ()
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items() if name not in apart}


def _tensors(copies: list[Held]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for held in copies:
        found |= _model(held)
        for name, parameter in _whole_here(held).items():
            found |= entries(name, held.optimizer.state.get(parameter, {}))
    return found


def _whole_here(held: Held) -> dict[str, nn.Parameter]:
    """The parameters of a stage that this rank steps whole."""
    apart = held.shards.names if held.shards is not None else ()
    return {name: p for name, p in held.parameters.items() if name not in apart}


def _shared_out(trainer: Trainer, held: Held) -> dict[str, Any]:
    """What replicas share out, as if it were whole: one unit after the other is gathered, and each is written by
    another of those who share them, so that nobody holds more than the mean. Only the first group of replicas writes.
    """
    shards, found = held.shards, dict[str, Any]()
    if shards is None or trainer.replica >= trainer.plan.sharers:
        return found
    for unit in range(len(shards.units)):
        weights = shards.whole_weights(unit)
        state = shards.whole_state(unit, held.optimizer.state)
        if unit % trainer.plan.sharers == shards.place:
            found |= {f"model.{name}": tensor for name, tensor in weights.items()}
            for name, own in state.items():
                found |= entries(name, own)
    return found


# -- loading ----------------------------------------------------------------------------------------------------------


def load(trainer: Trainer, path: str | Path) -> None:
    """Take everything from a checkpoint, whatever plan it was saved under; all ranks call this. (Weights, buffers, the
    optimizer's state and settings, the scheduler, the step, the seed, the place in the data.)"""
    refuse_asynchronous(trainer.plan)
    trainer.settle()
    path = Path(path)
    if trainer.rank == 0:
        put_back(path)
    _barrier()
    # From here to `dcp.load` every rank looks at the whole checkpoint, so that all refuse it, or none.
    about = read_about(path)
    saved = saved_tensors(path)
    _check_model(trainer, path, about, saved)
    training = _check_training(trainer, path, about)
    # Stage by stage, and unit by unit of what is shared out, or load by load of a server: all ranks load together, and
    # one that has fewer to load than another loads nothing then.
    portions = _portions(trainer, saved)
    for number in range(_most_loads(trainer)):
        wanted, take = portions[number] if number < len(portions) else (dict, _nothing)
        places = wanted()
        try:
            with quiet():
                dcp.load(places, checkpoint_id=str(path), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise broken(path, reason(error)) from None
        take(places)
    for own in (trainer.part.shard, *trainer.part.held.values()):
        if own is not None:
            _take_settings(own, training)
    trainer.continue_from(about.step, about.seed, about.place)


def _portions(trainer: Trainer, saved: dict[str, Any]) -> list[Portion]:
    """What this rank loads, one after the other: places for it, and what becomes of it once it is there."""
    part, found = trainer.part, list[Portion]()
    for held in part.held.values():
        steps = part.layout.steps_at(trainer.rank)  # else the optimizer's state is with the servers
        for unit in (-1, *range(_units(held))):

            def wanted(held: Held = held, unit: int = unit, steps: bool = steps) -> dict[str, Any]:
                own, model = (_whole_here(held), _model(held)) if unit < 0 else _unit_wanted(held, unit)
                return {**model, **(state_wanted(held.optimizer, own, saved) if steps else {})}

            found.append((wanted, lambda places, held=held, unit=unit: _take_state(held, places, unit)))  # type: ignore[misc]
    return found + portions_of_server(trainer, saved)


def _nothing(places: dict[str, Any]) -> None:
    """What becomes of nothing."""


def _units(held: Held) -> int:
    return len(held.shards.units) if held.shards is not None else 0


def _most_loads(trainer: Trainer) -> int:
    """How many loads the rank with the most of them has."""
    plan, units = trainer.plan, trainer.part.layout.units
    count = Counter[int]()
    for stage in range(plan.depth):
        for rank in plan.replicas_of(stage):
            count[rank] += 1 + len(units[stage])
    service = trainer.part.layout.service
    servers = [len(loads) for loads in service.by_server] if service is not None and plan.servers else []
    return max([*count.values(), *servers])


def _unit_wanted(held: Held, unit: int) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """The parameters of a unit that this rank has a part of, and places for them as a whole."""
    assert held.shards is not None
    own = {name: held.shards.pieces[name] for name in held.shards.units[unit].parts(held.shards.place)}
    whole = dict(zip(held.shards.units[unit].names, held.shards.weights[unit], strict=True))
    return own, {f"model.{name}": torch.empty(whole[name].shape, dtype=p.dtype) for name, p in own.items()}


def _check_model(trainer: Trainer, path: Path, about: About, saved: dict[str, Any]) -> None:
    """Every tensor of the whole model is there, with its shape and type, and there is none of another model."""
    held = trainer.captured.exported.held
    other = about.workload != trainer.workload.name
    of = f"it is of {about.workload}, and this run trains {trainer.workload.name}: " if other else ""
    instead = "the checkpoint of this model"
    for name, item in held.items():
        entry = saved.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            raise InputError(f"checkpoint {path}", f"{of}there is no {name!r} in it", instead)
        there, here = (tuple(entry.size), entry.properties.dtype), (item.shape, item.dtype)
        if there != here:
            why = f"{of}{name!r} is {there[0]} {there[1]} there, and {here[0]} {here[1]} here"
            raise InputError(f"checkpoint {path}", why, instead)
    for key in saved:
        name = key.removeprefix("model.")
        if key.startswith("model.") and name not in held:
            raise InputError(f"checkpoint {path}", f"{of}it has a {name!r}, which this model has not", instead)


def _check_training(trainer: Trainer, path: Path, about: About) -> dict[str, Any]:
    """The settings and the scheduler, if they are of an optimizer and a scheduler such as this run's."""
    optimizer, scheduler = _optimizer(trainer)
    here = type(optimizer).__name__, _kind(scheduler)
    for what, theirs, ours in zip(("optimizer", "scheduler"), (about.optimizer, about.scheduler), here, strict=True):
        if theirs != ours:
            why = f"it was saved with {theirs or f'no {what}'}, and this run has {ours or 'none'}"
            raise InputError(f"checkpoint {path}", why, f"the {what} that it was saved with")
    try:
        training: dict[str, Any] = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    except Exception as error:
        raise broken(path, f"{TRAINING} cannot be read ({line_of(error)})") from None
    _check_groups(trainer.optimizer_groups, [tuple(group["names"]) for group in training["groups"]], path)
    return training


def _check_groups(here: Groups, there: list[tuple[str, ...]], path: Path) -> None:
    ours, theirs = ({name: place for place, names in enumerate(groups) for name in names} for groups in (here, there))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            place = [f"group {p[name]}" if name in p else "no group" for p in (theirs, ours)]
            why = f"{name!r} is in {place[0]} of the optimizer there, and in {place[1]} here"
            raise InputError(f"checkpoint {path}", why, "an optimizer with the same groups")
    if len(here) != len(there):
        why = f"its optimizer has {len(there)} groups, and this run's {len(here)}"
        raise InputError(f"checkpoint {path}", why, "an optimizer with the same groups")


def _take_settings(held: Held | Shard, training: dict[str, Any]) -> None:
    for group, stored in zip(held.optimizer.param_groups, training["groups"], strict=True):
        group.update({key: _like(value, group.get(key)) for key, value in stored["settings"].items()})
    if held.scheduler is not None:
        held.scheduler.load_state_dict(training["scheduler"])


def _take_state(held: Held, loaded: dict[str, Any], unit: int = -1) -> None:
    """What was loaded of the optimizer, and of a unit its weights: as it is, or this rank's part of it."""
    shards, state = held.shards, held.optimizer.state
    found = by_name(loaded)
    if unit >= 0:
        assert shards is not None
        for name in shards.units[unit].parts(shards.place):
            state.pop(shards.pieces[name], None)
        shards.take_weights(unit, {key.removeprefix("model."): v for key, v in loaded.items() if key[:6] == "model."})
        shards.take_state(unit, found, state)
        return
    for name, parameter in _whole_here(held).items():
        state.pop(parameter, None)
        for entry, value in found.get(name, {}).items():
            state[parameter][entry] = value


def _like(value: Any, there: Any) -> Any:
    """A learning rate that is a tensor is where the one before it was."""
    return value.to(there.device) if isinstance(value, Tensor) and isinstance(there, Tensor) else value


# -- small things -----------------------------------------------------------------------------------------------------


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
