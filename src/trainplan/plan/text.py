"""The one-line form of requests and plans, which a person can type.

>>> request = parse("pp=4 schedule=1f1b micro=16 dp=2")
>>> request.pp, request.schedule, request.stages
(4, '1f1b', None)
>>> parse("ddp dp=4 bucket=4MiB").bucket
4194304
>>> text(parse("pp=4 schedule=1f1b micro=16 dp=2 memory=12GiB"))
'dp=2 pp=4 schedule=1f1b micro=16 memory=12GiB'

A key of `plan.systems` may stand first and means its choices; what follows overrides them.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from trainplan import files
from trainplan.errors import InputError, PlanError, nearest
from trainplan.plan.plan import WORDS, Plan, Request, default_placement
from trainplan.units import GIB, KIB, MIB, parse_bytes

_NUMBERS = ("dp", "pp", "micro")
_SIZES = ("bucket", "memory")
_ORDER = (
    "dp", "pp", "schedule", "micro", "stages", "recompute", "exchange", "bucket", "updates", "precision", "overlap",
    "memory",
)  # fmt: skip
# What a plan has where the short form says nothing.
_USUAL: dict[str, object] = {
    "dp": 1, "pp": 1, "micro": 1, "schedule": "naive", "stages": (), "recompute": "none", "exchange": "all-reduce",
    "updates": "sync", "precision": "fp32", "overlap": "on", "memory": None,
}  # fmt: skip


def parse(line: str) -> Request:
    """The request that a line asks for."""
    from trainplan.plan.systems import SYSTEMS  # systems are rows in this same form

    request = Request()
    seen: set[str] = set()
    for place, word in enumerate(line.split()):
        field, equals, value = word.partition("=")
        if not equals:
            if place or field not in SYSTEMS:
                known = [key for key, row in SYSTEMS.items() if row.choices is not None]
                why = "a word without '=' is the name of a system, and stands first" if place else "no such system"
                raise PlanError(f"plan {line!r}, word {word!r}", why, nearest(field, known))
            row = SYSTEMS[field]
            if row.choices is None:
                raise PlanError(
                    f"plan {line!r}", f"the system {field} ({row.name}) is not built yet", "trainplan systems"
                )
            request = replace(parse(row.choices), key=field)
            continue
        if field not in _ORDER:
            raise PlanError(f"plan {line!r}", f"there is no choice named {field!r}", nearest(field, _ORDER))
        if field in seen:
            raise PlanError(f"plan {line!r}", f"{field} is given twice")
        seen.add(field)
        request = replace(request, **{field: _value(field, value, line)})
    return request


def _value(field: str, value: str, line: str) -> Any:
    asked = f"plan {line!r}, {field}={value}"
    if field in WORDS:
        if value not in WORDS[field]:
            raise PlanError(
                asked, f"{field} is one of {', '.join(WORDS[field])}", f"{field}={nearest(value, WORDS[field], 1)}"
            )
        return value
    if field in _SIZES:
        try:
            return parse_bytes(value)
        except InputError as error:
            raise PlanError(asked, error.why, f"{field}=25MiB") from None
    parts = value.split(",") if field == "stages" else [value]
    if not all(part.isdecimal() for part in parts):
        raise PlanError(asked, "a whole number was expected", f"{field}=2")
    numbers = tuple(int(part) for part in parts)
    if field == "stages":
        return numbers
    if numbers[0] < 1:
        raise PlanError(asked, f"{field} counts from 1", f"{field}=1")
    return numbers[0]


def _size(value: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if value % unit == 0 and value:
            return f"{value // unit}{name}"
    return f"{value}B"


def text(choices: Request | Plan) -> str:
    """The shortest line that says the same: what is as usual is left out of a plan, what is open out of a request.

    >>> from trainplan.plan.plan import plan
    >>> text(plan(dp=4)), text(plan(pp=2, schedule="gpipe", micro=8, stages=(3,), blocks=6))
    ('dp=4 bucket=25MiB', 'pp=2 schedule=gpipe micro=8 stages=3')
    >>> text(plan(pp=2, stages=(3,), blocks=6))
    'pp=2 schedule=naive micro=1 stages=3'
    """
    words = []
    for field in _ORDER:
        value = getattr(choices, field, None)
        if value is None:
            continue
        pipelined = isinstance(choices, Plan) and choices.pp > 1 and field in ("schedule", "micro")
        if isinstance(choices, Plan) and value == _USUAL.get(field) and not pipelined:
            continue  # a pipeline always says its order of work and its micro-batches: they are searched for otherwise
        if isinstance(choices, Plan) and field == "bucket" and choices.dp == 1:
            continue  # without replicas there is nothing to put into buckets
        if field in _SIZES:
            value = _size(int(value))
        elif field == "stages":
            value = ",".join(map(str, value))
        words.append(f"{field}={value}")
    if isinstance(choices, Plan) and not words:
        return "single"
    return " ".join(words)


def title(choices: Request | Plan) -> str:
    """What a table shows: a plan without its cuts and buckets."""
    drop = ("stages=", "bucket=")
    words = [word for word in text(choices).split() if not word.startswith(drop)]
    return " ".join(words) or "single"


def to_json(plan: Plan) -> dict[str, object]:
    """Every choice of a plan, for files."""
    data = files.to_json(plan)
    data["text"] = text(plan)
    if plan.placement == default_placement(plan.dp, plan.pp):
        del data["placement"]
    return data


def from_json(data: dict[str, object], where: str = "plan") -> Plan:
    """The plan that `to_json` wrote."""
    data = dict(data)
    data.pop("text", None)
    if "placement" not in data and isinstance(data.get("dp"), int) and isinstance(data.get("pp"), int):
        data["placement"] = files.to_json(default_placement(data["dp"], data["pp"]))  # type: ignore[arg-type]
    return files.from_json(Plan, data, where)


assert set(_ORDER) == {f.name for f in fields(Request)} - {"key"}
