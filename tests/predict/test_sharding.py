"""What replicas share out: bytes of every kind by formula, bytes sent by formula, and what is hidden behind compute."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from synthetic import chain
from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node, Slowdown
from trainplan.plan.plan import Plan, plan
from trainplan.predict.clock import play, seconds_by_kind
from trainplan.predict.memory import tracks
from trainplan.predict.predict import predict, step_seconds
from trainplan.profile.profile import Parameter, Profile
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.lower.sharded import AHEAD
from trainplan.program.ops import SHARED_OUT, Kind, Value
from trainplan.program.program import Program

STATES = {"adam": 8.0, "momentum": 4.0, "sgd": 0.0}
# GB of model states a rank, of 10⁹ weights in fp32 on 8 ranks: stages 0 to 3 (ZeRO's table, without mixed precision).
WORKED = {"adam": (16, 9, 5.5, 2), "momentum": (12, 8.5, 5, 1.5), "sgd": (8, 8, 4.5, 1)}


def states(program: Program, rank: int) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer states that are there all the time."""
    found = (program.bytes_at_start(rank, kind) for kind in (Value.WEIGHTS, Value.GRADIENTS, Value.OPTIMIZER))
    return tuple(found)  # type: ignore[return-value]


STAGES = [pytest.param(z, marks=pytest.mark.system(f"zero{z}", "P"), id=f"zero{z}") for z in (1, 2, 3)]


@pytest.mark.parametrize("zero", [0, *STAGES])
def test_worked_bytes(zero: int) -> None:
    for optimizer, gigabytes in WORKED.items():
        profile = chain(4, weights=10**9, state_bytes_per_parameter=STATES[optimizer])
        program = lower(plan(dp=8, blocks=4, zero=zero, bucket=10**9), profile, 8)
        assert {sum(states(program, rank)) for rank in range(8)} == {gigabytes[zero] * 10**9}


@pytest.mark.parametrize(
    ("weights", "ranks", "kept", "gigabytes"),
    [
        (7.5e9, 64, 12, (120, 31.40625, 16.640625, 1.875)),  # Adam: a copy in fp32 and two moments
        (1e9, 8, 12, (16, 5.5, 3.75, 2)),
        (1e9, 8, 8, (12, 5, 3.25, 1.5)),  # momentum
    ],
)
def test_worked_bytes_in_two_bytes_a_weight(
    weights: float, ranks: int, kept: int, gigabytes: tuple[float, ...]
) -> None:  # fmt: skip
    """ZeRO's own table: weights and gradients of two bytes, and so many of the optimizer."""
    blocks, each = 4, int(weights) // 4
    profile = chain(blocks, state_bytes_per_parameter=float(kept))
    profile = replace(profile, parameters=tuple(Parameter(f"w{i}", (i,), each, 2 * each) for i in range(blocks)))
    for zero, wanted in enumerate(gigabytes):
        program = lower(plan(dp=ranks, blocks=blocks, zero=zero, bucket=10**9), profile, ranks)
        assert {sum(states(program, rank)) for rank in range(0, ranks, 7)} == {wanted * 10**9}


def any_model(counts: list[int]) -> Profile:
    """A block for each, and one tied weight over all of them."""
    profile = chain(len(counts), state_bytes_per_parameter=8.0)
    own = [Parameter(f"w{i}", (i,), count, 4 * count) for i, count in enumerate(counts)]
    tied = Parameter("tied", (0, len(counts) - 1), 7, 28)
    return replace(profile, parameters=(*own, tied) if len(counts) > 1 else tuple(own))


