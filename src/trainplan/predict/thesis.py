"""The thesis's own equations for torchgpipe, as published (Jansen 2020, equations 6.1 and 6.2).

It found that torchgpipe computes and exchanges in turn, all workers in lockstep, and that nothing overlaps; so a batch
takes the sum of both:

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
