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
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    read_about,
    saved_tensors,
)
from trainplan.errors import InputError, RunError
from trainplan.plan import text as plan_text
from trainplan.plan.plan import Plan
from trainplan.workload.optimizer import Groups

if TYPE_CHECKING:
    from trainplan.engine.held import Held
    from trainplan.engine.trainer import Trainer

# -- saving -----------------------------------------------------------------------------------------------------------


def save(trainer: Trainer, path: str | Path) -> None:
    """Write a checkpoint; all ranks call this. The folder appears whole or not at all."""
    refuse_servers(trainer.plan)
    trainer.settle()
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    instead = "a folder that every rank can write to"
    if trainer.rank == 0:
        training = _training(trainer)
        try:
            put_back(path)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / TRAINING).write_bytes(training)
        except OSError as error:
            raise RunError(f"saving {path}", str(error.strerror), instead) from None
    _barrier()
    # Copies of a stage are the same, apart from running statistics, which are those of the first.
    tensors = _tensors([held for held in trainer.part.held.values() if held.is_first_copy])
    for held in trainer.part.held.values():
        tensors |= _shared_out(trainer, held)
    try:
        with _quiet():
            dcp.save(tensors, checkpoint_id=str(partial), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise RunError(f"saving {path}", _reason(error), instead) from None
    if trainer.rank == 0:
        sizes = {found.name: found.stat().st_size for found in sorted(partial.iterdir())}
        files.write(partial / ABOUT, "checkpoint", files.to_json(_about(trainer, sizes)))
        old = old_place(path)
        if path.exists():
            os.replace(path, old)
        os.replace(partial, path)
        shutil.rmtree(old, ignore_errors=True)
    _barrier()


def refuse_servers(plan: Plan) -> None:
    """Refused where the optimizer's state is in pieces on servers, which keep none of it."""
    if plan.servers:
        why = f"the optimizer's state is in pieces on {plan.servers} server(s), and these are not saved"
        raise RunError(f"a checkpoint under {plan_text.brief(plan)!r}", why, "exchange=dataparallel or all-reduce")


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
    """Those of a stage of this rank: groups and scheduler are the same in all of them."""
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
            found |= _entries(name, held.optimizer.state.get(parameter, {}))
    return found


def _entries(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"optimizer.{name}:{key}": value for key, value in state.items() if value is not None}


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
            for name, entries in state.items():
                found |= _entries(name, entries)
    return found


# -- loading ----------------------------------------------------------------------------------------------------------


def load(trainer: Trainer, path: str | Path) -> None:
    """Take everything from a checkpoint, whatever plan it was saved under; all ranks call this. (Weights, buffers, the
    optimizer's state and settings, the scheduler, the step, the seed, the place in the data.)"""
    refuse_servers(trainer.plan)
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
    # Stage by stage, and unit by unit of what is shared out: all ranks load together, and one that has fewer to load
    # than another loads nothing then.
    loads = [(held, unit) for held in trainer.part.held.values() for unit in (-1, *range(_units(held)))]
    for held, unit in [*loads, *[(None, -1)] * (_most_loads(trainer) - len(loads))]:
        wanted: dict[str, Any] = {}
        if held is not None:
            own, model = (_whole_here(held), _model(held)) if unit < 0 else _unit_wanted(held, unit)
            wanted = {**model, **_state_wanted(held, own, saved)}
        try:
            with _quiet():
                dcp.load(wanted, checkpoint_id=str(path), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise broken(path, _reason(error)) from None
        if held is not None:
            _take_state(held, wanted, unit)
    for held in trainer.part.held.values():
        _take_settings(held, training)
    trainer.continue_from(about.step, about.seed, about.place)


def _units(held: Held) -> int:
    return len(held.shards.units) if held.shards is not None else 0


def _most_loads(trainer: Trainer) -> int:
    """How many loads the rank with the most of them has."""
    plan, units = trainer.plan, trainer.part.layout.units
    count = Counter[int]()
    for stage in range(plan.depth):
        for rank in plan.replicas_of(stage):
            count[rank] += 1 + len(units[stage])
    return max(count.values())


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


def _state_wanted(held: Held, parameters: Mapping[str, nn.Parameter], saved: dict[str, Any]) -> dict[str, Any]:
    """Places for the optimizer's state of some of the parameters that are here."""
    wanted = dict[str, Any]()
    groups = held.optimizer.param_groups
    on_device = {p for group in groups if group.get("fused") or group.get("capturable") for p in group["params"]}
    for key, item in saved.items():
        name, _, entry = key.removeprefix("optimizer.").rpartition(":")
        if not key.startswith("optimizer.") or name not in parameters:
            continue
        if not isinstance(item, TensorStorageMetadata):
            wanted[key] = None
            continue
        # The number of the step stays on the host, unless the optimizer's kernel reads it, as torch has it.
        parameter = parameters[name]
        on_host = entry == "step" and parameter not in on_device
        device = torch.device("cpu") if on_host else parameter.device
        wanted[key] = torch.empty(item.size, dtype=item.properties.dtype, device=device)
    return wanted


def _take_settings(held: Held, training: dict[str, Any]) -> None:
    for group, stored in zip(held.optimizer.param_groups, training["groups"], strict=True):
        group.update({key: _like(value, group.get(key)) for key, value in stored["settings"].items()})
    if held.scheduler is not None:
        held.scheduler.load_state_dict(training["scheduler"])


def _take_state(held: Held, loaded: dict[str, Any], unit: int = -1) -> None:
    """What was loaded of the optimizer, and of a unit its weights: as it is, or this rank's part of it."""
    shards, state = held.shards, held.optimizer.state
    found: dict[str, dict[str, Any]] = {}
    for key, value in loaded.items():
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition(":")
            found.setdefault(name, {})[entry] = value
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


def _reason(error: CheckpointException) -> str:
    """What the first rank that failed said."""
    rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {line_of(first)}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that a run of one process is one of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
