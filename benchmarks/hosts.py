"""What does a host take to issue its work on slices of a GPU, beside what else goes on in its process?

    python benchmarks/hosts.py --slices 4 --out benchmarks/data/hosts-gpu.json          (starts MPS, which needs root)

Every process issues the same small operators to its slice, forward and backward, whose device has next to nothing to
do; another thread of the process meanwhile does nothing, waits for the device, waits for a message, copies to the host,
or exchanges messages with its neighbours: what the threads of a pipeline's rank do. All of them take turns, twice, and
medians over ranks are kept. Were it Python's lock or the cores that slow hosts down beside messages, it would show.
"""

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from trainplan import files
from trainplan.bench.command import command
from trainplan.bench.pool import pool
from trainplan.bench.slices import sliced
from trainplan.cluster.probe.compute import Issuing
from trainplan.profile.machine import describe
from trainplan.units import KIB, MIB

SECONDS, CYCLES = 1.2, 4_000_000  # of a measurement; that a device is kept busy for at a time
BESIDE = ("nothing", "waits for the device", "waits for a message", "copies", "small messages", "large messages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=4, help="of the GPU, a process each")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with sliced(options.slices):
        for turn in range(2):
            for beside in BESIDE:
                each = pool(options.slices).run(issued, beside)
                rows.append({"beside": beside, "turn": turn, "issue_s": median(each), "ranks": each})
                print(f"{beside:22} {1e3 * median(each):7.2f} ms", flush=True)
    if options.out:
        machine = f"{describe(torch.device('cuda'))}, {options.slices} slices"
        about = {"machine": machine, "made": time.strftime("%Y-%m-%d", time.gmtime()), "torch": torch.__version__}
        files.write(options.out, "hosts", {**about, "command": command(), "rows": rows})


def issued(rank: int, world: int, beside: str) -> float:
    """On every rank: the median seconds of issuing, beside a thread of that kind."""
    device = torch.device("cuda", 0)
    work, over = Issuing(device), threading.Event()
    for _ in range(5):
        work()
    torch.cuda.synchronize(device)
    call = threads(device, rank, world, over)[beside]
    dist.barrier()
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    taken, until = [], time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
        torch.cuda.current_stream(device).synchronize()
    over.set()
    if beside == "waits for a message":
        sent = dist.isend(torch.zeros(1), (rank - 1) % world, tag=5)
        assert sent is not None
        sent.wait()
    thread.join()
    dist.barrier()
    return median(taken)


def threads(device: torch.device, rank: int, world: int, over: threading.Event) -> dict[str, Callable[[], None]]:
    """What a thread does until it is over."""
    side = torch.cuda.Stream(device)

    def waits_for_device() -> None:
        with torch.cuda.stream(side):
            while not over.is_set():
                torch.cuda._sleep(CYCLES)
                side.synchronize()

    def waits_for_message() -> None:
        coming = dist.irecv(torch.zeros(1), (rank + 1) % world, tag=5)
        assert coming is not None
        coming.wait()

    def copies() -> None:
        there, host = torch.zeros(2 * MIB, device=device), torch.zeros(2 * MIB, pin_memory=True)
        with torch.cuda.stream(side):
            while not over.is_set():
                host.copy_(there, non_blocking=True)
                side.synchronize()
                time.sleep(0.001)

    def messages(size: int) -> Callable[[], None]:
        def exchange() -> None:
            out, into, all_over = torch.zeros(size // 4), torch.zeros(size // 4), False
            while not all_over:
                works = [dist.irecv(into, (rank + 1) % world, tag=6), dist.isend(out, (rank - 1) % world, tag=6)]
                for one in works:
                    assert one is not None
                    one.wait()
                time.sleep(0.0005)
                told = torch.tensor([float(over.is_set())])
                dist.all_reduce(told)
                all_over = told.item() == world

        return exchange

    return dict(
        zip(
            BESIDE,
            (lambda: None, waits_for_device, waits_for_message, copies, messages(4 * KIB), messages(8 * MIB)),
            strict=True,
        )
    )


if __name__ == "__main__":
    main()
