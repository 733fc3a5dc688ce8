"""One rank running its list, step after step.

The runner is an interpreter: it goes through the instructions of its rank, waits for what each reads, hands it to the
handler of its kind (`handlers.py`), notes when it started and ended, and drops the values that it frees. It decides
nothing; everything that could be decided is in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainplan.engine.clocks import now
from trainplan.engine.decided import Exchange
from trainplan.engine.exchanges import Sums
from trainplan.engine.held import Held
from trainplan.engine.inputs import Fed, Inputs
from trainplan.engine.instructions import Instruction, instructions
from trainplan.engine.loads import Loaded, take
from trainplan.engine.parcels import Host, Parcel
from trainplan.engine.recorder import Recorder
from trainplan.engine.seeds import reseed
from trainplan.engine.serving import Shard, Weights
from trainplan.engine.sharded import Chain, Gathered
from trainplan.engine.transport import Arrivals, Form, Gloo, Message, Pending
from trainplan.errors import RunError
from trainplan.profile.capture.sliced import Carry, Slice
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.loads import INPUT_MESSAGES
from trainplan.program.lower.service import Load
from trainplan.program.ops import COLLECTIVES, COPIES, RECEIVES, SENDS, Kind
from trainplan.program.posting import RECEIVES_AHEAD, due, in_order_of_sending
from trainplan.program.program import Program
from trainplan.workload.workload import Batch, Loss

SERVED = (Kind.SEND_G, Kind.RECV_G, Kind.SEND_W, Kind.RECV_W)  # messages between workers and servers
_TENSORS = 1024  # that a message with running statistics may carry
# These go on after their handler has returned, or are several operations in one call.
NOTED_BY_THEIR_HANDLERS = (*SENDS, *COLLECTIVES, *COPIES, Kind.TICK, Kind.LOAD)


@dataclass
class Part:
    """What this rank holds of a plan: one stage, or several."""

    layout: Layout
    replica: int
    held: dict[int, Held]  # by number of the stage
    loss: Loss
    transport: Gloo
    groups: list[dist.ProcessGroup | None]  # of the program
    seed: int
    device: torch.device
    inputs: Inputs  # what steps train on
    slices: Sequence[Slice] = ()  # of every sequence; none: sequences are whole
    # Of weights that several stages hold: by unit of their exchange, the parameters of every copy on this rank.
    tied: dict[int, list[list[nn.Parameter]]] = field(default_factory=dict)
    chain: Chain | None = None  # what follows collectives of gradients that are shared out
    host: Host | None = None  # where parcels go away
    sums: dict[int, Sums] = field(default_factory=dict)  # by group, of those that are made in rounds
    # By stage, of a worker whose weights come from where the optimizer is, or go from here.
    weights: dict[int, Weights] = field(default_factory=dict)
    shard: Shard | None = None  # of a server
    exchanges: dict[int, Exchange] = field(default_factory=dict)  # by stage, where their order is decided while running
    # Of the step before: optimizer steps of blocks that wait for the next forward pass, by block.
    deferred: dict[int, tuple[int, int]] = field(default_factory=dict)  # (operation, step)

    @property
    def is_last(self) -> bool:
        """Whether the loss is worked out here."""
        return any(held.is_last for held in self.held.values())


@dataclass
class StepState:
    """What is alive within one step."""

    number: int
    parts: list[Batch]  # micro-batches of this replica
    weights: list[float]  # share of each (or of each of their slices) in the whole batch's mean
    values: dict[int, Any] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)  # value → what must be waited for before it is read
    passes: dict[tuple[int, int], Any] = field(default_factory=dict)  # (stage, piece) → a pass on its way back
    carries: dict[tuple[int, int], Carry] = field(default_factory=dict)  # (stage, piece) → keys and values of a slice
    # (stage, piece) → section → what its forward pass has saved, where it goes away
    parcels: dict[tuple[int, int], dict[int, Parcel]] = field(default_factory=dict)
    sending: dict[int, Pending] = field(default_factory=dict)  # value → the message that carries it
    sent: list[Pending] = field(default_factory=list)
    loss: Tensor | None = None  # weighted sum over this replica's micro-batches
    norm: float | None = None
    fed: Fed | None = None  # what is loaded in this step, or for it
    loaded: dict[int, Loaded] = field(default_factory=dict)  # by stage
    # Of a server: gradients that have arrived, by load, in the order of workers.
    received: dict[int, list[list[Tensor]]] = field(default_factory=dict)


def served_tag(layout: Layout, unit: int, push: bool, stage: int = 0) -> int:
    """The tag of a load: on its way from a stage of the worker to the server, or back."""
    assert layout.service is not None
    widest = max(_TENSORS, *(len(load.segments) + 1 for load in layout.service.loads))
    return (2 * (unit * layout.plan.depth + stage) + push) * widest


class Runner:
    """Interprets the list of one rank."""

    def __init__(self, program: Program, rank: int, part: Part, recorder: Recorder) -> None:
        from trainplan.engine.handlers import HANDLERS

        self.program, self.rank, self.part, self.recorder = program, rank, part, recorder
        self.list = instructions(program, rank)
        self.handlers = HANDLERS
        taken = [i for i in self.list if i.kind in RECEIVES]
        order = list(range(len(taken)))
        if not part.layout.backend.tagged:
            order = in_order_of_sending([i.peer for i in taken], [i.sent_by for i in taken])
        self.receives = [taken[number] for number in order]  # as they are posted
        self._due = due(order)
        self.edges = {(e.source, e.target): e for e in part.layout.edges}
        self._numbers = {ends: number for number, ends in enumerate(self.edges)}
        self._widest = max((len(e.crossings) for e in self.edges.values()), default=1)
        # By stage, the piece whose backward pass completes its gradients: the last.
        self.completing = {i.stage: self.piece(i) for i in self.list if i.kind in (Kind.B, Kind.W)}
        self.names = [c.name for c in part.layout.profile.crossings]
        held = next(iter(part.held.values()), None)  # a server holds no stage
        self.shapes = {c.name: c.shape for c in held.stage.captured.crossings} if held else {}
        self.state: StepState | None = None
        self._posted = self._taken = 0
        self._messages: dict[int, Message] = {}
        self._arrivals: Arrivals | None = None
        # Where backward has come to a piece of its stage: whoever runs it wants to know.
        self.boundary: Callable[[int], None] | None = None

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self, number: int, fed: Fed) -> StepState:
        """Run the list once."""
        state = self.state = StepState(number, fed.parts, fed.weights, fed=fed)
        self.recorder.begin(number)
        for held in self.part.held.values():
            if held.shards is not None:
                held.shards.close()  # what somebody wanted to see since the last step
        self._posted = self._taken = 0
        self._messages = {}
        self._post()
        place = 0
        while place < len(self.list):
            place += self._run(place, state)
        for pending in (*state.sending.values(), *state.sent):
            pending.wait()
        for held in self.part.held.values():
            if held.reducer is not None and not self.part.layout.steps_at(self.rank):
                held.reducer.zero()  # what was pushed; elsewhere the step empties the buckets
        if self.part.device.type == "cuda":
            if self.part.layout.plan.preload == "on":  # not the whole device: the next batch is on its way there
                torch.cuda.current_stream(self.part.device).synchronize()
            else:
                torch.cuda.synchronize(self.part.device)
        self.recorder.settle()
        self.state = None
        return state

    def _run(self, place: int, state: StepState) -> int:
        """Run the instruction at a place; how many instructions that took care of."""
        instruction = self.list[place]
        if instruction.kind in RECEIVES:
            self._receive(instruction, state)
            return 1
        self.wait_for(instruction)
        start = self.recorder.mark()
        taken = self.handlers[instruction.kind](self, instruction, place) or 1
        noted = instruction.kind in NOTED_BY_THEIR_HANDLERS
        noted |= self.part.layout.crosses and instruction.kind in (Kind.F, Kind.STEP)  # `crossing.py`
        if taken == 1 and not noted:
            self.recorder.note(instruction.op, start, self.recorder.mark())
        for done in self.list[place : place + taken]:
            self.free(done, state)
        return taken

    def do(self, place: int) -> None:
        """Run an instruction that is due while another one is on its way."""
        self._run(place, self.current)

    def came_back_to(self, piece: int) -> None:
        """The backward pass that is on its way begins with a piece of its stage."""
        if self.boundary is not None:
            self.boundary(piece)

    def wait_for(self, instruction: Instruction) -> None:
        """Wait for what an instruction reads; not where a chain does it, after what it reads."""
        chained = self.part.chain is not None and instruction.kind is Kind.REDUCE_GRAD
        chained &= instruction.unit not in self.part.tied
        for value in instruction.reads:
            pending = self.current.pending.pop(value, None)
            if pending is not None and not chained:
                self._wait(pending, instruction, "its group")

    def _wait(self, pending: Pending, instruction: Instruction, whom: str) -> None:
        try:
            pending.wait()
        except RuntimeError as error:
            at = self.program.name(instruction.op)
            reason = str(error).splitlines()[0]
            raise RunError(f"rank {self.rank} at {at}", f"waiting for {whom} failed: {reason}") from error

    def free(self, instruction: Instruction, state: StepState) -> None:
        """Drop what the program says is over. What was sent has been taken by then, so waiting for it costs nothing."""
        for value in instruction.frees:
            given_up = state.values.pop(value, None)
            if isinstance(given_up, Gathered | Loaded):
                given_up.release()
            pending = state.sending.pop(value, None)
            if pending is not None:
                self._wait(pending, instruction, "whoever receives what was sent")

    # -- messages -------------------------------------------------------------------------------------------------

    def _post(self) -> None:
        """Post the receives that are due."""
        for instruction in self.receives[self._posted : self._due[self._taken]]:
            forms = self._forms(instruction)
            message = self.part.transport.receive(forms, instruction.peer, self.tag(instruction))
            if self.recorder.on and instruction.waits:
                self._arrivals = self._arrivals or Arrivals(RECEIVES_AHEAD)
                message.watch(self._arrivals)
            self._messages[instruction.op] = message
        self._posted = self._due[self._taken]

    def _forms(self, instruction: Instruction) -> list[Form]:
        """The tensors of a message."""
        if instruction.kind in SERVED:
            return self._served_forms(instruction)
        if instruction.kind is Kind.RECV_INPUT:
            return self.part.inputs.forms(sum(part.samples for part in self.current.parts))
        return self._crossing_forms(instruction)

    def _crossing_forms(self, instruction: Instruction) -> list[Form]:
        """The tensors of an activation, or of its gradient."""
        samples = self.current.parts[instruction.micro].samples
        forms: list[Form] = []
        for number in self._carried(instruction.kind, *self._ends(instruction)):
            name = self.names[number]
            shape, part = self.shapes[name], self.part_of(instruction)
            sizes = shape.at(samples)
            forms.append((part.size(sizes, part.tokens.named(name)) if part else sizes, shape.dtype))
        return forms

    def _served_forms(self, instruction: Instruction) -> list[Form]:
        """The tensors of a load, of weights or gradients."""
        holder = self.part.shard or self.part.weights[instruction.stage]
        return holder.forms(self.load(instruction))

    def load(self, instruction: Instruction) -> Load:
        """What a message between a worker and a server carries."""
        assert self.part.layout.service is not None
        return self.part.layout.service.loads[instruction.unit]

    def _receive(self, instruction: Instruction, state: StepState) -> None:
        """Wait for a message that was posted before; the time that it takes is what comes after its arrival."""
        message = self._messages.pop(instruction.op)
        self._wait(message, instruction, f"rank {instruction.peer}")
        # Where only the device waits (NCCL), the message is there when the device gets here, not the host.
        there = now() if instruction.waits else self.recorder.mark()
        tensors = message.take()
        if instruction.kind is Kind.RECV_G:
            state.received.setdefault(instruction.unit, []).append(tensors)
        elif instruction.kind is Kind.RECV_W:
            self.part.weights[instruction.stage].take(self.load(instruction), tensors)
        elif instruction.kind is Kind.RECV_INPUT:
            take(self, instruction, tensors)
        else:
            names = self.edge_names(instruction.kind, *self._ends(instruction))
            state.values[instruction.made[0]] = dict(zip(names, tensors, strict=True))
        self._taken += 1
        self._post()
        over = now() if instruction.waits else self.recorder.mark()
        self.recorder.note(instruction.op, there, over, sum(tensor.nbytes for tensor in tensors))
        self.recorder.note_arrival(instruction.sent_by, message.arrival.result() if message.arrival else there)
        self.free(instruction, state)

    def _ends(self, instruction: Instruction) -> tuple[int, int]:
        """Source and target stage of the edge that a message belongs to."""
        forward = instruction.kind in (Kind.SEND_F, Kind.RECV_F)
        sends = instruction.kind in SENDS
        pair = (instruction.stage, instruction.peer_stage)
        return pair if forward == sends else (pair[1], pair[0])

    def _carried(self, kind: Kind, source: int, target: int) -> tuple[int, ...]:
        edge = self.edges[source, target]
        return edge.crossings if kind in (Kind.SEND_F, Kind.RECV_F) else edge.gradients

    def edge_names(self, kind: Kind, source: int, target: int) -> list[str]:
        """Names of the crossings that a message carries."""
        return [self.names[n] for n in self._carried(kind, source, target)]

    def tag(self, instruction: Instruction) -> int:
        """The same number at both ends of a message, and no other message in flight between the two has it."""
        if instruction.kind in SERVED:
            push, of_worker = instruction.kind in (Kind.SEND_G, Kind.RECV_G), (Kind.SEND_G, Kind.RECV_W)
            stage = instruction.stage if instruction.kind in of_worker else instruction.peer_stage
            return served_tag(self.part.layout, instruction.unit, push, stage)
        if instruction.kind in INPUT_MESSAGES:  # after those of all loads
            assert self.part.layout.service is not None
            return served_tag(self.part.layout, len(self.part.layout.service.loads), push=False)
        edge = self._numbers[self._ends(instruction)]
        backward = int(instruction.kind in (Kind.SEND_B, Kind.RECV_B))
        return ((edge * self.part.layout.plan.pieces + self.piece(instruction)) * 2 + backward) * self._widest

    # -- for handlers -----------------------------------------------------------------------------------------------

    @property
    def current(self) -> StepState:
        assert self.state is not None  # handlers run within a step
        return self.state

    def piece(self, instruction: Instruction) -> int:
        """Which of all that goes through at once it is about: a micro-batch, or a slice of one."""
        return instruction.micro * max(1, len(self.part.slices)) + instruction.slice

    def batch(self, instruction: Instruction) -> Batch:
        """The micro-batch that an instruction is about: as its stage has loaded it, or as it was given."""
        loaded = self.current.loaded.get(instruction.stage)
        return (loaded.parts if loaded is not None else self.current.parts)[instruction.micro]

    def part_of(self, instruction: Instruction) -> Slice | None:
        """The slice of the sequences that an instruction is about; None: sequences are whole."""
        return self.part.slices[instruction.slice] if self.part.slices else None

    def carry(self, instruction: Instruction) -> Carry | None:
        """What the attentions of a stage keep of a slice, and read of those before it; None: sequences are whole."""
        if not self.part.slices:
            return None
        carries, stage, piece = self.current.carries, instruction.stage, self.piece(instruction)
        if (stage, piece) not in carries:
            earlier = range(piece - instruction.slice, piece)
            carries[stage, piece] = Carry([carries[stage, number] for number in earlier])
        return carries[stage, piece]

    def seeder(self, micro: int) -> Callable[[int], None]:
        """Seeds the generator before a block that draws random numbers."""
        state, part = self.current, self.part

        def seed(block: int) -> None:
            reseed(part.seed, state.number, part.replica, micro, block)

        return seed
