"""The user's own model: a function in a file (`path/file.py:function`) or a package (`package.module:function`).

The function returns a dict (or a `Workload`, or a tuple `(model, inputs, loss)` or `(model, inputs, loss, optimizer)`):

    import torch
    from torch import nn

    def classifier(width=64):
        return {
            "model": nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 3)),
            "inputs": lambda samples, seed: (torch.randn(samples, 20), torch.randint(3, (samples,))),
            "loss": "cross_entropy",
            "batch": 256,
        }

| key | what |
|---|---|
| `model` or `build` | the module; or a function that makes it, better where it is large |
| `inputs` | function (samples, seed) or (samples) → batch, or an example batch; a batch is a `Batch`, a pair (inputs, targets), or a dict of keyword arguments |
| `loss` | a word (`cross_entropy`, `token_cross_entropy`, `mse`), a function (output, targets) → mean over samples, or a `Loss` |
| `optimizer` | function of the model's (name, parameter) pairs → optimizer (`optimizer.py`), or a word (`sgd`, `adam`, `adamw`, with `lr`, `momentum`, `weight_decay`); default adamw |
| `batch`, `samples_per_epoch` | numbers; defaults 32 and 100,000 |
| `clip_norm`, `schedule`, `sample`, `tokens_per_sample`, `dataset`, `feed` | as in `Workload` |

The function is called once when the workload is loaded, and again whenever the model is built: on the meta device to
look at it, on each worker to train it. So it must give the same model each time. Every worker makes the batches for
itself, too: random numbers of torch, NumPy and Python are seeded before `inputs` is called. Options in the name that are
parameters of the function are handed to it (`file.py:classifier,width=128`), the others are the training's.
"""  # noqa: E501  # a table

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainplan.errors import InputError, ModelError, TrainplanError, nearest
from trainplan.workload import options
from trainplan.workload.call import call
from trainplan.workload.losses import as_loss
from trainplan.workload.module import assemble
from trainplan.workload.options import Option
from trainplan.workload.random_numbers import random_numbers
from trainplan.workload.training import OPTIMIZER_KEYS, TRAINING_KEYS, named_optimizer
from trainplan.workload.workload import Workload

_PARTS = ("model", "inputs", "loss", "optimizer")  # of a tuple
_loaded: dict[str, tuple[int, types.ModuleType]] = {}  # path → time of its last change, module


def load_file(path: str, function: str, given: Mapping[str, Any]) -> Workload:
    """The workload of a function in a file."""
    return _load(import_file(path), path, function, given)


def load_package(module: str, function: str, given: Mapping[str, Any]) -> Workload:
    """The workload of a function in a module that Python can import, from the current folder too."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _raised(f"importing {module}", error) from error
        raise InputError(
            f"module {module}", f"there is no module {error.name!r}", "path/file.py:function, or installing the package"
        ) from None
    except Exception as error:
        raise _raised(f"importing {module}", error) from error
    return _load(found, module, function, given)


def _load(module: types.ModuleType, head: str, name: str, given: Mapping[str, Any]) -> Workload:
    function = _function(module, head, name)
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    handed = {
        key: options.guess(value)
        for key, value in given.items()
        if key in parameters or (takes_all and key not in TRAINING_KEYS)
    }
    ours = {key: value for key, value in given.items() if key not in handed}
    for key in ours:
        if key not in TRAINING_KEYS:
            instead = nearest(key, [*parameters, *TRAINING_KEYS])
            raise InputError(f"{key}={ours[key]} of {head}:{name}", "neither the function nor training has it", instead)
    title = f"{head}:{name}"
    # Making a model to look at must not move the caller's random numbers; and an example batch that the function draws
    # must be the same on every rank.
    with random_numbers(0):
        result = _call(function, title, handed)
    if isinstance(result, Workload):
        workload = dataclasses.replace(result, name=title, loss=as_loss(result.loss, title))
    else:
        fields = _fields(result, title)
        _maker(fields, title)
        rest = {key: value for key, value in fields.items() if key not in ("build", "model")}
        workload = assemble(title, call(made, function=function, name=title, handed=handed), rest)
    values = {key: value for key, value in handed.items() if _is_changed(parameters.get(key), value)}
    return _with_training(workload, values, ours)


def _is_changed(parameter: inspect.Parameter | None, value: Any) -> bool:
    return parameter is None or parameter.default != value


def _with_training(workload: Workload, handed: dict[str, Any], ours: dict[str, Any]) -> Workload:
    """Apply the options of the training, and spell the canonical name."""
    title = workload.name
    fixed = {
        "batch": workload.batch,
        "samples_per_epoch": workload.samples_per_epoch,
        "clip_norm": float(workload.clip_norm),
    }
    table = [Option(key, value, minimum=0 if key == "clip_norm" else 1) for key, value in fixed.items()]
    wanted = {key: value for key, value in ours.items() if key in OPTIMIZER_KEYS}
    values = options.read({key: ours[key] for key in ours if key not in wanted}, table, title)
    changes: dict[str, Any] = dict(values)
    if "samples_per_epoch" in ours:
        changes["epoch_assumed"] = False
    if wanted:
        if "optimizer" not in wanted:
            raise InputError(
                f"{next(iter(wanted))}= for {title}", "it has its own optimizer", "naming one: optimizer=adamw,lr=0.001"
            )
        changes["optimizer"], settings, own = named_optimizer(wanted, title)
        values |= settings
        table += own
    pairs = [f"{key}={options.show(value)}" for key, value in handed.items()]
    head = ",".join([title, *pairs])
    return dataclasses.replace(workload, name=options.spell(head, values, table), **changes)


def made(function: Callable[..., Any], name: str, handed: Mapping[str, Any]) -> nn.Module:
    """The model of a user's function, made anew."""
    maker = _maker(_fields(_call(function, name, handed), name), name)
    if isinstance(maker, nn.Module):
        return maker
    try:
        model = maker()
    except TrainplanError:
        raise
    except Exception as error:
        raise _raised(f"build of {name}", error) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"build of {name}", f"it gave a {type(model).__name__}", "an nn.Module")
    return model


