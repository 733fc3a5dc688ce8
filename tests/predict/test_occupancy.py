"""Memory as the tools of a GPU show it: torch's allocator, played; and what differs from step to step."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.predict.reference_allocator import Reference
from tests.program.strategies import examples
from trainplan.cluster.catalogue import device
from trainplan.cluster.parse import cluster
from trainplan.plan.plan import plan
from trainplan.predict.allocator import LARGE_SEGMENT, SMALL_SEGMENT, Allocator
from trainplan.predict.occupancy import CUBLAS, CUBLAS_HOPPER, Pieces, cut, workspace_of
from trainplan.predict.planned import planned
from trainplan.predict.predict import MEMORY_MARGIN, predict
from trainplan.profile.estimate import estimate
from trainplan.program.ops import Value
from trainplan.report.answers import Predicted
from trainplan.solve.limits import limited
from trainplan.workload.load import load

MIB = 2**20


def test_sizes_are_rounded_and_come_out_of_segments():
    allocator = Allocator()
    allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (512, SMALL_SEGMENT)
    allocator.allocate(MIB)  # still a small one
    assert (allocator.allocated, allocator.reserved) == (512 + MIB, SMALL_SEGMENT)
    allocator.allocate(MIB + 1)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    allocator.allocate(11 * MIB + 1)  # from 10 MiB on a segment of its own, unless a hole is large enough
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    allocator.allocate(11 * MIB + 1)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT + 12 * MIB


def test_what_is_left_of_a_large_block_is_cut_off_only_if_it_is_worth_it():
    allocator = Allocator()
    allocator.free(allocator.allocate(32 * MIB))
    allocator.allocate(31 * MIB + 512)  # less than 1 MiB would be left
    assert allocator.allocated == 32 * MIB
    other = Allocator()
    other.free(other.allocate(32 * MIB))
    other.allocate(30 * MIB)
    assert other.allocated == 30 * MIB


def test_neighbours_become_one_again():
    allocator = Allocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for place in (1, 3, 0, 2):
        allocator.free(blocks[place])
    allocator.allocate(20 * MIB)
    assert allocator.reserved == LARGE_SEGMENT


def test_segments_that_nobody_uses_are_given_back_when_there_is_no_more():
    allocator = Allocator(limit=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved, allocator.over) == (80 * MIB, False)
    allocator.allocate(80 * MIB)
    assert allocator.over


def scenes(allocate, free, seed):
    """Some hundred tensors that come and go."""
    draw = random.Random(seed)
    alive = []
    for _ in range(300):
        if alive and draw.random() < 0.45:
            free(alive.pop(draw.randrange(len(alive))))
        else:
            alive.append(allocate(int(2 ** draw.uniform(4, 25))))
        yield


@pytest.mark.parametrize("seed", range(3))
def test_books_are_never_wrong(seed):
    allocator = Allocator()
    for _ in scenes(allocator.allocate, allocator.free, seed):
        assert allocator.allocated + sum(allocator.unused) == allocator.reserved


MOVES = st.lists(st.one_of(st.integers(-40, -1), st.floats(4, 26).map(lambda power: int(2**power))), max_size=120)


@examples(60)
@given(MOVES, st.sampled_from([0, 30 * MIB, 200 * MIB]))
def test_what_is_compiled_follows_the_rules(moves, limit):
    """Tensors that come (bytes) and go (which of those that are there)."""
    allocator, reference, alive = Allocator(limit), Reference(limit), []
    for move in moves:
        if move > 0:
            alive.append((allocator.allocate(move), reference.allocate(move)))
        elif alive:
            block, other = alive.pop(move % len(alive))
            allocator.free(block)
            reference.free(other)
        for what in ("allocated", "reserved", "peak_allocated", "peak_reserved", "over"):
            assert getattr(allocator, what) == getattr(reference, what)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_the_allocator_is_torch_s(seed):
    import torch

    torch.cuda.empty_cache()
    before = [torch.cuda.memory_stats()[f"{what}_bytes.all.current"] for what in ("allocated", "reserved")]
    allocator, pairs = Allocator(), {}

    def allocate(size):
        block = allocator.allocate(size)
        pairs[block] = torch.empty(size, dtype=torch.uint8, device="cuda")
        return block

    def free(block):
        del pairs[block]
        allocator.free(block)

    for _ in scenes(allocate, free, seed):
        stats = torch.cuda.memory_stats()
        now = [stats[f"{what}_bytes.all.current"] for what in ("allocated", "reserved")]
        # What other tests have left may have holes that fit.
        assert now[0] - before[0] == pytest.approx(allocator.allocated, abs=4 * MIB)
        assert now[1] - before[1] == pytest.approx(allocator.reserved, abs=LARGE_SEGMENT)


SHAPE = "gpt:layers=4,hidden=64,heads=4,seq=32,vocab=199,batch=8"


@pytest.fixture(scope="module")
def profile():
    return estimate(load(SHAPE), cluster("1xA100-80").device(0), samples=[1, 2, 4, 8])


def found(profile, on="1xA100-80", **choices):
    return predict(plan(blocks=len(profile.blocks), **choices), profile, cluster(on), batch=8)


def test_the_optimizer_s_states_come_at_the_end_of_the_first_step(profile):
    answer = found(profile)
    places = answer.occupancy
    states = profile.state_bytes_per_parameter * profile.parameter_count
    assert places.later_steps.allocated - places.first_step.allocated == pytest.approx(states, rel=0.05)
    # What the program has at its peak, what is rounded, and what cuBLAS keeps for two threads.
    assert places.later_steps.allocated == pytest.approx(answer.peak.bytes + 2 * CUBLAS, rel=0.02)
    context = cluster("1xA100-80").device(0).context_bytes
    for _, taken in places.rows:
        assert taken.allocated <= taken.reserved == taken.visible - context
    assert places.resuming.allocated < places.evaluation.allocated < places.later_steps.allocated
    assert answer.to_json()["occupancy"]["first_step"]["allocated"] == places.first_step.allocated


def test_what_fits_has_room_for_workspaces_and_holes_too(profile):
    """Tensors that fill all but the margin of a small device: cuBLAS's two workspaces of 32 MiB are more than that."""
    there, here = cluster("1xH100-SXM"), replace(profile, device="H100-SXM")
    single = plan(blocks=len(profile.blocks))
    alone = predict(single, here, there, batch=8)

    def within(memory):
        return predict(single, here, limited(there, memory), batch=8)

    tight = within(int(alone.peak_bytes / (1 - MEMORY_MARGIN)) + 2)
    assert tight.peak_bytes <= tight.limit_bytes
    assert tight.occupancy.over
    assert not tight.fits
    assert tight.to_json()["fits"] is False
    assert "DOES NOT FIT, though tensors would" in str(Predicted(tight, here, there))
    enough = within(tight.occupancy.most.visible + LARGE_SEGMENT)
    assert enough.fits
    assert enough.occupancy.most.visible <= enough.occupancy.memory
    assert "GiB never taken" in str(Predicted(enough, here, there))


