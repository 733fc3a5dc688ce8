"""Request and plan: which choices were made. Values without behaviour.

A `Request` may leave things open; `solve.resolve` turns it into a `Plan`, in which nothing is: explicit cuts, an
explicit placement of every stage on ranks, an explicit bucket size. Only plans are lowered, run, saved and compared.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields

from trainplan.lasting import lasting
from trainplan.plan.keys import SPLIT
from trainplan.plan.offload import Away, shortest
from trainplan.plan.order import GIVEN, known
from trainplan.plan.placement import ANY_TABLE, Lines, Placement, lines
from trainplan.plan.placement import placement as table

# The words that each field may hold today. Later systems add words here; nothing else lists them. (An order of work
# may also be given, operation by operation: `order.py`.)
WORDS: dict[str, tuple[str, ...]] = {
    "exchange": (
        "all-reduce",
        "ring",
        "tree",
        "hierarchical",
        "all-to-all",
        "all-to-all-sliced",
        "halving-doubling",
        "dataparallel",
        "ps-bsp",
        "ps-asp",
        "ssp",
        "dssp",
        "horovod",
        "p3",
        "bytescheduler",
        "pace",
    ),
    "schedule": (
        "naive",
        "gpipe",
        "lockstep",
        "looped",
        "1f1b",
        "1f1b-early",
        "interleaved",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "gems",
        "chimera",
        "chimera-doubled",
        "terapipe",
    ),
    "updates": ("sync",),
    "recompute": ("none", "full", "except-last", "selective"),
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "overlap": ("on", "off"),
    "sequence": ("off", "on"),
    "preload": ("given", "off", "on"),
    "offload": ("none", "activations", "partitioned"),
}

# Exchanges whose order is decided while running, and the numbers that each of them has.
EXCHANGE_FIELDS: dict[str, tuple[str, ...]] = {
    "horovod": ("threshold", "cycle"),
    "p3": ("threshold", "slice"),
    "bytescheduler": ("threshold", "slice", "credit"),
    "pace": ("slice", "fused"),
}

# The solvers that a request may name for its cuts (`solve/partition/partitioners.py`); a plan has the cuts.
PARTITIONS = (
    "bottleneck",
    "torchgpipe",
    "torchgpipe-corrected",
    "even",
    "elasticpipe",
    "uneven",
    "pipedream",
    "pipedream-code",
    "dapple",
    "dapple-formula",
    "chimera",
    "piper",
    "2bw",
    "hetpipe",
    "pipe-torch",
    "bapipe",
    "lamp",
    "pipemare",
)


@dataclass(frozen=True)
class Request:
    """What was asked; None where it was left open."""

    dp: int | None = None  # replicas of the model (or of the pipeline)
    spread: tuple[int, ...] | None = None  # ranks of each stage, where they differ; written dp=2,1,1
    pp: int | None = None  # ranks of a pipeline: so many stages, or so many times `chunks`
    micro: int | None = None  # micro-batches that one replica runs a step
    schedule: str | None = None  # order of work of a pipeline
    chunks: int | None = None  # stages that each rank of a pipeline holds
    pairs: int | None = None  # of pipelines in opposite directions (Chimera)
    # Tokens of every slice of a sequence (TeraPipe); a number: so many slices, whose sizes are left open.
    slices: tuple[int, ...] | int | None = None
    stages: tuple[int, ...] | None = None  # explicit cuts: the first block of every stage but the first
    partition: str | None = None  # the solver that chooses them; open: the clock does
    recompute: str | None = None
    exchange: str | None = None  # how gradients are summed over replicas
    bucket: int | None = None  # bytes of gradients that travel together
    updates: str | None = None  # which weights a step reads
    precision: str | None = None
    overlap: str | None = None  # off: nothing is computed while anything is sent
    placement: tuple[int, ...] | None = None  # the rank of every stage, counted within a replica
    order: tuple[str, ...] | None = None  # an order of work that is given: a line for every rank (see `order.py`)
    memory: int | None = None  # bytes that a rank may use; open: what the device has
    key: str = ""  # the named system that this began as
    zero: int | None = None  # what replicas share out: 1 optimizer states, 2 gradients as well, 3 weights as well
    shard: int | None = None  # over how many neighbouring replicas; open: over all of them
    node: int | None = None  # ranks of a node, for exchanges that ask where ranks are; open: as the cluster has them
    servers: int | None = None  # parameter servers, ranks of their own behind those of the workers
    bound: tuple[int, ...] | None = None  # steps that a worker may be ahead: of ssp one number, of dssp two
    split: int | None = None  # elements from which on a parameter is split over all servers (see `keys.py`)
    threshold: int | None = None  # bytes of gradients that are fused at most
    cycle: float | None = None  # seconds between two looks at what is ready (Horovod)
    slice: int | None = None  # bytes of a gradient that go at once (P3, ByteScheduler, PACE)
    credit: int | None = None  # bytes that may be on their way before the next slice goes (ByteScheduler)
    fused: tuple[int, ...] | None = None  # gradients of each fused tensor, in the order of their arrival (PACE)
    tp: int | None = None  # ranks that share every stage between them: slices of its weights and of its arithmetic
    sequence: str | None = None  # on: what they do not slice they share out by tokens
    preload: str | None = None  # on: the next batch comes to its device while this one is trained
    offload: str | None = None  # what goes to the host's memory where the device's is too small
    away: Away | None = None  # how much of it, exactly; open: as much as `memory` asks for
    ratio: tuple[int, ...] | None = None  # samples of the replicas, in proportion; open: as their devices are fast


@dataclass(frozen=True)
class Plan:
    """Every choice, made."""

    dp: int
    pp: int
    micro: int
    schedule: str
    stages: tuple[int, ...]
    recompute: str
    exchange: str
    bucket: int
    updates: str
    precision: str
    overlap: str
    blocks: int  # how many blocks the model has, so that the cuts mean something
    placement: Placement
    key: str = ""
    chunks: int = 1
    pairs: int = 1
    spread: tuple[int, ...] = ()
    order: tuple[str, ...] = ()
    cut_by: str = field(default="", compare=False)  # which solver cut it, by what, and what else it said
    slices: tuple[int, ...] = ()  # tokens of each; none: sequences stay whole
    zero: int = 0  # what replicas share out: 1 optimizer states, 2 gradients as well, 3 weights as well
    shard: int = 0  # over how many neighbouring replicas; 0: over all of them
    node: int = 0  # ranks of a node, where the exchange of gradients asks for them; 0: it does not
    servers: int = 0
    bound: tuple[int, ...] = ()
    split: int = SPLIT
    # Of exchanges that are decided while running; 0 or none where an exchange does not ask (see `EXCHANGE_FIELDS`).
    threshold: int = 0
    cycle: float = 0.0
    slice: int = 0
    credit: int = 0
    fused: tuple[int, ...] = ()
    tp: int = 1  # ranks of every stage of a pipeline, with a slice of its weights each
    sequence: str = "off"
    # How a batch comes to the devices: given there; loaded when a step begins; or during the step before (`loads.py`).
    preload: str = "given"
    offload: str = "none"
    away: Away = ()  # of activations that are offloaded: see `offload.py`
    ratio: tuple[int, ...] = ()  # samples of the replicas, in proportion; none: as equal as possible

    @property
    def sharers(self) -> int:
        """Replicas that share out what `zero` says."""
        return self.shard or self.dp

    @property
    def depth(self) -> int:
        """Stages."""
        return len(self.stages) + 1

    @property
    def wanted(self) -> int:
        """Stages that the table has places for: as many as there are once the model is cut."""
        return len(self.placement[0]) if self.placement else 0

    @property
    def takes_any_table(self) -> bool:
        """Whether the order of work goes with any placement of stages on ranks."""
        return self.schedule in ANY_TABLE and self.pp > 1 and not self.spread

    @property
    def pieces(self) -> int:
        """Micro-batches of a replica, or slices of all of them: what goes through at once."""
        return self.micro * max(1, len(self.slices))

    @lasting
    def lines(self) -> int:
        """Pipelines of one replica (see `placement.py`)."""
        return len(self.placement) // self.dp

    @lasting
    def workers(self) -> int:
        """Ranks that compute stages."""
        return len({rank for pipeline in self.placement for stage in pipeline for rank in stage})

    @property
    def world(self) -> int:
        """Ranks that the plan occupies: servers come after those that compute stages."""
        return self.workers + self.servers

    @lasting
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For every stage the blocks first ≤ b < last.

        >>> plan(dp=1, pp=3, micro=4, schedule="1f1b", stages=(2, 5), blocks=8).bounds
        ((0, 2), (2, 5), (5, 8))
        """
        edges = (0, *self.stages, self.blocks)
        return tuple(itertools.pairwise(edges))

    @lasting
    def replicated(self) -> bool:
        """Whether several ranks hold a copy of some stage, so that there are gradients to be summed."""
        if self.dp > 1 or len(self.placement) < 2:
            return self.dp > 1
        return any(len({line[stage : stage + 1] for line in self.placement}) > 1 for stage in range(self.wanted))

    def rank(self, replica: int, stage: int, line: int = 0) -> int:
        """The rank that runs a stage of a line of a replica; of several that share it, the first."""
        return self.placement[replica * self.lines + line][stage][0]

    def ranks(self, replica: int) -> tuple[int, ...]:
        """The ranks of a replica, in the order of the first stage that each holds; of a group of `tp`, the first."""
        own = self.placement[replica * self.lines : (replica + 1) * self.lines]
        return tuple(dict.fromkeys(stage[0] for line in own for stage in line))

    def replicas_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a copy of a stage, or the first slice of one."""
        return tuple(dict.fromkeys(pipeline[stage][0] for pipeline in self.placement))

    def slicers(self, rank: int) -> tuple[int, ...]:
        """The ranks that share the stages of a rank with it, slice by slice."""
        return self._groups[rank]

    @lasting
    def leaders(self) -> tuple[int, ...]:
        """The first rank of every group that shares stages: all ranks that compute, where none are shared."""
        return tuple(sorted({stage[0] for pipeline in self.placement for stage in pipeline}))

    @lasting
    def _groups(self) -> dict[int, tuple[int, ...]]:
        return {rank: stage for pipeline in self.placement for stage in pipeline for rank in stage}


def plan(
    dp: int = 1,
    pp: int = 1,
    micro: int = 1,
    schedule: str = "naive",
    stages: tuple[int, ...] = (),
    recompute: str = "none",
    exchange: str = "all-reduce",
    bucket: int = 25 * 2**20,
    updates: str = "sync",
    precision: str = "fp32",
    overlap: str = "on",
    blocks: int = 1,
    placement: Placement | None = None,
    key: str = "",
    chunks: int = 1,
    pairs: int = 1,
    spread: tuple[int, ...] = (),
    order: tuple[str, ...] = (),
    slices: tuple[int, ...] = (),
    zero: int = 0,
    shard: int = 0,
    node: int = 0,
    servers: int = 0,
    bound: tuple[int, ...] = (),
    split: int = SPLIT,
    threshold: int = 0,
    cycle: float = 0.0,
    slice: int = 0,
    credit: int = 0,
    fused: tuple[int, ...] = (),
    tp: int = 1,
    sequence: str = "off",
    preload: str = "given",
    offload: str = "none",
    away: Away = (),
    ratio: tuple[int, ...] = (),
) -> Plan:
    """A plan with the usual choices where none is given.

    >>> plan(order=("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"), stages=(3,), blocks=6).micro
    2
    """
    if order:  # which says these
        pp, micro, schedule = known(tuple(order)).ranks, known(tuple(order)).micro, GIVEN
    return Plan(
        dp, pp, micro, schedule, tuple(stages), recompute, exchange, bucket, updates, precision, overlap, blocks,
        placement or table(dp, _lines(schedule, pp, chunks, pairs, spread, order), tp), key, chunks, pairs,
        tuple(spread), tuple(order), slices=tuple(slices), zero=zero, shard=0 if shard == dp else shard,
        node=node, servers=servers, bound=tuple(bound), split=split, threshold=threshold, cycle=cycle, slice=slice,
        credit=credit, fused=tuple(fused), tp=tp, sequence=sequence, preload=preload, offload=offload,
        away=shortest(away), ratio=tuple(ratio),
    )  # fmt: skip


def _lines(
    schedule: str, pp: int, chunks: int, pairs: int, spread: tuple[int, ...], order: tuple[str, ...]
) -> Lines:  # fmt: skip
    return known(tuple(order)).local if order else lines(schedule, pp, chunks, pairs, spread)


def usual_lines(plan: Plan) -> Lines:
    """The lines of one replica where no placement is given."""
    return _lines(plan.schedule, plan.pp, plan.chunks, plan.pairs, plan.spread, plan.order)


def usual_placement(plan: Plan) -> Placement:
    """The placement that a plan has where none is given."""
    return table(plan.dp, usual_lines(plan), plan.tp)


def open_fields(request: Request) -> tuple[str, ...]:
    """The choices that a request leaves open."""
    given = {
        "memory",
        "spread",
        "placement",
        "order",
        "partition",
        "zero",
        "shard",
        "node",
        "preload",
        "offload",
        "away",
        "ratio",
    }
    given |= {"servers", "bound", "split", "tp", "sequence", *itertools.chain(*EXCHANGE_FIELDS.values())}
    choices = [f.name for f in fields(request) if f.name not in given]
    return tuple(name for name in choices if getattr(request, name) is None)
