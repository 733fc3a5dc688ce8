"""What every program must satisfy. `check.py` is the specification."""

from trainplan.program.check.check import check, faults
from trainplan.program.check.view import Fault

__all__ = ["Fault", "check", "faults"]
