"""Everything about a plan on a model that the passes of lowering need, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trainplan.plan.plan import Plan
from trainplan.plan.rules import micro_batches
from trainplan.profile.profile import Parameter, Profile
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
    def edge(self) -> dict[tuple[int, int], Edge]:
        """The edge from a stage to a stage."""
        return {(e.source, e.target): e for e in self.edges}

    @cached_property
    def parameters(self) -> list[list[Parameter]]:
        """The parameters that each stage uses, in order of gradient arrival."""
        found: list[list[Parameter]] = [[] for _ in range(self.plan.pp)]
        for parameter in self.profile.parameters:
            for stage in sorted({self.stage_of[block] for block in parameter.blocks}):
                found[stage].append(parameter)
        return found

    @cached_property
    def ties(self) -> list[Tie]:
        return ties(self.profile, self.plan.bounds)

    @cached_property
    def buckets(self) -> list[list[Bucket]]:
        """For every stage its gradient buckets; none where there is one replica and nothing to exchange."""
        if self.plan.dp == 1:
            return [[] for _ in range(self.plan.pp)]
        samples = max(self.sizes[0])
        return [
            stage_buckets(self.profile, parameters, *bound, self.plan.bucket, samples)
            for parameters, bound in zip(self.parameters, self.plan.bounds, strict=True)
        ]

    @cached_property
    def first_tie(self) -> int:
        """Unit of the exchange of the first tie: beyond the buckets of every stage, so that all holders agree on it."""
        return max((len(buckets) for buckets in self.buckets), default=0)

    @cached_property
    def blocks(self) -> range:
        return range(self.plan.blocks)

    @cached_property
    def stage_of(self) -> list[int]:
        """The stage of every block."""
        return [stage for stage, (first, last) in enumerate(self.plan.bounds) for _ in range(first, last)]

    @property
    def clips(self) -> bool:
        """Whether the norm of the gradients is summed over the stages."""
        return self.profile.clip_norm > 0 and self.plan.pp > 1

    @property
    def counts(self) -> bool:
        """Whether the number that the loss's mean is over must be summed over the replicas first."""
        return self.plan.dp > 1 and self.profile.mean_over != "samples"

    @property
    def recomputes(self) -> bool:
        return self.plan.recompute == "full"

    @property
    def observed(self) -> bool:
        """Pure data parallelism: torch's DDP runs it, and we watch."""
        return self.plan.dp > 1 and self.plan.pp == 1 and not self.recomputes and self.plan.overlap == "on"

    @property
    def gathers(self) -> bool:
        """Whether gradients of passes before the last are gathered beside the buckets: that is how DDP does it."""
        return self.observed and self.plan.micro > 1

    def is_tied(self, parameter: Parameter) -> bool:
        """Whether several stages hold it."""
        return len({self.stage_of[block] for block in parameter.blocks}) > 1

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