@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=6), sharers=st.integers(2, 5), groups=st.integers(1, 2),
    zero=st.integers(1, 3), bucket=st.integers(1, 400), micro=st.integers(1, 3), full=st.booleans(),
)  # fmt: skip
def test_bytes_and_volume_by_formula(
    counts: list[int], sharers: int, groups: int, zero: int, bucket: int, micro: int, full: bool
) -> None:
    """Weights, gradients and states apart, but for what shares are filled up with; every element of a state once."""
    profile = any_model(counts)
    psi = sum(p.count for p in profile.parameters)
    dp = sharers * groups
    chosen = plan(
        dp=dp, micro=micro, blocks=len(counts), zero=zero, shard=sharers, bucket=bucket,
        recompute="full" if full else "none",
    )  # fmt: skip
    program = check(lower(chosen, profile, dp * micro))
    units = {int(unit): int(program.bytes[op]) for op in gathers(program) for unit in [program.unit[op]]}
    spare = len(units) * 4 * (sharers - 1)
    stepped = 0
    for rank in range(dp):
        weights, gradients, own = states(program, rank)
        whole, share = 4 * psi, 4 * psi / sharers
        assert 0 <= weights - (share if zero == 3 else whole) <= spare
        assert 0 <= gradients - (whole if zero == 1 else share) <= spare
        stepped += own
        assert sent(program, rank) == volume(program, chosen, units)
    assert stepped == groups * 8 * psi
    assert sum(units.values()) - 4 * psi <= spare


def gathers(program: Program) -> list[int]:
    return [op for op in program.lists.row(0).tolist() if program.kind[op] == Kind.GATHER_F]


def sent(program: Program, rank: int) -> float:
    """Bytes that a rank puts on the wire for weights and gradients."""
    total = 0.0
    for op in program.lists.row(rank).tolist():
        share = 1 - 1 / len(program.members(op))
        if program.kind[op] in SHARED_OUT:
            total += share * int(program.bytes[op])
        elif program.kind[op] == Kind.REDUCE_GRAD:
            total += 2 * share * int(program.bytes[op])
    return pytest.approx(total)


def volume(program: Program, chosen: Plan, units: dict[int, int]) -> float:
    """The same by formula: 2Ψ, (M + 1)Ψ, 3MΨ times (N − 1)/N; in groups, a share of it is summed across them. What a
    forward pass reads last stays for its backward pass."""
    psi, passes, inside = sum(units.values()), chosen.micro, 1 - 1 / chosen.sharers
    groups = chosen.dp // chosen.sharers
    again = [op for op in program.lists.row(0).tolist() if program.kind[op] == Kind.GATHER_B]
    stays = psi - sum(int(program.bytes[op]) for op in again) / passes
    moved = {1: 2 * psi, 2: (passes + 1) * psi, 3: passes * (3 * psi - stays)}[chosen.zero]
    assert 0 < stays <= psi
    return inside * moved + 2 * (1 - 1 / groups) * psi / chosen.sharers


