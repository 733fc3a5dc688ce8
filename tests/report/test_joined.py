"""Predicted beside measured: shares add up, medians are taken, noise is told from error."""

import pytest

from search.models import model
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError
from trainplan.plan.text import parse
from trainplan.predict.predict import predict
from trainplan.program.timeline import Event, Timeline
from trainplan.report.exclusive import WAIT, steps
from trainplan.report.joined import join, kind_words, noise_floor
from trainplan.solve.resolve import resolve


def timeline(source, *events, world=1, steps=1):
    return Timeline(source, world, steps, tuple(Event(*event) for event in events), "test")


def shares(found):
    return {(s.name, s.rank): s.seconds for s in found.shares}


def test_every_moment_belongs_to_one_operation():
    """Computation before communication; what is over first before what follows; idleness to what comes next."""
    line = timeline(
        "predicted",
        ("0F0", "F", 0, 0.0, 2.0),
        ("0REDUCE_GRAD", "REDUCE_GRAD", 0, 1.0, 4.0),
        ("0REDUCE_GRAD.1", "REDUCE_GRAD", 0, 1.5, 6.0),
        ("0STEP", "STEP", 0, 8.0, 9.0),
    )
    (step,) = steps(line)
    assert step.seconds == 9.0
    assert shares(step) == {("0F0", 0): 2.0, ("0REDUCE_GRAD", 0): 2.0, ("0REDUCE_GRAD.1", 0): 2.0, ("0STEP", 0): 3.0}


def test_waiting_for_a_message_is_the_same_however_it_was_noted():
    """A receive that started late, and one that took long."""
    late = timeline("predicted", ("0F0", "F", 0, 0, 1), ("0RECV_B0", "RECV_B", 0, 4, 5), ("0B0", "B", 0, 5, 6))
    long = timeline("measured", ("0F0", "F", 0, 0, 1), ("0RECV_B0", "RECV_B", 0, 1, 5), ("0B0", "B", 0, 5, 6))
    joined = join(late, long)
    assert [row.difference_s for row in joined.ops] == [0, 0, 0]
    assert {row.name: row.measured_s for row in joined.ops}["0RECV_B0"] == 4


def test_what_is_left_of_a_step_is_waiting_for_the_others():
    line = timeline("predicted", ("0F0", "F", 0, 0, 1), ("1F0", "F", 1, 1, 5), world=2)
    (step,) = steps(line)
    assert shares(step) == {("0F0", 0): 1, (WAIT, 0): 4, ("1F0", 1): 5}


def test_workers_of_asynchronous_servers_have_the_mean_of_all_their_steps():
    """Worker 0 is three times as fast as worker 1, and through before that ends its first step; the server is worker
    2. Nothing of what they did is missing, and what each did a step adds up to the mean step."""

    def events(fast, slow):
        for step in range(3):
            for rank, each in ((0, fast), (1, slow)):
                copy, unit, name = "^1" * rank, ".1" * rank, f"@{step}" if step else ""
                yield f"0F0{copy}{name}", "F", rank, step * each, step * each + 0.5 * each
                yield f"0RECV_W0>2{copy}{name}", "RECV_W", rank, step * each + 0.9 * each, (step + 1) * each
                yield f"2STEP{unit}{copy}{name}", "STEP", 2, step * each + 0.6 * each, step * each + 0.8 * each

    measured = timeline("measured", *events(1.0, 3.0), world=3, steps=3)
    predicted = timeline("predicted", *events(2.0, 2.5), world=3, steps=3)
    found = join(predicted, measured)
    assert (found.only_predicted, found.only_measured, found.steps, found.mean) == ((), (), 3, True)
    assert found.total.measured_s == pytest.approx(3.0)
    assert found.total.predicted_s == pytest.approx(2.5)
    assert {r.name: r.measured_s for r in found.ops}["0F0"] == pytest.approx(0.5)
    assert "mean of 3" in found.summary()
    (step,) = steps(measured)
    for rank in range(3):
        assert sum(s.seconds for s in step.shares if s.rank == rank) == pytest.approx(step.seconds)


def test_where_one_rank_goes_ahead_of_the_others_each_has_steps_of_its_own():
    """Rank 0 is frozen: it waits for nobody, and is through with all steps before the other is with the first."""

    def events(begins):
        for step, (first, second) in enumerate(begins):
            mark = f"@{step}" if step else ""
            yield f"0F0{mark}", "F", 0, first, first + 1
            yield f"1RECV_F0{mark}", "RECV_F", 1, second, second
            for kind, start, end in (("F", 0, 1), ("B", 1, 3), ("STEP", 3, 4)):
                micro = "" if kind == "STEP" else "0"
                yield f"1{kind}{micro}{mark}", kind, 1, second + start, second + end

    predicted = timeline("predicted", *events([(0, 1), (1, 5), (2, 9)]), world=2, steps=3)
    measured = timeline("measured", *events([(0, 1), (1, 6), (3, 11), (4, 16)]), world=2, steps=4)
    assert [step.seconds for step in steps(predicted)] == [4, 4]
    assert [step.seconds for step in steps(measured)] == [5, 5, 5]
    for step in (*steps(predicted), *steps(measured)):
        for rank in range(2):
            assert sum(s.seconds for s in step.shares if s.rank == rank) == pytest.approx(step.seconds)
    found = join(predicted, measured)
    assert found.only_measured == found.only_predicted == ()
    assert found.total.difference_s == pytest.approx(-1)
    assert sum(row.difference_s for row in found.kinds) == pytest.approx(-1)
    assert {row.name: (row.predicted_s, row.measured_s) for row in found.ops}["0F0"] == (1, 1)
    assert found.steps == 3


