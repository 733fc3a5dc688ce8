"""`check` finds programs that may wait for ever."""

from synthetic import chain
from tests.program.legality import lockstep, rejected, rejecting, replicas, two_stages
from tests.program.surgery import find, move, relist
from trainplan.plan.plan import plan
from trainplan.program.builder import Builder
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Value
from trainplan.program.program import Program
from trainplan.program.wiring import stuck, wire


def waits_before_it_sends() -> Program:
    """Rank 0 waits for the gradient of what it has not sent yet."""
    return move(two_stages(), 0, "0RECV_B0", before="0SEND_F0")


def opposite_orders() -> Program:
    """Two ranks take part in two sums of the same group, each in another order."""
    program = replicas()
    ops = [find(program, name) for name in ("0REDUCE_GRAD", "0REDUCE_GRAD.1")]
    for rank in (0, 1):  # the sums stand together, after what they sum
        rest = [op for op in program.lists.row(rank).tolist() if op not in ops]
        at = rest.index(find(program, "0LOSS"))
        order = ops if rank == 0 else ops[::-1]
        program = relist(program, rank, lambda _, rest=rest, at=at, order=order: rest[:at] + order + rest[at:])
    return program


def both_receive_first() -> Program:
    build = Builder(world=2)
    build.op(0, "0SEND_F0", to=1, makes={"there": (Value.MESSAGE, 1)})
    build.op(1, "1SEND_B0", to=0, makes={"back": (Value.MESSAGE, 1)})
    build.op(0, "0RECV_B0", to=1, reads=["back"], frees=["back"], makes={"g": (Value.BOUNDARY, 1)})
    build.op(1, "1RECV_F0", to=0, reads=["there"], frees=["there"], makes={"h": (Value.BOUNDARY, 1)})
    return relist(relist(build.program(), 0, lambda row: row[::-1]), 1, lambda row: row[::-1])


def three_in_a_circle() -> Program:
    """Each rank waits for its left neighbour before it sends to its right one."""
    build = Builder(world=3)
    for rank in range(3):
        build.op(rank, f"{rank}SEND_F0>{(rank + 1) % 3}", to=(rank + 1) % 3, makes={f"m{rank}": (Value.MESSAGE, 1)})
    for rank in range(3):
        left = (rank - 1) % 3
        made = {f"h{rank}": (Value.BOUNDARY, 1)}
        build.op(rank, f"{rank}RECV_F0>{left}", to=left, reads=[f"m{left}"], frees=[f"m{left}"], makes=made)
    program = build.program()
    for rank in range(3):
        program = relist(program, rank, lambda row: row[::-1])
    return program


def barriers_in_opposite_orders() -> Program:
    """Rank 1 comes to a barrier before the one in front of it; it computes and exchanges nothing between the two."""
    return move(lockstep(), 1, "0BARRIER.9", before="0BARRIER.8")


def message_over_a_barrier() -> Program:
    """What rank 0 sends in one phase rank 1 takes in the next one, while others compute."""
    return move(move(lockstep(), 1, "1RECV_F1", before="1F1"), 1, "0BARRIER.3", before="1RECV_F1")


test_rejects = rejecting(
    (waits_before_it_sends, "ends", "0RECV_B0", "rank 0 waits at 0RECV_B0 for 1SEND_B0 of rank 1, which waits at"),
    (opposite_orders, "ends", "0REDUCE_GRAD", "rank 0 waits for ever at 0REDUCE_GRAD"),
    (both_receive_first, "ends", "0RECV_B0", "rank 0 waits at 0RECV_B0 for 1SEND_B0 of rank 1"),
    (barriers_in_opposite_orders, "ends", "0BARRIER.9", "rank 1 waits for ever at 0BARRIER.9"),
    (message_over_a_barrier, "apart", "1RECV_F1", "0SEND_F1 after 3 barriers, 1RECV_F1 after 4 barriers"),
    (three_in_a_circle, "ends", "0RECV_F0>2", "rank 0 waits at 0RECV_F0>2 for 2SEND_F0>0 of rank 2"),
)


# -- collectives of different groups ------------------------------------------------------------------------------


def sums(*lists: str) -> Program:
    """Ranks that issue sums (a letter each) in the order of their words; a sum is of the ranks whose word has it."""
    build = Builder(world=len(lists))
    order = sorted(set("".join(lists)))
    for number, letter in enumerate(order):
        members = [rank for rank, word in enumerate(lists) if letter in word]
        build.op(members, f"{number}LOSS", waits=False)
    program = build.program()
    for rank, word in enumerate(lists):
        program = relist(program, rank, lambda _, word=word: [order.index(letter) for letter in word])
    return program


def test_sums_of_different_groups_in_opposite_orders() -> None:
    """A is a sum of ranks 0 and 1, B of all three. Rank 0 issues A first, rank 1 B."""
    program = sums("AB", "BA", "B")
    assert not len(stuck(program, wire(program)))  # nobody's host waits, and gloo would bring it to its end
    why = "rank 0 issues 0LOSS of ranks 0, 1 before 1LOSS of ranks 0, 1, 2"
    rejected(program, "ordered", "0LOSS", why)
    rejected(program, "ordered", "1LOSS", "rank 1 issues 1LOSS of .* before 0LOSS of .*; nothing else orders them")
    assert check(sums("AB", "AB", "B"))


def test_sums_in_a_circle_of_three_groups() -> None:
    """No two ranks have two sums in common, and yet each may wait for the next."""
    rejected(sums("AB", "BC", "CA"), "ordered", "2LOSS", "rank 2 issues 2LOSS of ranks 1, 2 before 0LOSS of ranks 0, 2")
    assert check(sums("AB", "BC", "AC"))
    assert check(sums("ABD", "ABC", "ACD"))


def test_sums_of_different_groups_with_others_between() -> None:
    rejected(sums("APB", "BQA", "BPQ"), "ordered", "1LOSS", "rank 0 issues 0LOSS")
    assert check(sums("APB", "AQB", "PQB"))


def test_exchanges_of_a_plan_in_opposite_orders() -> None:
    """Tied weights of two replicated stages: rank 1 sums them before its own bucket, which the others do after it."""
    tied = lower(
        plan(dp=2, pp=2, micro=2, schedule="gpipe", stages=(1,), blocks=2), chain(2, tied=((0, 1),)), batch=4
    )  # fmt: skip
    assert check(tied)
    own, shared = find(tied, "0REDUCE_GRAD"), find(tied, "0REDUCE_GRAD.1")
    assert (tied.members(own), tied.members(shared)) == ((0, 1), (0, 1, 2, 3))
    row = tied.lists.row(1).tolist()
    at = row.index(own)
    row.remove(shared)
    rejected(relist(tied, 1, lambda _: [*row[:at], shared, *row[at:]]), "ordered", "0REDUCE_GRAD", "rank 1 issues")
