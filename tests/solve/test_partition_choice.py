"""`partition=NAME`: what a published solver answers, as a plan for a model on a cluster."""

import dataclasses
import re
from dataclasses import replace

import pytest

from synthetic import chain
from trainplan.cluster.cluster import Cluster, Device, Link, Node, Pair
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan import text as plan_text
from trainplan.plan.plan import PARTITIONS, Plan
from trainplan.plan.text import parse, text
from trainplan.profile.profile import Crossing, Parameter, Profile
from trainplan.report.explain import explain
from trainplan.solve.partition.chimera import greedy_batch
from trainplan.solve.partition.instance import P1, P2, Instance
from trainplan.solve.partition.partitioners import CHOOSES, PARTITIONERS
from trainplan.solve.partition.problem import problem
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import resolve, solve
from trainplan.units import GIB, MIB

SECOND = 2.0**-10  # of a worked chain, in ours; a power of two, so that nothing is rounded
SLOW = 2.0**10  # bytes/s: one of its bytes a second of its


def worked(given: Instance, samples: tuple[int, ...] = (1, 64)) -> Profile:
    """A worked chain as a profile: seconds and bytes are its own, whatever the micro-batch."""
    even = chain(blocks=given.blocks, saved=0, boundary=0, weights=0, samples=samples)
    blocks = []
    for row, both, forward in zip(even.blocks, given.seconds, given.forward, strict=True):
        ahead, back = (tuple(SECOND * s for _ in samples) for s in (forward, both - forward))
        blocks.append(replace(row, forward_s=ahead, backward_s=back))
    crossings = [Crossing(f"h{i}", i, (i + 1,), 0.0, int(size)) for i, size in enumerate(given.boundary)]
    weights = [Parameter(f"w{i}", (i,), 0, int(size)) for i, size in enumerate(given.weights)]
    return replace(even, blocks=tuple(blocks), crossings=tuple(crossings), parameters=tuple(weights))


def devices(*speeds: float, rate: float = 1.0, nodes: int = 1, between: float = 1.0, memory: int = GIB) -> Cluster:
    """Devices of such speeds in each node; a rate of 1 is a byte of a worked chain in a second of it."""
    made = tuple(Device("cpu" if s == 1 else f"cpu{s:g}", memory, {"fp32": s * 1e12}, 1e12) for s in speeds)
    inside, network = Link("inside", 0.0, SLOW * rate), Link("network", 0.0, SLOW * between)
    return Cluster("there", (Node("node", made, inside, network if nodes > 1 else None),) * nodes, "nccl")


def shape(plan: Plan) -> tuple:
    return plan.stages, plan.spread or plan.dp, plan.pp, plan.micro, plan.schedule


def test_every_partitioner_can_be_asked_for():
    assert set(PARTITIONS) == set(PARTITIONERS)
    assert set(CHOOSES) <= set(PARTITIONS)
    for name in PARTITIONS:
        assert parse(f"partition={name}").partition == name
        assert text(parse(f"pp=2 partition={name}")) == f"pp=2 partition={name}"


# -- the worked instances, from a profile and a cluster to a plan ----------------------------------------------------

FOUR = devices(1, 1, 1, 1)
TWICE = replace(P1, seconds=tuple(3 * t for t in P1.seconds), forward=P1.seconds)  # its seconds as those of forward


