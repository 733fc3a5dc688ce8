"""All plans that there are, as columns: a row for each, and none of them made before it is needed.

What may be chosen is read from what a plan is: its words (`plan.WORDS`), and the rules that say which of them go
together. Rules ask for plans, so one is made for every order of work on so many ranks; replicas, micro-batches and
ranks that share blocks multiply these without asking again.

    devices        all, or a power of two of them, or of nodes        (`space.device_counts`)
    tp, sequence   ranks that share blocks: those that share a node evenly, where the model can be cut so
    pp, dp         what is left of the devices, in all ways
    schedule, …    every order of work with its chunks, recomputation and what replicas share out, as rules allow
    micro          `solve.shape.micro_counts`
    shard          those of a node share out, or all replicas
    spread         stages with different numbers of ranks, of few devices (`space.spreads`)

`tp`, `sequence` and `recompute=selective` are predicted, and not yet run: they are in the space only where that was
asked for. A precision is not searched for: another one trains another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan.optimizers import shares
from trainplan.plan.plan import WORDS, Plan, plan
from trainplan.plan.sliced import SELECTIVE
from trainplan.plan.text import brief
from trainplan.profile.profile import Profile
from trainplan.profile.variant import Choice, refuse
from trainplan.program.program import Bools, Ints
from trainplan.search.space import device_counts, outlines, spreads
from trainplan.solve.shape import micro_counts

FIELDS = (
    "dp", "tp", "sequence", "pp", "schedule", "chunks", "pairs", "micro", "recompute", "zero", "shard", "spread",
)  # fmt: skip
_WORDS = {field: WORDS[field] for field in ("sequence", "schedule", "recompute")}
_NAIVE = WORDS["schedule"].index("naive")
_EXCEPT_LAST = WORDS["recompute"].index("except-last")


@dataclass(frozen=True)
class Space:
    """The plans for a model on a cluster: row by row, a number for every field; of words their places in `WORDS`."""

    profile: Profile
    cluster: Cluster
    batch: int
    precision: str
    rows: Ints  # plan, field
    spreads: tuple[tuple[int, ...], ...] = ((),)  # ranks of each stage, by number; the first: as many of each

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, field: str) -> Ints:
        return self.rows[:, FIELDS.index(field)]

    def sketch(self, row: int) -> Plan:
        """The plan of a row, not yet cut into stages. (A search asks for some of them again and again.)"""
        if row in self._sketches:
            return self._sketches[row]
        values = dict(zip(FIELDS, self.rows[row].tolist(), strict=True))
        words: dict[str, Any] = {field: words[values[field]] for field, words in _WORDS.items()}
        words["spread"] = self.spreads[values["spread"]]
        made = plan(**{**values, **words}, blocks=len(self.profile.blocks), precision=self.precision)
        self._sketches[row] = made
        return made

    @cached_property
    def _sketches(self) -> dict[int, Plan]:
        return {}

    def having(self, field: str, value: object) -> Bools:
        """The plans in which a field is this: none where it is nothing that is searched for."""
        known: Sequence[object] = self.spreads if field == "spread" else _WORDS.get(field, ())
        number = (known.index(value) if value in known else -1) if known else value
        return np.asarray(self.column(field) == number)

    def only(self, keep: Bools) -> Space:
        """Some of the plans."""
        return replace(self, rows=self.rows[keep])

    @cached_property
    def ranks(self) -> Ints:
        """Devices that each plan uses."""
        many = np.array([sum(spread) for spread in self.spreads])[self.column("spread")]
        return self.column("dp") * self.column("tp") * np.maximum(self.column("pp"), many)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Of every field, how many values it has."""
        return {field: len(np.unique(self.column(field))) for field in FIELDS}


