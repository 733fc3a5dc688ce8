"""A measured profile: every block timed and weighed on the device that is here.

    capture and verify ─ trace (FLOPs, does it fit?) ─┬─ fits: the chain, block by block, and whole steps (in_chain)
                                                      └─ does not: each block alone (one_by_one)

All timings are ratios to a reference kernel that runs beside them (`reference`), because machines drift.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainplan.errors import InputError, ModelError
from trainplan.profile import by_slice, machine
from trainplan.profile.arithmetic import runs_in
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.capture.tokens import Tokens, tokens_of
from trainplan.profile.capture.verify import verify as hold_against_eager
from trainplan.profile.in_chain import InChain
from trainplan.profile.once_more import once_more
from trainplan.profile.one_by_one import measure_one_by_one
from trainplan.profile.profile import Floats, Parameter, Profile
from trainplan.profile.provenance import Provenance, WholeStep
from trainplan.profile.structure import structure
from trainplan.profile.subject import Subject
from trainplan.profile.trace import trace
from trainplan.profile.traced import Trace
from trainplan.profile.update import time_updates
from trainplan.units import gib
from trainplan.workload.modes import in_training
from trainplan.workload.workload import Workload

SECONDS = 10.0  # of timing, roughly; capturing and the first runs come on top
LEAST_REPEATS, MOST_REPEATS = 3, 15
LARGEST_SHARE = 0.75  # of the seconds may go to the largest size; a size that would need more is not measured
MEMORY_SHARE = 0.8  # of the free memory may be used
SPARE = 1.3  # what a step needs, over the sum of what is known before it has run
PROBE_S = 0.12  # accumulation and arrival of gradients are measured at the largest sizes with shorter passes

Progress = Callable[[str, float], None]


def measure(
    workload: Workload,
    *,
    device: str | torch.device = "cpu",
    samples: Sequence[int] | None = None,
    compile: bool | Mapping[str, Any] = False,
    repeats: int | None = None,
    seconds: float = SECONDS,
    memory: int | None = None,
    progress: Progress | None = None,
    verify: bool = True,
) -> Profile:
    """Measure a workload on a device of this machine.

    `samples` are the micro-batch sizes; by default powers of two up to the batch, as far as `seconds` and memory allow.
    Every size is timed `repeats` times; by default as often as `seconds` allow. `compile` runs blocks through
    torch.compile (a mapping: with these options). `memory` is the number of bytes that may be used; by default most of
    what is free. `verify` holds the captured model against eager on one batch first. `progress` is told what is being
    done, and what share of it all is over.
    """
    here = machine.device_of(device)
    say = progress or (lambda what, share: None)
    sizes = _checked(samples, workload)
    say("capturing the model", 0.0)
    prepared = _prepare(workload, here, machine.free_bytes(here) * MEMORY_SHARE if memory is None else memory, verify)
    options = dict(compile) if isinstance(compile, Mapping) else ({} if compile else None)
    trained = frozenset(p.name for p in prepared.base.parameters if p.trainable)
    subject = Subject(prepared.captured, workload, here, trained, options)
    with machine.still(here), torch.enable_grad(), torch.random.fork_rng(_cuda(here)):
        if prepared.fits(sizes[0] if samples else 1) and prepared.has_values:
            measured, wholes = _in_chain(subject, prepared, sizes, samples is not None, repeats, seconds, say)
        else:
            measured, wholes = sizes if samples else sizes[:4], []
            buffers = values_of(prepared.skeleton.model)
            measure_one_by_one(subject, buffers, measured, repeats or LEAST_REPEATS, seconds, say)
    say("done", 1.0)
    return _assemble(subject, prepared, measured, wholes, verify and prepared.has_values)


# -- before -----------------------------------------------------------------------------------------------------------


@dataclass
class _Prepared:
    """A captured model, and what it would need."""

    skeleton: Skeleton
    model: torch.nn.Module | None  # None: it is too large to be built
    captured: Captured
    base: Profile  # structure without times
    trace: Trace
    tokens: Tokens | None  # None: sequences cannot be cut
    limit: float  # bytes that may be used

    @property
    def has_values(self) -> bool:
        return self.model is not None

    def needed(self, size: int) -> float:
        """Bytes of a training step with so many samples, roughly."""
        crossing = [c for c in self.captured.crossings if self.trace.saved_by.get(c.name)]
        inside = sum(block.saved_bytes for block in self.trace.blocks) * size / self.trace.samples
        activations = inside + sum(c.shape.bytes(size) for c in crossing) + self.base.input_bytes_per_sample * size
        weights = sum(p.bytes for p in self.base.parameters)
        return SPARE * (activations + 4 * weights)  # gradients, and as much as Adam keeps

    def fits(self, size: int) -> bool:
        return self.needed(size) <= self.limit


def _prepare(workload: Workload, device: torch.device, limit: float, verify: bool) -> _Prepared:
    example = workload.inputs(2, 0)
    skeleton = Skeleton(workload.build)
    weights = sum(p.nbytes for p in skeleton.model.parameters())
    model = None
    if 2 * weights <= machine.free_bytes(torch.device("cpu")) * MEMORY_SHARE and 4 * weights <= limit:
        with torch.random.fork_rng(_cuda(device)):
            torch.manual_seed(0)
            model = in_training(workload.build())
    captured = capture(skeleton.model, example, workload.loss)
    if verify and model is not None:
        hold_against_eager(captured, model, example, workload.loss, inputs=workload.inputs)
    base = structure(captured, workload, example)
    tokens = None
    if base.whole_sequences is None:
        tokens = tokens_of(captured, workload.tokens_per_sample, workload.loss, example)
    return _Prepared(skeleton, model, captured, base, trace(captured, workload, 2), tokens, limit)


def _checked(samples: Sequence[int] | None, workload: Workload) -> list[int]:
    if samples is None:
        return [2**power for power in range(max(1, workload.batch).bit_length())]
    sizes = sorted(set(samples))
    if not sizes or sizes[0] < 1:
        raise InputError(f"micro-batch sizes {list(samples)}", "each must be at least 1", "1,2,4,8")
    return sizes


def _cuda(device: torch.device) -> list[int]:
    return [device.index] if device.type == "cuda" and device.index is not None else []


# -- the chain --------------------------------------------------------------------------------------------------------


def _in_chain(
    subject: Subject,
    prepared: _Prepared,
    sizes: list[int],
    given: bool,
    repeats: int | None,
    seconds: float,
    say: Progress,
) -> tuple[list[int], list[int]]:
    """Survey sizes as far as they go, then time them in turns. Returns the sizes, and those with whole steps."""
    assert prepared.model is not None  # asked before
    chain = InChain(subject, subject.stage(0, len(subject.blocks), values_of(prepared.model)))
    chosen: list[int] = []
    for size in sizes:
        if not prepared.fits(size):
            if given:
                raise InputError(
                    f"profile with {size} samples",
                    f"a step needs about {gib(prepared.needed(size))}, and {gib(prepared.limit)} may be used",
                    f"at most {max((s for s in sizes if prepared.fits(s)), default=1)} samples",
                )
            break
        say(f"first runs with {size} samples", 0.05 + 0.2 * len(chosen) / len(sizes))
        try:
            chain.survey(size)
        except Exception as error:
            if size == 1 and not given and len(sizes) > 1:
                continue  # a model may need two samples (statistics over the batch); then the sizes begin at 2
            asked, why = f"running {subject.workload.name} with {size} samples", f"{type(error).__name__}: {error}"
            instead = f"{max(chosen)} samples, which it ran" if chosen else "one step of it by itself, as eager runs it"
            raise ModelError(asked, why, instead) from error
        chosen.append(size)
        if not given and len(chosen) > 1 and 2 * chain.cost_s[size] * LEAST_REPEATS > LARGEST_SHARE * seconds:
            break
    _rounds(chain, chosen, repeats, seconds, say)
    quick = [size for size in chosen if chain.cost_s[size] / 2 <= PROBE_S][-2:] or chosen[:1]
    for turn in range(LEAST_REPEATS):
        for size in quick:
            say(f"gradients with {size} samples", 0.9 + 0.05 * turn / LEAST_REPEATS)
            chain.accumulate(size)
        chain.arrivals(quick[-1])
        chain.halves(quick[-1])
        chain.again(quick[-1])
        if prepared.tokens is not None:
            chain.slices(quick[-1], prepared.tokens)
    counted = subject.state_bytes
    for index in subject.blocks:
        say(f"optimizer of {subject.captured.blocks[index].name}", 0.95 + 0.05 * index / len(subject.blocks))
        time_updates(subject, chain.stage, index)
    subject.state_bytes = counted
    return chosen, chosen


def _rounds(chain: InChain, sizes: list[int], repeats: int | None, seconds: float, say: Progress) -> None:
    """Sizes take turns until each has had its share of the seconds, but at least the least number of repeats."""
    spent = dict.fromkeys(sizes, 0.0)
    count = dict.fromkeys(sizes, 0)

    def wants(size: int) -> bool:
        if repeats is not None:
            return count[size] < repeats
        fair = spent[size] < seconds / len(sizes)
        return count[size] < LEAST_REPEATS or (fair and count[size] < MOST_REPEATS)

    while any(map(wants, sizes)):
        for size in filter(wants, sizes):
            shares = [min(1.0, count[s] / (repeats or LEAST_REPEATS)) for s in sizes]
            say(f"{size} samples, repeat {count[size] + 1}", 0.25 + 0.65 * sum(shares) / len(shares))
            started = chain.subject.clock.elapsed()
            # Blocks are what is wanted; of large steps taken whole, two are enough to hold their sum against.
            chain.round(size, whole=count[size] < 2 or chain.cost_s[size] < PROBE_S)
            spent[size] += chain.subject.clock.elapsed() - started
            count[size] += 1


# -- after ------------------------------------------------------------------------------------------------------------


def _assemble(subject: Subject, prepared: _Prepared, sizes: list[int], wholes: list[int], verified: bool) -> Profile:
    readings, base, traced = subject.readings, prepared.base, prepared.trace
    (updates, update_apart), (workspace, update_adds) = _updates(subject, wholes), _update_workspace(subject)
    added = _accumulation(subject, base)
    halves = [_halves(subject, index) for index in subject.blocks]
    blocks = []
    for index, block in enumerate(base.blocks):
        found = [subject.bytes[size, index] for size in sizes]
        run, issue = updates[index]
        (there, whole), (issued_there, issued) = (
            [[read((what, size, index)) for size in sizes] for what in ("forward", "backward")]
            for read in (readings.run_s, readings.issue_s)
        )
        parts, again = halves[index], once_more(readings, index)
        blocks.append(
            replace(
                block,
                backward_input_s=tuple(seconds * parts[0] for seconds in whole) if parts else (),
                backward_weight_s=tuple(seconds * parts[1] for seconds in whole) if parts else (),
                backward_input_issue_s=(parts[2],) * len(sizes) if parts else (),
                backward_weight_issue_s=tuple(max(parts[3], i - parts[2]) for i in issued) if parts else (),
                slice_forward=_slices(subject, prepared, "forward", index),
                slice_backward=_slices(subject, prepared, "backward", index),
                flops=traced.blocks[index].flops / traced.samples,
                convolution_flops=traced.blocks[index].convolution_flops / traced.samples,
                tail_flops=0.0
                if subject.compile_options is not None
                else traced.blocks[index].tail_flops / traced.samples,
                recompute_s=tuple(seconds * again[0] for seconds in there) if again else (),
                recompute_issue_s=tuple(seconds * again[1] for seconds in issued_there) if again else (),
                forward_s=tuple(there),
                backward_s=tuple(whole),
                forward_issue_s=tuple(issued_there),
                backward_issue_s=tuple(issued),
                accumulate_s=added[index],
                update_s=run,
                update_issue_s=issue,
                update_workspace_bytes=workspace[index],
                saved_bytes=tuple(float(b.saved) for b in found),
                forward_workspace_bytes=tuple(float(b.forward_workspace) for b in found),
                backward_workspace_bytes=tuple(float(b.backward_workspace) for b in found),
            )
        )
    timed = [what for what in readings.taken if isinstance(what, tuple) and what[0] in ("forward", "backward")]
    counts = [readings.count(what) for what in timed]
    trained = sum(p.count for p in base.parameters if p.trainable)
    products_in, convolutions_in = runs_in(subject.device, base.precision)
    return replace(
        base,
        device=machine.name_of(subject.device),
        kind="measured",
        compiled=subject.compile_options is not None,
        optimizer=subject.optimizer,
        state_bytes_per_parameter=subject.state_bytes / trained if trained else 0.0,
        update_adds=update_adds,
        update_apart=update_apart,
        products_in=products_in,
        convolutions_in=convolutions_in,
        samples=tuple(sizes),
        blocks=tuple(blocks),
        crossings=tuple(replace(c, saved_by=subject.saved_by.get(c.name, ())) for c in base.crossings),
        parameters=tuple(_ready(subject, parameter) for parameter in base.parameters),
        whole=tuple(_whole(subject, size) for size in wholes),
        provenance=Provenance(
            machine=machine.describe(subject.device),
            made=machine.now(),
            versions=machine.versions(),
            threads=1 if subject.device.type == "cpu" else torch.get_num_threads(),
            repeats=min(counts, default=0),
            spread=statistics.median(readings.spread(what) for what in timed),
            reference_s=readings.reference_s,
            verified=verified,
            source=base.provenance.source,
            digest=base.provenance.digest,
        ),
    )


def _whole(subject: Subject, size: int) -> WholeStep:
    forward, backward, update = (
        subject.readings.run_s((f"whole {what}", size)) for what in ("forward", "backward", "update")
    )
    return WholeStep(size, forward, backward, update, subject.peak_bytes[size])


def _ready(subject: Subject, parameter: Parameter) -> Parameter:
    shares = subject.ready.get(parameter.name)
    return replace(parameter, ready=statistics.median(shares)) if shares else parameter


def _updates(subject: Subject, wholes: list[int]) -> tuple[list[tuple[float, float]], float]:
    """(run, issue) of the optimizer for each block. Steps for blocks alone pay the fixed costs of a step once each, so
    where the step for all parameters was timed too, they are scaled to add up to it; and how many times longer they
    were before."""
    readings = subject.readings
    found = [
        (readings.run_s(("update", i)), readings.issue_s(("update", i))) if readings.count(("update", i)) else (0, 0)
        for i in subject.blocks
    ]
    total = sum(max(run, issue) for run, issue in found)
    if not wholes or not total:
        return [(float(run), float(issue)) for run, issue in found], 1.0
    factor = statistics.median(readings.run_s(("whole update", size)) for size in wholes) / total
    return [(run * factor, issue * factor) for run, issue in found], max(1.0, 1 / factor)


def _update_workspace(subject: Subject) -> tuple[list[float], float]:
    """Extra bytes of the optimizer's step for each block alone, and what share of them adds up in a step for all."""
    found = [float(subject.update_workspace.get(index, 0)) for index in subject.blocks]
    most, total = max(found), sum(found)
    whole = subject.update_workspace.get(None, total)
    return found, min(max((whole - most) / (total - most), 0.0), 1.0) if total > most else 1.0


