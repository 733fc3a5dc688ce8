"""`check` finds messages that are lost, doubled, swapped or of the wrong size."""

from synthetic import chain
from tests.program.legality import rejecting, two_stages
from tests.program.surgery import change, find, reread, values_between, without
from trainplan.plan.plan import plan
from trainplan.program.builder import Builder
from trainplan.program.lower import lower
from trainplan.program.ops import Value
from trainplan.program.program import Program


def receive_dropped() -> Program:
    return without(two_stages(), "1RECV_F1")


def send_dropped() -> Program:
    return without(two_stages(), "1SEND_B0")


def sizes_differ() -> Program:
    program = two_stages()
    return change(program, "bytes", find(program, "1RECV_F0"), 11)


def to_the_wrong_rank() -> Program:
    program = lower(
        plan(pp=3, micro=1, schedule="gpipe", stages=(1, 2), blocks=3), chain(3), batch=1
    )  # fmt: skip
    return change(program, "peer", find(program, "0SEND_F0"), 2)


def micro_batches_crossed() -> Program:
    program = two_stages()
    first, second = values_between(program, "0SEND_F0", "1RECV_F0"), values_between(program, "0SEND_F1", "1RECV_F1")
    program = reread(program, find(program, "1RECV_F0"), lambda row: second)
    return reread(program, find(program, "1RECV_F1"), lambda row: first)


def steps_crossed() -> Program:
    program = two_stages()
    first, second = values_between(program, "0SEND_F0", "1RECV_F0"), values_between(program, "0SEND_F0@1", "1RECV_F0@1")
    program = reread(program, find(program, "1RECV_F0"), lambda row: second)
    return reread(program, find(program, "1RECV_F0@1"), lambda row: first)


def received_twice() -> Program:
    program = two_stages()
    message = values_between(program, "0SEND_F0", "1RECV_F0")
    return reread(program, find(program, "1RECV_F1"), lambda row: [*row, *message])


def gradient_received_as_activation() -> Program:
    build = Builder(world=2)
    build.op(0, "0SEND_F0", to=1, makes={"h": (Value.MESSAGE, 4)})
    build.op(1, "1RECV_B0>0", to=0, reads=["h"], frees=["h"], makes={"h on 1": (Value.BOUNDARY, 4)})
    return build.program()


def message_from_nowhere() -> Program:
    build = Builder(world=2)
    build.value(-1, "h", Value.MESSAGE, 4)
    build.op(1, "1RECV_F0", to=0, reads=["h"], frees=["h"], makes={"h on 1": (Value.BOUNDARY, 4)})
    return build.program()


def in_flight_without_a_message() -> Program:
    program = two_stages()
    (value,) = values_between(program, "0F0", "0SEND_F0")
    return change(program, "value_rank", value, -1)


test_rejects = rejecting(
    (receive_dropped, "matched", "0SEND_F1", "received 0 times, not once"),
    (send_dropped, "matched", "0RECV_B0", "receives what nobody sends"),
    (sizes_differ, "matched", "1RECV_F0", "expects 11 bytes, 0SEND_F0 sends 10"),
    (to_the_wrong_rank, "matched", "1RECV_F0", "on rank 1 receives what 0SEND_F0 on rank 0 sends to rank 2"),
    (micro_batches_crossed, "matched", "1RECV_F1", "receives what 0SEND_F0"),
    (steps_crossed, "matched", "1RECV_F0", "receives what 0SEND_F0@1", "ends"),
    (received_twice, "matched", "1RECV_F1", "receives 2 messages, not one"),
    (gradient_received_as_activation, "matched", "1RECV_B0>0", "receives what 0SEND_F0"),
    (message_from_nowhere, "matched", "1RECV_F0", "receives what nobody sends"),
    (in_flight_without_a_message, "matched", "0F0", "what 0F0 makes is on no rank, but no message"),
)
