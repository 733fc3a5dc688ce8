"""Five systems that are very unlike each other, written down by hand.

Before the types were fixed these had to be expressible, checkable and playable without a special case: PipeDream-2BW
(weight versions), Chimera (two directions), TeraPipe (slices), an asynchronous parameter server (order decided while
running) and a Checkmate schedule (single operators, recomputed).

Those that have been built since are held against what their plans are lowered to: the same operations, of the same
weights, which wait for the same ones.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from synthetic import chain
from trainplan.errors import ProgramError
from trainplan.plan.plan import plan
from trainplan.predict.clock import bubble, compute_seconds, play, seconds_by_kind
from trainplan.predict.memory import in_flight, peaks
from trainplan.program.builder import Builder
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Kind, Value
from trainplan.program.policies import Policy
from trainplan.program.program import Program
from trainplan.program.text import Key, name, parse

Waits = dict[
    str, tuple[int, int, frozenset[str]]
]  # operation → its rank, the version of its weights, what it waits for


def waits(program: Program, kinds: Sequence[Kind]) -> Waits:
    """What operations of these kinds are, and which ones make what they read."""
    found: Waits = {}
    for op in np.flatnonzero(np.isin(program.kind, kinds)).tolist():
        makers = program.value_maker[program.reads.row(op)]
        before = frozenset(program.name(int(maker)) for maker in makers if maker >= 0)
        found[program.name(op)] = int(program.rank[op]), int(program.version[op]), before
    return found


FREE = dict.fromkeys((Kind.SEND_F, Kind.SEND_B, Kind.REDUCE_GRAD, Kind.STEP), 0.0)


def pipeline(
    build: Builder, lists: list[str], place, stages: int, version=lambda key: key.step, slices: int = 1
) -> None:
    """Lists of compute (and STEP) operations, with messages and values between neighbouring stages.

    `place(stage, pipeline)` is the rank. Each forward saves 10 bytes, each boundary has 1 byte. A slice reads what
    earlier ones have saved, the keys and values among it; their gradients, 3 bytes a slice, gather from the backward
    pass of the last slice on until that of the slice whose they are.
    """
    rows = [[parse(word) for word in row.split()] for row in lists]
    cursor = [0] * len(rows)
    made: set[str] = set()

    def tag(key: Key) -> str:
        return f"{key.micro_batch}/{key.slice}@{key.step}^{key.pipeline}"

    def ready(key: Key) -> bool:
        if key.kind is Kind.F and key.stage:
            return f"a{key.stage}:{tag(key)}" in made
        if key.kind is Kind.B and key.stage < stages - 1:
            return f"g{key.stage}:{tag(key)}" in made
        return True

    def emit(rank: int, key: Key) -> None:
        s, t = key.stage, tag(key)
        other = {**key.__dict__, "peer": -1}
        if key.kind is Kind.F:
            reads = [f"w{s}.{version(key)} on {rank}"]
            if s:
                source = place(s - 1, key.pipeline)
                word = name(Key(**{**other, "kind": Kind.RECV_F, "peer": s - 1}))
                build.op(
                    rank,
                    word,
                    to=source,
                    reads=[f"m{s}:{t}"],
                    frees=[f"m{s}:{t}"],
                    makes={f"in{s}:{t}": (Value.BOUNDARY, 1)},
                )
                reads.append(f"in{s}:{t}")
            reads += [f"saved{s}:{tag(replace(key, slice=earlier))}" for earlier in range(key.slice)]
            makes = {f"saved{s}:{t}": (Value.SAVED, 10)}
            if s < stages - 1:
                makes[f"out{s}:{t}"] = (Value.BOUNDARY, 1)
            build.op(rank, name(key), reads=reads, makes=makes, version=version(key))
            if s < stages - 1:
                target = place(s + 1, key.pipeline)
                word = name(Key(**{**other, "kind": Kind.SEND_F, "peer": s + 1}))
                build.op(
                    rank,
                    word,
                    to=target,
                    reads=[f"out{s}:{t}"],
                    frees=[f"out{s}:{t}"],
                    makes={f"m{s + 1}:{t}": (Value.MESSAGE, 1)},
                )
                made.add(f"a{s + 1}:{t}")
        elif key.kind is Kind.B:
            reads = [f"w{s}.{version(key)} on {rank}", f"saved{s}:{t}"]
            frees = [f"saved{s}:{t}"]
            if s < stages - 1:
                word = name(Key(**{**other, "kind": Kind.RECV_B, "peer": s + 1}))
                source = place(s + 1, key.pipeline)
                build.op(
                    rank,
                    word,
                    to=source,
                    reads=[f"gm{s}:{t}"],
                    frees=[f"gm{s}:{t}"],
                    makes={f"gin{s}:{t}": (Value.BOUNDARY, 1)},
                )
                reads.append(f"gin{s}:{t}")
                frees.append(f"gin{s}:{t}")
            if s:
                reads.append(f"in{s}:{t}")
                frees.append(f"in{s}:{t}")
            makes = {f"gout{s}:{t}": (Value.BOUNDARY, 1)} if s else {}
            if key.slice == slices - 1:
                of = [tag(replace(key, slice=earlier)) for earlier in range(key.slice)]
                makes |= {f"keys and values{s}:{earlier}": (Value.SAVED, 3) for earlier in of}
            else:
                frees.append(f"keys and values{s}:{t}")
            build.op(rank, name(key), reads=reads, frees=frees, makes=makes, version=version(key))
            if s:
                target = place(s - 1, key.pipeline)
                word = name(Key(**{**other, "kind": Kind.SEND_B, "peer": s - 1}))
                build.op(
                    rank,
                    word,
                    to=target,
                    reads=[f"gout{s}:{t}"],
                    frees=[f"gout{s}:{t}"],
                    makes={f"gm{s - 1}:{t}": (Value.MESSAGE, 1)},
                )
                made.add(f"g{s - 1}:{t}")
        else:
            old = f"w{s}.{key.step - 1} on {rank}"
            frees = [old] if old in build.values and build.staleness else []
            build.op(rank, name(key), makes={f"w{s}.{key.step + 1} on {rank}": (Value.WEIGHTS, 100)}, frees=frees)

    # The builder wants makers before readers: go round the ranks, each as far as it can.
    while any(cursor[r] < len(rows[r]) for r in range(len(rows))):
        before = list(cursor)
        for r, row in enumerate(rows):
            while cursor[r] < len(row) and ready(row[cursor[r]]):
                emit(r, row[cursor[r]])
                cursor[r] += 1
        assert cursor != before, "the lists deadlock"


def test_pipedream_2bw_p2() -> None:
    """Two stages, two micro-batches a batch, three batches: a batch reads the weights of two updates ago, no flush."""
    build = Builder(world=2, steps=3, staleness=1, title="2BW p=2 m=2")
    for stage in (0, 1):
        build.value(stage, f"w{stage}.0 on {stage}", Value.WEIGHTS, 100)
    rows = [
        "0F0 0F1 0B0 0F0@1 0B1 0STEP 0F1@1 0B0@1 0F0@2 0B1@1 0STEP@1 0F1@2 0B0@2 0B1@2 0STEP@2",
        "1F0 1B0 1F1 1B1 1STEP 1F0@1 1B0@1 1F1@1 1B1@1 1STEP@1 1F0@2 1B0@2 1F1@2 1B1@2 1STEP@2",
    ]
    pipeline(build, rows, lambda stage, pipe: stage, stages=2, version=lambda key: max(0, key.step - 1))
    program = check(build.program())
    played = play(program, seconds_by_kind(program, {Kind.F: 1, Kind.B: 2, **FREE}))
    # The last stage is never idle after its first input: one fill of F, then 3 batches of 2 (F + B), one drain of B.
    assert played.makespan == 1 + 3 * 2 * 3 + 2
    steps = [i for i in range(len(program)) if program.kind[i] == Kind.STEP and program.stage[i] == 1]
    assert np.diff(played.end[steps]).tolist() == [6.0, 6.0]  # the time of a step is the slope: no bubble
    assert [in_flight(played, r) for r in (0, 1)] == [2, 1]
    assert max(p.breakdown["weights"] for p in peaks(played)) == 300  # old, new, and the newest while it is made


def test_chimera_p4_m4() -> None:
    """Two pipelines in opposite directions; a stage lives on two ranks, whose gradients are summed."""
    build = Builder(world=4, title="Chimera D=4 N=4")

    def place(stage: int, pipe: int) -> int:
        return stage if pipe == 0 else 3 - stage

    for stage in range(4):
        for pipe in (0, 1):
            build.value(place(stage, pipe), f"w{stage}.0 on {place(stage, pipe)}", Value.WEIGHTS, 100)
            build.value(place(stage, pipe), f"grad{stage} on {place(stage, pipe)}", Value.GRADIENTS, 100)
    rows = [
        "0F0 0F1 3F2^1 3B2^1 3F3^1 3B3^1 0B0 0B1",
        "1F0 2F2^1 1F1 2F3^1 2B2^1 1B0 2B3^1 1B1",
        "1F2^1 2F0 1F3^1 2F1 2B0 1B2^1 2B1 1B3^1",
        "0F2^1 0F3^1 3F0 3B0 3F1 3B1 0B2^1 0B3^1",
    ]
    pipeline(build, rows, place, stages=4)
    for stage in range(4):
        ranks = sorted({place(stage, 0), place(stage, 1)})
        gradients = [f"grad{stage} on {rank}" for rank in ranks]
        build.op(ranks, f"{stage}REDUCE_GRAD", reads=gradients, makes={f"sum{stage}": (Value.TOKEN, 0)}, waits=False)
    for rank in range(4):
        for stage in sorted({rank, 3 - rank}):
            build.op(rank, f"{stage}STEP^{int(stage != rank)}", reads=[f"sum{stage}@{rank}"])
    program = check(build.program())
    equal = play(program, seconds_by_kind(program, {Kind.F: 1, Kind.B: 1, **FREE}))
    assert equal.makespan == 2 * 4 + 4 - 2  # 2N + D − 2 slots
    assert bubble(equal) == pytest.approx(0.2)
    double = play(program, seconds_by_kind(program, {Kind.F: 1, Kind.B: 2, **FREE}))
    assert double.makespan == 5 * 4 - 4
    assert [in_flight(equal, r) for r in range(4)] == [3, 4, 4, 3]  # D/2 + 1 + min(r, D − 1 − r)
    assert compute_seconds(double).tolist() == [12.0] * 4


def test_terapipe_three_slices() -> None:
    """One micro-batch in three slices of tokens; later slices read the keys and values of earlier ones."""
    build = Builder(world=3, title="TeraPipe K=3, 3 slices")
    for stage in range(3):
        build.value(stage, f"w{stage}.0 on {stage}", Value.WEIGHTS, 100)
    rows = [" ".join(f"{s}F0/{j}" if j else f"{s}F0" for j in range(3)) for s in range(3)]
    rows = [row + " " + " ".join(f"{s}B0/{j}" if j else f"{s}B0" for j in (2, 1, 0)) for s, row in enumerate(rows)]
    pipeline(build, rows, lambda stage, pipe: stage, stages=3, slices=3)
    program = check(build.program())
    kinds = (Kind.F, Kind.B, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    given = chain(3, tokens_per_sample=6, whole_sequences=None)
    choices = plan(pp=3, schedule="terapipe", stages=(1, 2), blocks=3, slices=(2, 2, 2))
    assert waits(program, kinds) == waits(lower(choices, given, 4), kinds)
    assert waits(program, kinds)["1F0/2"] == (1, 0, {"1F0", "1F0/1", "1RECV_F0/2"})
    seconds = seconds_by_kind(program, {Kind.F: 0, Kind.B: 0, **FREE})
    slices = np.array([1.0, 3.0, 2.0])
    forward, backward = program.kind == Kind.F, program.kind == Kind.B
    seconds[forward] = slices[program.slice[forward]]
    seconds[backward] = 2 * slices[program.slice[backward]]
    # Each direction: the sum of the slices once, and the largest once more for every further stage.
    assert play(program, seconds).makespan == pytest.approx(3 * (6 + 2 * 3))
    played = play(program, seconds)
    assert [in_flight(played, r) for r in range(3)] == [3, 3, 3]
    # As the last slice goes back: three slices, and the gradients of the keys and values of the two before it.
    assert [(peak.op, peak.breakdown["saved"]) for peak in peaks(played)] == [(f"{s}B0/2", 36) for s in range(3)]


def parameter_server(pushes: int, version=lambda k: k) -> Program:
    """Two workers (ranks 0 and 1) and a server (rank 2) that serves whoever comes first.

    A worker computes with the weights of its latest pull, and none that are older. How many updates of others these
    lack is known only when the order at the server is.
    """
    build = Builder(world=3, steps=pushes, title="asynchronous parameter server")
    build.policy(2, Policy.PUSH)
    build.value(2, "w", Value.WEIGHTS, 100)
    for worker in (0, 1):
        build.value(worker, f"w for {worker}, 0", Value.WEIGHTS, 100)
    for k in range(pushes):
        for worker in (0, 1):
            mark, t = f"^{worker}@{k}", f"{worker}, {k}"
            weights = f"w for {t}"
            build.op(worker, f"0F0{mark}", reads=[weights], makes={f"saved {t}": (Value.SAVED, 10)}, version=version(k))
            build.op(
                worker,
                f"0B0{mark}",
                reads=[f"saved {t}"],
                frees=[f"saved {t}"],
                makes={f"g {t}": (Value.GRADIENTS, 100)},
                version=version(k),
            )
            build.op(
                worker,
                f"0SEND_G0>1{mark}",
                to=2,
                reads=[f"g {t}"],
                frees=[f"g {t}"],
                makes={f"push {t}": (Value.MESSAGE, 100)},
            )
            build.op(
                2,
                f"1RECV_G0{mark}",
                to=worker,
                reads=[f"push {t}"],
                frees=[f"push {t}"],
                makes={f"got {t}": (Value.GRADIENTS, 100)},
            )
            build.op(
                2,
                f"1STEP{'.1' if worker else ''}{mark}",
                reads=["w", f"got {t}"],
                frees=[f"got {t}"],
                makes={f"fresh {t}": (Value.WEIGHTS, 100)},
            )
            build.op(
                2,
                f"1SEND_W0{mark}",
                to=worker,
                reads=[f"fresh {t}"],
                frees=[f"fresh {t}"],
                makes={f"pull {t}": (Value.MESSAGE, 100)},
            )
            after = f"w for {worker}, {k + 1}"
            build.op(
                worker,
                f"0RECV_W0>1{mark}",
                to=2,
                reads=[f"pull {t}"],
                frees=[f"pull {t}", weights],
                makes={after: (Value.WEIGHTS, 100)},
            )
    return build.program()


def test_asynchronous_parameter_server() -> None:
    """Nobody waits for the other worker: the order at the server is that of arrival, and is recorded."""
    program = check(parameter_server(pushes=3))
    kinds = (Kind.F, Kind.B, Kind.SEND_G, Kind.RECV_G, Kind.STEP, Kind.SEND_W, Kind.RECV_W)
    lowered = lower(plan(dp=2, blocks=3, exchange="ps-asp", servers=1), chain(3), 4, steps=3)
    assert waits(program, kinds) == waits(lowered, kinds)
    assert (program.staleness, program.policy) == (lowered.staleness, lowered.policy)
    seconds = seconds_by_kind(program, {Kind.F: 0, Kind.B: 0, Kind.SEND_G: 0.5, Kind.STEP: 1.0, Kind.SEND_W: 0.5})
    seconds[(program.kind == Kind.F) & (program.pipeline == 0)] = 2.0
    seconds[(program.kind == Kind.F) & (program.pipeline == 1)] = 2.25
    played = play(program, seconds)
    steps = [int(i) for i in played.order if program.kind[i] == Kind.STEP]
    arrivals = [(int(program.pipeline[i]), float(played.start[i])) for i in steps]
    # Worker 0 pushes at 2.5 and is served at once; worker 1 arrives at 2.75 and waits until 3.5. From then on both
    # have a round trip of 4 s (1 s of it the server's), and worker 1 stays 1 s behind.
    assert arrivals == [(0, 2.5), (1, 3.5), (0, 6.5), (1, 7.75), (0, 10.5), (1, 12.0)]
    # So all but the first gradient that the server applies are of weights that lack one update, the other worker's.
    latest, stale = [0, 0], list[int]()
    for update, (worker, _) in enumerate(arrivals):
        stale.append(update - latest[worker])
        latest[worker] = update + 1
    assert stale == [0, 1, 1, 1, 1, 1]


def test_a_worker_that_goes_on_with_old_weights_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"0F0@1 reads weights of version 0; 0 update\(s\) less than step 1"):
        check(parameter_server(pushes=2, version=lambda k: 0))


def test_asynchronous_server_prefers_whoever_came_first() -> None:
    program = parameter_server(pushes=1)
    seconds = seconds_by_kind(program, {Kind.F: 0, Kind.B: 0, Kind.SEND_G: 0.5, Kind.STEP: 1.0, Kind.SEND_W: 0.5})
    seconds[(program.kind == Kind.F) & (program.pipeline == 0)] = 3.0
    played = play(program, seconds)
    assert [int(program.pipeline[i]) for i in played.order if program.kind[i] == Kind.STEP] == [1, 0]


def test_checkmate_six_operators() -> None:
    """Three operators forward, three backward; operator 1 is thrown away and computed again."""
    sizes = {"x": 1, "f0": 4, "f1": 6, "f2": 2, "g2": 2, "g1": 6, "g0": 4}
    build = Builder(world=1, title="Checkmate, 6 operators")
    build.value(0, "w0.0 on 0", Value.WEIGHTS, 50)
    build.value(0, "x", Value.INPUT, sizes["x"])

    def op(text: str, reads: str, makes: str, frees: str = "") -> None:
        made = {name: (Value.SAVED, sizes[name.rstrip("'")]) for name in makes.split()}
        build.op(0, text, reads=reads.split(), makes=made, frees=frees.split())

    op("0F0", "x", "f0")
    op("0F0.1", "f0", "f1")
    op("0F0.2", "f1", "f2", frees="f1")
    op("0R0.1", "f0", "f1'")
    op("0B0.2", "f1' f2", "g2", frees="f2")
    op("0B0.1", "f0 f1' g2", "g1", frees="f1' g2")
    op("0B0", "x f0 g1", "g0", frees="f0 g1 x")
    program = check(build.program())
    seconds = seconds_by_kind(program, {Kind.F: 1, Kind.R: 1, Kind.B: 2})
    played = play(program, seconds)
    assert played.makespan == 3 * 1 + 1 + 3 * 2
    (peak,) = peaks(played)
    # While 0B0.1 runs: weights 50, x 1, f0 4, f1 6, g2 2, g1 6.
    assert (peak.bytes, peak.op) == (69, "0B0.1")