@pytest.mark.system("hsdp", "P")
def test_hsdp_moves_a_share_across_groups() -> None:
    """3Ψ(m − 1)/m inside, 2(n − 1)/n · Ψ/m across, less the unit that backward starts with."""
    program = lower(plan(dp=8, shard=4, blocks=5, zero=3, bucket=1600), chain(5, weights=1600), 8)
    psi, last = 8000, 1600
    assert sent(program, 0) == (3 * psi - last) * 3 / 4 + psi / 4
    assert {sum(states(program, rank)) for rank in range(8)} == {2 * psi // 4}


@pytest.mark.parametrize("zero", STAGES)
def test_all_but_the_first_gather_and_the_last_scatter_is_hidden(zero: int) -> None:
    """A piece waits for its own weights only; where the link is the slower one, it never rests."""
    blocks = 5
    program = check(lower(plan(dp=2, bucket=1000, blocks=blocks, zero=zero), chain(blocks), 2, steps=3))
    table = {Kind.F: 1.0, Kind.B: 2.0, Kind.LOSS: 0, Kind.STEP: 0.25}

    def step(gather: float, scatter: float) -> float:
        talk = {Kind.GATHER_F: gather, Kind.GATHER_B: gather, Kind.SCATTER_GRAD: scatter}
        return step_seconds(play(program, seconds_by_kind(program, table | talk)))

    for gather, scatter in ((0.5, 0.5), (1.0, 1.0), (0.25, 1.5)):
        assert step(gather, scatter) == gather + blocks * 3 + scatter + 0.25
    if zero < 3:
        assert step(3.0, 0.5) == blocks * 3 + 1 + blocks * 2 + 0.5 + 0.25
    else:  # all gathers but one twice, without a gap, and what comes after the last of them
        assert step(3.0, 0.5) == (2 * blocks - 1) * 3.0 + (blocks - 2) * 0.5 + 2.0 + 0.5 + 0.25


@pytest.mark.system("zero3", "P")
@given(
    blocks=st.integers(2, 12), micro=st.integers(1, 3), gather=st.sampled_from((0.0, 0.1, 1.0, 5.0)), full=st.booleans()
)
@example(blocks=12, micro=1, gather=0.1, full=True)
@pytest.mark.parametrize("backend", ["gloo", "gloo-staged", "nccl"])
def test_zero3_has_no_more_weights_than_the_list_has_side_by_side(
    backend: str, blocks: int, micro: int, gather: float, full: bool
) -> None:
    """A host that is far ahead has asked for all of them, and the link may be fast: a device gathers what it was asked
    for when it comes to that point. So one piece computes, and two are gathered ahead; where forward becomes backward
    two of either are."""
    recompute = "full" if full else "none"
    chosen = plan(dp=2, micro=micro, bucket=1000, blocks=blocks, zero=3, recompute=recompute)
    program = check(lower(chosen, chain(blocks, weights=1000), 2 * micro, backend))
    table = {Kind.F: 1.0, Kind.R: 1.0, Kind.B: 2.0, Kind.LOSS: 0, Kind.STEP: 0.25, Kind.SCATTER_GRAD: 0.1}
    played = play(program, seconds_by_kind(program, table | {Kind.GATHER_F: gather, Kind.GATHER_B: gather}))
    for track in tracks(played):
        weights = track.start[Value.WEIGHTS] + np.cumsum(np.where(track.kind == Value.WEIGHTS, track.change, 0))
        assert weights.max() <= (blocks / 2 + min(2 * AHEAD + 1, 2 * blocks)) * 1000


def test_groups_of_a_node_share_its_cores_and_memory() -> None:
    """Where two groups at once take 1.5 times as long as one, a step that is nothing but exchanges does, too; and in a
    larger team three groups ask for more than two did, and get no more."""
    profile = chain(1, forward=1e-9, backward=1e-9, weights=10**6)  # one block: one exchange at a time
    ops = ("all_gather", "reduce_scatter", "all_reduce")
    alone = [Curve(op, 2, (0, 10**6), (0.0, 1.0)) for op in ops]
    beside = [Curve(op, 2, (0, 10**6), (0.0, 1.5), groups=2) for op in ops]
    for replicas, longer in ((2, 1.0), (4, 1.5), (6, 2.25)):
        device = Device("cpu", 2**40, {"fp32": 1e15}, memory_rate=1e18)
        node = Node("node", (device,) * replicas, Link("loopback", 0.0, 1e12))
        here = Cluster("here", (node,), "gloo", tuple(alone))
        chosen = plan(dp=replicas, blocks=1, zero=3, shard=2, bucket=10**6)
        before = predict(chosen, profile, here, replicas).step_s
        after = predict(chosen, profile, replace(here, collectives=(*alone, *beside)), replicas).step_s
        assert after == pytest.approx(longer * before, rel=0.01)


@pytest.mark.parametrize(("backend", "slows"), [("gloo", "slowed_message"), ("nccl", "slowed_collective")])
def test_what_computing_does_to_shares(backend: str, slows: str) -> None:
    """On gloo gathers and scatters are messages of ours, and are slowed down as messages are; NCCL has its own."""
    profile = chain(4, 1.0, 2.0, weights=1000)
    program = lower(plan(dp=2, blocks=4, zero=1, bucket=1), profile, 2, backend)
    table = {Kind.F: 1.0, Kind.B: 2.0, Kind.STEP: 0.0, Kind.LOSS: 0.0, Kind.GATHER_F: 0.5, Kind.SCATTER_GRAD: 0.5}
    run = seconds_by_kind(program, table)
    scatters = program.kind == Kind.SCATTER_GRAD

    def seconds(slowdown: Slowdown) -> list[float]:
        played = play(program, run, slowdown=slowdown)
        return sorted((played.end - played.start)[scatters].tolist())

    last, *others = seconds(Slowdown(**{slows: 3.0}))  # the last one has no computation beside it
    assert last == pytest.approx(0.5)
    assert others == pytest.approx([1.5] * 3)
    other = {"slowed_message", "slowed_collective"} - {slows}
    assert seconds(Slowdown(**dict.fromkeys(other, 3.0))) == pytest.approx([0.5] * 4)
