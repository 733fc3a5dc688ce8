"""Lowering: a plan becomes a program. `lower.py` says how."""

from trainplan.program.lower.lower import lower

__all__ = ["lower"]
