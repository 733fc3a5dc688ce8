"""The thesis's own equations for Horovod and torchgpipe, as published (Jansen 2020, equations 5.1, 6.1 and 6.2).

Of Horovod it assumes that all but the last of the fused sums is hidden behind the backward pass, and that the ring goes
at the pace of its slowest link:

    5.1   T = T_seq / W + 2 · (W − 1) · max_i (L_i + min(G, th) / (W · BW_i))

with the seconds T_seq that one device needs for the whole batch, G bytes of gradients, the fusion threshold th, and the
latency L_i and rate BW_i of the link behind each worker, the last one's back to the first among them.

Of torchgpipe it found that it computes and exchanges in turn, all workers in lockstep, and that nothing overlaps; so a
batch takes the sum of both:

    6.1   T_comp = T_seq · (W + m − 1) / (W · m)
    6.2   T_comm = 2 · [ Σ_{i=1}^{W−2} max_{j≤i} c_j + (m − (W − 2)) · max_j c_j + Σ_{i=2}^{W−1} max_{j≥i} c_j ]

with W workers, m micro-batches, the seconds T_seq that one device needs for the batch in micro-batches, and the seconds
c_j that the activations of a micro-batch need over link j. The sums are the exchanges in which only the first links are
in use yet, or only the last ones still: there are W − 2 of each, and m − (W − 2) with all links between them, so 6.2
wants m ≥ W − 2.

Under these assumptions they are exact: `schedule=lockstep` (the system `torchgpipe-as-found`), played by the clock with
equal stages and free barriers, takes 6.1 + 6.2 to the last digit. What they leave out, and the program has: stages that
are not alike, recomputation, what a tick costs however small it is, skip connections over a cut.

>>> compute_seconds(24.0, workers=4, micro_batches=8), exchange_seconds((1, 3, 2), micro_batches=8)
(8.25, 54.0)
"""

from __future__ import annotations

from collections.abc import Sequence

from trainplan.errors import InputError


def horovod_seconds(
    whole: float, gradients: float, links: Sequence[tuple[float, float]], threshold: float = 64e6
) -> float:  # fmt: skip
    """Equation 5.1: seconds of a step. `links`: (latency, rate) of the link behind each worker of the ring.

    >>> slow, fast = (20e-6, 5e9), (10e-6, 10e9)
    >>> [round(horovod_seconds(1.2, *case), 5) for case in ((102e6, [fast, fast, slow, fast]), (44.6e6, [fast] * 4))]
    [0.31932, 0.30675]
    """
    workers = len(links)
    if workers < 1:
        raise InputError("equation 5.1 without links", "a ring has as many links as workers", "one for each worker")
    if workers == 1:
        return whole
    piece = min(gradients, threshold) / workers
    return whole / workers + 2 * (workers - 1) * max(latency + piece / rate for latency, rate in links)


def compute_seconds(whole: float, workers: int, micro_batches: int) -> float:
    """Equation 6.1: seconds of computing a batch that takes one device `whole` seconds.

    >>> [compute_seconds(1.0, 4, m) for m in (12, 20, 30)]
    [0.3125, 0.2875, 0.275]
    """
    if workers < 1 or micro_batches < 1:
        raise InputError(f"{workers} workers, {micro_batches} micro-batches", "both count from 1", "1 of each")
    return whole * (workers + micro_batches - 1) / (workers * micro_batches)


def exchange_seconds(links: Sequence[float], micro_batches: int) -> float:
    """Equation 6.2: seconds of exchanging the activations of a batch, and their gradients. `links`: seconds of a
    micro-batch over the link behind each worker but the last.

    >>> exchange_seconds((0.5, 0.5, 0.5), micro_batches=8)
    10.0
    """
    workers = len(links) + 1
    if workers == 1:
        return 0.0
    fewest = max(1, workers - 2)
    if micro_batches < fewest:
        why = f"with {workers} workers it wants {fewest} micro-batches or more: it counts m − (W − 2) full exchanges"
        raise InputError(f"equation 6.2 with {micro_batches} micro-batch(es)", why, f"{fewest} micro-batches")
    filling = sum(max(links[:i]) for i in range(1, workers - 1))
    draining = sum(max(links[i - 1 :]) for i in range(2, workers))
    return float(2 * (filling + (micro_batches - (workers - 2)) * max(links) + draining))


def link_seconds(latency_s: float, rate: float, bytes_per_sample: float, samples: int) -> float:
    """c_j: seconds of the activations of a micro-batch over a link.

    >>> link_seconds(0.01, 100e6, 1e6, 10)
    0.11
    """
    return latency_s + samples * bytes_per_sample / rate
