"""Every exchange on real processes, against what its rounds cost from probed constants: a table of docs/sums.md.

    python benchmarks/exchanges.py --ranks 2 3 4 8 16 --out benchmarks/data/exchanges.json

For each number of processes this machine is probed with as many, and then each exchange sums (or gathers, or scatters)
tensors of several sizes, all of them in turn, round after round. What it takes, from when the last process has come
until the last has left, is held against two predictions: that of the clock, which has the probed *curves* of messages
and of gloo's all-reduce, and the *closed form* of textbooks with three constants (seconds of a message, bytes a second
of a link, bytes a second that are added) and the host's seconds for a message.

Needs a core for each process. Numbers of processes that are in the file already are not measured again, and
`--for SECONDS` stops it between two of them.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from trainplan import files
from trainplan.bench import limit
from trainplan.bench.command import command
from trainplan.bench.pool import pool
from trainplan.cluster.cluster import Cluster
from trainplan.engine.exchanges import Sums
from trainplan.engine.probe import probe
from trainplan.engine.transport import Gloo
from trainplan.predict import collectives
from trainplan.predict.exchanges import in_rounds
from trainplan.profile.machine import describe
from trainplan.program.exchanges import BY_ROUNDS, rounds_of
from trainplan.units import KIB, MIB

BY_BACKEND = ("all-reduce", "all-gather", "reduce-scatter")  # of shares, as ZeRO needs them, the latter two
SIZES = (4 * KIB, 256 * KIB, 2 * MIB, 16 * MIB)
Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One exchange of one size."""

    exchange: str
    ranks: int
    bytes: int
    predicted_s: float  # by the clock
    closed_s: float  # from constants alone
    measured_s: float
    noise_floor: float  # how far two halves of the rounds are apart


def names(ranks: int) -> list[str]:
    """What so many ranks can do; two make one node of `hierarchical`, and one node is none."""
    return [name for name in (*BY_BACKEND, *BY_ROUNDS) if name != "hierarchical" or (ranks % 2 == 0 and ranks > 2)]


def node_of(name: str, ranks: int) -> int:
    """Ranks of a node, where an exchange asks for it: two nodes."""
    return ranks // 2 if name == "hierarchical" else 0


def whole(size: int, ranks: int) -> int:
    """Elements of a tensor of about that size that so many ranks can share out equally."""
    return max(1, size // 4 // ranks) * ranks


def predicted(cluster: Cluster, name: str, ranks: int, size: int) -> float:
    """Seconds by the clock."""
    members = tuple(range(ranks))
    if name in BY_ROUNDS:
        return in_rounds(cluster, name, members, size, node_of(name, ranks)).seconds
    rule = {
        "all-reduce": collectives.all_reduce, "all-gather": collectives.all_gather,
        "reduce-scatter": collectives.reduce_scatter,
    }[name]  # fmt: skip
    return rule(cluster, members, size).seconds


# -- in the processes -------------------------------------------------------------------------------------------------


def call_of(name: str, tensor: Tensor, sums: Sums, transport: Gloo, world: int) -> Call:
    """One exchange, from start to end."""
    group = dist.group.WORLD
    if name == "all-reduce":
        return lambda: transport.all_reduce(tensor, group).wait()
    own = tensor[: tensor.numel() // world].clone()
    if name == "all-gather":
        return lambda: transport.all_gather(tensor, own, group).wait()
    if name == "reduce-scatter":
        return lambda: _scatter(transport, tensor, own, world)
    rounds = rounds_of(name, tuple(range(world)), tensor.numel(), node_of(name, world))
    return lambda: sums.start(tensor, rounds, -1).wait()


def _scatter(transport: Gloo, tensor: Tensor, own: Tensor, world: int) -> None:
    works, total = transport.reduce_scatter(tensor, world, dist.group.WORLD)
    works.wait()
    total(own, False)


def moments(rank: int, world: int, sizes: tuple[int, ...], rounds: int) -> list[list[tuple[float, float]]]:
    """Of every exchange and size, round after round: when this process came, and when it left. (All processes of a
    machine share a clock.)"""
    transport = Gloo(torch.device("cpu"))
    sums = Sums(transport, dist.group.WORLD, range(world), rank)
    calls = [
        call_of(name, torch.zeros(whole(size, world)), sums, transport, world)
        for name in names(world)
        for size in sizes
    ]
    found: list[list[tuple[float, float]]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, own in zip(calls, found, strict=True):
            dist.barrier()
            came = time.perf_counter()
            call()
            if number:  # the first round makes connections
                own.append((came, time.perf_counter()))
    dist.barrier()
    sums.close()
    return found


# -- from here --------------------------------------------------------------------------------------------------------


def measured(ranks: int, sizes: tuple[int, ...], rounds: int, cluster: Cluster) -> list[Row]:
    """All exchanges on so many ranks."""
    constants = replace(cluster, collectives=())
    own = pool(ranks).run(moments, sizes, rounds)
    rows = []
    for number, (name, size) in enumerate((name, size) for name in names(ranks) for size in sizes):
        times = [
            max(left for _, left in at) - max(came for came, _ in at)
            for at in zip(*(one[number] for one in own), strict=True)
        ]
        exact = 4 * whole(size, ranks)
        halves = median(times[0::2]), median(times[1::2] or times)
        noise = abs(halves[0] / halves[1] - 1)
        guesses = [predicted(one, name, ranks, exact) for one in (cluster, constants)]
        rows.append(Row(name, ranks, exact, *guesses, median(times), noise))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--quick", action="store_true", help="a quick probe")
    parser.add_argument("--out", type=Path, required=True)
    limit.add_option(parser)
    options = parser.parse_args()
    until = limit.Limit(options.limit)
    rows = (
        [files.from_json(Row, r) for r in files.read(options.out, "exchanges")["rows"]] if options.out.exists() else []
    )
    print(f"{'exchange':18} {'ranks':>5} {'KiB':>8} {'clock ms':>10} {'closed ms':>10} {'measured':>10} {'noise':>7}")
    for ranks in options.ranks:
        if any(row.ranks == ranks for row in rows) or until.over():
            continue
        cluster = probe(ranks, quick=options.quick, refresh=True)
        found = measured(ranks, tuple(options.sizes), options.rounds, cluster)
        rows += found
        for row in found:
            ms = [f"{1e3 * s:10.3f}" for s in (row.predicted_s, row.closed_s, row.measured_s)]
            size = row.bytes / KIB
            print(f"{row.exchange:18} {ranks:5d} {size:8.0f} {' '.join(ms)} {row.noise_floor:7.1%}", flush=True)
        about = {
            "machine": describe(torch.device("cpu")), "made": time.strftime("%Y-%m-%d", time.gmtime()),
            "torch": torch.__version__, "command": command(),
        }  # fmt: skip
        files.write(options.out, "exchanges", {**about, "rows": files.to_json(rows)})
    until.leave()


if __name__ == "__main__":
    main()
