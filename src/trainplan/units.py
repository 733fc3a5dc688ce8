"""Quantities: the only module that parses or prints them.

Inside, everything is SI: seconds, bytes, FLOP, bytes per second. Outside, memory is in GiB, links in GB/s, rates in
TFLOP/s, with three significant digits.

>>> parse_bytes("12GiB"), parse_rate("400Gb/s"), parse_seconds("1.5ms")
(12884901888, 50000000000.0, 0.0015)
>>> gib(12884901888), gb_per_s(50e9), seconds(0.0015)
('12.0 GiB', '50.0 GB/s', '1.50 ms')
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from trainplan.errors import InputError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BYTES = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
}  # fmt: skip
_BITS = {"b": 1, "kb": 10**3, "Mb": 10**6, "Gb": 10**9, "Tb": 10**12}
_BITS |= {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
_SECONDS = {
    "": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_FLOPS = {"": 1.0, "FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*$")


def _parse(text: str | float, table: Mapping[str, float], what: str, example: str, positive: bool = False) -> float:
    if isinstance(text, int | float) and not isinstance(text, bool):
        value, unit = float(text), ""
    else:
        match = _NUMBER.match(str(text))
        if not match:
            raise InputError(f"{what} {text!r}", "it is not a number with a unit", example)
        value, unit = float(match[1]), match[2]
    if unit not in table:
        raise InputError(f"{what} {text!r}", f"unknown unit {unit!r}", f"a value such as {example}")
    result = value * table[unit]
    if not math.isfinite(result) or result < 0 or (positive and result == 0):
        least = "more than zero" if positive else "zero or more"
        raise InputError(f"{what} {text!r}", f"it must be {least}, and finite", example)
    return result


def parse_bytes(text: str | float, positive: bool = False) -> int:
    """Bytes from `12GiB`, `25MB` or a plain number of bytes; `positive`: none at all is refused."""
    return round(_parse(text, _BYTES, "size", "12GiB", positive))


def parse_rate(text: str | float, positive: bool = False) -> float:
    """Bytes per second from `25GB/s`, `400Gb/s`, `10Gbit/s` or a plain number of bytes per second; `positive`: none at
    all is refused."""
    table = {f"{unit}/s" if unit else "": float(factor) for unit, factor in _BYTES.items()}
    table |= {f"{unit}/s": factor / 8 for unit, factor in _BITS.items()}
    return _parse(text, table, "rate", "25GB/s", positive)


def parse_seconds(text: str | float) -> float:
    """Seconds from `1.5ms`, `30us`, `2h` or a plain number of seconds."""
    return _parse(text, _SECONDS, "time", "1.5ms")


def parse_flops(text: str | float) -> float:
    """FLOP per second from `312TFLOP/s` or a plain number; none at all is refused."""
    return _parse(text, _FLOPS, "speed", "312TFLOP/s", positive=True)


def significant(value: float, digits: int = 3) -> str:
    """`value` with so many significant digits and no exponent.

    >>> [significant(v) for v in (0, 1234.5, 12.345, 0.012345)]
    ['0', '1,234', '12.3', '0.0123']
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def gib(size: float) -> str:
    """Bytes, printed in GiB (or MiB, KiB when small).

    >>> gib(3 * 2**20), gib(2**40)
    ('3.00 MiB', '1,024 GiB')
    """
    if abs(size) >= GIB / 10 or size == 0:
        return f"{significant(size / GIB)} GiB"
    if abs(size) >= MIB / 10:
        return f"{significant(size / MIB)} MiB"
    return f"{significant(size / KIB)} KiB"


def gb_per_s(rate: float) -> str:
    """Bytes per second, printed in GB/s."""
    return f"{significant(rate / 1e9)} GB/s"


def tflops(rate: float) -> str:
    """FLOP per second, printed in TFLOP/s."""
    return f"{significant(rate / 1e12)} TFLOP/s"


def some(number: int, what: str) -> str:
    """So many of them, in words.

    >>> some(1, "replica"), some(2, "micro-batch")
    ('1 replica', '2 micro-batches')
    """
    plural = "es" if what.endswith(("ch", "s")) else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def count(value: float) -> str:
    """A large count: 11.2 M, 8.03 B.

    >>> count(11_173_962), count(8.03e9), count(512)
    ('11.2 M', '8.03 B', '512')
    """
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{significant(value / factor)} {letter}"
    return significant(value)


def seconds(value: float) -> str:
    """A duration in the unit that suits it.

    >>> seconds(0.000012), seconds(95), seconds(7300), seconds(200000)
    ('12.0 µs', '1 min 35 s', '2 h 1 min', '2 d 7 h')
    """
    if not math.isfinite(value):
        return str(value)
    if value < 1e-3:
        return f"{significant(value * 1e6)} µs"
    if value < 1:
        return f"{significant(value * 1e3)} ms"
    if value < 60:
        return f"{significant(value)} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    if value < 86400:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    return f"{int(value // 86400)} d {int(value % 86400 // 3600)} h"


def percent(share: float) -> str:
    """A share in percent, with its sign left to the number.

    >>> percent(0.1579)
    '15.8 %'
    """
    return f"{share * 100:.1f} %"