def space(
    profile: Profile,
    cluster: Cluster,
    batch: int,
    precision: str = "fp32",
    predicted: bool = False,
    most_devices: int | None = None,
) -> Space:
    """Every plan there is. `predicted`: also with choices that can be predicted, and not yet be run."""
    shared = slicings(profile, cluster, precision) if predicted else [1]
    words = WORDS["recompute"]
    recompute = [words.index(word) for word in words if predicted or word != SELECTIVE]
    blocks, known = len(profile.blocks), dict[tuple[int, bool], dict[int, Ints]]()
    inside = len(cluster.nodes[0].devices) if len(cluster.nodes) > 1 else 0
    found, spread = list[Ints](), list[tuple[int, ...]]([()])
    for used in device_counts(cluster, most_devices):
        for tp in (tp for tp in shared if used % tp == 0):
            left = used // tp
            for pp in (pp for pp in range(1, min(left, blocks) + 1) if left % pp == 0 and left // pp <= batch):
                dp = left // pp
                key = pp, dp > 1
                if key not in known:
                    known[key] = _ways(*key, blocks, profile.has_halves, recompute, shares(profile.optimizer))
                groups = [0, *([inside] if 1 < inside < dp and dp % inside == 0 else [])]
                for fewest, ways in known[key].items():
                    found += list(_rows(dp, tp, pp, ways, _counts(dp, pp, fewest, batch), groups))
        for each in spreads(used, blocks):
            spread.append(each)
            found.append(_spread(each, len(spread) - 1, batch, recompute))
    return Space(profile, cluster, batch, precision, np.concatenate(found), tuple(spread))


def of(plans: Sequence[Plan], profile: Profile, cluster: Cluster, batch: int, precision: str) -> Space:
    """A space of these plans alone. Where stages are cut and gradients put together is for the search to say; what
    else it does not choose, these may not have chosen either."""
    others = sorted({plan.precision for plan in plans} - {precision})
    if others:
        why = f"some of them train in {', '.join(others)}, which is other training"
        raise PlanError(f"the best of {len(plans)} plans in {precision}", why, "plans of one precision")
    found = as_given(plans, profile, cluster, batch, precision)
    for number, given in enumerate(plans):
        same = replace(found.sketch(number), stages=given.stages, bucket=given.bucket, key=given.key)
        if same != given:
            why = f"the search would run {brief(same)!r}: what else this one chooses, it does not choose from"
            raise PlanError(f"plan {brief(given)!r} among those to search", why, "trainplan predict, for one plan")
    return replace(found, rows=np.unique(found.rows, axis=0))


def as_given(plans: Sequence[Plan], profile: Profile, cluster: Cluster, batch: int, precision: str) -> Space:
    """A row for each of these plans, whatever else they choose."""
    spreads = ((), *sorted({plan.spread for plan in plans} - {()}))

    def row(plan: Plan) -> list[int]:
        values = {**{field: getattr(plan, field) for field in FIELDS}, "spread": spreads.index(plan.spread)}
        return [_WORDS[field].index(value) if field in _WORDS else value for field, value in values.items()]

    return Space(profile, cluster, batch, precision, np.array([row(plan) for plan in plans]), spreads)


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


def _ways(
    pp: int, several: bool, blocks: int, in_parts: bool, recompute: list[int], shared: bool
) -> dict[int, Ints]:  # fmt: skip
    """By the fewest micro-batches that they need: orders of work, with chunks, recomputation and what is shared out."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for outline in outlines(1 + several, pp, blocks, in_parts):
        fewest = rules.least_micro(outline)
        for again in recompute:
            sketch = replace(outline, micro=fewest, recompute=WORDS["recompute"][again])
            if not rules.is_order(sketch):
                continue
            zeros = [0, *(zero for zero in (1, 2, 3) if shared and rules.can_share(replace(sketch, zero=zero)))]
            schedule = WORDS["schedule"].index(outline.schedule)
            found.setdefault(fewest, []).extend(
                (schedule, outline.chunks, outline.pairs, again, zero) for zero in zeros
            )
    return {fewest: np.array(rows, dtype=np.int64) for fewest, rows in found.items()}


def _counts(dp: int, pp: int, fewest: int, batch: int) -> Ints:
    few, many = micro_counts(plan(pp=pp, schedule="1f1b" if pp > 1 else "naive"), batch // dp)
    return np.array([count for count in few + many if count >= fewest], dtype=np.int64)


def _rows(dp: int, tp: int, pp: int, ways: Ints, counts: Ints, groups: list[int]) -> Iterator[Ints]:
    """Every way with every number of micro-batches; one stage has nothing to order, and one micro-batch one order. Of
    one stage no micro-batch is left that need not be recomputed."""
    way, micro = np.repeat(ways, len(counts), axis=0), np.tile(counts, len(ways))
    ordered = (way[:, 0] == _NAIVE) | (micro > 1) if pp > 1 else way[:, 0] == _NAIVE
    ordered &= (way[:, 3] != _EXCEPT_LAST) | ((micro > 1) & (pp > 1))
    way, micro = way[ordered], micro[ordered]
    for sequence in range(len(WORDS["sequence"]) if tp > 1 else 1):
        for shard in groups:
            shared = way[:, 4] > 0 if shard else np.ones(len(way), dtype=bool)
            same = [np.full(int(shared.sum()), value) for value in (dp, tp, sequence, pp, shard, 0)]
            own = way[shared]
            yield np.column_stack([*same[:4], own[:, :3], micro[shared], own[:, 3:], *same[4:]])


def _spread(each: tuple[int, ...], number: int, batch: int, recompute: list[int]) -> Ints:
    """Stages with so many ranks each, in every order of work that goes with them."""
    found, pp = [], len(each)
    for schedule in rules.SPREAD:
        for micro in _counts(1, pp, max(each), batch).tolist():
            for again in recompute:
                word = WORDS["recompute"][again]
                sketch = plan(pp=pp, spread=each, schedule=schedule, micro=micro, recompute=word)
                if (micro > 1 or schedule == "naive") and word != SELECTIVE and rules.is_order(sketch):
                    where = WORDS["schedule"].index(schedule)
                    found.append((1, 1, 0, pp, where, 1, 1, micro, again, 0, 0, number))
    return np.array(found, dtype=np.int64).reshape(-1, len(FIELDS))
