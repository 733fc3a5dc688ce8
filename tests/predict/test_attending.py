"""Hosts that wait for what gloo sums before they issue what computes with it: those of GPUs whose messages go through
their hosts' memory."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import Case, cases, examples
from trainplan.cluster.cluster import Slowdown
from trainplan.plan.plan import plan
from trainplan.predict.clock import play
from trainplan.program.builder import Builder
from trainplan.program.lower import lower
from trainplan.program.ops import COLLECTIVES, COMPUTES, Kind, Value
from trainplan.program.program import Program

ANY = (None, Slowdown(copy=2.0))  # by the lists, and by events


def summed(hosts_attend: bool) -> Program:
    """A pass that makes gradients, their sum over two ranks, and a step with it."""
    build = Builder(world=2)
    for rank in (0, 1):
        build.op(rank, f"0B0^{rank}", waits=False, makes={f"own{rank}": (Value.GRADIENTS, 1)})
    own, made = ["own0", "own1"], {"sum": (Value.GRADIENTS, 1)}
    build.op([0, 1], "0REDUCE_GRAD", waits=False, reads=own, frees=own, makes=made)
    for rank in (0, 1):
        build.op(rank, f"0STEP^{rank}", waits=False, reads=[f"sum@{rank}"], frees=[f"sum@{rank}"])
    return replace(build.program(), hosts_attend=hosts_attend)


def test_a_step_is_issued_when_its_sum_is_there() -> None:
    """A pass of 1 s, a sum of 5 s, and a step of 1 s that takes 2 s to issue."""
    run, issue = np.array([1.0, 1, 5, 1, 1]), np.array([1.0, 1, 0, 2, 2])
    for slowdown in ANY:
        ahead, after = (play(summed(attend), run, issue, slowdown) for attend in (False, True))
        assert ahead.start[2] == after.start[2] == 1  # the sum itself begins as before
        assert (ahead.start[3], ahead.end[3]) == (6, 7)  # issued while it went on
        assert (after.start[3], after.end[3]) == (6, 8)  # from its first kernel to its last


@examples(60)
@given(cases(), st.randoms(use_true_random=False))
def test_nothing_is_issued_before_the_collectives_that_it_reads_are_over(case: Case, random) -> None:
    program = replace(case.program(), hosts_attend=True)
    run = np.array([random.randint(0, 8) / 2 for _ in range(len(program))])
    issue = np.array([random.choice([0, 1, 3]) / 2 for _ in range(len(program))])
    for slowdown in ANY:
        played, free = (play(p, run, issue, slowdown) for p in (program, replace(program, hosts_attend=False)))
        maker, reader = program.value_maker[program.reads.items], program.reads.owner
        found = (maker >= 0) & np.isin(program.kind[maker], COLLECTIVES) & np.isin(program.kind[reader], COMPUTES)
        assert (played.end[reader[found]] >= played.end[maker[found]] + issue[reader[found]] - 1e-9).all()
        if slowdown is None:  # with slow-downs there are anomalies
            assert (played.end >= free.end - 1e-9).all()


@examples(40)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))
def test_a_host_ends_a_step_by_waiting_for_its_device(dp: int, pp: int, micro: int, zero: int) -> None:
    """So the first thing that it issues in the next step starts after everything that it computed in this one."""
    shared = zero if dp > 1 and pp == 1 else 0
    order, cuts = ("1f1b" if pp > 1 else "naive"), tuple(range(2, 2 * pp, 2))
    chosen = plan(dp=dp, pp=pp, schedule=order, stages=cuts, micro=micro, zero=shared, blocks=6)
    programs = {name: lower(chosen, chain(6), 12, name, steps=3) for name in ("gloo-staged", "nccl")}
    program = programs["gloo-staged"]
    assert program.hosts_attend
    assert not programs["nccl"].hosts_attend
    computes = np.isin(program.kind, COMPUTES)
    played = play(program, computes * 1.0, np.full(len(program), 0.25))
    for rank in range(program.world):
        own = program.lists.row(rank)
        for step in (1, 2):
            before = own[computes[own] & (program.step[own] == step - 1)]
            first = own[program.step[own] == step]
            assert played.start[first].min() >= played.end[before].max() - 1e-9
            assert program.kind[before[program.waits[before]]].tolist() == [Kind.STEP]
