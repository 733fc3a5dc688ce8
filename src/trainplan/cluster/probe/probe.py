"""This machine as a cluster, measured with real processes, and remembered.

Imports no torch: the workers do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from trainplan.cluster import catalogue
from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node, Pair
from trainplan.cluster.probe import fit, machine
from trainplan.cluster.probe.launch import Place, run_workers
from trainplan.errors import InputError, TrainplanError
from trainplan.units import gib, percent

FULL_S, QUICK_S = 14.0, 4.5  # of measuring; starting the workers comes on top
FULL_ROUNDS, QUICK_ROUNDS = 4, 3  # at the least
MOST_WORKERS = 256
MEASURES = 6  # counts up when a probe measures more than before, or otherwise: what was remembered then will not do
WORKER = "trainplan.cluster.probe.worker"
DISTURBED = 0.1  # share of the machine that others may use before a probe says so

Progress = Callable[[str, float], None]
_Links = tuple[Link, tuple[Pair, ...], Link | None]  # between two workers, between some of them, to other networks


def probe(
    workers: int | None = None,
    device: Literal["cpu", "cuda"] | str = "cpu",
    backend: str | None = None,
    *,
    threads: int = 1,
    quick: bool = False,
    refresh: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
    timeout_s: float | None = None,
    place: Place | None = None,
    worker: str = WORKER,
) -> Cluster:
    """Measure this machine with so many workers: by default one for each core, or for each GPU.

    `backend` is gloo, or nccl where every worker has a GPU of its own. With `quick` fewer sizes and rounds are
    measured. A machine that was probed before with the same versions is not measured again unless `refresh`; `cache`
    off neither looks nor remembers. `progress` is told what was done, and what share of it all that is. Workers are
    started inside their `place`, if that is given; then nothing is remembered. `worker` is the module that each runs:
    one that measures more than ours (`engine/probe.py`).
    """
    cache = cache and place is None
    count, backend = _checked(workers, device, backend, threads)
    name = "local" if workers is None else f"{count}xlocal"
    path = _path(count, device, backend, threads, quick, worker)
    if cache and not refresh:
        known = _remembered([_path(count, device, backend, threads, False, worker), path])
        if known is not None:
            return replace(known, name=name)
    settings = {
        "device": device,
        "backend": backend,
        "threads": threads,
        "quick": quick,
        "seconds": QUICK_S if quick else FULL_S,
        "least_rounds": QUICK_ROUNDS if quick else FULL_ROUNDS,
        "timeout_s": 60,
    }
    if progress:
        progress(f"starting {_many(count, 'worker')}", 0.0)
    limit = timeout_s or 90 + 10 * count
    load, in_use = machine.Load(), machine.gpu_memory_in_use() if device == "cuda" else {}
    results = run_workers(
        worker, count, settings, timeout_s=limit, threads=threads, progress=progress, place=place
    )  # fmt: skip
    found = _cluster(name, results, settings, load.of_others(), in_use, worker)
    if cache:
        found.save(path)
    return found


def _checked(workers: int | None, device: str, backend: str | None, threads: int) -> tuple[int, str]:
    """The number of workers and the backend, or why they cannot be."""
    if device not in ("cpu", "cuda"):
        raise InputError(f"device {device}", "a machine is probed as cpu or cuda", "cpu")
    count = workers if workers is not None else (machine.cores() if device == "cpu" else machine.accelerators() or 1)
    if not 1 <= count <= MOST_WORKERS:
        raise InputError(f"{count} workers", f"from 1 to {MOST_WORKERS} can be started on one machine", "2")
    if threads < 1:
        raise InputError(f"{threads} threads", "a worker computes with at least one", "1")
    own_gpu = device == "cuda" and 1 < count <= machine.accelerators()
    backend = backend or ("nccl" if own_gpu else "gloo")
    if backend not in ("gloo", "nccl"):
        raise InputError(f"backend {backend}", "a probe communicates by gloo or nccl", "gloo")
    if backend == "nccl" and not own_gpu:
        why = f"nccl needs a GPU for each worker, and {machine.accelerators()} can be used here"
        raise InputError(f"backend nccl with {count} workers on {device}", why, "gloo")
    return count, backend


# -- the cache -----------------------------------------------------------------------------------------------------


def _path(count: int, device: str, backend: str, threads: int, quick: bool, worker: str) -> Path:
    """The file that such a probe of this machine with these versions is kept in."""
    key: dict[str, Any] = machine.identity() | machine.versions()
    key |= {"workers": count, "device": device, "backend": backend, "threads": threads, "quick": quick}
    key |= {"measures": MEASURES, "worker": worker}
    mark = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return machine.cache_folder() / f"cluster-{mark}.json"


def _remembered(paths: list[Path]) -> Cluster | None:
    """The first of these files that can be read; one that cannot is as good as none, and will be written anew."""
    for path in paths:
        if path.is_file():
            try:
                return Cluster.load(path)
            except TrainplanError:
                continue
    return None


# -- from samples to a cluster -------------------------------------------------------------------------------------


def _cluster(
    name: str,
    results: list[dict[str, Any]],
    settings: dict[str, Any],
    others: float,
    in_use: dict[str, int],
    worker: str,
) -> Cluster:
    workers: list[fit.Samples] = [result["samples"] for result in results]
    count = len(workers)
    threads = settings["threads"]
    staged = settings["device"] == "cuda" and settings["backend"] == "gloo"
    backend = "gloo-staged" if staged else settings["backend"]
    rounds = "/".join(str(number) for number in workers[0]["rounds"])
    source = (
        f"probed {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {machine.processor()}, {_many(machine.cores(), 'core')}, "
        f"{gib(machine.memory_bytes())}; torch {results[0]['torch']}, {settings['backend']}, "
        f"{_many(count, 'worker')} of {_many(threads, 'thread')}, {rounds} rounds"
    )
    device = _device(results, source, in_use)
    spaces = fit.spaces([result["network"] for result in results])
    links, curves = _links(workers, spaces, settings["backend"], source)
    nodes = tuple(
        Node(
            name="this machine" if len(spaces) == 1 else f"network namespace {number} of this machine",
            devices=(device,) * len(space),
            inside=inside,
            network=network,
            pairs=pairs,
            host_memory_bytes=machine.memory_bytes(),
            cores=machine.cores(),
            sources={"node": source},
        )
        for number, (space, (inside, pairs, network)) in enumerate(zip(spaces, links, strict=True))
    )
    notes = [f"{count} × {device.name} on this machine, as measured"]
    if settings["device"] == "cpu" and count * threads > machine.cores():
        notes.append(f"{count} workers of {_many(threads, 'thread')} share {_many(machine.cores(), 'core')}")
    if others > DISTURBED:
        notes.append(f"other processes used {percent(others)} of this machine meanwhile: probe again when it is quiet")
    if settings["backend"] == "nccl" and worker != WORKER:
        notes.append("what the engine takes of hosts was not measured: NCCL between several ranks is not tested")
    if results[0]["sharers"] > 1:
        notes.append(f"{results[0]['sharers']} workers share one GPU, and its memory is dealt out evenly")
    if len(nodes) > 1:
        notes.append(f"the workers are in {len(nodes)} networks: what passes between these shares a link")
    return Cluster(
        name=name,
        nodes=nodes,
        backend=backend,
        collectives=curves,
        slowdown=fit.slowdowns(workers, count),
        contention=fit.contention(workers, count, machine.cores() if settings["device"] == "cpu" else 0),
        hosts=fit.hosts(workers, count),
        dispatch_s=fit.dispatch(workers),
        source=source,
        notes=tuple(notes),
        spread=fit.spread(workers),
        slowdown_of_two=fit.slowdowns(workers, 2) if count > 2 and not settings["quick"] else None,
        one_machine=len(nodes) > 1,
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _device(results: list[dict[str, Any]], source: str, in_use: dict[str, int]) -> Device:
    """A worker's device: measured speeds, and its share of the memory. `in_use` was taken before workers started."""
    first: fit.Samples = results[0]["samples"]
    products = {name.removeprefix("product."): median(first[name]) for name in first if name.startswith("product.")}
    order = [precision for precision in catalogue.PRECISIONS if precision in products]
    last = first["memory"][-1]
    sharers = results[0]["sharers"]
    if results[0]["device"]:  # a GPU: what its workers have taken, less what their tensors hold, is their contexts
        total = last["total"]
        taken = last["taken"] - in_use.get(last["gpu"], 0)
        context = max(0, taken - sharers * last["tensors"]) // sharers
        name = catalogue.reported(results[0]["device"])
    else:
        total, context, name = machine.memory_bytes(), last["taken"], "cpu"
        sharers = len(results)
    sheet = catalogue.device(name) if catalogue.has("device", name) else None
    sources = {f"flops.{precision}": "measured: products" for precision in order}
    sources |= {"memory": f"share of {gib(total)}", "memory_rate": "measured: copy", "context": "measured"}
    host_rate = median(first["host.pinned"]) if "host.pinned" in first else 0.0
    if host_rate:
        pageable = median(first["host.pageable"])
        sources["host_link"] = f"measured: pinned memory, median of both ways (pageable: {pageable / 1e9:.1f} GB/s)"
    return Device(
        name=name,
        memory_bytes=total // sharers,
        flops={precision: products[precision] for precision in order},
        memory_rate=median(first["copy"]),
        host_rate=host_rate,
        context_bytes=context,
        sources=sources,
        capability=sheet.capability if sheet else (0, 0),
        processors=_processors(results[0], sheet),
    )