@pytest.mark.parametrize("line", ["single", "ddp", "dp=2 pp=2", "gpipe", "naive"])
def test_shares_of_a_rank_add_up_to_the_step(line):
    profile, there = model(), cluster("2x2xTitanRTX")
    p = predict(resolve(parse(line), profile, there, 16), profile, there, 16, keep=True)
    for step in steps(p.timeline()):
        for rank in range(p.plan.world):
            assert sum(s.seconds for s in step.shares if s.rank == rank) == pytest.approx(step.seconds)


def test_a_timeline_joined_with_itself_has_no_error():
    profile, there = model(), cluster("2x2xTitanRTX")
    line = predict(resolve(parse("dp=2 pp=2"), profile, there, 16), profile, there, 16, keep=True).timeline()
    joined = join(line, line)
    assert joined.total.error == pytest.approx(0, abs=1e-9)
    assert all(abs(row.difference_s) < 1e-9 for row in (*joined.kinds, *joined.ops))
    assert sum(row.predicted_s for row in joined.kinds) == pytest.approx(joined.total.predicted_s)
    assert joined.only_measured == joined.only_predicted == ()


def test_medians_over_steps_and_the_largest_difference_first():
    predicted = timeline("predicted", ("0F0", "F", 0, 0, 1), ("0B0", "B", 0, 1, 3), ("0STEP", "STEP", 0, 3, 4))
    events = []
    for step, (forward, backward) in enumerate([(1.0, 2.5), (1.1, 9.0), (1.2, 2.7)]):
        begin, mark = 100.0 * step, f"@{step}" if step else ""
        events += [
            (f"0F0{mark}", "F", 0, begin, begin + forward),
            (f"0B0{mark}", "B", 0, begin + forward, begin + forward + backward),
            (f"0STEP{mark}", "STEP", 0, begin + forward + backward, begin + forward + backward + 1),
        ]
    joined = join(predicted, timeline("measured", *events, steps=3))
    assert [row.name for row in joined.ops] == ["0B0", "0F0", "0STEP"]
    assert [row.name for row in joined.kinds] == ["B", "F", "STEP"]
    assert joined.ops[0].measured_s == pytest.approx(2.7)
    assert joined.ops[0].error == pytest.approx(2 / 2.7 - 1)
    assert joined.total.measured_s == pytest.approx(4.9)
    assert joined.total.predicted_s == 4
    assert joined.steps == 3
    assert "0B0" in str(joined)
    assert "noise floor" in str(joined)
    assert joined.to_json()["kinds"][0]["name"] == "B"


def test_what_only_one_side_has_is_named():
    predicted = timeline("predicted", ("0F0", "F", 0, 0, 1), ("0B0", "B", 0, 1, 2))
    measured = timeline("measured", ("0F0", "F", 0, 0, 1), ("0STEP", "STEP", 0, 1, 2))
    joined = join(predicted, measured)
    assert joined.only_predicted == ("0B0 on rank 0",)
    assert joined.only_measured == ("0STEP on rank 0",)
    assert "only measured: 0STEP on rank 0" in str(joined)


def test_noise_floor():
    assert noise_floor([1.0]) is None
    assert noise_floor([2.0, 2.0, 2.0]) == 0.0
    assert noise_floor([1.0, 3.0, 1.0, 3.0]) == 1.0


def test_one_step_says_nothing_of_noise():
    one = timeline("measured", ("0F0", "F", 0, 0, 1))
    assert join(one, one).noise is None
    assert "(one step): error 0.0 %, noise floor not known" in str(join(one, one))


def test_refused():
    other = Timeline("measured", 1, 1, (Event("0F0", "F", 0, 0, 1),), "another")
    with pytest.raises(InputError, match=r"one is of the plan 'test', the other of 'another'"):
        join(timeline("predicted", ("0F0", "F", 0, 0, 1)), other)
    one = timeline("predicted", ("0F0", "F", 0, 0, 1))
    with pytest.raises(InputError, match="one has 1 ranks, the other 2"):
        join(one, timeline("measured", ("0F0", "F", 0, 0, 1), world=2))
    with pytest.raises(InputError, match="no events"):
        join(one, timeline("measured"))


def test_every_kind_has_words():
    from trainplan.program.ops import Kind

    assert all(kind_words(kind.name) for kind in Kind)