@pytest.mark.parametrize(
    ("line", "given", "there", "expected"),
    [
        ("pp=4 micro=8 partition=bottleneck", P1, FOUR, ((2, 3, 5), 1, 4, 8, "1f1b")),
        pytest.param(
            "gpipe pp=4 micro=8 partition=torchgpipe", P1, FOUR, ((1, 2, 3), 1, 4, 8, "gpipe"),
            marks=pytest.mark.system("gpipe", "S"),
        ),
        pytest.param(
            "interleaved pp=3 micro=6 partition=even", P1, FOUR, ((1, 2, 3, 4, 5), 1, 3, 6, "interleaved"),
            marks=pytest.mark.system("interleaved", "S"),
        ),
        pytest.param(
            "dapple micro=4 partition=dapple", TWICE, FOUR, ((3,), (2, 2), 2, 4, "1f1b"),
            marks=pytest.mark.system("dapple", "S"),
        ),
        ("micro=8 partition=pipedream", P1, FOUR, ((2, 5), (1, 2, 1), 3, 8, "1f1b")),
        ("micro=8 partition=pipedream", P2, FOUR, ((3,), (1, 3), 2, 8, "1f1b")),
        ("micro=8 partition=pipedream-code", P1, FOUR, ((2, 3, 5), 1, 4, 8, "1f1b")),
        ("micro=8 partition=pipedream", P1, devices(1, 1, 1, 1, rate=4.0), ((), 4, 1, 2, "naive")),
        ("pp=3 micro=4 partition=pipemare", P1, FOUR, ((2, 3), 1, 3, 4, "1f1b")),
        ("micro=3 partition=pipe-torch", P1, devices(1, 1, 1), ((3,), (2, 1), 2, 3, "1f1b")),
        ("micro=8 partition=bapipe pp=3", P1, devices(1, 1, 1, rate=4.0), ((2, 4), 1, 3, 8, "1f1b-early")),
        ("micro=8 partition=bapipe pp=3 schedule=gpipe", P1, devices(1, 1, 1), ((2, 4), 1, 3, 8, "gpipe")),
        ("micro=4 partition=2bw", P1, devices(1, 1, 1, 1, rate=4.0), ((3,), (2, 2), 2, 4, "1f1b")),
        ("dp=2,1,1 pp=3 micro=4 partition=elasticpipe", P1, FOUR, ((3, 5), (2, 1, 1), 3, 4, "1f1b")),
    ],
)  # fmt: skip
def test_worked_instances_become_plans(line, given, there, expected):
    profile = worked(given)
    plan = resolve(parse(line), profile, there, 64)
    assert shape(plan) == expected
    assert plan.recompute == ("except-last" if line.startswith("gpipe") else "none")
    name = re.search(r"partition=(\S+)", line)[0]
    assert plan.cut_by.startswith(f"{name}, which expects ")
    # What is chosen is explicit: the plan's own line is the same plan, by nobody's choice.
    again = resolve(parse(text(plan)), profile, there, 64)
    assert replace(again, key=plan.key, bucket=plan.bucket) == plan
    assert again.cut_by == ""
    assert plan_text.from_json(plan_text.to_json(plan)).cut_by == plan.cut_by


def test_values_are_those_of_the_worked_instances():
    """6 seconds a micro-batch, 93.5 and 86.667 of a flush, in ours; 9 bytes a stage."""

    def words(line, given):
        return resolve(parse(line), worked(given), FOUR, 64).cut_by

    assert f"{1000 * 6 * SECOND:.2f} ms a micro-batch by its own costs" in words("micro=8 partition=pipedream", P1)
    assert f"{1000 * 93.5 * SECOND:.1f} ms a flush" in words("micro=4 partition=dapple", TWICE)
    assert f"{1000 * 86.667 * SECOND:.1f} ms a flush" in words("micro=4 partition=dapple-formula", TWICE)
    assert "a stage by its own costs" in words("pp=3 partition=pipemare", P1)


def test_replicas_of_equal_width_are_replicas_of_the_pipeline():
    """Where micro-batches are open, two ranks a stage are `dp=2`, with half of them each: the same program."""
    profile = worked(TWICE)
    open_ = solve(parse("partition=dapple"), profile, FOUR, 64)
    assert (open_.plan.spread, open_.plan.dp, open_.plan.pp) == ((), 2, 2)
    line = f"partition=dapple micro={open_.plan.micro * 2}"
    asked = solve(parse(line), profile, FOUR, 64)
    assert (asked.plan.spread, asked.plan.stages) == ((2, 2), open_.plan.stages)
    assert asked.compute_s == pytest.approx(open_.compute_s)


# -- devices, links, memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "speeds", "cuts", "order"),
    [
        (P1, (1, 1, 2), (3, 5), (2, 0, 1)),
        (P2, (1, 1, 2), (3, 5), (0, 2, 1)),
        (P1, (1, 2, 2, 4), (3, 4, 5), (3, 0, 1, 2)),
    ],
)
def test_hetpipe_orders_mixed_devices(given, speeds, cuts, order):
    """The fast ones where the work is; the plan's placement says so, and each computes at its own pace."""
    there = devices(*speeds, rate=4.0)
    found = solve(parse("micro=6 partition=hetpipe"), worked(given), there, 6)
    assert found.plan.stages == cuts
    assert [stage for (stage,) in found.plan.placement[0]] == list(order)
    edges = (0, *cuts, given.blocks)
    busiest = max(sum(given.seconds[a:b]) / speeds[r] for a, b, r in zip(edges, edges[1:], order, strict=False))
    assert found.compute_s == pytest.approx(6 * SECOND * busiest)
    assert "scaled" in found.profile
    assert found.error.median is None
    usual = solve(parse(f"pp={len(speeds)} micro=6"), worked(given), there, 6)
    assert found.step_s <= usual.step_s * 1.0001


