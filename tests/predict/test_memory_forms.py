"""Simulated memory equals what can be worked out by hand: in closed form, or by counting along a rank's list.

(What real processes need is in test_memory.py.)
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.predict.pipelines import pipeline, timed
from tests.program.strategies import Case, cases, examples
from trainplan.plan.plan import plan
from trainplan.predict.clock import Played, play
from trainplan.predict.memory import in_flight, peaks, tracks
from trainplan.program.lower import lower
from trainplan.program.ops import Value
from trainplan.program.posting import RECEIVES_AHEAD
from trainplan.program.program import Program
from trainplan.program.text import parse

SCHEDULES = ("gpipe", "lockstep", "1f1b", "naive")
SAVED, BOUNDARY, WEIGHTS = 100, 10, 1000  # of a block, and of what passes between two of them


def held(schedule: str, stages: int, micro: int, rank: int) -> int:
    """Micro-batches in flight."""
    return {"gpipe": micro, "lockstep": micro, "1f1b": min(micro, stages - rank), "naive": 1}[schedule]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight(schedule: str) -> None:
    for p, m, message in itertools.product(range(2, 6), (1, 2, 3, 4, 8), (0.0, 0.5, 3.0)):
        for recompute in ("none", "full", "except-last"):
            played = timed(pipeline(schedule, p, m, recompute=recompute), message=message)
            assert [in_flight(played, rank) for rank in range(p)] == [held(schedule, p, m, r) for r in range(p)]


def highest(played: Played, rank: int = 0) -> dict[str, int]:
    """Most bytes while each operation runs."""
    track, program = tracks(played)[rank], played.program
    found = {}
    for op in program.lists.row(rank):
        before, within = track.seconds <= played.start[op], track.seconds < played.end[op]
        levels = [int(track.start.sum()), *track.level.tolist()]
        first, last = int(before.sum()), int((before | within).sum())
        found[program.name(op)] = max(levels[first : last + 1])
    return found


# -- pipelines of one block a stage -------------------------------------------------------------------------------


def counted(program: Program, rank: int) -> int:
    """The peak of a rank, by the rules of the engine: going along its list with a pencil.

    The next receives have their buffers already. What was sent stays: an activation until its backward is over, a
    gradient until something comes in that the other side sent after it had taken it, or until the step.
    """
    last = program.world - 1
    names = [parse(name) for name in program.rank_list(rank)]
    before = program.rank_list(rank - 1) if rank else []
    receives = sum(key.kind.name.startswith("RECV") for key in names)
    alive, gradients, given, taken, most = 0, 0, set(), 0, 0
    for key in names:
        posted = BOUNDARY * min(RECEIVES_AHEAD, receives - taken)
        micro, peak = key.micro_batch, 0
        if key.kind.name.startswith("RECV"):
            taken += 1
            alive += BOUNDARY  # it was posted; now it is an input, or a gradient
            posted = BOUNDARY * min(RECEIVES_AHEAD, receives - taken)
        if key.kind.name == "RECV_F":
            sent = before.index(f"{rank - 1}SEND_F{micro}")
            given -= {m for m in given if before.index(f"{rank - 1}RECV_B{m}") < sent}
        elif key.kind.name == "F":
            alive += SAVED + BOUNDARY * (rank < last)
        elif key.kind.name == "B":
            gradients = WEIGHTS
            peak = BOUNDARY * (rank > 0)  # the gradient of what came in
        most = max(most, alive + gradients + posted + BOUNDARY * len(given) + peak)
        if key.kind.name == "B":
            alive -= SAVED + BOUNDARY * (rank > 0) + 2 * BOUNDARY * (rank < last)
            given |= {micro} if rank else set()
        elif key.kind.name == "STEP":
            assert alive == 0
    return WEIGHTS + most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_peak_memory_of_pipelines(schedule: str) -> None:
    """Weights and gradients; what is in flight, with what came in and what went out; messages."""
    for p, m in itertools.product(range(2, 6), (1, 2, 4, 8, 12)):
        program = pipeline(schedule, p, m)
        for message in (0.0, 0.5):
            for peak in peaks(timed(program, message=message)):
                assert peak.bytes == counted(program, peak.rank), (p, m, peak)
                assert peak.op.startswith(f"{peak.rank}B")
                most = SAVED * held(schedule, p, m, peak.rank)
                assert most - SAVED <= peak.breakdown["saved"] <= most


@examples(40)
@given(cases(), st.integers(0, 99))
def test_peaks_are_the_highest_of_all_that_comes_and_goes(case: Case, seed: int) -> None:
    """Values one by one, in the order of time, as tracks have them; whole seconds, so that much happens at once."""
    program = case.program()
    rng = np.random.default_rng(seed)
    played = play(program, rng.integers(0, 3, len(program)), rng.integers(0, 2, len(program)))
    for peak, track in zip(peaks(played), tracks(played), strict=True):
        levels = [int(track.start.sum()), *track.level.tolist()]
        at = int(np.argmax(levels))
        parts = track.start + np.bincount(track.kind[:at], track.change[:at], len(Value)).astype(np.int64)
        assert peak.bytes == levels[at]
        assert peak.breakdown == {kind.name.lower(): int(parts[kind]) for kind in Value if parts[kind]}
        assert peak.op == (program.name(track.op[at - 1]) if at else "")


def test_what_is_in_flight_does_not_grow_with_the_micro_batches_of_1f1b() -> None:
    for rank in range(4):
        few, many = (peaks(timed(pipeline("1f1b", 4, m)))[rank].bytes for m in (12, 60))
        assert few == many


def test_peak_memory_of_gpipe_with_recomputation() -> None:
    """Boundaries of all micro-batches, and the activations of one stage: what GPipe's paper promises."""
    for p, m in itertools.product(range(2, 6), (1, 2, 4, 8)):
        for peak in peaks(timed(pipeline("gpipe", p, m, recompute="full"))):
            inside, first, last = SAVED, peak.rank == 0, peak.rank == p - 1
            if not last:  # all outputs but the first to come back, which is made a second time; gradients; receives
                inside += BOUNDARY * (m - 1) + BOUNDARY + BOUNDARY + BOUNDARY * min(RECEIVES_AHEAD, m - 1)
            if not first:  # all inputs, and a gradient that goes back
                inside += BOUNDARY * m + BOUNDARY
            assert peak.bytes == 2 * WEIGHTS + inside, (p, m, peak)
        # The last one goes back at once, so that nothing is saved by recomputing it.
        but_last = peaks(timed(pipeline("gpipe", p, m, recompute="except-last")))
        every = peaks(timed(pipeline("gpipe", p, m, recompute="full")))
        assert [peak.bytes for peak in but_last] == [peak.bytes for peak in every]


