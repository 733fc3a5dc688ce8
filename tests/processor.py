"""How fast this machine's processor is today: goals in seconds are those of a normal one.

Virtual machines with the same name differ by a factor of two, and so does one of them from day to day.
"""

import resource
import subprocess
import sys
from functools import cache

NORMAL_S = 0.6  # to import numba and scipy


def taken(code: str) -> float:
    """Seconds of the processor that a fresh Python takes for some code: others may be at work."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


@cache
def slower() -> float:
    """How many times as long as a normal one it takes; at least once."""
    return max(1.0, taken("import numba, scipy.optimize") / NORMAL_S)