def test_mixed_devices_are_cut_by_speed_without_a_solver_too():
    fast_last = devices(1, 4)
    even = chain(blocks=10, forward=1.0, backward=2.0)
    assert resolve(parse("pp=2 micro=8"), even, fast_last, 8).stages == (2,)


def test_hetpipe_in_replicas():
    """Two pipelines of two: replicas stand side by side, and the order of places is the same in both."""
    there = devices(1, 1, 2, 2, rate=4.0)
    plan = resolve(parse("dp=2 pp=2 micro=4 partition=uneven"), worked(P2), there, 8)
    first, second = plan.placement
    assert {rank for stage in first + second for rank in stage} == {0, 1, 2, 3}
    assert first == ((0,), (2,))
    assert second == ((1,), (3,))


def test_an_instance_is_what_profile_and_cluster_say():
    profile = replace(worked(P1), input_bytes_per_sample=3.0, state_bytes_per_parameter=8.0)
    given = problem(Tables(profile), devices(1, 1, rate=4.0, nodes=2, between=0.5), range(4), 2, 5)
    assert given.seconds == pytest.approx([SECOND * t for t in P1.seconds])
    assert (given.weights, given.boundary) == (P1.weights, P1.boundary)
    assert given.states == P1.weights  # gradients
    assert (given.rate(0, 1), given.rate(1, 2)) == (4 * SLOW, 0.5 * SLOW)
    assert [level.count for level in given.levels] == [2, 2]
    assert given.memory == pytest.approx([GIB * 0.94 - 30] * 4)
    assert given.micro == 5
    both_ways = Tables(profile).at(2).traffic[:5]
    assert list(given.boundary) == pytest.approx(both_ways / 2)  # one way
    slower = problem(Tables(profile), devices(1, 1), range(2), 2, 5, "full")
    assert slower.seconds == pytest.approx([SECOND * (t + f) for t, f in zip(P1.seconds, P1.forward, strict=True)])
    assert slower.saved == slower.inputs == (0, *P1.boundary)


def test_links_that_differ_are_given_pair_by_pair():
    there = devices(1, 1, 1)
    node = replace(there.nodes[0], pairs=(Pair(0, 2, Link("fast", 0.0, 9 * SLOW)),))
    given = problem(Tables(worked(P1)), replace(there, nodes=(node,)), range(3), 1, 1)
    assert (given.rate(0, 1), given.rate(2, 0), given.slowest_rate) == (SLOW, 9 * SLOW, SLOW)
    uneven = replace(there, nodes=(node, replace(there.nodes[0], network=Link("net", 0, SLOW / 2))))
    uneven = replace(uneven, nodes=(replace(node, network=Link("net", 0, SLOW / 2)), uneven.nodes[1]))
    assert problem(Tables(worked(P1)), uneven, range(6), 1, 1).rate(0, 5) == SLOW / 2


@pytest.fixture(scope="module")
def profile():
    return chain(
        blocks=12, forward=1e-3, backward=2e-3, saved=4 * MIB, boundary=10**5, weights=8 * MIB,
        samples=(1, 2, 4, 8, 16, 32, 64), flat=False, device="TitanRTX",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["2bw", "piper"])
def test_planners_recompute_where_nothing_else_fits(name, profile):
    """All or nothing: what a plan can say. Without a limit they do not."""
    heavy = replace(profile, blocks=tuple(replace(b, saved_bytes=(400.0 * MIB,) * 7) for b in profile.blocks))
    there = cluster("4xTitanRTX")
    free = solve(parse(f"micro=16 partition={name}"), heavy, there, 64)
    tight = solve(parse(f"micro=16 memory=1900MiB partition={name}"), heavy, there, 64)
    assert (free.plan.recompute, tight.plan.recompute) == ("none", "full")
    assert tight.fits
    forced = solve(parse(f"micro=16 recompute=full partition={name}"), heavy, there, 64)
    assert forced.plan.recompute == "full"


