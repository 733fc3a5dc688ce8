"""Everything about a plan on a model that the passes of lowering need, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trainplan.plan.plan import Plan
from trainplan.plan.rules import micro_batches
from trainplan.profile.profile import Profile
from trainplan.program.lower.backend import Backend
from trainplan.program.lower.buckets import Bucket, Tie, stage_buckets, ties
from trainplan.program.lower.edges import Edge, edges


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

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Samples of each micro-batch of each replica."""
        return micro_batches(self.plan, self.batch)

    @cached_property
    def edges(self) -> list[Edge]:
        return edges(self.profile, self.plan.bounds)

    @cached_property
    def incoming(self) -> list[list[Edge]]:
        return [[e for e in self.edges if e.target == stage] for stage in range(self.plan.pp)]

    @cached_property
    def outgoing(self) -> list[list[Edge]]:
        return [[e for e in self.edges if e.source == stage] for stage in range(self.plan.pp)]

    @cached_property
    def ties(self) -> list[Tie]:
        return ties(self.profile, self.plan.bounds)

    @cached_property
    def buckets(self) -> list[list[Bucket]]:
        """For every stage its gradient buckets; none where there is one replica and nothing to exchange."""
        if self.plan.dp == 1:
            return [[] for _ in range(self.plan.pp)]
        samples = max(self.sizes[0])
        return [stage_buckets(self.profile, *bound, self.plan.bucket, samples) for bound in self.plan.bounds]

    @property
    def recomputes(self) -> bool:
        return self.plan.recompute == "full"

    @property
    def observed(self) -> bool:
        """Pure data parallelism: torch's DDP runs it, and we watch."""
        return self.plan.dp > 1 and self.plan.pp == 1 and not self.recomputes

    def rank(self, replica: int, stage: int) -> int:
        """The rank of the cluster."""
        return self.plan.rank(replica, stage)

    def local(self, replica: int, stage: int) -> int:
        """The rank in the program: the same, or the stage where only one replica is simulated."""
        return self.plan.rank(replica, stage) if len(self.replicas) == self.plan.dp else stage

    def stage_group(self, stages: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks that hold any of these stages: in the program, and in the cluster."""
        here = sorted(self.local(replica, stage) for stage in stages for replica in self.replicas)
        all_ = sorted(self.rank(replica, stage) for stage in stages for replica in range(self.plan.dp))
        return tuple(here), tuple(all_)