def _maker(fields: Mapping[str, Any], name: str) -> nn.Module | Callable[[], Any]:
    """The model, or what makes it."""
    maker = fields.get("model") if fields.get("build") is None else fields["build"]
    if maker is None:
        raise ModelError(name, "what the function returned has no model", 'the key "model", or "build"')
    if not callable(maker):  # a module is callable too
        raise ModelError(name, f"its model is a {type(maker).__name__}", "an nn.Module, or a function that makes it")
    return maker


def _fields(result: Any, name: str) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, tuple) and len(result) in (3, 4):
        return dict(zip(_PARTS, result, strict=False))
    raise ModelError(
        name,
        f"the function returned {type(result).__name__}"
        + (f" of {len(result)} items" if isinstance(result, tuple) else ""),
        'a dict with the keys "model", "inputs" and "loss", a tuple of these, or a Workload',
    )


def _call(function: Callable[..., Any], name: str, handed: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(function).bind(**handed)
    except TypeError as error:
        raise InputError(
            name, f"the function cannot be called so: {error}", "giving it as an option: name,key=value"
        ) from None
    try:
        return function(**handed)
    except TrainplanError:
        raise
    except Exception as error:
        raise _raised(name, error) from error


def _function(module: types.ModuleType, head: str, name: str) -> Callable[..., Any]:
    """The function of that name, or an error that offers those that the module defines itself."""
    functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"}
    own = [key for key, value in functions.items() if value.__module__ == module.__name__]
    found = getattr(module, name, None) if name else None
    if callable(found):
        return found
    instead = nearest(name, own) if own else "a function that returns the model, its inputs and its loss"
    if not name:
        raise InputError(head, "it does not say which function", ", ".join(f"{head}:{key}" for key in own) or instead)
    why = "there is no such function in it" if found is None else f"{name} is a {type(found).__name__}, not a function"
    raise InputError(f"{head}:{name}", why, instead)


def _mended(error: BaseException, place: str) -> str:
    """What helps against an error of the user's code."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"installing {error.name} where trainplan is, or running where {error.name} is found (PYTHONPATH)"
    return f"mending it{' there' if place else ''}: calling the function by itself shows the whole traceback"


def _raised(what: str, error: BaseException) -> ModelError:
    """The error of the user's code, with the last place that is theirs."""
    theirs = own_frames(error) or traceback.extract_tb(error.__traceback__)
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({error.filename}:{error.lineno})"
    return ModelError(what, f"it raised {type(error).__name__}: {error}{place}", _mended(error, place))


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an error went through the user's own code: neither ours, nor that of Python and of what is installed."""
    paths = sysconfig.get_paths()
    foreign = (str(Path(__file__).parents[1]), paths["stdlib"], paths["purelib"], paths["platlib"], "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(foreign)]


# -- files ---------------------------------------------------------------------------------------------------------


def import_file(path: str) -> types.ModuleType:
    """The module in a file, imported once and again when the file changes.

    Its folder is on the path, so it may import its neighbours; `from .neighbour import x` works too, whether or not
    the folder is a package.
    """
    file = Path(path)
    if not file.is_file():
        neighbours = [str(found) for found in file.parent.glob("*.py")] if file.parent.is_dir() else []
        instead = nearest(path, neighbours) if neighbours else "the path of a Python file"
        raise InputError(path, f"there is no such file in {file.parent.resolve()}", instead)
    file = file.resolve()
    changed = file.stat().st_mtime_ns
    if str(file) in _loaded and _loaded[str(file)][0] == changed:
        return _loaded[str(file)][1]
    package, root = _package(file)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if str(file.parent) not in sys.path:  # inside a package: last, so that its modules hide no others
        sys.path.append(str(file.parent))
    try:
        module = _execute(f"{package}.{file.stem}", file)
    except Exception as error:
        raise _raised(f"importing {path}", error) from error
    _loaded[str(file)] = (changed, module)
    return module


def _package(file: Path) -> tuple[str, Path]:
    """The package that a file belongs to, and the folder to put on the path."""
    root, names = file.parent, list[str]()
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    if names:
        package = ".".join(names)
        found = sys.modules.get(names[0])
        taken = found is not None and str(root / names[0]) not in [str(Path(p).resolve()) for p in found.__path__]
        if taken:
            raise InputError(
                str(file), f"its package {names[0]!r} has the name of another that is imported", "renaming its folder"
            )
        return package, root
    # A folder that is no package gets a name of its own, so that relative imports have something to be relative to.
    package = f"_trainplan_{hashlib.sha1(str(root).encode()).hexdigest()[:12]}"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(root)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return package, root


def _execute(name: str, file: Path) -> types.ModuleType:
    """Run a file as the module of that name."""
    importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        # Compiled here and not by the loader, whose bytecode cache misses a change within the same second.
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module