# -- one device ---------------------------------------------------------------------------------------------------


def test_peak_memory_of_one_device() -> None:
    """Activations go while gradients come: at each block those before it are there, and the gradients after it."""
    blocks = 6
    profile = chain(blocks, state_bytes_per_parameter=8.0, input_bytes_per_sample=3.0)
    fixed = blocks * WEIGHTS + blocks * 250 * 8 + 2 * 3
    passing = [BOUNDARY * (b > 0) + BOUNDARY * (b < blocks - 1) for b in range(blocks)]
    sweep = [(blocks - b) * WEIGHTS + (b + 1) * SAVED + passing[b] for b in range(blocks)]
    (peak,) = peaks(timed(lower(plan(blocks=blocks), profile, 2)))
    assert peak.bytes == fixed + max(sweep) == fixed + blocks * WEIGHTS + SAVED + BOUNDARY
    assert peak.breakdown == {
        "weights": 6000, "gradients": 6000, "optimizer": 12000, "saved": SAVED, "workspace": BOUNDARY, "input": 6
    }  # fmt: skip
    # With heavy activations and light weights the worst moment is the first block to go back.
    (peak,) = peaks(timed(lower(plan(blocks=blocks), chain(blocks, saved=3000), 2)))
    assert (peak.bytes, peak.breakdown["gradients"]) == (6000 + 6 * 3000 + 1000 + BOUNDARY, 1000)
    # With several micro-batches all gradients are there when the second one goes back.
    (peak,) = peaks(timed(lower(plan(micro=2, blocks=blocks), profile, 2)))
    assert peak.bytes == fixed + blocks * (WEIGHTS + SAVED) + BOUNDARY
    assert peak.op == "0F1"  # what passes between blocks is there in forward, its gradient in backward: the same
    (peak,) = peaks(timed(lower(plan(blocks=blocks, recompute="full"), profile, 2)))
    # Recomputed: inputs of blocks up to this one, the activations of one, and a second copy of what it hands on.
    inputs = [BOUNDARY * b + BOUNDARY * (b < blocks - 1) for b in range(blocks)]
    sweep = [(blocks - b) * WEIGHTS + inputs[b] + SAVED + passing[b] for b in range(blocks)]
    assert peak.bytes == fixed + max(sweep)


