"""Checkpoints that do not know the layout: saved under one plan, resumed under another.

Tensors are saved by torch's distributed checkpoint under the model's own parameter names, the optimizer's state under
the name of the parameter that it belongs to, so any rank of any plan finds what it needs. Beside them stands a small
JSON file with the step (from which the place in the data follows), the seed, and the optimizer's settings.

    checkpoint/
      trainplan.json       workload, plan, step, seed, hyper-parameters
      .metadata, *.distcp  the tensors
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainplan import files
from trainplan.errors import InputError
from trainplan.plan import text as plan_text

if TYPE_CHECKING:
    from trainplan.engine.trainer import Trainer

_ABOUT = "trainplan.json"


def save(trainer: Trainer, path: str | Path) -> None:
    """Write a checkpoint; all ranks call this. The folder appears whole or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    if trainer.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    # Replicas hold the same, apart from running statistics, which are those of replica 0.
    tensors = _tensors(trainer) if trainer.replica == 0 else {}
    with _quiet():
        dcp.save(tensors, checkpoint_id=str(partial), no_dist=not dist.is_initialized())
    if trainer.rank == 0:
        files.write(partial / _ABOUT, "checkpoint", _about(trainer))
        old = path.with_name(f".{path.name}.old")
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)
        os.replace(partial, path)
        shutil.rmtree(old, ignore_errors=True)
    _barrier()


def load(trainer: Trainer, path: str | Path) -> None:
    """Take weights, buffers, optimizer state and step from a checkpoint, whatever plan it was saved under."""
    path = Path(path)
    about = files.read(path / _ABOUT, "checkpoint")
    if about["workload"] != trainer.workload.name:
        why = f"it is of {about['workload']}, and this run trains {trainer.workload.name}"
        raise InputError(f"checkpoint {path}", why, "the checkpoint of this workload")
    saved = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {f"model.{name}": tensor for name, tensor in _model(trainer).items()}
    missing = [key for key in wanted if key not in saved]
    if missing:
        why = f"{len(missing)} tensors of this model are not in it, first {missing[0].removeprefix('model.')!r}"
        raise InputError(f"checkpoint {path}", why)
    parameters = _parameters(trainer)
    for key, item in saved.items():
        name = next((n for n in parameters if key.startswith(f"optimizer.{n}:")), None)
        if name is None:
            continue
        if isinstance(item, TensorStorageMetadata):
            # A number of steps stays on the host, as torch's optimizers keep it; the rest is where the parameter is.
            device = parameters[name].device if item.size else torch.device("cpu")
            wanted[key] = torch.empty(item.size, dtype=item.properties.dtype, device=device)
        else:
            wanted[key] = None
    with _quiet():
        dcp.load(wanted, checkpoint_id=str(path), no_dist=not dist.is_initialized())
    state: dict[str, dict[str, Any]] = {}
    for key, value in wanted.items():
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition(":")
            state.setdefault(name, {})[entry] = value
    optimizer = trainer.part.optimizer
    for name, entries in state.items():
        optimizer.state[parameters[name]] = entries
    for group, settings in zip(optimizer.param_groups, about["groups"], strict=False):
        group.update({key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()})
    if trainer.part.scheduler is not None and about["scheduler"] is not None:
        trainer.part.scheduler.load_state_dict(about["scheduler"])
    trainer.steps_done = about["step"]


def _parameters(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in trainer.stage.named_parameters() if p.requires_grad}


def _model(trainer: Trainer) -> dict[str, Tensor]:
    held = {**dict(trainer.stage.named_parameters()), **dict(trainer.stage.named_buffers())}
    return {name: tensor.detach() for name, tensor in held.items()}


def _tensors(trainer: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {f"model.{name}": tensor for name, tensor in _model(trainer).items()}
    state = trainer.part.optimizer.state
    for name, parameter in _parameters(trainer).items():
        for key, value in state.get(parameter, {}).items():
            if value is not None:
                found[f"optimizer.{name}:{key}"] = value
    return found


def _about(trainer: Trainer) -> dict[str, Any]:
    optimizer, scheduler = trainer.part.optimizer, trainer.part.scheduler
    settings = [{key: v for key, v in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "workload": trainer.workload.name,
        "plan": plan_text.text(trainer.plan),
        "step": trainer.steps_done,
        "seed": trainer.seed,
        "groups": [{key: v for key, v in group.items() if _plain(v)} for group in settings],
        "scheduler": {k: v for k, v in scheduler.state_dict().items() if _plain(v)} if scheduler is not None else None,
    }


def _plain(value: Any) -> bool:
    """Whether JSON can carry it."""
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that a run of one process is one of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