def test_of_many_micro_batches_a_few_are_enough(profile, monkeypatch):
    """Only those that are in flight at once, and some more, are played."""
    from trainplan.predict import occupancy

    few = found(profile, "2xA100-80", pp=2, schedule="1f1b", micro=8, stages=(3,)).occupancy
    monkeypatch.setattr(occupancy, "AHEAD", 100)
    assert found(profile, "2xA100-80", pp=2, schedule="1f1b", micro=8, stages=(3,)).occupancy == few


def test_a_cpu_has_no_such_tools(profile):
    assert found(replace(profile, device="cpu"), "1xcpu").occupancy is None


def test_what_cublas_keeps_goes_by_what_a_device_can_do():
    sizes = {name: workspace_of(device(name)) for name in ("V100-16", "A100-80", "RTX4090", "H200", "B200")}
    assert set(list(sizes.values())[:3]) == {CUBLAS}
    assert sizes["H200"] == sizes["B200"] == CUBLAS_HOPPER
    renamed = replace(device("H200"), name="own")
    assert workspace_of(renamed) == workspace_of(replace(renamed, capability=(0, 0))) == CUBLAS_HOPPER


def states_of(profile, **choices):
    """The tensors of the optimizer's states, and the weights with as much of each state of the largest block."""
    answer = predict(plan(blocks=len(profile.blocks), **choices), profile, cluster("1xA100-80"), batch=8, keep=True)
    pieces = Pieces(answer.played, 0, planned(answer.plan, profile, cluster("1xA100-80")))
    return pieces.initial(Value.OPTIMIZER), pieces.largest_unit


