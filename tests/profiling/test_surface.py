"""Between measured points: what a surface says follows from the points, not from their order or from a processor."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainplan.profile.device.surface import NEIGHBOURS, Surface

# A grid, as many measured points form one: the middle of a cell has many points that are equally far.
GRID = np.array(list(product(range(5), repeat=3)), dtype=float)
MIDDLES = GRID[:40] + 0.5


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=len(GRID))


@given(st.integers(0, 2**32 - 1))
def test_the_order_of_points_does_not_matter(seed):
    """Nor, therefore, that numpy sorts equals otherwise where a processor has wider instructions: the estimates of an
    H200 differed by 0.3 % from machine to machine."""
    assert len(GRID) > NEIGHBOURS
    order = np.random.default_rng(seed).permutation(len(GRID))
    found = Surface(GRID, values(seed)).at(MIDDLES)
    assert Surface(GRID[order], values(seed)[order]).at(MIDDLES) == pytest.approx(found, abs=1e-9)


def test_what_was_measured_is_said_there_and_nothing_beyond_it():
    surface = Surface(GRID, values(1))
    assert surface.at(GRID) == pytest.approx(values(1))
    assert surface.at(np.full((1, 3), 99.0)) == pytest.approx(surface.at(np.full((1, 3), 4.0)))