def test_workspace_counts_where_it_is_needed() -> None:
    """Forward needs 500 bytes in block 1 and 30 in block 2; the step 5000 at once, or 1500 for the largest block."""
    rows = list(chain(3).blocks)
    rows[1] = replace(rows[1], forward_workspace_bytes=(500.0, 500.0), update_workspace_bytes=1500.0)
    rows[2] = replace(rows[2], forward_workspace_bytes=(30.0, 30.0), update_workspace_bytes=3500.0)
    for adds, update in ((1.0, 5000), (0.0, 3500), (0.5, 4250)):
        profile = chain(3, update_adds=adds)
        profile = replace(profile, blocks=tuple(rows))
        played = timed(lower(plan(blocks=3), profile, 1), STEP=1.0)
        most = highest(played)
        # In block 1: its own and block 0's activations, what it reads and what it makes.
        assert most["0F0"] == 3000 + 2 * SAVED + 2 * BOUNDARY + 500
        assert most["0STEP"] == 3000 + 3000 + update
        (peak,) = peaks(played)
        assert (peak.op, peak.breakdown["workspace"]) == ("0STEP", update)


def test_norm_of_the_gradients_is_worked_out_in_double_precision() -> None:
    profile = chain(2, clip_norm=1.0)  # 250 numbers a block: their doubles, and the squares of these
    (peak,) = peaks(timed(lower(plan(blocks=2), profile, 1)))
    assert (peak.op, peak.breakdown["workspace"]) == ("0STEP", 2 * 8 * 250)
    program = lower(plan(pp=2, stages=(1,), blocks=2), profile, 1)
    for peak in peaks(timed(program, NORM=0.0)):
        assert (peak.op, peak.breakdown["workspace"]) == ("0NORM", 2 * 8 * 250)


# -- replicas -----------------------------------------------------------------------------------------------------


def test_replicas_keep_their_gradients_in_buckets() -> None:
    for micro, beside in ((1, 0), (2, 3000)):
        # DDP's first passes gather gradients beside the buckets.
        program = lower(plan(dp=2, micro=micro, bucket=1000, blocks=3), chain(3), 2 * micro)
        for peak in peaks(timed(program)):
            assert peak.bytes == 3000 + 3000 + beside + 3 * SAVED + BOUNDARY
        # Our own buckets do not: every pass adds to them.
        program = lower(plan(dp=2, micro=micro, bucket=1000, blocks=3, recompute="full"), chain(3), 2 * micro)
        for peak in peaks(timed(program)):
            assert peak.breakdown["gradients"] == 3000


def test_each_piece_of_a_backward_pass_frees_its_activations() -> None:
    """A block where one piece ends and the next begins counts in both."""
    played = timed(lower(plan(dp=2, bucket=1000, blocks=3), chain(3), 2))
    most = highest(played)
    assert [most[name] - 6000 for name in ("0B0", "0B0.1", "0B0.2", "0STEP")] == [310, 310, 220, 0]


def test_tied_weights_are_copied_for_their_exchange() -> None:
    program = lower(plan(pp=2, stages=(1,), blocks=2), chain(2, tied=((0, 1),), weights=400), 1)
    for rank, peak in enumerate(peaks(timed(program))):
        assert peak.breakdown["gradients"] == 800
        assert (peak.op, peak.breakdown["communication"]) == ("0REDUCE_GRAD", 400), rank


def test_late_and_early_values_count_outside_the_operation() -> None:
    """Of 1000 bytes of gradients and 100 saved by each block: the first block to go back has only its own."""
    (track,) = tracks(timed(lower(plan(blocks=2), chain(2, saved=5000), 1)))
    assert track.level.tolist()[-1] == 2000
    levels = dict(zip(np.round(track.seconds).astype(int).tolist(), track.level.tolist(), strict=True))
    assert levels[1] == 2000 + 2 * 5000 + 1000 + BOUNDARY  # at the start of backward, when all that comes has come
    assert levels[3] == 2000
