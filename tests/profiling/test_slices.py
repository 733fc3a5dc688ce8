"""What slices of sequences take: found again from points, measured, and estimated from operators."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.program.strategies import examples
from trainplan.cluster.catalogue import device
from trainplan.profile.by_slice import terms
from trainplan.profile.estimate import estimate
from trainplan.profile.in_chain import even
from trainplan.profile.measure import measure
from trainplan.profile.profile import Portion, Profile
from trainplan.workload.load import load

POINTS = [(0.5, 0.5), (0.5, 1.0), (0.25, 0.25), (0.25, 0.5), (0.25, 0.75), (0.25, 1.0)]
parts = st.floats(0.0, 10.0).map(lambda x: round(x, 3))


@examples(40)
@given(parts, parts, parts, st.floats(0.1, 4.0))
def test_terms_are_found_again(fixed: float, by_length: float, by_reach: float, ratio: float) -> None:
    beyond = by_length + by_reach
    whole = fixed + beyond
    if not whole:
        return
    points = [(x, r, fixed + x * (by_length + by_reach * r)) for x, r in POINTS]
    found = terms(points, own=whole, whole=ratio * whole)
    wanted = (ratio * fixed, by_length / beyond, by_reach / beyond) if beyond else (ratio * fixed, 0.0, 0.0)
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_noise_makes_no_part_negative_and_no_attention_where_there_is_none() -> None:
    points = [(x, r, 1.0 - 0.5 * x + 0.1 * x * r) for x, r in POINTS]  # longer slices are quicker: noise
    assert min(terms(points, own=1.0, whole=1.0)) >= 0
    assert terms(points, own=1.0, whole=1.0, attends=False)[2] == 0
    assert terms([(x, r, 0.0) for x, r in POINTS], own=0.0, whole=0.0) == (0.0, 1.0, 0.0)


def seconds(profile: Profile, block: int, lengths: list[int]) -> list[float]:
    """Forward and backward of a block on each slice, for two sequences."""
    before, length = np.cumsum(lengths) - lengths, sum(lengths)
    portions = [Portion(2, n, int(c), length) for n, c in zip(lengths, before, strict=True)]
    return [sum(profile.total(q, block, block + 1, p) for q in ("forward_s", "backward_s")) for p in portions]


def test_an_estimate_knows_what_attends() -> None:
    profile = estimate(load("gpt:layers=2,hidden=256,heads=4,seq=4096,vocab=1000,batch=2"), device("A100-80"))
    assert profile.whole_sequences is None
    embedding, first, second, head = range(4)
    for block in (embedding, head):
        assert profile.blocks[block].carried_bytes == 0
        assert np.ptp(seconds(profile, block, [1024] * 4)) == pytest.approx(0.0, abs=1e-12)
    for block in (first, second):
        assert profile.blocks[block].carried_bytes == 2 * 4096 * 256 * 4  # keys and values of every token
        times = seconds(profile, block, [1024] * 4)
        assert times == sorted(times)
        assert times[-1] > 1.5 * times[0]
        # All pairs of a slice's rectangle are computed and then masked: slices take longer than the whole.
        whole = sum(profile.total(q, block, block + 1, 2) for q in ("forward_s", "backward_s"))
        assert 1.02 * whole < sum(times) < 1.5 * whole


def test_a_measured_profile_has_slices_of_every_block() -> None:
    profile = measure(load("gpt:layers=1,hidden=16,heads=2,seq=32,vocab=40,batch=2"), samples=[2], repeats=1)
    assert profile.whole_sequences is None
    for index, block in enumerate(profile.blocks):
        assert len(block.slice_forward) == len(block.slice_backward) == 3
        assert min(block.slice_forward + block.slice_backward) >= 0
        assert all(time > 0 for time in seconds(profile, index, even(32, 3)))


def test_models_without_sequences_say_why() -> None:
    profile = estimate(load("resnet18:cifar10,batch=2"), device("A100-80"))
    assert profile.whole_sequences == "its samples are no sequences: it has 0 tokens a sample (tokens_per_sample)"
    assert all(block.slice_forward == () for block in profile.blocks)
