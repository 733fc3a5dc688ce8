"""The trained model, out of a checkpoint: in one process, whatever plan and however many ranks had it.

Under most plans no rank has the whole model, so the way out is the checkpoint, which has every tensor under the name
that it has in the user's own module.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainplan.engine.checkpoint_folder import ABOUT, broken, latest, quiet, read_about, reason, saved_tensors
from trainplan.errors import InputError
from trainplan.profile.capture.tensors import values_of
from trainplan.units import some

Model = TypeVar("Model", bound=nn.Module)
_PREFIX = "model."


def load_weights(path: str | Path, model: Model) -> Model:
    """Give a module the weights and buffers that a checkpoint has of it, and return it.

    `path` is a checkpoint, or the folder of a run, of which it is the last one. The module is one of the kind that was
    trained; it stays on its device and in its types. It takes everything or, where a name or a shape differs, nothing.
    """
    path = _checkpoint(Path(path))
    about = read_about(path)
    saved = {
        key.removeprefix(_PREFIX): entry
        for key, entry in saved_tensors(path).items()
        if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    here = values_of(model)
    asked = f"weights of {type(model).__name__} from {path}"
    lost, strange = [name for name in here if name not in saved], [name for name in saved if name not in here]
    differs = [f"it lacks {some(len(lost), 'tensor')} of the model, first {lost[0]!r}"] if lost else []
    differs += [f"it has {some(len(strange), 'tensor')} that the model lacks, first {strange[0]!r}"] if strange else []
    instead = f"the model that was trained, which was {about.workload}"
    if differs:
        raise InputError(asked, ", and ".join(differs), instead)
    for name, tensor in here.items():
        if saved[name].size != tensor.shape:
            why = f"{name!r} is {tuple(saved[name].size)} there, and {tuple(tensor.shape)} here"
            raise InputError(asked, why, instead)
    places = {_PREFIX + name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    try:
        with quiet():
            dcp.load(places, checkpoint_id=str(path), no_dist=True)
    except CheckpointException as error:
        raise broken(path, reason(error)) from None
    with torch.no_grad():
        for name, tensor in here.items():
            tensor.copy_(places[_PREFIX + name])
    return model


def _checkpoint(path: Path) -> Path:
    """The checkpoint that is meant by its own folder, or by that of its run."""
    if not path.is_dir() or (path / ABOUT).is_file():
        return path
    found = latest(path)
    if found is None:
        why = "there is no checkpoint in it"
        raise InputError(f"weights from {path}", why, "a folder of trainer.save, or of a run with --save-every")
    return found
