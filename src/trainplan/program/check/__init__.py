"""What every program must satisfy. `specification.py` lists the rules."""

from trainplan.program.check.specification import check, faults
from trainplan.program.check.view import Fault

__all__ = ["Fault", "check", "faults"]
