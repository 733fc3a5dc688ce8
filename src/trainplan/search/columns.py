"""All plans that there are, as columns: a row for each, and none of them made before it is needed.

What may be chosen is read from what a plan is: its words (`plan.WORDS`), and the rules that say which of them go
together. Rules ask for plans, so one is made for every order of work on so many ranks; replicas, micro-batches and
ranks that share blocks multiply these without asking again.

    devices        all, or a power of two of them, or of nodes        (`space.device_counts`)
    tp, sequence   ranks that share blocks: those that share a node evenly, where the model can be cut so
    pp, dp         what is left of the devices, in all ways
    schedule, …    every order of work with its chunks, recomputation and what replicas share out, as rules allow
    micro          `solve.shape.micro_counts`

`tp`, `sequence` and `recompute=selective` are predicted, and not yet run: they are in the space only where that was
asked for. A precision is not searched for: another one trains another model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan.plan import WORDS, Plan, plan
from trainplan.plan.sliced import SELECTIVE
from trainplan.profile.profile import Profile
from trainplan.profile.variant import Choice, refuse
from trainplan.program.program import Ints
from trainplan.search.space import RECOMPUTE, device_counts, outlines
from trainplan.solve.shape import micro_counts

FIELDS = ("dp", "tp", "sequence", "pp", "schedule", "chunks", "micro", "recompute", "zero")
_WORDS = {field: WORDS[field] for field in ("sequence", "schedule", "recompute")}
_NAIVE = WORDS["schedule"].index("naive")


@dataclass(frozen=True)
class Space:
    """The plans for a model on a cluster: row by row, a number for every field; of words their places in `WORDS`."""

    profile: Profile
    cluster: Cluster
    batch: int
    precision: str
    rows: Ints  # plan, field

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, field: str) -> Ints:
        return self.rows[:, FIELDS.index(field)]

    def sketch(self, row: int) -> Plan:
        """The plan of a row, not yet cut into stages."""
        values = dict(zip(FIELDS, self.rows[row].tolist(), strict=True))
        words = {field: words[values[field]] for field, words in _WORDS.items()}
        return plan(**{**values, **words}, blocks=len(self.profile.blocks), precision=self.precision)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Of every field, how many values it has."""
        return {field: len(np.unique(self.column(field))) for field in FIELDS}


def space(profile: Profile, cluster: Cluster, batch: int, precision: str = "fp32", predicted: bool = False) -> Space:
    """Every plan there is. `predicted`: also with choices that can be predicted, and not yet be run.

    >>> from trainplan.cluster.parse import cluster
    >>> from trainplan.profile.profile import Profile
    """
    shared = slicings(profile, cluster, precision) if predicted else [1]
    recompute = [WORDS["recompute"].index(word) for word in (*RECOMPUTE, *((SELECTIVE,) if predicted else ()))]
    blocks, known = len(profile.blocks), dict[tuple[int, bool], dict[int, Ints]]()
    found = []
    for used in device_counts(cluster):
        for tp in (tp for tp in shared if used % tp == 0):
            left = used // tp
            for pp in (pp for pp in range(1, min(left, blocks) + 1) if left % pp == 0 and left // pp <= batch):
                dp = left // pp
                key = pp, dp > 1
                if key not in known:
                    known[key] = _ways(*key, blocks, profile.has_halves, recompute)
                for fewest, ways in known[key].items():
                    found += list(_rows(dp, tp, pp, ways, _counts(dp, pp, fewest, batch)))
    return Space(profile, cluster, batch, precision, np.concatenate(found))


def slicings(profile: Profile, cluster: Cluster, precision: str) -> list[int]:
    """How many ranks may share every block: as a node can be shared evenly, and the model be cut.

    Refused where the profile does not say what blocks do: then nothing is known of ranks that share them.
    """
    refuse(profile, Choice(precision=precision, selective=True))
    inside = min(len(node.devices) for node in cluster.nodes)
    return [tp for tp in range(1, inside + 1) if inside % tp == 0 and _can_share(profile, tp)]


def _can_share(profile: Profile, tp: int) -> bool:
    try:
        refuse(profile, Choice(tp=tp))
    except PlanError:
        return False
    return True


def _ways(pp: int, several: bool, blocks: int, in_parts: bool, recompute: list[int]) -> dict[int, Ints]:
    """By the fewest micro-batches that they need: orders of work, with chunks, recomputation and what is shared out."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for outline in outlines(1 + several, pp, blocks, in_parts):
        fewest = rules.least_micro(outline)
        for again in recompute:
            sketch = replace(outline, micro=fewest, recompute=WORDS["recompute"][again])
            if not rules.is_order(sketch):
                continue
            zeros = [0, *(zero for zero in (1, 2, 3) if rules.can_share(replace(sketch, zero=zero)))]
            schedule = WORDS["schedule"].index(outline.schedule)
            found.setdefault(fewest, []).extend((schedule, outline.chunks, again, zero) for zero in zeros)
    return {fewest: np.array(rows, dtype=np.int64) for fewest, rows in found.items()}


def _counts(dp: int, pp: int, fewest: int, batch: int) -> Ints:
    few, many = micro_counts(plan(pp=pp, schedule="1f1b" if pp > 1 else "naive"), batch // dp)
    return np.array([count for count in few + many if count >= fewest], dtype=np.int64)


def _rows(dp: int, tp: int, pp: int, ways: Ints, counts: Ints) -> Iterator[Ints]:
    """Every way with every number of micro-batches; one stage has nothing to order, and one micro-batch one order."""
    way, micro = np.repeat(ways, len(counts), axis=0), np.tile(counts, len(ways))
    ordered = (way[:, 0] == _NAIVE) | (micro > 1) if pp > 1 else way[:, 0] == _NAIVE
    way, micro = way[ordered], micro[ordered]
    for sequence in range(len(WORDS["sequence"]) if tp > 1 else 1):
        same = (np.full(len(way), value) for value in (dp, tp, sequence, pp))
        yield np.column_stack([*same, way[:, 0], way[:, 1], micro, way[:, 2], way[:, 3]])
