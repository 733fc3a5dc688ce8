"""From a name to a workload: `load("resnet50:cifar10,batch=256")`.

| text | what it is |
|---|---|
| `resnet50:cifar10`, `vgg11:mnist,bn=0` | a network of the zoo on a data set of the table |
| `gpt:layers=24,hidden=1024,heads=16,seq=1024,vocab=50257` | GPT-2 by shape |
| `hf:gpt2`, `hf:llama,hidden_size=64`, `hf:path/config.json` | a transformers model by its configuration |
| `path/file.py:function`, `package.module:function` | the user's own (see `user.py` for what the function returns) |
| an `nn.Module` | the user's own, from Python, with `inputs=` and `loss=` |

After the first comma come options: of the model, and of the training (`batch`, `samples_per_epoch`, `optimizer`, `lr`,
`momentum`, `weight_decay`, `clip_norm`). A workload's `name` is canonical: it spells out every option that is not the
default, so that `load(workload.name)` is the same workload again, in a worker process for instance:

>>> workload = load("ResNet-18:CIFAR-10,lr=0.1", batch=256)
>>> workload.name, workload == load(workload.name)
('resnet18:cifar10,batch=256', True)
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError, nearest
from trainplan.workload import options
from trainplan.workload.datasets import plain
from trainplan.workload.workload import Workload
from trainplan.workload.zoo import NETWORKS

if TYPE_CHECKING:
    from torch import nn

# What a name cannot say: given here, they have to be given again where the workload is loaded from its name.
FUNCTIONS = ("inputs", "loss", "schedule", "feed")
FORMS = "resnet18:cifar10, gpt:layers=2,hidden=64,heads=4, hf:gpt2, path/file.py:function or package.module:function"


def load(what: str | nn.Module | Workload, **overrides: Any) -> Workload:
    """The workload that a text or a module stands for.

    Overrides are options as in the text (`batch=256`, `bn=False`), which become part of the name; or functions:
    `optimizer` ((name, parameter) pairs → optimizer), `schedule` (optimizer → learning-rate scheduler), `loss`,
    `inputs`, `feed`.
    """
    made = [overrides[key] for key in ("optimizer", "schedule") if key in overrides]
    if any(not (value is None or isinstance(value, str) or callable(value)) for value in made):
        from trainplan.workload.optimizer import refuse_made

        name = what if isinstance(what, str) else what.name if isinstance(what, Workload) else type(what).__name__
        refuse_made(overrides.get("optimizer"), overrides.get("schedule"), name)
    if isinstance(what, Workload):
        return _with_functions(what, overrides)
    if not isinstance(what, str):
        from trainplan.workload.module import load_module

        return load_module(what, **overrides)
    functions = {key: overrides.pop(key) for key in FUNCTIONS if key in overrides}
    if callable(overrides.get("optimizer")):
        functions["optimizer"] = overrides.pop("optimizer")
    return _with_functions(_named(what.strip(), overrides), functions)


def _named(text: str, overrides: dict[str, Any]) -> Workload:
    path, colon, function = text.rpartition(".py:")
    if colon or text.endswith(".py"):
        from trainplan.workload.user import load_file

        name, given = options.split(function if colon else "")
        return load_file(f"{path}.py" if colon else text, name, given | overrides)
    head, _, rest = text.partition(":") if ":" in text else text.partition(",")
    rest, given = options.split(rest)
    given |= overrides
    if plain(head) in NETWORKS:
        from trainplan.workload.vision import load_vision

        return load_vision(head, rest, given)
    if plain(head) == "gpt":
        from trainplan.workload.language import load_gpt

        if rest:
            raise InputError(
                f"workload {text!r}", f"{rest!r} is not an option of gpt", "gpt:layers=2,hidden=64,heads=4"
            )
        return load_gpt(given)
    if head == "hf":
        from trainplan.workload.huggingface import load_huggingface

        return load_huggingface(rest, given)
    if head == "module":
        raise InputError(
            f"workload {text!r}",
            "it was made from a module in Python, which a name cannot bring back",
            "a function that makes it: path/file.py:function",
        )
    if ":" in text and _is_module(head):
        from trainplan.workload.user import load_package

        return load_package(head, rest, given)
    raise _unknown(text, head, rest)


def _is_module(name: str) -> bool:
    """Whether `name` could be a module: it is there, or it is dotted, so that nothing else can be meant."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    if "." in name or Path(f"{name}.py").is_file() or Path(name).is_dir():
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # __main__ and its like
        return False


def _unknown(text: str, head: str, rest: str) -> InputError:
    close = nearest(plain(head), [*NETWORKS, "gpt", "hf"], count=2)
    if close.startswith("one of"):
        return InputError(f"workload {text!r}", "it is not a name that we know", FORMS)
    suggestions = [f"{name}:{rest or 'cifar10'}" if name in NETWORKS else name for name in close.split(", ")]
    return InputError(f"workload {text!r}", f"{head!r} is not in the zoo, and no module", " or ".join(suggestions))


def _with_functions(workload: Workload, functions: dict[str, Any]) -> Workload:
    if "loss" in functions:
        from trainplan.workload.losses import as_loss

        functions = functions | {"loss": as_loss(functions["loss"], workload.name)}
    if "inputs" in functions:
        from trainplan.workload.module import as_inputs

        functions = functions | {"inputs": as_inputs(functions["inputs"], workload.name)}
    if isinstance(functions.get("optimizer"), str):
        from trainplan.workload.training import named_optimizer

        word = {"optimizer": functions["optimizer"]}
        functions = functions | {"optimizer": named_optimizer(word, workload.name)[0]}
    fields = {field.name for field in dataclasses.fields(Workload)} - {"name", "build"}
    for key in functions:
        if key not in fields:
            raise InputError(f"{key}= for {workload.name}", "a workload has no such field", nearest(key, fields))
    if "samples_per_epoch" in functions:
        functions = functions | {"epoch_assumed": False}
    return dataclasses.replace(workload, **functions)
