"""The clock: what must hold for any program and any durations, and the small cases that can be worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import Case, cases, examples
from trainplan.cluster.cluster import Slowdown
from trainplan.errors import ProgramError
from trainplan.plan.plan import plan
from trainplan.predict import events
from trainplan.predict.clock import play, seconds_by_kind
from trainplan.predict.flows import Flows, no_flows
from trainplan.program.builder import Builder
from trainplan.program.lower import lower
from trainplan.program.ops import COLLECTIVES, SENDS, Kind, Lane, Value
from trainplan.program.policies import Policy
from trainplan.program.program import Program, Ragged
from trainplan.program.wiring import wire

slowdowns = st.builds(Slowdown, *[st.sampled_from([1.0, 1.25, 2.0, 4.0])] * 7)


def durations(program: Program, random) -> tuple[np.ndarray, np.ndarray]:
    """Whole or half seconds, so that sums are exact."""
    run = np.array([random.randint(0, 8) / 2 for _ in range(len(program))])
    return run, np.array([random.choice([0, 0, 1, 3]) / 2 for _ in range(len(program))])


# -- properties ---------------------------------------------------------------------------------------------------


@examples(80)
@given(cases(), st.randoms(use_true_random=False), slowdowns, st.sampled_from([0.25, 3.0, 7.0]))
def test_time_scales_with_costs(case: Case, random, slowdown: Slowdown, factor: float) -> None:
    program = case.program()
    run, issue = durations(program, random)
    for noise in (None, slowdown):
        once, scaled = play(program, run, issue, noise), play(program, factor * run, factor * issue, noise)
        np.testing.assert_allclose(scaled.end, factor * once.end, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(scaled.start, factor * once.start, rtol=1e-12, atol=1e-12)


@examples(80)
@given(cases(), st.randoms(use_true_random=False), slowdowns)
def test_no_resource_is_busy_for_longer_than_the_whole_takes(case: Case, random, slowdown: Slowdown) -> None:
    program = case.program()
    run, issue = durations(program, random)
    for noise in (None, slowdown):
        played = play(program, run, issue, noise)
        busy = np.zeros(len(program.resource_lane))
        np.add.at(busy, program.holds.items, run[program.holds.owner])
        assert played.makespan >= busy.max() - 1e-9
        hosts = [issue[program.lists.row(rank)].sum() for rank in range(program.world)]
        assert played.makespan >= max(hosts) - 1e-9
        # And what holds a resource holds it alone.
        for resource in range(len(busy)):
            ops = program.holds.owner[program.holds.items == resource]
            order = ops[np.lexsort((played.end[ops], played.start[ops]))]
            assert (played.start[order[1:]] >= played.end[order[:-1]] - 1e-9).all()


def random_flows(program: Program, random) -> Flows:
    """Some messages and collectives pass one or two of three cards."""
    talks = np.isin(program.kind, SENDS + COLLECTIVES)
    rows = [random.sample(range(3), random.randint(0, 2)) if talks[op] else [] for op in range(len(program))]
    cards = Ragged.of(rows)
    share = np.array([random.choice([0.25, 0.5, 1.0, 2.0]) for _ in cards.items])
    return Flows(
        cards.start, cards.items, share, np.array([random.choice([0.0, 0.5, 4.0]) for _ in range(len(program))]), 3
    )  # fmt: skip


@examples(120)
@given(cases(), st.randoms(use_true_random=False), st.booleans())
def test_lists_and_events_agree_where_nothing_slows_down(case: Case, random, shared: bool) -> None:
    """Also where messages share network cards."""
    program = case.program()
    run, issue = durations(program, random)
    wiring = wire(program)
    flows = random_flows(program, random) if shared else no_flows(len(program))
    played = play(program, run, issue, None, wiring, flows)
    start, end, order = events.play(program, wiring, run, issue, Slowdown(), flows)
    np.testing.assert_allclose(start, played.start, atol=1e-9)
    np.testing.assert_allclose(end, played.end, atol=1e-9)
    assert sorted(order) == sorted(played.order) == list(range(len(program)))
    assert (np.diff(end[order]) >= -1e-9).all()


@examples(80)
@given(cases(), st.randoms(use_true_random=False))
def test_less_work_never_ends_later(case: Case, random) -> None:
    """With every order fixed, each end is a maximum of sums of durations: there are no anomalies as Graham found them.

    So a faster link never makes any of our plans slower, as long as communication does not slow down compute.
    """
    program = case.program()
    run, issue = durations(program, random)
    talk = np.isin(program.kind, SENDS + COLLECTIVES)
    before = play(program, run, issue)
    some = np.array([random.choice([0.0, 0.5, 1.0]) for _ in range(len(program))])
    for less in (np.where(talk, 0.5 * run, run), np.where(talk, 0.0, run), some * run):
        assert (play(program, less, issue).end <= before.end + 1e-9).all()
    assert (play(program, run, some * issue).end <= before.end + 1e-9).all()


def test_where_messages_slow_down_compute_a_faster_link_can_cost_time() -> None:
    """The anomaly that the property above has to leave out.

    Rank 2 computes for 10 s and then sends what rank 0 needs for 20 s more. A message for rank 2, wanted much later,
    comes by way of rank 1. If the way is slow, it arrives when rank 2 has nothing to do; if it is fast, it arrives in
    the middle of the computation, and slows it down.
    """
    build = Builder(world=3)
    build.op(0, "0SEND_F0", to=1, makes={"first": (Value.MESSAGE, 1)})
    build.op(1, "1RECV_F0", to=0, reads=["first"], frees=["first"], makes={"there": (Value.BOUNDARY, 1)})
    build.op(1, "1SEND_F0", to=2, reads=["there"], frees=["there"], makes={"second": (Value.MESSAGE, 1)})
    build.op(2, "2F1", makes={"made": (Value.BOUNDARY, 1)})
    build.op(2, "2SEND_F1>0", to=0, reads=["made"], frees=["made"], makes={"third": (Value.MESSAGE, 1)})
    build.op(2, "2RECV_F0", to=1, reads=["second"], frees=["second"])
    build.op(0, "0RECV_F1>2", to=2, reads=["third"], frees=["third"], makes={"input": (Value.BOUNDARY, 1)})
    build.op(0, "0F1", reads=["input"], frees=["input"])
    program = build.program()
    slow = np.array([10.0, 0, 4, 10, 0, 0, 0, 20])
    fast = np.array([1.0, 0, 4, 10, 0, 0, 0, 20])
    noise = Slowdown(receive=2.0)
    assert play(program, slow).makespan == play(program, fast).makespan == 30
    assert play(program, slow, slowdown=noise).makespan == 30
    assert play(program, fast, slowdown=noise).makespan == 32  # 4 s at half speed


# -- network cards ------------------------------------------------------------------------------------------------


def at_one_card(*messages: tuple[float, float, float], lead: float = 0.0) -> list[float]:
    """When messages of (begin, seconds, share) end that all pass one card, each from a rank of its own."""
    build = Builder(world=2 * len(messages))
    for k, _ in enumerate(messages):
        build.op(2 * k, f"0F0^{k}", makes={f"h{k}": (Value.BOUNDARY, 1)})
        made = {f"m{k}": (Value.MESSAGE, 1)}
        build.op(2 * k, f"0SEND_F0^{k}", to=2 * k + 1, reads=[f"h{k}"], frees=[f"h{k}"], makes=made)
        build.op(2 * k + 1, f"1RECV_F0^{k}", to=2 * k, reads=[f"m{k}"], frees=[f"m{k}"])
    program = build.program()
    sends = np.flatnonzero(program.kind == Kind.SEND_F)
    run = np.zeros(len(program))
    run[program.kind == Kind.F], run[sends] = [m[0] for m in messages], [m[1] for m in messages]
    cards = Ragged.of([[0] if op in sends else [] for op in range(len(program))])
    flows = Flows(cards.start, cards.items, np.array([m[2] for m in messages]), np.full(len(program), lead), 1)
    found = []
    for slowdown in (None, Slowdown(copy=2.0)):  # by the lists, and by events
        found.append(play(program, run, slowdown=slowdown, flows=flows).end[sends].tolist())
    assert found[0] == pytest.approx(found[1])
    return found[0]


def test_messages_share_a_network_card() -> None:
    assert at_one_card((0, 10, 1)) == [10]
    assert at_one_card((0, 10, 1), (0, 10, 1)) == [20, 20]
    assert at_one_card((0, 10, 1), (0, 10, 1), (0, 10, 1)) == [30, 30, 30]
    # The second comes when half of the first is through, and has it for itself from when the first is through.
    assert at_one_card((0, 10, 1), (5, 10, 1)) == [15, 20]
    # The card can carry two that ask for half of it, and three of them at two thirds of their speed.
    assert at_one_card((0, 10, 0.5), (0, 10, 0.5)) == [10, 10]
    assert at_one_card((0, 10, 0.5), (0, 10, 0.5), (0, 10, 0.5)) == pytest.approx([15, 15, 15])
    # One that stands for three of its kind.
    assert at_one_card((0, 10, 3)) == [30]
    # Latency is not shared: both are at the card from 2 on, with 8 s of work.
    assert at_one_card((0, 10, 1), (0, 10, 1), lead=2.0) == [18, 18]
    assert at_one_card((0, 10, 1), (10, 10, 1), lead=2.0) == [10, 20]


@examples(60)
@given(cases(), st.randoms(use_true_random=False))
def test_a_card_carries_no_more_than_it_can(case: Case, random) -> None:
    program = case.program()
    run, issue = durations(program, random)
    flows = random_flows(program, random)
    played = play(program, run, issue, flows=flows)
    alone = play(program, run, issue)
    assert (played.end >= alone.end - 1e-9).all()
    asked = np.zeros(3)
    owner = np.repeat(np.arange(len(program)), np.diff(flows.card_start))
    np.add.at(asked, flows.card_items, flows.share * np.maximum(run - flows.lead, 0)[owner])
    assert played.makespan >= asked.max() - 1e-9


# -- slow-downs ---------------------------------------------------------------------------------------------------


def beside(kind: str, talk: float, compute: float, slowdown: Slowdown) -> tuple[float, float, float]:
    """Communication of so many seconds beside computation that takes so many alone: when computation ends on ranks 0
    and 1, and when the communication does."""
    build = Builder(world=2)
    if kind == "message":
        build.op(0, "0SEND_F9", to=1, makes={"m": (Value.MESSAGE, 1)})
    else:
        build.op([0, 1], "0LOSS", waits=False)
    for rank in (0, 1):
        build.op(rank, f"{rank}F0")
    if kind == "message":
        build.op(1, "1RECV_F9", to=0, reads=["m"], frees=["m"])
    program = build.program()
    run = seconds_by_kind(program, {Kind.F: compute, Kind.SEND_F: talk, Kind.LOSS: talk})
    end = play(program, run, slowdown=slowdown).end
    return float(end[1]), float(end[2]), float(end[0])


@pytest.mark.parametrize("slow", [1.0, 1.25, 2.0, 4.0])
@pytest.mark.parametrize(("talk", "compute"), [(2.0, 10.0), (10.0, 2.0), (3.0, 3.0), (8.0, 2.0), (0.0, 5.0)])
def test_computation_beside_communication(slow: float, talk: float, compute: float) -> None:
    # While communication goes on, computation advances at 1/slow: C + M − M/slow if M ends first, else slow · C.
    wanted = min(compute + talk - talk / slow, slow * compute)
    assert beside("message", talk, compute, Slowdown(send=slow)) == pytest.approx((wanted, compute, talk))
    assert beside("message", talk, compute, Slowdown(receive=slow)) == pytest.approx((compute, wanted, talk))
    assert beside("sum", talk, compute, Slowdown(collective=slow)) == pytest.approx((wanted, wanted, talk))


@pytest.mark.parametrize("slow", [1.0, 2.0])
@pytest.mark.parametrize("slowed", [1.25, 4.0])
@pytest.mark.parametrize(("talk", "compute"), [(2.0, 10.0), (10.0, 2.0), (3.0, 3.0), (0.0, 5.0)])
def test_communication_beside_computation(slow: float, slowed: float, talk: float, compute: float) -> None:
    # While a rank computes, communication advances at 1/slowed, and what is left when computation is over goes at full
    # speed; while communication goes on, computation advances at 1/slow.
    both = min(slowed * talk, slow * compute)  # seconds in which both go on
    wanted = (compute + both - both / slow, both + talk - both / slowed)
    of_sum = Slowdown(collective=slow, slowed_collective=slowed)
    assert beside("sum", talk, compute, of_sum) == pytest.approx((wanted[0], *wanted))
    of_message = Slowdown(send=slow, receive=slow, slowed_message=slowed)
    assert beside("message", talk, compute, of_message) == pytest.approx((wanted[0], *wanted))


def test_one_rank_that_computes_holds_up_a_sum() -> None:
    """A sum of 6 s on two ranks, at half speed while either computes: one for 2 s, the other for 4 s."""
    build = Builder(world=2)
    build.op([0, 1], "0LOSS", waits=False)
    build.op(0, "0F0")
    build.op(1, "1F0")
    played = play(build.program(), np.array([6.0, 2.0, 4.0]), slowdown=Slowdown(slowed_collective=2.0))
    assert played.end.tolist() == [8.0, 2.0, 4.0]


def test_computation_slows_down_what_shares_a_card() -> None:
    """Two messages of 10 s at one card, each at half of its speed; and one at a quarter while its sender computes."""
    build = Builder(world=4)
    for k in (0, 1):
        build.op(2 * k, f"0SEND_F0^{k}", to=2 * k + 1, makes={f"m{k}": (Value.MESSAGE, 1)})
        build.op(2 * k + 1, f"1RECV_F0^{k}", to=2 * k, reads=[f"m{k}"], frees=[f"m{k}"])
    build.op(0, "0F1")
    program = build.program()
    sends = np.flatnonzero(program.kind == Kind.SEND_F)
    run = seconds_by_kind(program, {Kind.F: 8.0, Kind.SEND_F: 10.0})
    cards = Ragged.of([[0] if op in sends else [] for op in range(len(program))])
    flows = Flows(cards.start, cards.items, np.ones(2), np.zeros(len(program)), 1)
    end = play(program, run, slowdown=Slowdown(slowed_message=2.0), flows=flows).end
    # By 8 s 2 s of the first and 4 s of the second are through; by 20 s 8 and 10; then the first has the card alone.
    assert end[sends].tolist() == [22.0, 20.0]


def test_the_worst_of_several_slow_downs_counts() -> None:
    """A send of 4 s from the start, a sum of 2 s that begins after 1 s, beside 10 s of computation."""
    build = Builder(world=2)
    build.op(0, "0SEND_F9", to=1, makes={"m": (Value.MESSAGE, 1)})
    build.op(1, "1F0", makes={"t": (Value.TOKEN, 0)})
    build.op([0, 1], "0LOSS", reads=["t"], waits=False)
    build.op(0, "0F0")
    build.op(1, "1RECV_F9", to=0, reads=["m"], frees=["m"])
    program = build.program()
    run = np.array([4.0, 1.0, 2.0, 10.0, 0.0])
    played = play(program, run, slowdown=Slowdown(send=2.0, collective=4.0))
    # 1 s at ½, 2 s at ¼, 1 s at ½: 1½ s of work in 4 s; the other 8½ at full speed.
    assert played.end[3] == pytest.approx(4 + 8.5)
    assert played.start[2] == 1.0


def test_waiting_is_not_slowed_down() -> None:
    """Only computation that goes on while something is sent is slowed down, not what comes before or after it."""
    build = Builder(world=2)
    build.op(0, "0F0", makes={"h": (Value.BOUNDARY, 1)})
    build.op(0, "0SEND_F0", to=1, reads=["h"], frees=["h"], makes={"m": (Value.MESSAGE, 1)})
    build.op(1, "1RECV_F0", to=0, reads=["m"], frees=["m"], makes={"in": (Value.BOUNDARY, 1)})
    build.op(1, "1F0", reads=["in"], frees=["in"])
    program = build.program()
    played = play(program, np.array([3.0, 2.0, 0.0, 3.0]), slowdown=Slowdown(4.0, 4.0, 4.0, 4.0))
    assert played.makespan == 8


# -- the host -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 3])
def test_issue_bound_programs_take_as_long_as_issuing_them(micro: int) -> None:
    """The host needs longer to issue an operation than the device to run it (NCCL: the host never waits)."""
    program = lower(plan(micro=micro, blocks=2), chain(2), micro, backend="nccl")
    issue = np.arange(1.0, len(program) + 1)
    played = play(program, 0.5 * issue, issue)
    assert played.makespan == issue.sum()


def test_a_host_that_is_faster_than_its_device_runs_ahead() -> None:
    program = lower(plan(micro=4, blocks=2), chain(2), 4, backend="nccl")
    run, issue = np.full(len(program), 5.0), np.full(len(program), 1.0)
    assert play(program, run, issue).makespan == run.sum()
    # The host that waits for every operation begins to issue the next one only when the last is over: here that
    # makes no difference, since an operation starts as soon as its issue begins.
    waits = lower(plan(micro=4, blocks=2), chain(2), 4, backend="gloo")
    assert play(waits, run, issue).makespan == run.sum()


def test_a_device_that_waits_for_its_host_once_waits_for_the_sum_from_then_on() -> None:
    """Long, then short operations: the host is ahead at first, and the device catches up with it."""
    program = lower(plan(micro=3, blocks=1), chain(1), 3, backend="nccl")  # F B F B F B STEP
    run, issue = np.array([10.0, 1, 1, 1, 1, 1, 1]), np.full(7, 4.0)
    # The device is busy until 10, then 11; the third operation was issued from 8 to 12, so it ends at 12; and so on.
    assert play(program, run, issue).end.tolist() == [10, 11, 12, 16, 20, 24, 28]


# -- policies and dead ends ---------------------------------------------------------------------------------------


def served(policy: Policy, arrivals: list[float], priorities: list[int]) -> list[int]:
    """The order in which a server of 2 s takes requests that arrive at these times."""
    count = len(arrivals)
    build = Builder(world=count + 1, staleness=1)
    build.policy(count, policy)
    for worker in range(count):
        build.op(worker, f"0F0^{worker}", makes={f"g{worker}": (Value.BOUNDARY, 1)})
        build.op(
            worker, f"0SEND_F0^{worker}", to=count, reads=[f"g{worker}"], makes={f"m{worker}": (Value.MESSAGE, 1)}
        )  # fmt: skip
    for worker in range(count):
        made = {f"got{worker}": (Value.BOUNDARY, 1)}
        build.op(count, f"1RECV_F0^{worker}", to=worker, reads=[f"m{worker}"], makes=made, priority=priorities[worker])
        build.op(count, f"1F0^{worker}", reads=[f"got{worker}"], priority=priorities[worker])
    program = build.program()
    run = seconds_by_kind(program, {Kind.F: 2.0, Kind.SEND_F: 0.0})
    for worker, arrival in enumerate(arrivals):
        run[(program.kind == Kind.F) & (program.pipeline == worker) & (program.stage == 0)] = arrival
    played = play(program, run)
    taken = [op for op in played.order.tolist() if program.kind[op] == Kind.F and program.stage[op] == 1]
    starts = [float(played.start[op]) for op in taken]
    assert starts == sorted(starts)
    return [int(program.pipeline[op]) for op in taken]


def test_policies() -> None:
    arrivals, priorities = [3.0, 1.0, 2.0, 1.5], [0, 3, 2, 1]
    assert served(Policy.ARRIVAL, arrivals, priorities) == [1, 3, 2, 0]
    assert served(Policy.PRIORITY, arrivals, priorities) == [1, 0, 3, 2]  # 1 was alone at 1.0; at 3.0 all others wait
    assert served(Policy.PRIORITY, [1.0, 1.0, 1.0], [2, 0, 1]) == [1, 2, 0]
    assert served(Policy.ARRIVAL, [1.0, 1.0, 1.0], [2, 0, 1]) == [0, 1, 2]  # ties always go the same way


@pytest.mark.parametrize("policy", [Policy.ARRIVAL, Policy.PRIORITY])
def test_a_link_carries_one_message_at_a_time_also_where_a_policy_decides(policy: Policy) -> None:
    """Three messages of 2 s to one rank, all ready at once, and one to another rank, which does not wait for them."""
    build = Builder(world=3)
    build.policy(0, policy)
    for micro, (to, priority) in enumerate(((1, 2), (1, 0), (1, 1), (2, 5))):
        made = {f"m{micro}": (Value.MESSAGE, 1)}
        build.op(0, f"0SEND_F{micro}>{to}", to=to, makes=made, priority=priority)
        build.op(to, f"{to}RECV_F{micro}>0", to=0, reads=[f"m{micro}"], frees=[f"m{micro}"])
    program = build.program()
    end = play(program, seconds_by_kind(program, {Kind.SEND_F: 2.0})).end[program.kind == Kind.SEND_F]
    assert end.tolist() == ([2, 4, 6, 2] if policy is Policy.ARRIVAL else [6, 2, 4, 2])


def test_a_program_that_deadlocks_is_not_played_to_a_number() -> None:
    build = Builder(world=2)
    build.op(0, "0SEND_F0", to=1, makes={"a": (Value.MESSAGE, 1)})
    build.op(1, "1SEND_B0", to=0, makes={"b": (Value.MESSAGE, 1)})
    build.op(0, "0RECV_B0", to=1, reads=["b"])
    build.op(1, "1RECV_F0", to=0, reads=["a"])
    for rank in (0, 1):
        build.lists[rank].reverse()
    program = build.program()
    for slowdown in (None, Slowdown(send=2.0)):
        with pytest.raises(ProgramError, match="4 of 4 operations never run: it deadlocks"):
            play(program, np.ones(4), slowdown=slowdown)


def test_seconds_by_kind_names_what_is_missing() -> None:
    program = lower(plan(blocks=1), chain(1), 1)
    with pytest.raises(ProgramError, match="B, STEP"):
        seconds_by_kind(program, {Kind.F: 1.0})


def test_resources_have_names() -> None:
    program = lower(plan(dp=2, pp=2, stages=(1,), blocks=2, schedule="gpipe"), chain(2), 2)
    names = {program.resource_name(r) for r in range(len(program.resource_lane))}
    assert {"compute 0", "compute 3", "link 0→2", "link 3→1", "group 0 group 0"} <= names
    assert {Lane(int(lane)) for lane in program.resource_lane} == {Lane.COMPUTE, Lane.LINK, Lane.GROUP}
