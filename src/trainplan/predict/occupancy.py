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

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit

from trainplan.cluster.cluster import Device
from trainplan.plan.plan import Plan
from trainplan.predict.allocator import (
    ALLOCATED,
    OVER,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    RESERVED,
    Books,
    allocate,
    books,
    release,
    roomy,
)
from trainplan.predict.clock import Played
from trainplan.predict.memory import changes, in_flight
from trainplan.profile.footprint import footprints
from trainplan.profile.profile import Amount, Parameter, Portion, Profile
from trainplan.profile.variant import MASTER_BYTES
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Bools, Ints
from trainplan.units import gib

# What cuBLAS keeps for a thread that multiplies: forward runs in one, backward in another (`CUBLAS_WORKSPACE_CONFIG`).
# torch asks for the larger one from Hopper on, Blackwell too (`parseChosenWorkspaceSize` in its CublasHandlePool.cpp).
CUBLAS, CUBLAS_HOPPER = 8_519_680, 32 * 2**20
HOPPER = (9, 0)
AHEAD = 4  # micro-batches that are played beyond those that are in flight at once: then it only repeats itself
FINEST = 200_000  # tensors that are played; beyond, what a block keeps is taken whole


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
    def overdrawn(self) -> int:
        """Bytes that torch asks for beyond those that there are."""
        return max(1, self.most.visible - self.memory) if self.over else 0

    @property
    def words(self) -> str:
        """What is left of the device's memory, or what is short."""
        if not self.over:
            left, most = gib(self.memory - self.most.visible), gib(self.most.visible)
            return f"{left} of {gib(self.memory)} never taken (nvidia-smi shows {most} at most)"
        return (
            f"with its workspaces and holes torch would ask for {gib(self.most.visible)}, more than the "
            f"{gib(self.memory)} of the device"
        )

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
    room = max(1, device.memory_bytes - device.context_bytes)
    (*steps, (between, _)), over = _steps(played, at, pieces, room, workspace)

    def taken(allocated: int, reserved: int) -> Taken:
        return Taken(allocated, reserved, reserved + device.context_bytes)

    first, later = taken(*steps[0]), taken(*steps[-1])
    state = _all(books(0), np.array([size for kind in _STATES for size in pieces.initial(kind)], np.int64))
    alone = _beside(state, [workspace, *pieces.evaluation])
    gathered = pieces.largest_unit if plan.zero else 0
    saving = _beside(state, cut(gathered, ()))
    resuming = _beside(state, [max(pieces.parameters, default=0)])
    return Occupancy(
        rank=rank,
        memory=device.memory_bytes,
        over=over or max(alone[1], saving[1], resuming[1]) > room,
        first_step=first,
        later_steps=later,
        # Between steps, what training has reserved is there.
        evaluation=taken(max(alone[0], between), max(alone[1], later.reserved)),
        saving=taken(max(saving[0], between), max(saving[1], later.reserved)),
        resuming=taken(*resuming),
    )


class Tools:
    """The occupancy of a device, played when it is first asked for: it takes as long as a prediction. Until then what
    it is played from stays, and no longer."""

    def __init__(self, play: Callable[[], Occupancy]) -> None:
        self._play: Callable[[], Occupancy] | None = play
        self._found: Occupancy | None = None

    @property
    def occupancy(self) -> Occupancy:
        if self._found is None:
            assert self._play is not None
            self._found, self._play = self._play(), None
        return self._found


def workspace_of(device: Device) -> int:
    """Bytes that cuBLAS keeps for a thread; of a device of which nobody says what it is, as on an H200."""
    return CUBLAS if (0, 0) < device.capability < HOPPER else CUBLAS_HOPPER


_NOBODY = -1
_BACK = (int(Kind.B), int(Kind.W), int(Kind.I))
_STATES = (Value.WEIGHTS, Value.OPTIMIZER, Value.BUFFERS, Value.GRADIENTS, Value.INPUT, Value.COMMUNICATION)


def _beside(there: Books, sizes: Iterable[int]) -> tuple[int, int]:
    """(allocated, reserved) where these come and nothing is given back, beside what is there: which stays as it is."""
    own = _all(Books(*[column.copy() for column in there]), np.array([size for size in sizes if size], np.int64))
    return int(own.totals[PEAK_ALLOCATED]), int(own.totals[PEAK_RESERVED])


@njit(cache=True)
def _all(of: Books, sizes: Ints) -> Books:
    of = roomy(of, len(sizes))
    for size in sizes:
        allocate(of, size)
    return of


