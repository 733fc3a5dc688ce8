"""Random models, and random plans for them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st

from trainplan.plan.plan import Plan, plan
from trainplan.profile.profile import Block, Crossing, Parameter, Profile
from trainplan.profile.provenance import Provenance
from trainplan.program.lower import lower
from trainplan.program.program import Program

SCHEDULES = ("naive", "gpipe", "1f1b", "lockstep")
FACTOR = int(os.environ.get("TRAINPLAN_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """So many examples, the same every time: a suite that fails only now and then teaches people to run it again.

    With TRAINPLAN_EXAMPLES=50 they are fifty times as many, and others each time.
    """
    return settings(max_examples=count * FACTOR, derandomize=FACTOR == 1, deadline=None, database=None)


@st.composite
def profiles(draw, most_blocks: int = 7, uneven: bool = True, simple: bool = False) -> Profile:
    """A model with skips, tied and frozen weights, several tensors at a cut, and whole-numbered costs.

    `simple`: a chain, nothing but equal boundaries and weights of its own in every block.
    """
    blocks = draw(st.integers(1, most_blocks))
    count = range(blocks)

    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    def curve(low: int, high: int) -> tuple[float, ...]:
        value = float(number(low, high))
        return (value, value * 8)

    same = Block("b", 1.0, (1.0, 1.0), (2.0, 2.0), 0.0, 0.0, (0.0, 0.0), (0.0, 0.0), 0.0, *[(0.0, 0.0)] * 3)
    rows = [same] * blocks if not uneven else [
        Block(
            f"b{i}", float(number(0, 9)), curve(1, 5), curve(1, 9), float(number(0, 2)), float(number(0, 3)),
            (0.0, 0.0), (0.0, 0.0), 0.0, curve(0, 99), curve(0, 20), curve(0, 20), number(0, 5),
        )
        for i in count
    ]  # fmt: skip
    crossings = [Crossing(f"h{i}", i, (i + 1,), 0.0 if simple else float(number(0, 9)), 4) for i in range(blocks - 1)]
    frozen = draw(st.sets(st.sampled_from(count))) if not simple else set()
    parameters = [Parameter(f"w{i}", (i,), 10, 40, trainable=i not in frozen) for i in reversed(count)]
    if not simple and blocks > 1:
        for n in range(number(0, 3)):
            producer = number(0, blocks - 2)
            consumers = draw(st.sets(st.integers(producer + 1, blocks - 1), min_size=1, max_size=3))
            saved = draw(st.sets(st.sampled_from([producer, *consumers])))
            flows = draw(st.booleans())
            crossings.append(
                Crossing(f"s{n}", producer, tuple(sorted(consumers)), 3.0, 0, flows, tuple(sorted(saved)))
            )  # fmt: skip
    if not simple:
        for n in range(number(0, 4)):
            users = tuple(sorted(draw(st.sets(st.sampled_from(count), min_size=1, max_size=3))))
            size, ready, trains = number(1, 50), draw(st.sampled_from([0.0, 0.25, 1.0])), draw(st.booleans())
            parameters.append(Parameter(f"p{n}", users, size, 4 * size, ready, trains))
        parameters = draw(st.permutations(parameters))
    return Profile(
        "random", "sample", 0, 8, 80, "cpu", "measured", False, "fp32", "sgd", draw(st.sampled_from([0.0, 8.0])),
        (1, 8), tuple(rows), tuple(crossings), tuple(parameters), float(number(0, 4)),
        Provenance("test", "2026-01-01"), draw(st.sampled_from(["samples", "tokens"])),
        draw(st.sampled_from([0.0, 1.0])),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """All that `lower` needs."""

    profile: Profile
    plan: Plan
    batch: int
    backend: str
    steps: int
    fold: bool

    def program(self, **other) -> Program:
        chosen = {"backend": self.backend, "steps": self.steps, "fold": self.fold, **other}
        return lower(self.plan, self.profile, self.batch, **chosen)


@st.composite
def cases(draw, profile=None, placed: bool = True, folds=st.booleans(), overlaps=("on", "off"), **fixed) -> Case:
    """A random plan for a random model. `fixed` are choices of the plan that are not drawn."""
    found = draw(profile or profiles())
    blocks = len(found.blocks)
    pp = draw(st.integers(1, min(4, blocks)))
    dp = fixed.pop("dp", None) or draw(st.integers(1, 3))
    micro = draw(st.integers(1, 5))
    choices = {
        "schedule": draw(st.sampled_from(SCHEDULES)) if pp > 1 else "naive",
        "stages": tuple(sorted(draw(st.permutations(range(1, blocks)))[: pp - 1])),
        "recompute": draw(st.sampled_from(["none", "full", "except-last"])),
        "bucket": draw(st.sampled_from([1, 40, 41, 100, 10**9])),
        "overlap": draw(st.sampled_from(overlaps)),
        **fixed,
    }
    ranks = draw(st.permutations(range(dp * pp))) if placed and draw(st.booleans()) else None
    table = ranks and tuple(tuple((ranks[r * pp + s],) for s in range(pp)) for r in range(dp))
    backend = draw(st.sampled_from(["gloo", "gloo-staged", "nccl"]))
    batch = dp * micro + draw(st.integers(0, 7))
    chosen = plan(dp=dp, pp=pp, micro=micro, blocks=blocks, placement=table, **choices)
    return Case(found, chosen, batch, backend, draw(st.integers(1, 3)), draw(folds))
