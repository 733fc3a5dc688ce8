"""Everything about a plan on a model that the passes of lowering need, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainplan.lasting import lasting
from trainplan.plan.decided import BY_PRIORITY, DECIDED
from trainplan.plan.exchanges import BY_BACKEND
from trainplan.plan.offload import PARTITIONED
from trainplan.plan.plan import Plan
from trainplan.plan.rules import micro_batches, splits_backward
from trainplan.plan.served import ASYNCHRONOUS, AT_ROOT, SERVED
from trainplan.profile.profile import Amount, Parameter, Portion, Profile
from trainplan.program.agenda import Agenda, Agendas, in_turn
from trainplan.program.exchanges import BY_ROUNDS
from trainplan.program.lower.backend import Backend
from trainplan.program.lower.buckets import Bucket, Tie, parameters_by_stage, ties, trainable_by_stage, trained
from trainplan.program.lower.edges import Edge, known_edges
from trainplan.program.lower.filled import filled
from trainplan.program.lower.parts import Decided, decided_of
from trainplan.program.lower.service import Service, service
from trainplan.program.lower.turns import completed_crosswise, turning_later
from trainplan.program.lower.units import Section, Unit, known_sections, known_units, units
from trainplan.program.ops import Kind
from trainplan.program.program import Bools, Ints
from trainplan.program.schedules import Order, Orders, orders_of


class Holding(NamedTuple):
    """One copy of a stage: its weights, gradients and optimizer state on one rank."""

    stage: int
    replica: int
    rank: int  # of the program
    lines: tuple[int, ...]  # of the replica, that run through this copy


@dataclass(frozen=True)
class Layout:
    """A plan laid over a model.

    `replicas` are the replicas that get lists of their own: all of them, or only the first where they are alike and
    are simulated once.
    """

    plan: Plan
    profile: Profile
    batch: int
    backend: Backend
    replicas: tuple[int, ...]
    # Of every step, where the exchange is decided while running; none: each part in turn.
    agendas: tuple[Agendas, ...] = ()

    @lasting
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Samples of each micro-batch of each replica."""
        return micro_batches(self.plan, self.batch)

    @lasting
    def amounts(self) -> tuple[tuple[Amount, ...], ...]:
        """What goes through at once, of each replica: micro-batches, or the slices of one after those of the other."""
        slices, length = self.plan.slices, sum(self.plan.slices)
        if not slices:
            return self.sizes
        before = [sum(slices[:number]) for number in range(len(slices))]
        pairs = list(zip(slices, before, strict=True))
        return tuple(tuple(Portion(n, own, c, length) for n in sizes for own, c in pairs) for sizes in self.sizes)

    @lasting
    def kinds_of_amount(self) -> tuple[list[Amount], Ints]:
        """The amounts that differ, and which of them each piece of each replica is."""
        known: dict[Amount, int] = {}
        which = [[known.setdefault(amount, len(known)) for amount in row] for row in self.amounts]
        return list(known), np.array(which, dtype=np.int64)

    def piece(self, order: Order) -> Ints:
        """What each operation of an order works on: a micro-batch, or a slice of one, by its place in `amounts`."""
        return np.asarray(order[:, 3] * max(1, len(self.plan.slices)) + order[:, 4])

    # -- the order of work ------------------------------------------------------------------------------------------

    @lasting
    def orders(self) -> Orders:
        """What each rank of a replica computes, in order."""
        return orders_of(self.plan)

    @lasting
    def line_of(self) -> Ints:
        """The line (a pipeline of the replica) that each piece takes."""

        def lines() -> Ints:
            found = np.zeros(self.plan.pieces, dtype=np.int64)
            for order in self.orders:
                found[self.piece(order)] = order[:, 1]
            return found

        return self.orders.once(("lines", len(self.plan.slices)), lines)

    @lasting
    def splits(self) -> bool:
        """Whether backward comes in two parts, for the input and for the weights: all passes, or some of them."""
        return splits_backward(self.plan)

    @lasting
    def in_phases(self) -> bool:
        """Whether all ranks of a replica compute and exchange in turn, with a barrier between (`phases.py`)."""
        return self.plan.schedule == "lockstep"

    # -- what passes between stages ---------------------------------------------------------------------------------

    @lasting
    def edges(self) -> list[Edge]:
        return known_edges(self.profile, self.plan.bounds)

    @lasting
    def incoming(self) -> list[list[Edge]]:
        return [[e for e in self.edges if e.target == stage] for stage in self.stages]

    @lasting
    def outgoing(self) -> list[list[Edge]]:
        return [[e for e in self.edges if e.source == stage] for stage in self.stages]

    @lasting
    def edge(self) -> dict[tuple[int, int], Edge]:
        """The edge from a stage to a stage."""
        return {(e.source, e.target): e for e in self.edges}

    def is_message(self, edge: Edge, line: int) -> bool:
        """Whether an edge goes from rank to rank; else both its stages are on one."""
        return self.plan.rank(0, edge.source, line) != self.plan.rank(0, edge.target, line)

    # -- weights ----------------------------------------------------------------------------------------------------

    @lasting
    def parameters(self) -> list[list[Parameter]]:
        """The parameters that each stage uses, in order of gradient arrival."""
        return parameters_by_stage(self.profile, self.plan.bounds)

    @lasting
    def trainable(self) -> list[list[Parameter]]:
        """Those of them that are trained."""
        return trainable_by_stage(self.profile, self.plan.bounds)

    @lasting
    def parameter_of(self) -> list[dict[str, Parameter]]:
        """The same by name."""
        return [{p.name: p for p in own} for own in self.parameters]

    @lasting
    def ties(self) -> list[Tie]:
        return ties(self.profile, self.plan.bounds)

    @lasting
    def copies(self) -> list[int]:
        """How many ranks hold each stage, over all replicas."""
        return [len(self.plan.replicas_of(stage)) for stage in self.stages]

    @lasting
    def buckets(self) -> list[list[Bucket]]:
        """For every stage its gradient buckets; none where there is one copy and nothing to exchange."""
        return filled(self)

    def bucketed(self, stage: int) -> bool:
        """Whether the gradients of a stage are in buckets: where they go to other ranks."""
        return self.copies[stage] > 1 or self.plan.exchange in SERVED

    @lasting
    def service(self) -> Service | None:
        """What passes between workers and servers; None where the plan has another exchange."""
        if self.plan.exchange not in SERVED:
            return None
        buffers = sum(block.buffer_bytes for block in self.profile.blocks)
        return service(self.plan, self.profile.parameters, self.buckets, buffers)

    @lasting
    def by_push(self) -> bool:
        """Whether workers push and pull without regard to each other, so that nothing is summed over them."""
        return self.plan.exchange in ASYNCHRONOUS

    @property
    def sums_loss(self) -> bool:
        """Whether the loss of a step is summed over the replicas."""
        return self.copies[-1] > 1 and not self.by_push

    def steps_at(self, rank: int) -> bool:
        """Whether a rank that holds a stage has an optimizer that runs."""
        return self.service is None or (self.service.at_root and rank == self.service.rank(0))

    @lasting
    def decides(self) -> bool:
        """Whether the order of the exchange is decided while running."""
        return self.plan.exchange in DECIDED

    @lasting
    def crosses(self) -> bool:
        """Whether gradients are still summed while the next step begins: a block takes its step when it is needed."""
        return self.plan.exchange in BY_PRIORITY

    @lasting
    def decided(self) -> list[Decided]:
        """Where that is so: of every stage its gradients in parts, and what decides which of them go when."""
        return [decided_of(self.plan, own) for own in self.buckets]

    def agenda(self, step: int, stage: int) -> Agenda:
        """What of a stage goes when in a step."""
        return self.agendas[step][stage] if self.agendas else in_turn(self.decided[stage].rule)

    @lasting
    def stepping(self) -> list[dict[int, tuple[str, ...]]]:
        """Where each block of a stage takes its step alone: block → its weights, each with the first that uses it."""
        found: list[dict[int, tuple[str, ...]]] = [{} for _ in self.stages]
        for stage, parameters in enumerate(self.parameters):
            for p in sorted((p for p in parameters if p.trainable), key=lambda p: p.low):
                found[stage][p.low] = (*found[stage].get(p.low, ()), p.name)
        return found

    @lasting
    def awaited(self) -> list[dict[int, frozenset[int]]]:
        """The same: block → the buckets that its step waits for."""
        bucket_of = [{name: k for k, bucket in enumerate(own) for name in bucket.names} for own in self.buckets]
        return [
            {block: frozenset(known[name] for name in names) for block, names in own.items()}
            for own, known in zip(self.stepping, bucket_of, strict=True)
        ]

    @lasting
    def first_tie(self) -> int:
        """Unit of the exchange of the first tie: beyond the buckets of every stage, so that all holders agree on it."""
        if self.decides:
            return max(len(own.parts) for own in self.decided)
        return max(0, *map(len, self.buckets), *map(len, self.units))

    # -- what replicas share out ------------------------------------------------------------------------------------

    @lasting
    def _gathered(self) -> list[list[Section]]:
        """For every stage the runs of blocks that weights are gathered for; none where they are not shared out."""
        stages = zip(self.parameters, self.plan.bounds, strict=True)
        if not self.plan.zero:
            return [[] for _ in self.stages]
        return [known_sections(self.profile, own, bound, self.plan.bucket) for own, bound in stages]

    @lasting
    def sections(self) -> list[list[Section]]:
        """For every stage those parts, or, where parcels go away, its blocks; none where passes come whole."""
        return [[(b, b + 1) for b in range(*bound)] for bound in self.plan.bounds] if self.offloads else self._gathered

    @lasting
    def offloads(self) -> bool:
        """Whether anything goes away that passes have saved: then all of them come in sections (`away.py`)."""
        return bool(self.plan.away)

    @property
    def partitions(self) -> bool:
        """Whether ranks that share stages have a share each of what recomputed blocks read."""
        return self.plan.offload == PARTITIONED

    @lasting
    def units(self) -> list[list[Unit]]:
        """For every stage the weights that its replicas share out."""
        stages = zip(self.parameters, self._gathered, self.sections, strict=True)
        if not self.offloads:
            return [known_units(self.profile, own, cut, self.plan.sharers) if cut else [] for own, cut, _ in stages]
        return [units(own, cut, self.plan.sharers, fine) if cut else [] for own, cut, fine in stages]

    def backward_pieces(self, stage: int) -> int:
        """Into how many operations a backward pass is cut that exchanges gradients on its way; 0: it does not."""
        return len(self.sections[stage]) if self.units[stage] or self.offloads else len(self.buckets[stage])

    def cut(self, stage: int, kind: Kind, marked: bool) -> bool:
        """Whether a pass of a stage comes in sections; `marked`: the first forward of a step, or the backward that
        completes the gradients."""
        shares = self.plan.zero == 3 or marked or (kind is Kind.B and self.plan.zero == 2)
        return self.offloads or (bool(self.units[stage]) and shares)

    def gathers_in(self, stage: int, kind: Kind) -> list[int]:
        """The units that every forward (or backward) pass of a stage gathers, in the order in which it reads them.

        Where the backward pass of a micro-batch comes right after its forward pass, it starts with the weights that
        that one ended with.
        """
        found, count = self.units[stage], len(self.sections[stage])
        if self.plan.zero < 3 and kind is Kind.GATHER_B:
            return []
        if kind is Kind.GATHER_F:
            return list(range(len(found)))
        kept = count - 1 if stage in self.turning else count
        late = [number for number, unit in enumerate(found) if unit.last < kept]
        return sorted(late, key=lambda number: -found[number].last)

    @lasting
    def turning(self) -> frozenset[int]:
        """Stages in which every forward pass is followed by its backward pass at once, where that matters: of weights
        that are gathered for every pass."""
        if self.plan.zero < 3:
            return frozenset()
        later = self.orders.once("turning", lambda: turning_later(self.orders))
        return frozenset(self.stages) - later

    def sharing(self, replica: int) -> int:
        """The group of replicas that share out their states with this one."""
        return replica // self.plan.sharers

    def answering(self, replica: int) -> int:
        """The replica after which the norm of these gradients is called: itself, or the first that it shares with."""
        return self.sharing(replica) * self.plan.sharers if self.plan.zero else replica

    def shared_share(self, stage: int) -> float:
        """How much of a stage's weights a rank steps itself."""
        if not self.plan.zero:
            return 1.0
        return self._shared_shares[stage]

    @lasting
    def _shared_shares(self) -> list[float]:
        found = []
        for shared_out, bound in zip(self.units, self.plan.bounds, strict=True):
            whole = trained(self.profile, bound)
            own = whole + sum([unit.share - unit.count for unit in shared_out])
            found.append(own / whole if whole else 1.0)
        return found

    @lasting
    def holdings(self) -> list[Holding]:
        """Every copy of every stage that has a list: by stage, then by replica."""
        found = []
        for stage in self.stages:
            for replica in self.replicas:
                by_rank: dict[int, list[int]] = {}
                for line in range(self.plan.lines):
                    by_rank.setdefault(self.local(replica, stage, line), []).append(line)
                found += [Holding(stage, replica, rank, tuple(lines)) for rank, lines in by_rank.items()]
        return found

    @lasting
    def held(self) -> tuple[Ints, Ints, Ints]:
        """Their stages, replicas and ranks."""
        stage, replica, rank = np.array([holding[:3] for holding in self.holdings], dtype=np.int64).T.copy()
        return stage, replica, rank

    # -- the plan, in other words -----------------------------------------------------------------------------------

    @lasting
    def stages(self) -> range:
        return range(self.plan.depth)

    @lasting
    def blocks(self) -> range:
        return range(self.plan.blocks)

    @lasting
    def stage_of(self) -> list[int]:
        """The stage of every block."""
        return [stage for stage, (first, last) in enumerate(self.plan.bounds) for _ in range(first, last)]

    @lasting
    def clips(self) -> bool:
        """Whether the norm of the gradients is summed over the ranks of a replica, or of those that share out."""
        return self.profile.clip_norm > 0 and (self.plan.pp > 1 or self.plan.zero > 0 or self.plan.tp > 1)

    @property
    def counts(self) -> bool:
        """Whether the number that the loss's mean is over must be summed over the replicas first."""
        return self.plan.dp > 1 and self.profile.mean_over != "samples" and not self.by_push

    @lasting
    def recomputed(self) -> Bools:
        """Micro-batch (or slice of one) → whether its passes are run forward once more, block by block, before they go
        back. The last one may be left out: in GPipe's order it goes back right after it came."""
        found = np.full(self.plan.pieces, self.plan.recompute in ("full", "except-last"))
        found[-1] &= self.plan.recompute != "except-last"
        return found

    @lasting
    def recomputes(self) -> bool:
        """Whether any are."""
        return bool(self.recomputed.any())

    @lasting
    def observed(self) -> bool:
        """Pure data parallelism: torch's DDP runs it, and we watch. Not of weights of several types, since DDP does not
        say in which order it sums the last bucket of each."""
        plain = self.plan.exchange == BY_BACKEND and self.plan.overlap == "on"
        whole = not self.recomputes and not self.offloads and self.profile.one_type
        return self.plan.dp > 1 and self.plan.pp == 1 and not self.plan.zero and whole and plain

    @property
    def sums_by(self) -> str:
        """Who sums gradients over replicas: the backend, or an algorithm of `program/exchanges`."""
        return self.plan.exchange if self.plan.exchange in BY_ROUNDS else self.backend.sums_by

    @property
    def gathers(self) -> bool:
        """Whether gradients of passes before the last are gathered beside the buckets: that is how DDP does it."""
        return self.observed and self.plan.micro > 1

    @lasting
    def late(self) -> frozenset[int]:
        """Stages whose gradients are exchanged only after all passes of their ranks, and not after their own last."""
        if self.plan.exchange == AT_ROOT:  # nothing overlaps
            return frozenset(self.stages)
        if self.plan.lines == 1 or self.plan.spread:
            return frozenset()
        return self.orders.once("crosswise", lambda: completed_crosswise(self.orders))

    # -- ranks ------------------------------------------------------------------------------------------------------

    def rank(self, replica: int, stage: int, line: int = 0) -> int:
        """The rank of the cluster."""
        return self.plan.rank(replica, stage, line)

    def local(self, replica: int, stage: int, line: int = 0) -> int:
        """The rank in the program: the same, or its place in the replica where only one replica is simulated. Of ranks
        that share a stage the first stands for all: they do the same at the same time."""
        rank = self.plan.rank(replica, stage, line)
        return rank if len(self.replicas) == self.plan.dp and self.plan.tp == 1 else self._places[rank]

    @lasting
    def local_ranks(self) -> Ints:
        """The same of all that have lists, as a table: (replica, line, stage)."""
        lines = range(self.plan.lines)
        ranks = [[[self.local(r, stage, line) for stage in self.stages] for line in lines] for r in self.replicas]
        return np.array(ranks, dtype=np.int64)

    @lasting
    def _places(self) -> dict[int, int]:
        """Of the ranks that have lists: which of them it is."""
        ranks = self.plan.ranks(0) if len(self.replicas) < self.plan.dp else self.plan.leaders
        return {rank: place for place, rank in enumerate(ranks)}