def test_piper_recomputes_all_or_nothing_and_says_so(profile):
    """In between it would recompute some blocks, which no plan can say yet."""
    heavy = replace(profile, blocks=tuple(replace(b, saved_bytes=(400.0 * MIB,) * 7) for b in profile.blocks))
    plan = resolve(parse("micro=16 memory=3500MiB partition=piper"), heavy, cluster("4xTitanRTX"), 64)
    assert re.search(r"piper would recompute \d+ of 12 blocks, and a plan does all or none", plan.cut_by)


@pytest.mark.system("piper", "P")
def test_piper_by_its_key_takes_as_long_as_1f1b_says():
    """Too little memory for one stage: four of a rank each, and (m + p − 1)(F + B) where messages are free."""
    even = chain(blocks=8, forward=1.0, backward=2.0, saved=0, boundary=0, weights=64 * MIB)
    there = devices(1, 1, 1, 1, rate=1e12, memory=800 * MIB)
    found = solve(parse("piper"), even, there, 64)
    assert (found.plan.dp, found.plan.pp, found.plan.stages) == (1, 4, (2, 4, 6))
    assert found.step_s == pytest.approx((found.plan.micro + 3) * 2 * 3.0, rel=1e-6)
    assert found.fits
    assert found.peak.breakdown["weights"] == 2 * 64 * MIB


@pytest.mark.parametrize("key", ["bapipe", "lamp", "piper"])
def test_solvers_without_a_system_are_their_key(key, profile):
    there = cluster("4xTitanRTX")
    found, named = (resolve(parse(line), profile, there, 64) for line in (key, f"partition={key}"))
    assert replace(found, key="") == named
    assert found.cut_by == named.cut_by


@pytest.mark.system("chimera", "S")
def test_chimera_takes_its_greedy_batch(profile):
    """The largest micro-batch that fits at the best depth by the paper's model, over all devices."""
    there = cluster("4xTitanRTX")

    def at(samples):
        return problem(Tables(profile), there, range(4), samples, 64 // samples)

    expected = greedy_batch(at, 64, (1, 2, 4, 8, 16, 32, 64))
    plan = resolve(parse("chimera partition=chimera"), profile, there, 64)
    assert (plan.dp, plan.pp, plan.stages) == (expected.replicas[0], expected.stages, expected.cuts)
    assert plan.micro * plan.dp * expected.samples == 64
    assert plan.schedule == "chimera"
    little = resolve(parse("partition=chimera memory=780MiB"), profile, there, 64)
    assert little.micro > plan.micro or little.pp > plan.pp  # less on each device


# -- words and refusals ----------------------------------------------------------------------------------------------


def test_explain_says_who_cut(profile):
    there = cluster("4xTitanRTX")
    found = solve(parse("pp=4 partition=pipemare"), profile, there, 64)
    words = str(explain(found, profile, there))
    assert "Cut by partition=pipemare, which expects 24.0 MiB a stage by its own costs" in words
    assert "the system updates without waiting; here only its partition is used, in a synchronous order" in words
    assert "Cut by" not in str(explain(solve(parse("pp=4"), profile, there, 64), profile, there))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("partition=pipdream", "pipemare. Try partition=pipedream."),
        ("partition=", "partition is one of bottleneck, "),
        (
            "stages=3 partition=dapple",
            "the cuts are given, and partition=dapple is there to choose them. Try stages=3 or",
        ),
        (
            "pp=4 partition=pipedream",
            "pipedream chooses pp and dp itself. Try leaving out pp, or partition=bottleneck.",
        ),
        ("dp=2,1 partition=piper", "piper chooses pp and dp itself. Try leaving out dp"),
        ("micro=8 partition=chimera", "chimera chooses pp and dp and micro itself"),
        ("dapple partition=chimera", "chimera plans for its own order of work, not 1f1b. Try schedule=chimera."),
        ("interleaved partition=pipedream", "pipedream has one stage a device, and interleaved several"),
        ("zb-v partition=hetpipe", "Try partition=even or partition=bottleneck."),
        ("pp=3 schedule=interleaved chunks=5 partition=even", "15 stages, but the model has only 12 blocks. Try pp=2."),
        ("pp=5 partition=even", "it needs 1 × 5 = 5 devices, and there are 4"),
        (
            "pp=4 schedule=looped chunks=2 partition=even",
            "12 blocks do not divide by 8 stages. Try pp=3 or pp=6.",
        ),
        (
            "interleaved pp=4 chunks=2 partition=even",
            "partition=even on 4 devices of 2 chunks: 12 blocks do not divide by 8 stages. Try pp=3 or pp=6.",
        ),
        # What was asked for is kept or refused, whatever the planner answers.
        *(
            (
                f"{asked} micro=8 partition={name}",
                (
                    f"{name} answers data parallelism (dp=4) here, and the plan asks for "
                    f"schedule={asked.removeprefix('schedule=')}, an order of work between stages. "
                    "Try leaving the order of work out, or partition=bottleneck."
                ),
            )
            for asked, name in (
                ("schedule=gpipe", "pipedream"),
                ("gpipe", "dapple"),
                ("terapipe", "dapple"),
                ("chimera", "dapple"),
                ("naive", "pipedream"),
                ("schedule=1f1b", "bapipe"),
            )
        ),
        (
            "pipedream pp=2",
            "the system pipedream (PipeDream) is not built yet. Try partition=pipedream, which cuts as it",
        ),
        ("hetpipe", "Try partition=hetpipe, which cuts as it does."),
        ("megatron", "is not built yet. Try trainplan systems."),
    ],
)
def test_refusals(line, message, profile):
    with pytest.raises(PlanError) as error:
        resolve(parse(line), profile, cluster("4xTitanRTX"), 64)
    assert message in str(error.value)


