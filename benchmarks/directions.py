"""Whether both directions of a link are used at once: 32 MiB that two ranks have half of each, at 1 Gbit/s.

    python benchmarks/directions.py --out benchmarks/data/directions.json       (needs root)

Two processes in two network namespaces gather a tensor: by gloo's all-gather, by its all-to-all (each gives its half to
the other), and by messages with all receives posted first (`cluster/probe/shares.py`). In half of the rounds both come
at once, in the other half one of them, in turns, is 10 ms late. A row has the seconds from the moment at which the last
one came until both have everything: of every round, with the median. `least_s` is what half of the bytes take at the
link's rate, without headers.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from trainplan.bench.command import command
from trainplan.bench.pool import placed, pool
from trainplan.bench.slow_link import slow_link
from trainplan.cluster.probe import shares
from trainplan.profile.machine import describe
from trainplan.units import parse_rate

BYTES, LATE_S = 32 * 2**20, 0.01
WHEN = "at once", "one 10 ms late"


def _all_gather(whole: Tensor, own: Tensor) -> None:
    dist.all_gather(list(whole.view(dist.get_world_size(), -1)), own)


def _all_to_all(whole: Tensor, own: Tensor) -> None:
    dist.all_to_all_single(whole, own.repeat(dist.get_world_size()))


def _messages(whole: Tensor, own: Tensor) -> None:
    for work in shares.gather(whole, own, None):
        work.wait()


WAYS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "gloo's all-gather": _all_gather,
    "gloo's all-to-all": _all_to_all,
    "messages, receives first": _messages,
}


def gathered(rank: int, world: int, size: int, rounds: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """When this rank came and when it had everything, of every round: by the way, together or one of them late."""
    own = torch.full((size // 4 // world,), float(rank))
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {when: [] for when in WHEN} for name in WAYS}
    for turn in range(rounds):
        for name, way in WAYS.items():
            for when, moments in found[name].items():
                whole = torch.empty(size // 4)
                dist.barrier()
                if when == WHEN[1] and rank == turn % world:
                    time.sleep(LATE_S)
                since = time.monotonic()  # one clock: both are on this machine
                way(whole, own)
                moments.append((since, time.monotonic()))
                assert (whole.view(world, -1).mean(1) == torch.arange(float(world))).all()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1Gbit/s", help="of the link")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rate = parse_rate(options.rate)
    with slow_link(rate) as link, placed(link.place):
        ranks = pool(2).run(gathered, BYTES, options.rounds, timeout=1200)
    rows = []
    for name in WAYS:
        for when in WHEN:
            both = zip(*(rank[name][when] for rank in ranks), strict=True)
            seconds = [max(end for _, end in one) - max(since for since, _ in one) for one in both]
            rows.append({"way": name, "when": when, "median_s": median(seconds), "seconds": seconds})
            least, most = min(seconds) * 1e3, max(seconds) * 1e3
            print(f"{name:26} {when:15} {median(seconds) * 1e3:8.1f} ms ({least:.1f} to {most:.1f})")
    if options.out:
        about = {
            "machine": describe(torch.device("cpu")), "torch": torch.__version__,
            "made": time.strftime("%Y-%m-%d", time.gmtime()), "command": command(),
            "bytes": BYTES, "rate": rate, "late_s": LATE_S, "least_s": BYTES / 2 / rate,
        }  # fmt: skip
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
