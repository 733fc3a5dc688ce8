"""Orders of work against the lists of their papers, against torch's own, and the files that carry them."""

import csv
import itertools

import pytest
from torch.distributed.pipelining import schedules as torchs

from trainplan.errors import InputError
from trainplan.program.ops import Kind
from trainplan.program.schedules import SCHEDULES, Order, Size
from trainplan.program.schedules.given import read_csv, write_csv


def words(order: Order, stages: bool = True) -> str:
    rows = [(*row[:4], f"/{row[4]}" if row[4] else "") for row in order.tolist()]
    return " ".join(f"{s if stages else ''}{Kind(int(k)).name}{m}{part}" for k, _, s, m, part in rows)


# Rank by rank, as they are drawn; where every rank has one stage, it is left out.
LISTS = {
    ("gpipe", Size(4, 4)): ["F0 F1 F2 F3 B3 B2 B1 B0"] * 4,
    ("terapipe", Size(3, 1, slices=3)): ["F0 F0/1 F0/2 B0/2 B0/1 B0"] * 3,
    ("terapipe", Size(2, 2, slices=2)): ["F0 F0/1 F1 F1/1 B1/1 B1 B0/1 B0"] * 2,
    ("1f1b", Size(4, 8)): [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ],
    ("interleaved", Size(4, 8, chunks=2)): [
        (
            "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 4B5 "
            "4B6 4B7 0B4 0B5 0B6 0B7"
        ),
        (
            "1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3 5B4 5B5 "
            "5B6 5B7 1B4 1B5 1B6 1B7"
        ),
        (
            "2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3 6F6 6B4 6F7 6B5 "
            "6B6 6B7 2B4 2B5 2B6 2B7"
        ),
        (
            "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 7B6 "
            "7F7 7B7 3B4 3B5 3B6 3B7"
        ),
    ],
    ("zb-h1", Size(4, 8)): [
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7",
        "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7",
        "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7",
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7",
    ],
    ("zb-h2", Size(3, 6)): [
        "F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5",
        "F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5",
        "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5",
    ],
    ("zb-v", Size(2, 4, chunks=2)): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ],
    ("chimera", Size(4, 4)): [
        "0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1",
        "1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1",
        "1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3",
        "0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3",
    ],
    ("chimera", Size(4, 8)): [
        "0F0 0F1 3F2 3B2 3F3 3B3 0B0 0F4 0B1 0F5 3F6 3B6 3F7 3B7 0B4 0B5",
        "1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1 1F4 2F6 1F5 2F7 2B6 1B4 2B7 1B5",
        "1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3 1F6 2F4 1F7 2F5 2B4 1B6 2B5 1B7",
        "0F2 0F3 3F0 3B0 3F1 3B1 0B2 0F6 0B3 0F7 3F4 3B4 3F5 3B5 0B6 0B7",
    ],
    ("chimera-doubled", Size(4, 8)): [
        "0F0 0F1 0F2 0F3 3F4 3F5 3B4 3F6 3F7 3B5 0B0 3B6 0B1 3B7 0B2 0B3",
        "1F0 1F1 2F4 2F5 1F2 1F3 2F6 2F7 2B4 1B0 2B5 1B1 2B6 1B2 2B7 1B3",
    ],
    ("gems", Size(4, 4)): [
        "0F0 0B0 3F1 3B1 0F2 0B2 3F3 3B3",
        "1F0 1B0 2F1 2B1 1F2 1B2 2F3 2B3",
        "2F0 2B0 1F1 1B1 2F2 2B2 1F3 1B3",
        "3F0 3B0 0F1 0B1 3F2 3B2 0F3 0B3",
    ],
}


@pytest.mark.parametrize(("schedule", "size"), LISTS, ids=str)
def test_lists_are_those_of_the_papers(schedule: str, size: Size) -> None:
    wanted = LISTS[schedule, size]
    stages = wanted[0][0].isdigit()
    assert [words(order, stages) for order in SCHEDULES[schedule](size)][: len(wanted)] == wanted


