"""Finds the formulas of a family of models: the files of `src/trainplan/profile/families`.

    python benchmarks/families.py gpt

Many small models of the family are traced. What is the same in all of them (names, moments, layouts) is kept as it is;
every number that differs is solved for as a sum of products of the sizes, exactly, and must hold for the models that
were not needed to solve for it, too. A few numbers are the size of the largest tensor of an operator, and which tensor
that is depends on the shape; these are found as the largest of several products.

Takes a few minutes. To be run again whenever `tests/profiling/test_family.py` says that a captured model has another
value than its formula; that is so after any change to what is traced.
"""

import argparse
import json
import multiprocessing
import random
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from trainplan import files
from trainplan.profile.attention import Gpu
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.family import MARK, SAMPLES, evaluate, sizes_of
from trainplan.profile.modelled import in_one_piece
from trainplan.profile.repeated import TRACED
from trainplan.profile.trace import trace_update
from trainplan.workload.load import load
from trainplan.workload.training import OPTIMIZERS

FOLDER = Path(__file__).parents[1] / "src/trainplan/profile/families"
# Products that numbers may consist of: of the batch, times those of one sample.
OF_BATCH = ("", "t", "s", "s*t", "s*t*t")
OF_SHAPE = ("", "h", "h*h", "a", "w", "m", "v", "h*m", "h*v")
PRODUCTS = ["*".join(filter(None, pair)) for pair in product(OF_BATCH, OF_SHAPE)]
FACTORS = (1, 3)  # of the sizes of largest tensors: queries, keys and values are one


def shapes(count: int) -> Iterable[dict[str, int]]:
    """Random small ones; now the batch is large and now the model, so that every tensor is the largest somewhere.

    No two sizes are the same by accident, since some of what is traced is told by equal sizes.
    """
    draw, number = random.Random(0), 0

    def size(least: int, most: int) -> int:
        return round(least * (most / least) ** draw.random())

    while number < count:
        heads, width = size(2, 6), size(2, 12)
        shape = {
            "layers": TRACED,
            "heads": heads,
            "hidden": heads * width,
            "seq": size(3, 60),
            "mlp": size(5, 300),
            "vocab": size(5, 500),
        }
        own = [heads, width, *(shape[key] for key in ("hidden", "seq", "mlp", "vocab")), 3 * heads * width, 3, *SAMPLES]
        own += [samples * shape["seq"] for samples in SAMPLES]
        if len(set(own)) == len(own):
            number += 1
            yield shape


def value(name: str, shape: dict[str, Any], **more: Any) -> Any:
    return load(f"{name}:" + ",".join(f"{key}={item}" for key, item in shape.items()), **more)


Found = list[tuple[dict[str, int], Any]]  # (sizes, what was traced) of models, for each number of samples


def one(name: str, shape: dict[str, int], dropout: float) -> tuple[Found, dict[str, Found]]:
    """A model, and what each optimizer does with it."""
    workload = value(name, {**shape, "dropout": dropout, "batch": 2})
    example = workload.inputs(2, 0)
    model = Skeleton(workload.build).model
    found = in_one_piece(model, workload, example, (), Gpu())
    base = files.to_json(found.base) | {"workload": "", "batch": 0, "samples_per_epoch": 0}
    steps: dict[str, Found] = {}
    if not dropout:  # to which it makes no difference
        captured = capture(model, example, workload.loss)
        trained = {p.name for p in found.base.parameters if p.trainable}
        for optimizer in OPTIMIZERS:
            other = value(name, {**shape, "optimizer": optimizer})
            step = files.to_json(trace_update(captured, other, trained, gpu=True))
            steps[optimizer] = [(sizes_of(workload.build.options) | {"s": samples}, step) for samples in SAMPLES]
    models: Found = []
    for trace in found.traces:
        sizes = sizes_of(workload.build.options) | {"s": trace.samples}
        kept = {key: item for key, item in files.to_json(trace).items() if key != "cut"}  # which is empty
        models.append((sizes, {"base": base, "trace": kept}))
    return models, steps


def traced(name: str, count: int, dropout: float, workers: int) -> tuple[Found, dict[str, Found]]:
    """Some models, and what each optimizer does with them."""
    found: Found = []
    updates: dict[str, Found] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        made = pool.map(one, [name] * count, shapes(count), [dropout] * count)
        for number, (models, steps) in enumerate(made):
            print(f"\r{name} dropout={dropout}: {number + 1} of {count}", end="", flush=True)
            found += models
            for optimizer, step in steps.items():
                updates.setdefault(optimizer, []).extend(step)
    print()
    return found, updates


# -- formulas -------------------------------------------------------------------------------------------------------


