"""Work without interruption by the collector of garbage.

Whoever predicts thousands of plans keeps much of what he works out (rows of stages, prices, footprints), in objects
that are never garbage. The collector takes them for a reason to look through all of these again, and through all that
was imported, which took a tenth of 1,000 predictions. It is for what refers to itself in a circle; everything else
goes as soon as nobody needs it. Predictions make no circles (`tests/predict/test_thousand.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """While it lasts, nobody looks for garbage; then as before.

    >>> with uninterrupted():
    ...     with uninterrupted():
    ...         inside = gc.isenabled()
    ...     inside, gc.isenabled()
    (False, False)
    """
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()