@pytest.mark.parametrize("schedule", ["gpipe", "naive"])
def test_an_order_that_is_asked_for_is_kept(schedule):
    plan = resolve(parse(f"schedule={schedule} micro=8 partition=pipedream"), worked(P1), FOUR, 64)
    assert shape(plan) == ((2, 5), (1, 2, 1), 3, 8, schedule)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("zb-h1", "different numbers of ranks a stage are for 1f1b, gpipe, naive, not zb-h1"),
        ("chimera", "two directions meet in the middle of an even number of stages, not 3"),
    ],
)
def test_an_answer_that_does_not_go_with_the_order_is_told(asked, why):
    """What nobody wrote is not what is refused: the solver's answer is."""
    with pytest.raises(PlanError) as error:
        resolve(parse(f"{asked} micro=8 partition=pipedream"), worked(P1), FOUR, 64)
    assert str(error.value) == (
        f"plan '{asked} micro=8 partition=pipedream': pipedream answers dp=1,2,1 pp=3 here, and {why}. "
        "Try leaving the order of work out, or partition=bottleneck."
    )


def test_a_system_takes_whatever_its_own_planner_answers(profile):
    assert shape(resolve(parse("dapple micro=8 partition=dapple"), profile, cluster("4xTitanRTX"), 64)) == (
        (), 4, 1, 2, "naive",
    )  # fmt: skip


def test_a_published_algorithm_that_goes_wrong_says_how():
    exact = replace(P2, forward=tuple(t / 4 for t in P2.seconds))  # thirds would be rounded, and ties broken
    with pytest.raises(PlanError) as error:
        resolve(parse("pp=3 micro=4 partition=torchgpipe"), worked(exact), devices(1, 1, 1), 64)
    assert "goes wrong on this model: stage 1 holds no block. Try partition=torchgpipe-corrected" in str(error.value)


def test_devices_that_nobody_can_compare():
    """A solver for equal devices refuses others, and a device without a peak cannot be placed."""
    with pytest.raises(PlanError, match=r"it takes all devices for equal, and their speeds go from 1.0 to 2.0"):
        resolve(parse("partition=pipedream"), worked(P1), devices(1, 2), 64)
    unknown = devices(1, 2)
    blank = dataclasses.replace(unknown.nodes[0].devices[1], flops={})
    node = replace(unknown.nodes[0], devices=(unknown.nodes[0].devices[0], blank))
    with pytest.raises(PlanError, match="how fast cpu2 is beside cpu is not known: it has no peak in fp32"):
        resolve(parse("pp=2"), worked(P1), replace(unknown, nodes=(node,)), 64)