def _steps(played: Played, at: int, pieces: Pieces, limit: int, workspace: int) -> tuple[list[tuple[int, int]], bool]:
    """(allocated, reserved) at the worst moment of each step and, after these, when the last one is over; and whether
    there was too little at any time."""
    program, found = played.program, changes(played, only=at)
    own = slice(found.bounds[at], found.bounds[at + 1])
    op, comes = found.op[own], found.sign[own] > 0
    comes &= program.micro_batch[op] < pieces.micro_batches  # or it is left out, and so is its end
    values, which = np.unique(found.value[own], return_inverse=True)
    played_at_all = np.zeros(len(values), np.bool_)
    played_at_all[which[comes]] = True
    lots = Lots()
    lot = np.full(len(values), lots.of((), list))  # of those that are left out, nothing
    lot[played_at_all] = [
        lots.of(key, lambda key=key: pieces.made(*key))  # type: ignore[misc]
        for key in zip(*pieces.described(values[played_at_all]), strict=True)
    ]
    first = [size for what in Value if what is not Value.OPTIMIZER for size in pieces.initial(what)]
    kind, step = program.kind[op], program.step[op]
    stepped = (kind == Kind.STEP) | (step > 0)  # the optimizer's states come at the end of the first step
    back = np.isin(kind, _BACK)
    begin = [lots.of(("initial",), lambda: [*first, workspace]), lots.of(("workspace",), lambda: [workspace])]
    begin.append(lots.of(("states",), lambda: pieces.initial(Value.OPTIMIZER)))
    sizes, starts = lots.columns
    seen, over = _play(
        which, comes, np.asarray(step, np.int64), lot, sizes, starts, np.array(begin), _first(back), _first(stepped),
        program.steps, limit,
    )  # fmt: skip
    return [(int(allocated), int(reserved)) for allocated, reserved in seen if reserved], bool(over)


def _first(found: Bools) -> int:
    """The place of the first; behind all where there is none."""
    return int(np.argmax(found)) if found.any() else len(found)