def test_states_are_as_wide_as_weights_or_in_32_bits_beside_lowered_ones(profile):
    """Two states of Adam: in 32 bits, all in bf16, and lowered to bf16 with a copy of the weights in 32 bits."""
    counts = sorted(p.count for p in profile.parameters)
    largest = max(sum(p.count for p in profile.parameters if p.blocks[0] == b) for b in range(len(profile.blocks)))
    narrow = replace(
        profile,
        parameters=tuple(replace(p, bytes=2 * p.count) for p in profile.parameters),
        state_bytes_per_parameter=profile.state_bytes_per_parameter / 2,
    )
    for kind, choices, states, wide, weight in (
        (profile, {}, 2, 4, 4), (narrow, {}, 2, 2, 2), (profile, {"precision": "bf16"}, 3, 4, 2),
    ):  # fmt: skip
        sizes, unit = states_of(kind, **choices)
        expected = sorted(wide * count for count in counts for _ in range(states))
        assert [size for size in sorted(sizes) if size in expected][-len(counts) :] == expected[-len(counts) :]
        assert abs(len(sizes) - len(expected)) <= 1  # what is left over: counters of steps
        assert unit == pytest.approx(largest * (weight + states * wide), rel=0.01)


def test_a_value_is_cut_into_tensors():
    assert cut(100, (60, 50, 30, 0)) == [60, 30, 10]
    assert cut(100, (60, 40)) == [60, 40]


# Bytes of tensors at the worst moment of the first step on an H200 (torch 2.11, 2026-11-15), beyond what cuBLAS keeps:
# its workspaces were there before, from other models in the same process.
GPT, RESNET = "gpt:layers=4,hidden=256,heads=4,seq=128,vocab=999,batch=8", "resnet18:cifar10,batch=32"
ON_AN_H200 = {GPT: 95_738_880, RESNET: 236_572_672}


@pytest.mark.parametrize("name", [GPT, pytest.param(RESNET, marks=pytest.mark.slow)])
def test_a_first_step_takes_what_it_took_on_an_h200(name):
    there, workload = cluster("1xH200"), load(name)
    profile = estimate(workload, there.device(0), samples=[workload.batch])
    places = predict(plan(blocks=len(profile.blocks)), profile, there, batch=workload.batch).occupancy
    assert places.first_step.allocated - 2 * CUBLAS_HOPPER == pytest.approx(ON_AN_H200[name], rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [GPT, RESNET])
def test_a_step_takes_what_was_predicted(name):
    """Steps of the model itself: allocated within a tenth, and the first step's is smaller."""
    import torch

    from trainplan.profile.machine import name_of
    from trainplan.workload.batch import to_device

    here = torch.device("cuda")
    device = cluster(f"1x{name_of(here)}").device(0)
    workload = load(name)
    profile = estimate(workload, device, samples=[workload.batch])
    there = cluster(f"1x{name_of(here)}")
    expected = predict(plan(blocks=len(profile.blocks)), profile, there, batch=workload.batch).occupancy
    torch._C._cuda_clearCublasWorkspaces()  # earlier tests have left theirs, and this one would not count them
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = workload.build().to(here)
    batch = to_device(workload.inputs(workload.batch, 0), here)
    optimizer = workload.optimizer(list(model.named_parameters()))
    seen = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        workload.loss.function(model(*batch.args, **batch.kwargs), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        stats = torch.cuda.memory_stats()
        seen.append((stats["allocated_bytes.all.peak"] - before, stats["reserved_bytes.all.peak"]))
    assert expected.first_step.allocated == pytest.approx(seen[0][0], rel=0.1)
    assert expected.later_steps.allocated == pytest.approx(seen[-1][0], rel=0.1)
    assert expected.later_steps.reserved == pytest.approx(seen[-1][1], rel=0.25)
