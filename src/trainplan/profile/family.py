"""Models that we know by their shape: what they do, without capturing them. No torch here.

A file of `families/` has a model of three layers as it was traced (`traced.Traced`), where every number that depends on
the shape is a formula in its sizes:

    s samples · t tokens of a sequence · v vocabulary · h width · a heads · w width of a head · m width between layers

The formulas are found by tracing many small models (`benchmarks/families.py`), not by hand, and any model that is made
from them is the one that capturing would give, number by number (`tests/profiling/test_family.py`). So a GPT of 96
layers takes no more than reading a file and repeating its layer (`repeated`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files as resources
from math import prod
from typing import Any

from trainplan import files
from trainplan.profile.profile import Profile
from trainplan.profile.repeated import TRACED, expanded
from trainplan.profile.traced import Trace, Traced, UpdateTrace
from trainplan.workload import language
from trainplan.workload.call import Call
from trainplan.workload.losses import token_cross_entropy
from trainplan.workload.training import OPTIMIZERS, make_optimizer
from trainplan.workload.workload import Workload

MARK = "="  # before the number of a formula
SAMPLES = (2, 4)  # the two sizes of the micro-batch that are given
SHAPE = {"layers", "hidden", "heads", "seq", "vocab", "mlp", "dropout"}
SMALLEST = 2  # of every size: with one head, or one token, other operators run


def known(workload: Workload, gpu: bool) -> Traced | None:
    """What a model does of which we know all from its shape; None: it has to be traced."""
    if not gpu or not isinstance(workload.build, Call) or workload.build.function is not language.build:
        return None
    shape = dict(workload.build.options)
    if shape.pop("attention", "fused") != "fused" or set(shape) != SHAPE:  # an option that it was not traced with
        return None
    given = Call(language.sequences, {"seq": shape["seq"], "vocab": shape["vocab"]})
    update = optimizer_key(workload.optimizer)
    if workload.inputs != given or workload.loss != token_cross_entropy() or update is None:
        return None
    sizes = sizes_of(shape)
    if shape["layers"] < TRACED or min(sizes.values()) < SMALLEST:
        return None
    found = of_three(sizes, shape["dropout"] > 0, update)
    grown = found if shape["layers"] == TRACED else expanded(found, "h", shape["layers"])
    base = replace(
        grown.base,
        workload=workload.name,
        batch=workload.batch,
        samples_per_epoch=workload.samples_per_epoch,
        epoch_assumed=workload.epoch_assumed,
        clip_norm=workload.clip_norm,
    )
    return replace(grown, base=base)


def sizes_of(shape: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that formulas are written in."""
    return {
        "t": shape["seq"],
        "h": shape["hidden"],
        "w": shape["hidden"] // shape["heads"],
        "a": shape["heads"],
        "m": shape["mlp"],
        "v": shape["vocab"],
    }


def optimizer_key(optimizer: Any) -> str | None:
    """The name of an optimizer whose step we know; None: it is another, or has unusual settings."""
    if not isinstance(optimizer, Call) or optimizer.function is not make_optimizer:
        return None
    given = dict(optimizer.options)
    name = given["name"]
    _, momentum, decay = OPTIMIZERS[name]
    usual = bool(given.get("momentum", 0.0)) == bool(momentum) and bool(given["weight_decay"]) == bool(decay)
    return name if usual else None


def of_three(sizes: Mapping[str, int], dropout: bool, update: str) -> Traced:
    """The model of three layers."""
    content = _content()

    def read(kind: Any, data: Any, samples: int) -> Any:
        numbers = _values({**sizes, "s": samples})
        return files.from_json(kind, _filled(data, numbers), "family gpt")

    model = content["models"]["dropout" if dropout else "plain"]
    return Traced(
        read(Profile, model["base"], SAMPLES[0]),
        tuple(read(Trace, model["trace"], samples) for samples in SAMPLES),
        read(UpdateTrace, content["updates"][update], SAMPLES[0]),
        lines=True,
    )


@cache
def _content() -> Any:
    text = resources("trainplan.profile").joinpath("families/gpt.json").read_text(encoding="utf-8")
    return json.loads(text)


def _values(sizes: Mapping[str, int]) -> list[float]:
    return [evaluate(formula, sizes) for formula in _content()["formulas"]]


def evaluate(formula: str, sizes: Mapping[str, int]) -> float:
    """A sum of products, or the largest of several; whole where it is.

    >>> evaluate("4*h*h + 0.5*s", {"h": 3, "s": 3}), evaluate("2*h | 3*s", {"h": 3, "s": 3})
    (37.5, 9)
    """
    value = max(sum(_term(term, sizes) for term in part.split(" + ")) for part in formula.split(" | "))
    return int(value) if value == int(value) else value


def _term(term: str, sizes: Mapping[str, int]) -> float:
    number, *names = term.split("*")
    factor = int(number) if number.lstrip("-").isdigit() else float(number)
    return factor * prod(sizes[name] for name in names)


def _filled(data: Any, numbers: list[float]) -> Any:
    if isinstance(data, dict):
        return {key: _filled(item, numbers) for key, item in data.items()}
    if isinstance(data, list):
        return [_filled(item, numbers) for item in data]
    if isinstance(data, str) and data.startswith(MARK):
        return numbers[int(data[1:])]
    return data
