"""Programs that the lowering makes, from random plans on random models."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.program.strategies import Case, cases, examples
from trainplan.plan.rules import micro_batches
from trainplan.predict.clock import Played, play
from trainplan.program.check import check
from trainplan.program.lower.edges import edges
from trainplan.program.ops import Kind, Value
from trainplan.program.text import parse


@examples(160)
@given(cases())
def test_every_lowered_program_is_legal(case: Case) -> None:
    program = check(case.program())
    names = [f"{program.name(i)} {program.pipeline[i]}" for i in range(len(program))]
    assert len(set(names)) == len(names)  # every operation has a name of its own
    assert all(parse(program.name(i)) == program.op(i).key for i in range(len(program)))
    assert program.world == case.plan.pp * (1 if case.fold else case.plan.dp)


@examples(120)
@given(cases(folds=st.just(False)), st.randoms(use_true_random=False))
def test_whatever_the_durations_everything_waits_for_what_it_needs(case: Case, random) -> None:
    """The order that the *values* impose, asked of programs whose hosts wait for nothing (nccl) as well."""
    program = case.program()
    played = play(program, np.array([random.choice([0.0, 1.0, 5.0, 30.0]) for _ in range(len(program))]))
    plan, layout_edges = case.plan, edges(case.profile, case.plan.bounds)
    stages, final = range(plan.pp), plan.pp - 1

    for step, replica in itertools.product(range(case.steps), range(plan.dp)):

        def of(kind: Kind, stage: int, step=step, replica=replica) -> np.ndarray:
            one = (program.kind == kind) & (program.step == step) & (program.stage == stage)
            return np.flatnonzero(one & (program.pipeline == replica))

        def exchanges(kind: Kind, rank: int, step=step) -> list[int]:
            found = np.flatnonzero((program.kind == kind) & (program.step == step))
            return [int(op) for op in found if rank in program.members(int(op))]

        for stage in stages:
            rank = plan.rank(replica, stage)
            stepping = of(Kind.STEP, stage)
            assert len(stepping) == 1
            forwards, backwards = of(Kind.F, stage), of(Kind.B, stage)
            after(played, backwards, stepping)
            for exchange in exchanges(Kind.REDUCE_GRAD, rank) + exchanges(Kind.NORM, rank):
                after(played, [exchange], stepping)
                if program.kind[exchange] == Kind.NORM:
                    after(played, backwards, [exchange])
                    after(played, exchanges(Kind.REDUCE_GRAD, rank), [exchange])
            for edge in layout_edges:
                for micro in range(plan.micro):
                    here = [int(op) for op in forwards if program.micro_batch[op] == micro]
                    back = [int(op) for op in backwards if program.micro_batch[op] == micro]
                    if edge.target == stage:
                        source = of(Kind.F, edge.source)
                        after(played, source[program.micro_batch[source] == micro], here)
                    if edge.source == stage and edge.gradients:
                        target = of(Kind.B, edge.target)
                        # Recomputed blocks need the gradient one after the other, the last block first.
                        after(played, target[program.micro_batch[target] == micro], back)
        after(played, of(Kind.F, final), exchanges(Kind.LOSS, plan.rank(replica, final)))
        after(played, exchanges(Kind.COUNT, plan.rank(replica, final)), of(Kind.B, final))


def after(played: Played, before, ops) -> None:
    """Each of `ops` starts when all of `before` have ended."""
    if len(before) and len(ops):
        assert played.start[np.asarray(ops)].min() >= played.end[np.asarray(before)].max() - 1e-9


@examples(60)
@given(cases(folds=st.just(False)))
def test_a_bucket_is_exchanged_as_soon_as_it_and_those_before_it_are_complete(case: Case) -> None:
    program = case.program()
    for rank in range(program.world):
        row = program.lists.row(rank).tolist()
        for step in range(case.steps):
            passes = [op for op in row if program.kind[op] == Kind.B and program.step[op] == step]
            latest = 0
            for op in [op for op in row if program.kind[op] == Kind.REDUCE_GRAD and program.step[op] == step]:
                (maker,) = [m for m in program.value_maker[program.reads.row(op)].tolist() if program.rank[m] == rank]
                assert program.micro_batch[maker] == program.micro_batch[passes[-1]]  # of the last pass, not earlier
                latest = max(latest, row.index(maker))
                between = {Kind(int(program.kind[o])) for o in row[latest + 1 : row.index(op)]}
                assert between <= {Kind.REDUCE_GRAD, Kind.SEND_B, Kind.BARRIER}


@examples(60)
@given(cases(folds=st.just(False)))
def test_bytes_are_those_of_the_model(case: Case) -> None:
    program, plan, profile = case.program(), case.plan, case.profile
    trainable = {p.name: p for p in profile.parameters if p.trainable}
    for stage, (first, last) in enumerate(plan.bounds):
        here = [p for p in trainable.values() if any(first <= b < last for b in p.blocks)]
        across = sum(p.bytes for p in here if not all(first <= b < last for b in p.blocks))
        exchanged = sum(p.bytes for p in here) if plan.dp > 1 else across
        rank = plan.rank(0, stage)
        ops = [o for o in program.lists.row(rank) if program.kind[o] == Kind.REDUCE_GRAD and program.step[o] == 0]
        assert sum(int(program.bytes[o]) for o in ops) == exchanged
        assert program.bytes_at_start(rank, Value.WEIGHTS) == sum(
            p.bytes for p in profile.parameters if any(first <= b < last for b in p.blocks)
        )
    sizes = micro_batches(plan, case.batch)
    assert sum(map(sum, sizes)) == case.batch
    stage_of = [stage for stage, (first, last) in enumerate(plan.bounds) for _ in range(first, last)]
    wanted = Counter()
    for source, target in itertools.combinations(range(plan.pp), 2):
        through = [c for c in profile.crossings if stage_of[c.producer] == source]
        through = [c for c in through if target in {stage_of[block] for block in c.consumers}]
        back = [c for c in through if c.needs_grad]
        for samples in itertools.chain(*sizes):
            for kind, sender, tensors in ((Kind.SEND_F, source, through), (Kind.SEND_B, target, back)):
                if tensors:
                    size = sum(round(c.bytes_per_sample * samples) + c.fixed_bytes for c in tensors)
                    wanted[kind, sender, size] += case.steps
    sends = np.flatnonzero(np.isin(program.kind, (Kind.SEND_F, Kind.SEND_B)))
    found = Counter((Kind(int(program.kind[o])), int(program.stage[o]), int(program.bytes[o])) for o in sends)
    assert found == wanted


@examples(50)
@given(cases())
def test_memory_returns_to_where_it_was(case: Case) -> None:
    """What a step makes it frees: at the end of a program as much is alive as at its start."""
    program = case.program()
    kept = (program.value_maker >= 0) & (program.value_end < 0)
    assert not kept.any()
    assert (program.value_end[program.value_maker < 0] < 0).all()


@examples(50)
@given(cases(folds=st.just(False)))
def test_folded_lists_are_those_of_the_first_replica(case: Case) -> None:
    whole, folded = case.program(), case.program(fold=True)
    for stage in range(case.plan.pp):
        rank = case.plan.rank(0, stage)
        here = stage if case.plan.dp > 1 else rank
        assert folded.rank_list(here) == whole.rank_list(rank)
        assert folded.bytes[folded.lists.row(here)].tolist() == whole.bytes[whole.lists.row(rank)].tolist()
    assert folded.replicas == case.plan.dp