class Lots:
    """Tensors that come and go together: the sizes of many such lots in one array, equal ones once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._sizes: list[list[int]] = []

    def of(self, key: Hashable, sizes: Callable[[], list[int]]) -> int:
        """The number of a lot."""
        if key not in self._known:
            self._known[key] = len(self._sizes)
            self._sizes.append([size for size in sizes() if size])
        return self._known[key]

    @property
    def columns(self) -> tuple[Ints, Ints]:
        """Sizes, and where those of every lot begin."""
        counts = [len(own) for own in self._sizes]
        return np.array([size for own in self._sizes for size in own], np.int64), np.cumsum([0, *counts])


@njit(cache=True)
def _play(
    value: Ints, comes: Bools, step: Ints, lot: Ints, sizes: Ints, starts: Ints, begin: Ints, back: int, stepped: int,
    steps: int, limit: int,
) -> tuple[Ints, bool]:  # fmt: skip
    """The changes of a rank, one after the other: of these `value`s, each a lot of tensors. `begin`: the lots that are
    there before, that come with the first pass `back`, and with the first `stepped`."""
    seen = np.zeros((steps + 1, 2), np.int64)
    room = np.zeros(len(lot) + 1, np.int64)  # where the blocks of a value are noted
    for v in range(len(lot)):
        room[v + 1] = room[v] + starts[lot[v] + 1] - starts[lot[v]]
    # All at once: books that may be others from one tensor to the next are counted as often, which takes as long again.
    tensors = room[-1]
    for lots in begin:
        tensors += starts[lots + 1] - starts[lots]
    of = roomy(books(limit), tensors)
    blocks, there = np.empty(room[-1], np.int64), np.zeros(len(lot), np.bool_)
    for size in sizes[starts[begin[0]] : starts[begin[0] + 1]]:
        allocate(of, size)
    seen[0, 0], seen[0, 1] = of.totals[PEAK_ALLOCATED], of.totals[PEAK_RESERVED]
    for k in range(len(value)):
        for place, moment in ((2, stepped), (1, back)):
            if k == moment:
                for size in sizes[starts[begin[place]] : starts[begin[place] + 1]]:
                    allocate(of, size)
        v, now = value[k], step[k]
        if comes[k]:
            there[v] = True
            for place in range(room[v + 1] - room[v]):
                blocks[room[v] + place] = allocate(of, sizes[starts[lot[v]] + place])
                seen[now, 1] = max(seen[now, 1], of.totals[RESERVED])
        elif there[v]:
            there[v] = False
            for place in range(room[v], room[v + 1]):
                release(of, blocks[place])
        seen[now, 0], seen[now, 1] = max(seen[now, 0], of.totals[ALLOCATED]), max(seen[now, 1], of.totals[RESERVED])
    seen[steps, 0], seen[steps, 1] = of.totals[ALLOCATED], of.totals[RESERVED]
    return seen, of.totals[OVER] > 0


class Pieces:
    """The tensors that the values of a rank consist of."""

    def __init__(self, played: Played, at: int, profile: Profile) -> None:
        self.profile, self.program, self.at = profile, played.program, at
        self._initial: dict[Value, list[int]] = {}
        mine = self.program.lists.row(at)
        kinds = np.unique(self.program.cost[mine[self.program.kind[mine] == Kind.F]]).tolist()
        passes = [self.program.classes[kind] for kind in kinds]
        self.samples: Amount = max((about.samples for about in passes), key=_whole, default=0)
        self.bounds = sorted({(about.first, about.last) for about in passes})
        flight = in_flight(played, at)
        self.micro_batches = flight + AHEAD
        self.fine = True
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
        for p in self._parameters:
            wide = MASTER_BYTES if self.profile.lowered else p.bytes / max(1, p.count)
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
        return cut(need, self._written[0])

    def initial(self, kind: Value) -> list[int]:
        """What is there before the first step."""
        if kind not in self._initial:
            here = self.program.initial
            here = here[(self.program.value_rank[here] == self.at) & (self.program.value_kind[here] == kind)]
            self._initial[kind] = [size for value in here.tolist() for size in self.of(value) if size]
        return self._initial[kind]

    def of(self, value: int) -> list[int]:
        """The tensors of a value."""
        return self.made(*(column[0] for column in self.described(np.array([value]))))

    def described(self, values: Ints) -> tuple[list[int], list[int], list[int]]:
        """What decides of which tensors values consist: their kinds, bytes, and the cost classes of their makers
        (none: they are there from the beginning)."""
        program = self.program
        maker = program.value_maker[values]
        by = np.where(maker >= 0, program.cost[maker], _NOBODY)
        return program.value_kind[values].tolist(), program.value_bytes[values].tolist(), by.tolist()

    def made(self, kind: int, size: int, by: int) -> list[int]:
        """The tensors of a value of this kind and size, made by an operation of this class."""
        if kind == Value.OPTIMIZER:
            return cut(size, self.states)
        if by == _NOBODY:
            return cut(size, self.parameters) if kind in (Value.WEIGHTS, Value.GRADIENTS) else [size]
        about = self.program.classes[by]
        if kind == Value.GRADIENTS and about.last > about.first:  # of the blocks of that pass; else flat, to be sent
            return cut(size, [p.bytes for p in self.profile.parameters_of(about.first, about.last)])
        if kind == Value.SAVED:
            return cut(size, self._saved(about.first, about.last, about.samples))
        if kind == Value.WORKSPACE and self.fine:
            return cut(size, self._written[int(about.kind in _BACK)])
        return [size]  # weights that were gathered are views of one tensor

    def _saved(self, first: int, last: int, samples: Amount) -> list[int]:
        """What forward keeps, tensor by tensor: inside blocks where that is known (else, or where there would be too
        many, all that a block keeps at once), and what passes between them."""
        found = []
        whole = _whole(samples)
        for place, block in enumerate(self.profile.blocks[first:last], first):
            if block.recipe >= 0 and self.fine:
                recipe = self.profile.recipes[block.recipe]
                found += [round(recipe.at(kept.bytes, whole)) for kept in recipe.kept]
            else:
                found.append(round(self.profile.total("saved_bytes", place, place + 1, samples)))
        return found + [c.bytes(samples) for c in self.profile.crossings if first <= c.producer < last]

    @cached_property
    def _written(self) -> tuple[list[int], list[int]]:
        """What the operators of a forward and of a backward pass write, the largest first."""
        whole = _whole(self.samples)
        kinds = {b.recipe for first, last in self.bounds for b in self.profile.blocks[first:last] if b.recipe >= 0}
        found: tuple[set[int], set[int]] = set(), set()
        for recipe in (self.profile.recipes[kind] for kind in kinds):
            for own, works in zip(found, (recipe.forward, recipe.backward), strict=True):
                own |= {round(recipe.at((work.small.written, work.large.written), whole)) for work in works}
        return sorted(found[0], reverse=True), sorted(found[1], reverse=True)


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
