"""Random spaces for searches: made-up models on small clusters, also of mixed devices, beside others, and short of
memory; small enough to simulate every plan."""

import random
from dataclasses import dataclass, replace

import numpy as np

from search.models import model
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.overrides import with_overrides
from trainplan.cluster.parse import cluster
from trainplan.plan.plan import WORDS
from trainplan.predict.predict import Prediction
from trainplan.search.closer import Closer
from trainplan.search.columns import Space, space
from trainplan.search.floor import Floors, floors
from trainplan.solve.limits import limited
from trainplan.solve.resolve import draft
from trainplan.units import MIB

ALIKE = ("1xTitanRTX", "4xTitanRTX", "2x2xTitanRTX", "3x2xTitanRTX", "2x3xTitanRTX", "4x2xTitanRTX")
KINDS = ("A100-80", "V100-16", "T4")


def mixed(first: str, second: str) -> Cluster:
    """Two devices of one kind, and two of another."""
    one, other = cluster(f"2x2x{first}"), cluster(f"2x2x{second}")
    return replace(one, name=f"2x{first} and 2x{second}", nodes=(one.nodes[0], other.nodes[0]))


def some_space(seed: int, most: int, tied: bool = False, **only: int | str) -> Space:
    """So many of the plans for some model on some cluster, at most. `tied`: its first and last block share weights.
    `only`: those with these fields."""
    rng = random.Random(seed)
    where = mixed(*rng.sample(KINDS, 2)) if rng.random() < 0.3 else cluster(rng.choice(ALIKE))
    device = where.device(0).name
    if rng.random() < 0.5 and device == "TitanRTX":
        where = with_overrides(where, {"link": rng.choice(["0.2GB/s", "1GB/s", "20GB/s"])})
    if rng.random() < 0.3:
        table = tuple(rng.uniform(1, 3) for _ in range(4))
        where = replace(where, contention=table, spread=rng.choice([0.0, 0.04]))
    if rng.random() < 0.2:
        where = replace(where, backend="gloo")
    weights, boundary = rng.choice([1, 16, 64]) * MIB, rng.choice([10**4, 10**6])
    blocks, in_parts = rng.choice([3, 5, 8]), rng.random() < 0.7
    profile = model(
        seed, blocks, device, in_parts, weights=weights, boundary=boundary, tied=((0, blocks - 1),) if tied else ()
    )
    if rng.random() < 0.4:  # hosts that take their time, optimizers too
        rows = [
            replace(
                block, forward_issue_s=tuple(t * rng.random() for t in block.forward_s),
                update_s=rng.choice([0.0, 1e-3]), accumulate_s=rng.choice([0.0, 1e-4]),
            )
            for block in profile.blocks
        ]  # fmt: skip
        profile = replace(profile, blocks=tuple(rows))
    if (again := random.Random(-seed)).random() < 0.5:  # blocks that need not be run again whole
        rows = [
            replace(block, recompute_s=tuple(again.uniform(0.5, 1.0) * t for t in block.forward_s))
            for block in profile.blocks
        ]
        profile = replace(profile, blocks=tuple(rows))
    if rng.random() < 0.5:
        own = int(rng.choice([150, 300, 600]) * MIB * rng.uniform(0.7, 1.4))
        where = limited(where, where.device(0).context_bytes + own)
    whole = space(profile, where, rng.choice([7, 16]))
    for field, value in only.items():
        number = WORDS[field].index(value) if isinstance(value, str) else value
        whole = whole.only(whole.column(field) == number)
    keep = np.zeros(len(whole), dtype=bool)
    keep[rng.sample(range(len(whole)), min(most, len(whole)))] = True
    return whole.only(keep)


@dataclass(frozen=True)
class Simulated:
    """All plans of a space, one by one, beside what is said of them before."""

    known: Floors
    closer: list[float]  # bounds once they are cut
    in_order: list[float]  # … by the order of their passes
    fits: list[bool]  # … and whether they may fit by it
    bytes: list[float]  # that their fullest ranks have at least
    plans: list[Prediction]


def simulated(found: Space) -> Simulated:
    known = floors(found)
    cut = Closer(found, known)
    plans = [draft(found.sketch(row), found.cluster, found.batch, cut.tables(row)) for row in range(len(found))]
    bounds = [cut(row) for row in range(len(found))]
    in_order = [cut.in_order(row, stages) for row, (_, stages) in enumerate(bounds)]
    fits = [cut.fits(row, stages) for row, (_, stages) in enumerate(bounds)]
    sizes = [cut.bytes[row] for row in range(len(found))]
    return Simulated(known, [seconds for seconds, _ in bounds], in_order, fits, sizes, plans)
