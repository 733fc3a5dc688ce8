"""Numbers that differ among many, against numpy's own."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.program.strategies import examples
from trainplan.program.lower.distinct import distinct


@examples(200)
@given(st.lists(st.integers(-3, 40)), st.sampled_from([1, 7, 10**12]))
def test_numbers_that_differ(numbers: list[int], apart: int) -> None:
    """Close together, which are looked up in a table, and far apart, which are sorted."""
    column = np.array(numbers, dtype=np.int64) * apart
    first, which = distinct(column)
    _, index, inverse = np.unique(column, return_index=True, return_inverse=True)
    assert first.tolist() == index.tolist()
    assert which.tolist() == inverse.tolist()