def _processors(result: dict[str, Any], sheet: Device | None) -> int:
    """Multiprocessors of a worker's GPU: a slice sees its own; workers that take turns on a whole one have a share."""
    seen, sharers = int(result["processors"]), int(result["sharers"])
    whole = sheet is None or seen >= sheet.processors
    return seen // sharers if whole else seen


def _links(
    workers: list[fit.Samples], spaces: list[range], backend: str, source: str
) -> tuple[list[_Links], tuple[Curve, ...]]:
    """The links of every network that workers are in, and what was measured inside of one of them."""
    between = fit.messages(workers)
    if not between:
        alone = replace(catalogue.link("loopback"), source="assumed: not measured, there is one worker")
        return [(alone, (), None)], ()
    host = median(sample for worker in workers for sample in worker["message"])

    def link(curve: Curve, shared: bool = False) -> Link:
        latency, rate = fit.line(curve.bytes, curve.seconds)
        where = "between networks" if shared else "on this machine"
        rate = fit.sustained(curve) if shared else rate
        return Link(f"{backend} {where}", latency, rate, message_s=host, shared=shared, source=source)

    inside = {pair: curve for pair, curve in between.items() if any({*pair} <= {*space} for space in spaces)}
    usual = fit.together(list(inside.values()))
    leaving = [curve for pair, curve in between.items() if pair not in inside]
    network = link(fit.together(leaving), shared=True) if leaving else None
    apart = set(fit.apart(inside))
    links = [
        (
            link(usual),
            tuple(
                Pair(a - space[0], b - space[0], link(inside[a, b]))
                for a, b in inside
                if (a, b) in apart and a in space
            ),
            network,
        )
        for space in spaces
    ]
    curves = (usual, *fit.collectives(workers))
    if network is not None:  # what only some of its ranks are near each other for is no network's own
        curves = tuple(curve for curve in curves if curve.ranks <= len(spaces[0]) and curve.groups == 1)
    return links, curves