class Solver:
    """Sums of products through given values, exactly."""

    def __init__(self, sizes: list[dict[str, int]], formulas: dict[str, int]) -> None:
        self.sizes, self.formulas = sizes, formulas
        self.rows = [[prod(size[n] for n in p.split("*") if n) for p in PRODUCTS] for size in sizes]
        self.chosen, self.inverse = self._inverse()
        self.known: dict[tuple[float, ...], int] = {}

    def _inverse(self) -> tuple[list[int], list[list[Fraction]]]:
        """As many independent rows as there are products, and the inverse of their matrix."""
        size = len(PRODUCTS)
        chosen: list[int] = []
        reduced: list[tuple[int, list[Fraction], list[Fraction]]] = []  # (pivot, row, how it was made of the chosen)
        for number, row in enumerate(self.rows):
            left, made = [Fraction(x) for x in row], [Fraction(0)] * size
            for pivot, other, way in reduced:
                factor = left[pivot] / other[pivot]
                if factor:
                    left = [x - factor * y for x, y in zip(left, other, strict=True)]
                    made = [x - factor * y for x, y in zip(made, way, strict=True)]
            pivot = next((i for i, x in enumerate(left) if x), None)
            if pivot is None:
                continue
            made[len(chosen)] = Fraction(1)
            chosen.append(number)
            reduced.append((pivot, left, made))
            if len(chosen) == size:
                break
        else:
            raise SystemExit(f"{len(self.rows)} models span {len(chosen)} of {size} products: more are needed")
        inverse: list[list[Fraction]] = [[]] * size
        for place in reversed(range(size)):  # back substitution
            pivot, row, made = reduced[place]
            for other in range(size):
                if other != pivot and row[other] and inverse[other]:
                    made = [x - row[other] * y for x, y in zip(made, inverse[other], strict=True)]
            inverse[pivot] = [x / row[pivot] for x in made]
        return chosen, inverse

    def leaf(self, values: list[float], where: str) -> str:
        """The mark of the formula of a number."""
        key = tuple(values)
        if key not in self.known:
            formula = self._sum(values) or self._largest(values)
            if formula is None:
                raise SystemExit(f"no formula for {where}: {values[:6]}")
            self.known[key] = self.formulas.setdefault(formula, len(self.formulas))
        return f"{MARK}{self.known[key]}"

    def _sum(self, values: list[float]) -> str | None:
        right = [Fraction(values[row]) for row in self.chosen]
        factors = [sum((x * y for x, y in zip(row, right, strict=True) if x), Fraction(0)) for row in self.inverse]
        terms = [
            "*".join([_number(factor), *(n for n in p.split("*") if n)])
            for factor, p in zip(factors, PRODUCTS, strict=True)
            if factor
        ]
        if any(factor.denominator not in (1, 2, 4) for factor in factors) or len(terms) > 12:
            return None
        formula = " + ".join(terms) or "0"
        return formula if self._right(formula, values) else None

    def _largest(self, values: list[float]) -> str | None:
        """The largest of products that are nowhere larger, and somewhere equal."""
        reached: dict[str, set[int]] = {}  # product → the models in which it is the largest
        for place, p in enumerate(PRODUCTS):
            for factor in FACTORS:
                found = [factor * row[place] for row in self.rows]
                if all(x <= y for x, y in zip(found, values, strict=True)):
                    equal = {i for i, (x, y) in enumerate(zip(found, values, strict=True)) if x == y}
                    reached["*".join([str(factor), *(n for n in p.split("*") if n)])] = equal
        parts: list[str] = []
        left = set(range(len(values)))
        while left and reached:  # as few as will do
            best = max(reached, key=lambda part: len(reached[part] & left))
            if not reached[best] & left:
                return None
            parts.append(best)
            left -= reached.pop(best)
        formula = " | ".join(parts)
        return formula if parts and self._right(formula, values) else None

    def _right(self, formula: str, values: list[float]) -> bool:
        return all(evaluate(formula, size) == found for size, found in zip(self.sizes, values, strict=True))


def _number(factor: Fraction) -> str:
    return str(int(factor)) if factor.denominator == 1 else str(float(factor))


def merged(solver: Solver, found: list[Any], where: str = "") -> Any:
    """One value for all models: formulas where they differ."""
    first = found[0]
    if isinstance(first, dict):
        return {key: merged(solver, [item[key] for item in found], f"{where}.{key}") for key in first}
    if isinstance(first, list):
        if len({len(item) for item in found}) > 1:
            raise SystemExit(f"{where} has {sorted({len(item) for item in found})} entries")
        return [merged(solver, list(items), f"{where}[{i}]") for i, items in enumerate(zip(*found, strict=True))]
    if all(item == first for item in found):
        return first
    if not isinstance(first, int | float):
        raise SystemExit(f"{where} is {first!r} in one model, and another thing in another")
    return solver.leaf(found, where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=["gpt"])
    parser.add_argument("--models", type=int, default=32, help="how many are traced")
    parser.add_argument("--workers", type=int, default=2, help="processes that trace")
    arguments = parser.parse_args()
    formulas: dict[str, int] = {}
    content: dict[str, Any] = {"models": {}, "updates": {}}
    for key, dropout in (("plain", 0.0), ("dropout", 0.1)):
        found, updates = traced(arguments.family, arguments.models, dropout, arguments.workers)
        solver = Solver([sizes for sizes, _ in found], formulas)
        content["models"][key] = merged(solver, [item for _, item in found], key)
        for optimizer, steps in updates.items():
            content["updates"][optimizer] = merged(solver, [item for _, item in steps], optimizer)
    path = FOLDER / f"{arguments.family}.json"
    path.write_text(json.dumps({"formulas": list(formulas), **content}, separators=(",", ":")) + "\n")
    print(f"{path}: {len(formulas)} formulas, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
