"""`partition=NAME`: a request for a plan that a published solver cuts, and what its answer is as a plan.

Three sorts of partitioners (`partitioners.CHOOSES` says which is which):

    cuts only      stages as the request shapes them: `pp` ranks, `chunks` stages each, any order of work
    and the order  one stage a device, and which device: hetpipe and uneven order them, which becomes the placement
    planners       how many stages, and how many ranks each: what differs becomes `dp=2,1,1`, and what is alike
                   `dp=2 pp=3`; 2bw and piper say too whether to recompute, chimera the size of micro-batches

An answer has a value by its own paper's costs, which is told (`Plan.cut_by`) and not believed: how long the plan takes
is for the clock to say. So where a request leaves the micro-batches open, the clock takes the best of what the solver
answers for several numbers of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan.placement import Placement
from trainplan.plan.plan import Plan, Request, usual_placement
from trainplan.plan.rules import CHUNKED, check_sketch, split
from trainplan.plan.text import brief
from trainplan.solve.partition.answer import WEIGHTS, Partition
from trainplan.solve.partition.chimera import greedy_batch
from trainplan.solve.partition.even import divides
from trainplan.solve.partition.instance import Instance
from trainplan.solve.partition.partitioners import ASYNCHRONOUS, CHOOSES, PARTITIONERS
from trainplan.solve.partition.problem import plain, problem, recomputed
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.shape import micro_counts
from trainplan.units import gib, seconds

ROUNDS = (1, 2, 4)  # micro-batches for each device that a planner is asked about, where they are open


def counts(request: Request, sketch: Plan, world: int, batch: int) -> tuple[list[int], list[int]]:
    """The numbers of micro-batches to ask about, and those for where none of these fits."""
    chosen = CHOOSES.get(request.partition or "", ())
    if request.micro is not None or "micro" in chosen:
        return [sketch.micro], []
    if "pp" in chosen:  # how many stages there will be is not known yet
        return [count for count in (world * rounds for rounds in ROUNDS) if count <= batch] or [batch], []
    return micro_counts(sketch, batch) if sketch.pp > 1 else ([1], [])


def refuse(request: Request) -> None:
    """What cannot be asked together."""
    name = request.partition or ""
    asked, chosen = f"plan {brief(request)!r}", CHOOSES.get(name, ())
    if request.stages is not None:
        why = f"the cuts are given, and partition={name} is there to choose them"
        raise PlanError(asked, why, f"stages={','.join(map(str, request.stages))} or partition={name}, not both")
    given = {"pp": request.pp, "dp": request.spread or request.dp, "micro": request.micro}
    own = [field for field in ("pp", "dp", "micro") if field in chosen]
    if taken := [field for field in own if given[field] is not None]:
        why = f"{name} chooses {' and '.join(own)} itself"
        raise PlanError(asked, why, f"leaving out {' and '.join(taken)}, or partition=bottleneck")
    if request.placement is not None and ("pp" in chosen or "placement" in chosen):
        raise PlanError(asked, f"{name} chooses the devices of a stage itself", "leaving out placement")
    if name == "chimera" and request.schedule not in (None, "chimera", "chimera-doubled"):
        raise PlanError(asked, f"chimera plans for its own order of work, not {request.schedule}", "schedule=chimera")
    several = (request.chunks or 1) > 1 or request.schedule in CHUNKED
    if several and ("pp" in chosen or "placement" in chosen):
        why = f"{name} has one stage a device, and {request.schedule or 'chunks'} several"
        raise PlanError(asked, why, "partition=even or partition=bottleneck")


def partitioned(request: Request, sketch: Plan, cluster: Cluster, batch: int, tables: Tables) -> Plan:
    """The plan that the named solver makes of a sketch."""
    name = request.partition or ""
    chosen = CHOOSES.get(name, ())
    if name == "chimera":
        return _bidirectional(request, sketch, cluster, batch, tables)
    if "pp" in chosen:
        size = max(split(batch, min(sketch.micro, batch)))
        given = problem(tables, cluster, range(cluster.world), size, sketch.micro)
        return _planned(request, sketch, _with_recompute(name, given, request.recompute))
    local = max(split(batch, sketch.dp))
    ranks = [stage[0] for stage in sketch.placement[0]]
    given = problem(tables, cluster, ranks, max(split(local, sketch.micro)), sketch.micro, sketch.recompute)
    if sketch.spread:  # ranks of a stage take turns
        given = replace(given, speeds=tuple(s * n for s, n in zip(given.speeds, sketch.spread, strict=True)))
    if name == "even" and not request.placement:  # which has its own number of stages
        divides(sketch.blocks, sketch.pp, sketch.chunks)
    options = {"fall_back": request.pp is None} if name == "bapipe" else {}
    found = _sound(name, PARTITIONERS[name](given, **options))
    if found.stages == 1:  # bapipe: data parallelism is faster
        return _one_stage(request, sketch, sketch.dp * found.devices, found)
    schedule = sketch.schedule if request.schedule else found.order or sketch.schedule
    made = replace(sketch, stages=found.cuts, schedule=schedule)
    words = _words(name, found, made)
    if "placement" not in chosen:
        return replace(made, cut_by=words)
    # The devices are places in a replica: replicas stand side by side.
    places = [device for (device,) in found.placement]
    names = [place * made.dp + replica for place in places for replica in range(made.dp)]
    return replace(made, placement=_renamed(usual_placement(made), names), cut_by=words)


def _with_recompute(name: str, given: Instance, asked: str | None) -> Partition:
    """The answer of a planner, whose plan recomputes everything or nothing."""
    find = PARTITIONERS[name]
    if asked is not None:
        return _sound(name, _forced(name, given, asked))
    found = _sound(name, find(given))
    if len(found.recompute) in (0, given.blocks):
        return found
    trials = list[Partition]()
    for word in ("none", "full"):
        try:
            trials.append(_forced(name, given, word))
        except PlanError as error:
            refused = error
    if not trials:
        raise refused
    note = f"{name} would recompute {len(found.recompute)} of {given.blocks} blocks, and a plan does all or none"
    best = min(trials, key=lambda trial: trial.value)
    return replace(best, notes=(*best.notes, note))


def _forced(name: str, given: Instance, word: str) -> Partition:
    """The planner's answer where every block is recomputed, or none."""
    found = PARTITIONERS[name](plain(recomputed(given) if word != "none" else given))
    return replace(found, recompute=tuple(range(given.blocks)) if word != "none" else ())


