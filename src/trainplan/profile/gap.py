"""How far the sum of the blocks is from the model run in one piece. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from trainplan.profile.profile import Profile


def sum_gap(profile: Profile) -> dict[int, float]:
    """For every micro-batch size at which whole steps were timed: (sum of blocks) / (whole step) − 1.

    >>> from dataclasses import replace
    >>> from trainplan.profile.profile import Block
    >>> from trainplan.profile.provenance import Provenance, WholeStep
    >>> block = Block("b", 0.0, (1.0,), (2.0,), 0.0, 0.5, (0.0,), (0.0,), 0.0, (0.0,), (0.0,), (0.0,))
    >>> profile = Profile("w", "image", 0, 1, 1, "cpu", "measured", False, "fp32", "sgd", 0.0, (1,), (block, block), (),
    ...                   (), 0.0, Provenance("m", "now"), whole=(WholeStep(1, 2.0, 4.0, 1.0),))
    >>> sum_gap(profile)
    {1: 0.0}
    """
    gaps = {}
    for whole in profile.whole:
        place = profile.samples.index(whole.samples)
        blocks = profile.blocks
        passes = (
            [(b.forward_s[place], b.forward_issue_s[place]) for b in blocks],
            [(b.backward_s[place], b.backward_issue_s[place]) for b in reversed(blocks)],
            [(b.update_s, b.update_issue_s) for b in blocks],
        )
        total = whole.forward_s + whole.backward_s + whole.update_s
        gaps[whole.samples] = sum(two_lanes(work) for work in passes) / total - 1
    return gaps


def two_lanes(work: Iterable[tuple[float, float]]) -> float:
    """Seconds of pieces of work (run, issue) one after the other, from an idle device to an idle device.

    The host issues a piece after the other; the device starts a piece when it is free and the host has begun to issue
    it, and is not done with it before the host is.

    >>> two_lanes([(1.0, 0.0), (2.0, 0.0)]), two_lanes([(1.0, 3.0), (1.0, 3.0)]), two_lanes([(5.0, 1.0), (1.0, 3.0)])
    (3.0, 6.0, 6.0)
    """
    host = device = 0.0
    for run, issue in work:
        start = max(device, host)
        host += issue
        device = max(start + run, host)
    return device
