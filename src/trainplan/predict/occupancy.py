"""The memory of a GPU as its tools show it: in the first step, in later ones, in evaluation, while saving and resuming.

Three numbers for each: what tensors have (`torch.cuda.max_memory_allocated`), what torch has reserved for them
(`max_memory_reserved`), and what nvidia-smi shows, which has the device's context, too.

The program says which values come and go, in which order; here each of them is the tensors that it consists of (weights
one by one, what a block saves operator by operator, where that is known), and torch's allocator is played on them
(`allocator`). The first step is another than those after it: the optimizer's states come into being at its end. What it
has reserved stays reserved.

Not in these numbers, because nobody could say it without the device: what cudnn takes to try algorithms (with
`torch.backends.cudnn.benchmark`), and the buffers of NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainplan.cluster.cluster import Device
from trainplan.plan.plan import Plan
from trainplan.predict.allocator import Allocator, Block
from trainplan.predict.clock import Played
from trainplan.predict.memory import changes, in_flight
from trainplan.profile.footprint import footprints
from trainplan.profile.profile import Amount, Parameter, Portion, Profile
from trainplan.profile.variant import MASTER_BYTES, NARROW
from trainplan.program.ops import Kind, Value

# What cuBLAS keeps for a thread that multiplies: forward runs in one, backward in another (`CUBLAS_WORKSPACE_CONFIG`).
# torch asks for the larger one from Hopper on, Blackwell too (`parseChosenWorkspaceSize` in its CublasHandlePool.cpp).
CUBLAS, CUBLAS_HOPPER = 8_519_680, 32 * 2**20
HOPPER = (9, 0)
AHEAD = 4  # micro-batches that are played beyond those that are in flight at once: then it only repeats itself
FINEST = 200_000  # tensors that are played; beyond, values are taken whole


@dataclass(frozen=True)
class Taken:
    """Bytes of one device at the worst moment of a situation."""

    allocated: int  # by tensors
    reserved: int  # by torch, for them
    visible: int  # to nvidia-smi


@dataclass(frozen=True)
class Occupancy:
    """The memory of the fullest device."""

    rank: int
    first_step: Taken
    later_steps: Taken
    evaluation: Taken  # of one micro-batch, between steps
    saving: Taken
    resuming: Taken
    memory: int = 0  # that the device has
    over: bool = False  # whether torch asks for more than that, and has nothing to give back before

    @property
    def most(self) -> Taken:
        """The situation in which nvidia-smi shows most."""
        return max((taken for _, taken in self.rows), key=lambda taken: taken.visible)

    @property
    def rows(self) -> list[tuple[str, Taken]]:
        """The situations, with their names."""
        return [
            ("first step", self.first_step),
            ("later steps", self.later_steps),
            ("evaluation", self.evaluation),
            ("saving", self.saving),
            ("resuming", self.resuming),
        ]


def occupancy(played: Played, at: int, rank: int, plan: Plan, profile: Profile, device: Device) -> Occupancy:
    """The memory of the rank that is `at` a place of the program, and is called `rank` by the user."""
    pieces = Pieces(played, at, profile)
    workspace = workspace_of(device)
    allocator = Allocator(max(0, device.memory_bytes - device.context_bytes))
    steps, between = _steps(played, at, pieces, allocator, workspace)

    def taken(allocated: int, reserved: int) -> Taken:
        return Taken(allocated, reserved, reserved + device.context_bytes)

    first, later = taken(*steps[0]), taken(*steps[-1])
    state = [size for kind in _STATES for size in pieces.initial(kind)]
    alone = _played([*state, workspace, *pieces.evaluation])
    gathered = pieces.largest_unit if plan.zero else 0
    saving = _played([*state, *cut(gathered, ())])
    resuming = _played([*state, max(pieces.parameters, default=0)])
    room = device.memory_bytes - device.context_bytes
    return Occupancy(
        rank=rank,
        memory=device.memory_bytes,
        over=allocator.over or max(alone[1], saving[1], resuming[1]) > room,
        first_step=first,
        later_steps=later,
        # Between steps, what training has reserved is there.
        evaluation=taken(max(alone[0], between), max(alone[1], later.reserved)),
        saving=taken(max(saving[0], between), max(saving[1], later.reserved)),
        resuming=taken(*resuming),
    )


def workspace_of(device: Device) -> int:
    """Bytes that cuBLAS keeps for a thread; of a device of which nobody says what it is, as on an H200."""
    return CUBLAS if (0, 0) < device.capability < HOPPER else CUBLAS_HOPPER


_STATES = (Value.WEIGHTS, Value.OPTIMIZER, Value.BUFFERS, Value.GRADIENTS, Value.INPUT, Value.COMMUNICATION)


def _played(sizes: Iterable[int]) -> tuple[int, int]:
    """(allocated, reserved) where nothing is given back."""
    allocator = Allocator()
    for size in sizes:
        if size:
            allocator.allocate(size)
    return allocator.peak_allocated, allocator.peak_reserved


def _steps(
    played: Played, at: int, pieces: Pieces, allocator: Allocator, workspace: int
) -> tuple[list[tuple[int, int]], int]:
    """(allocated, reserved) at the worst moment of each step; and what is allocated when the last one is over."""
    program = played.program
    found = changes(played)
    own = slice(found.bounds[at], found.bounds[at + 1])
    for what in Value:
        if what is not Value.OPTIMIZER:
            for size in pieces.initial(what):
                allocator.allocate(size)
    allocator.allocate(workspace)
    tensors: dict[int, list[Block]] = {}
    seen = {0: (allocator.allocated, allocator.reserved)}
    stepped, went_back = False, False
    for value, op, sign in zip(
        found.value[own].tolist(), found.op[own].tolist(), found.sign[own].tolist(), strict=True
    ):
        step, kind = int(program.step[op]), int(program.kind[op])
        if (kind == Kind.STEP or step > 0) and not stepped:  # at the end of the first step
            stepped = True
            for size in pieces.initial(Value.OPTIMIZER):
                allocator.allocate(size)
        if kind in (Kind.B, Kind.W, Kind.I) and not went_back:
            went_back = True
            allocator.allocate(workspace)
        if sign > 0:
            if program.micro_batch[op] < pieces.micro_batches:
                tensors[value] = [allocator.allocate(size) for size in pieces.of(value) if size]
        else:
            for block in tensors.pop(value, ()):
                allocator.free(block)
        before = seen.get(step, (0, 0))
        seen[step] = max(before[0], allocator.allocated), max(before[1], allocator.reserved)
    return [seen[step] for step in sorted(seen)], allocator.allocated


class Pieces:
    """The tensors that the values of a rank consist of."""

    def __init__(self, played: Played, at: int, profile: Profile) -> None:
        self.profile, self.program, self.at = profile, played.program, at
        classes = played.program.classes
        mine = [(op, classes[self.program.cost[op]]) for op in self.program.lists.row(at).tolist()]
        passes = [about for op, about in mine if self.program.kind[op] == Kind.F]
        self.samples: Amount = max((about.samples for about in passes), key=_whole, default=0)
        self.bounds = sorted({(about.first, about.last) for about in passes})
        flight = in_flight(played, at)
        self.micro_batches = flight + AHEAD
        saved = sum(len(self._saved(first, last, self.samples)) for first, last in self.bounds)
        self.fine = flight * saved <= FINEST

    @cached_property
    def parameters(self) -> list[int]:
        """Bytes of the rank's weights, one by one."""
        return [p.bytes for p in self._parameters]

    @cached_property
    def states(self) -> list[int]:
        """Bytes of the optimizer's states of them, one by one: each has as many numbers as its weight.

        They are as wide as the weight, but where the optimizer keeps everything in 32 bits beside narrow weights.
        """
        each, found = self.profile.state_bytes_per_parameter, []
        lowered = self.profile.varied and self.profile.precision in NARROW
        for p in self._parameters:
            wide = MASTER_BYTES if lowered else p.bytes / max(1, p.count)
            found += [round(p.count * wide)] * max(1, round(each / max(1.0, wide)))
        return found

    @cached_property
    def _parameters(self) -> list[Parameter]:
        return [p for first, last in self.bounds for p in self.profile.parameters_of(first, last)]

    @cached_property
    def largest_unit(self) -> int:
        """Where states are shared out, they are saved unit by unit: a block's weights, and as much of each state."""
        sizes: dict[int, float] = {}
        for p in self.profile.parameters:
            own = p.bytes + p.count * self.profile.state_bytes_per_parameter
            sizes[p.blocks[0]] = sizes.get(p.blocks[0], 0.0) + own
        return round(max(sizes.values(), default=0.0))

    @property
    def evaluation(self) -> list[int]:
        """What a forward pass of one micro-batch needs that saves nothing."""
        prints = footprints(self.profile, self.samples)
        need = max((prints.forward_alone_extra(first, last) for first, last in self.bounds), default=0)
        return cut(need, self._written(0))

    def initial(self, kind: Value) -> list[int]:
        """What is there before the first step."""
        here = self.program.initial
        here = here[(self.program.value_rank[here] == self.at) & (self.program.value_kind[here] == kind)]
        return [size for value in here.tolist() for size in self.of(value) if size]

    def of(self, value: int) -> list[int]:
        """The tensors of a value."""
        kind, size, maker = (
            int(column[value])
            for column in (self.program.value_kind, self.program.value_bytes, self.program.value_maker)
        )
        if kind in (Value.WEIGHTS, Value.GRADIENTS):
            return cut(size, self.parameters)
        if kind == Value.OPTIMIZER:
            return cut(size, self.states)
        if not self.fine or maker < 0 or kind not in (Value.SAVED, Value.WORKSPACE):
            return [size]
        about = self.program.classes[self.program.cost[maker]]
        if kind == Value.SAVED:
            return cut(size, self._saved(about.first, about.last, about.samples))
        return cut(size, self._written(int(about.kind in (Kind.B, Kind.W, Kind.I))))

    def _saved(self, first: int, last: int, samples: Amount) -> list[int]:
        """What forward keeps, tensor by tensor: inside blocks where that is known, and what passes between them."""
        found = []
        whole = _whole(samples)
        for block in self.profile.blocks[first:last]:
            if block.recipe >= 0:
                recipe = self.profile.recipes[block.recipe]
                found += [round(recipe.at(kept.bytes, whole)) for kept in recipe.kept]
        return found + [c.bytes(samples) for c in self.profile.crossings if first <= c.producer < last]

    def _written(self, back: int) -> list[int]:
        """What the operators of a pass write, the largest first."""
        whole = _whole(self.samples)
        kinds = {b.recipe for first, last in self.bounds for b in self.profile.blocks[first:last] if b.recipe >= 0}
        found = []
        for kind in kinds:
            recipe = self.profile.recipes[kind]
            works = recipe.backward if back else recipe.forward
            found += [round(recipe.at((work.small.written, work.large.written), whole)) for work in works]
        return sorted(set(found), reverse=True)


def _whole(samples: Amount) -> float:
    """Samples, also of a slice of some."""
    return samples.samples * samples.share if isinstance(samples, Portion) else samples


def cut(size: int, like: Sequence[int]) -> list[int]:
    """So many bytes as tensors of these sizes, as far as they go, and one of what is left.

    >>> cut(100, (60, 50, 30))
    [60, 30, 10]
    """
    found = []
    for each in like:
        if 0 < each <= size:
            found.append(each)
            size -= each
    return [*found, size] if size else found