def _planned(request: Request, sketch: Plan, found: Partition) -> Plan:
    """The plan of an answer that says how many ranks each stage has."""
    name, widths = request.partition or "", set(found.replicas)
    recompute = request.recompute or ("full" if found.recompute else "none")
    if found.stages == 1:
        return _one_stage(request, replace(sketch, recompute=recompute), found.devices, found)
    made = replace(
        sketch, pp=found.stages, stages=found.cuts, recompute=recompute, spread=found.replicas,
        micro=max(sketch.micro, *found.replicas), schedule=request.schedule or found.order or "1f1b",
    )  # fmt: skip
    # The same program is `dp=2 pp=3` with half the micro-batches each, where they were not asked for.
    if widths == {1} or (len(widths) == 1 and request.micro is None and made.micro % found.replicas[0] == 0):
        width = found.replicas[0]
        made = replace(made, dp=width, spread=(), micro=made.micro // width)
    try:
        check_sketch(made, "")
    except PlanError as error:
        answer = f"dp={','.join(map(str, made.spread or (made.dp,)))} pp={made.pp}"
        raise _not_as_asked(request, answer, error.why) from None
    names = [device for group in found.placement for device in group]
    table = usual_placement(made)
    words = _words(name, found, made)
    return replace(made, placement=_renamed(table, names) if names else table, cut_by=words)


def _not_as_asked(request: Request, answer: str, why: str) -> PlanError:
    """Why an answer is none: it does not go with the order of work that was asked for."""
    why = f"{request.partition} answers {answer} here, and {why}"
    return PlanError(f"plan {brief(request)!r}", why, "leaving the order of work out, or partition=bottleneck")


def _one_stage(request: Request, sketch: Plan, replicas: int, found: Partition) -> Plan:
    """Every device has the whole model: refused where an order of work between stages was asked for. (The system that
    the planner belongs to is not one: with it goes whatever it answers.)"""
    name = request.partition or ""
    if request.schedule is not None and request.key != name:
        why = f"the plan asks for schedule={request.schedule}, an order of work between stages"
        raise _not_as_asked(request, f"data parallelism (dp={replicas})", why)
    total = sketch.dp * sketch.micro
    made = replace(
        sketch, dp=replicas, pp=1, chunks=1, pairs=1, spread=(), stages=(), schedule="naive",
        micro=max(1, total // replicas),
    )  # fmt: skip
    words = _words(name, found, made) + "; its answer is one stage: data parallelism"
    return replace(made, placement=usual_placement(made), cut_by=words)


def _bidirectional(request: Request, sketch: Plan, cluster: Cluster, batch: int, tables: Tables) -> Plan:
    """Chimera: every depth, each with the largest micro-batch that fits."""

    def at(samples: int) -> Instance:
        return problem(tables, cluster, range(cluster.world), samples, batch // samples, sketch.recompute)

    found = greedy_batch(at, batch, [size for size in range(1, batch + 1) if batch % size == 0])
    width = found.replicas[0]
    schedule = request.schedule or found.order
    made = replace(
        sketch, dp=width, pp=found.stages, micro=batch // found.samples // width, schedule=schedule, stages=found.cuts
    )
    return replace(made, placement=usual_placement(made), cut_by=_words("chimera", found, made))


def _sound(name: str, found: Partition) -> Partition:
    """The answer, if it is one: what was published may go wrong."""
    if found.faults:
        why = f"the published algorithm goes wrong on this model: {', '.join(found.faults)}"
        raise PlanError(f"partition={name}", why, "partition=torchgpipe-corrected or partition=bottleneck")
    return found


def _renamed(table: Placement, names: Sequence[int]) -> Placement:
    """The same placement with other ranks."""
    return tuple(tuple(tuple(names[rank] for rank in stage) for stage in line) for line in table)


def _words(name: str, found: Partition, made: Plan) -> str:
    """What a person should know of an answer."""
    value = f"{gib(found.value)} a stage" if found.unit == WEIGHTS else (
        f"{seconds(found.value)} {found.unit.removeprefix('seconds ')}"
    )  # fmt: skip
    notes = list(found.notes)
    if found.order and found.order != made.schedule and made.pp > 1:
        notes.append(f"it would take schedule={found.order}")
    if name in ASYNCHRONOUS and made.pp > 1:
        notes.append("the system updates without waiting; here only its partition is used, in a synchronous order")
    return "; ".join([f"partition={name}, which expects {value} by its own costs", *notes])