SIZES = [
    (schedule, Size(ranks, micro, chunks=chunks, pairs=pairs))
    for schedule, ranks, micro in itertools.product(SCHEDULES, (1, 2, 3, 4, 6, 8), (1, 2, 3, 5, 8, 13))
    for chunks in {"interleaved": (1, 2, 3), "looped": (1, 2, 3), "zb-v": (2,)}.get(schedule, (1,))
    for pairs in ((1, 2, 4) if schedule == "chimera" else (1,))
    if not (schedule.startswith("chimera") and (ranks % 2 or ranks // 2 % pairs))
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_goes_once_through_every_stage(schedule: str) -> None:
    for name, size in SIZES:
        if name != schedule:
            continue
        orders = SCHEDULES[schedule](size)
        assert len(orders) == size.ranks
        every = [tuple(row) for order in orders for row in order.tolist()]
        assert len(set(every)) == len(every)
        backward = (Kind.I, Kind.W) if schedule.startswith("zb") else (Kind.B,)
        wanted = itertools.product((Kind.F, *backward), range(size.stages), range(size.micro_batches))
        assert {(kind, stage, micro) for kind, _, stage, micro, _ in every} == set(wanted)
        # A micro-batch stays in one pipeline, and a stage of a pipeline on one rank.
        assert len({(micro, pipeline) for _, pipeline, _, micro, _ in every}) == size.micro_batches
        homes = {(row[1], row[2], rank) for rank, order in enumerate(orders) for row in order.tolist()}
        assert len(homes) == len({home[:2] for home in homes})


def torch_lists(kind: type, size: Size, tmp_path) -> list[Order]:
    """The lists of one of torch's own schedules, as it writes them to a file."""
    made = object.__new__(kind)
    made.pp_group_size, made._n_microbatches = size.ranks, size.micro_batches
    made.n_local_stages, made._num_stages, made.num_stages = size.chunks, size.stages, size.stages
    made._stages = [None] * size.chunks
    made.number_of_rounds = max(1, size.micro_batches // size.ranks)
    made.microbatches_per_round = size.micro_batches // made.number_of_rounds
    made.pipeline_order = {rank: made._calculate_single_rank_operations(rank) for rank in range(size.ranks)}
    path = tmp_path / "schedule.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(made.pipeline_order.values())
    return read_csv(path.read_text(), str(path))


@pytest.mark.parametrize(
    ("theirs", "ours", "size"),
    [
        (torchs.ScheduleInterleaved1F1B, "interleaved", Size(4, 8, chunks=2)),
        (torchs.ScheduleInterleaved1F1B, "interleaved", Size(3, 6, chunks=3)),
        (torchs.ScheduleInterleaved1F1B, "interleaved", Size(4, 10, chunks=2)),
        (torchs.ScheduleLoopedBFS, "looped", Size(3, 5, chunks=2)),
        (torchs.ScheduleZBVZeroBubble, "zb-v", Size(3, 4, chunks=2)),
        (torchs.ScheduleZBVZeroBubble, "zb-v", Size(4, 9, chunks=2)),
        (torchs.ScheduleInterleavedZeroBubble, "zb-h1", Size(4, 8)),
    ],
)
def test_torchs_lists_are_ours(theirs: type, ours: str, size: Size, tmp_path) -> None:
    found = torch_lists(theirs, size, tmp_path)
    assert [words(order) for order in found] == [words(order) for order in SCHEDULES[ours](size)]


# -- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "size"), [("interleaved", Size(2, 4, chunks=2)), ("chimera", Size(4, 6))])
def test_files_carry_orders_both_ways(schedule: str, size: Size) -> None:
    orders = SCHEDULES[schedule](size)
    again = read_csv(write_csv(orders), "again.csv")
    assert [order.tolist() for order in again] == [order.tolist() for order in orders]


def test_files_with_messages_and_pairs_are_read() -> None:
    (order,) = read_csv("0UNSHARD,0F0,0SEND_F0,(0F1;0B0)OVERLAP_F_B,,0RECV_B1,0B1", "torchs.csv")
    assert words(order) == "0F0 0F1 0B0 0B1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("0F0,0X0", "line 1, cell 2"),
        ("0F0,0B0\n1F0,oh", "line 2, cell 2"),
        ("0F0,0STEP", "F, B, I and W"),
    ],
)
def test_files_that_are_no_schedules(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_csv(text, "bad.csv")