def _halves(subject: Subject, index: int) -> tuple[float, float, float, float] | None:
    """Seconds of a block's backward in two parts, as shares of the whole, and those of the host to issue each; all were
    timed at one size."""
    readings = subject.readings
    timed = [what for what in readings.taken if isinstance(what, tuple) and what[0] == "input" and what[2] == index]
    if not timed:
        return None
    size = timed[0][1]
    whole = readings.run_s(("backward", size, index))
    names = [(part, size, index) for part in ("input", "weights")]
    shares = [readings.run_s(name) / whole if whole > 0 else 0.0 for name in names]
    return shares[0], shares[1], readings.issue_s(names[0]), readings.issue_s(names[1])


def _slices(subject: Subject, prepared: _Prepared, what: str, index: int) -> Floats:
    """What is kept of the seconds of slices; they were timed at one size. Empty: they were not timed."""
    readings, tokens = subject.readings, prepared.tokens
    timed = [n for n in readings.taken if isinstance(n, tuple) and n[0] == f"slice {what}" and n[2] == index]
    if tokens is None or not timed:
        return ()
    found = {(start, length): readings.run_s(name) for name in timed for start, length in [name[3:]]}
    own = found.pop((0, tokens.length))
    points = [(n / tokens.length, (start + n) / tokens.length, seconds) for (start, n), seconds in found.items()]
    attends = prepared.base.blocks[index].carried_bytes > 0
    return by_slice.terms(points, own, readings.run_s((what, timed[0][1], index)), attends)


def _accumulation(subject: Subject, base: Profile) -> list[float]:
    """Seconds that adding to gradients costs each block: what it costs all of them, shared out by bytes.

    The difference of two backward passes is small and noisy; a single block's would be lost in the noise.
    """
    added = [what for what in subject.readings.taken if isinstance(what, tuple) and what[0] == "added"]
    total = max(0.0, sum(subject.readings.run_s(what) for what in added))
    bytes_of = [sum(p.bytes for p in base.parameters if p.trainable and p.blocks[0] == i) for i in subject.blocks]
    return [total * size / max(1, sum(bytes_of)) for size in bytes_of]
