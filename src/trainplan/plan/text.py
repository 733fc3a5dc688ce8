"""The one-line form of requests and plans, which a person can type.

>>> request = parse("pp=4 schedule=1f1b micro=16 dp=2")
>>> request.pp, request.schedule, request.stages
(4, '1f1b', None)
>>> parse("ddp dp=4 bucket=4MiB").bucket
4194304
>>> text(parse("pp=4 schedule=1f1b micro=16 dp=2 memory=12GiB"))
'dp=2 pp=4 schedule=1f1b micro=16 memory=12GiB'
>>> text(parse("ddp micro=1 dp=4"))
'ddp dp=4'

A key of `plan.systems` may stand first and means its choices; what follows overrides them.

An order of work may also be given (`order.py`): `schedule=path/file.csv` reads the file, and what is kept is what it
says. In one line the ranks of such an order stand between bars, so that a line is a whole plan without the file:

>>> request = parse("schedule=0F0,0F1,0B0,0B1|1F0,1B0,1F1,1B1")
>>> request.pp, request.micro, text(request)
(2, 2, 'pp=2 schedule=0F0,0F1,0B0,0B1|1F0,1B0,1F1,1B1 micro=2')
>>> brief(request)
'pp=2 schedule=given micro=2'
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from trainplan import files
from trainplan.amounts import POSSIBLE, untrue
from trainplan.errors import InputError, PlanError, closest, nearest
from trainplan.plan.keys import SPLIT
from trainplan.plan.offload import away_text, parse_away
from trainplan.plan.order import GIVEN, from_file, known, read
from trainplan.plan.placement import placement as table
from trainplan.plan.placement import renamed
from trainplan.plan.plan import EXCHANGE_FIELDS, PARTITIONS, WORDS, Plan, Request, usual_lines, usual_placement
from trainplan.units import GIB, KIB, MIB, parse_bytes, parse_seconds, some

_MOST = 2**20  # ranks, stages or pieces: more than the largest machine has
_SIZES = ("bucket", "memory", "threshold", "slice", "credit")
_ORDER = (
    "dp", "ratio", "tp", "sequence", "pp", "schedule", "chunks", "pairs", "micro", "slices", "stages", "partition",
    "placement", "recompute", "exchange", "node", "threshold", "cycle", "slice", "credit", "fused", "zero", "shard",
    "bucket", "updates", "precision", "overlap", "preload", "offload", "away", "memory", "servers", "bound", "split",
)  # fmt: skip
# What a plan has where the short form says nothing.
_USUAL: dict[str, object] = {
    "dp": 1, "pp": 1, "chunks": 1, "pairs": 1, "micro": 1, "schedule": "naive", "slices": (), "stages": (),
    "recompute": "none", "exchange": "all-reduce", "updates": "sync", "precision": "fp32", "overlap": "on",
    "memory": None, "zero": 0, "shard": 0, "node": 0, "servers": 0, "bound": (), "split": SPLIT, "threshold": 0,
    "cycle": 0.0, "slice": 0, "credit": 0, "fused": (), "tp": 1, "sequence": "off", "preload": "given",
    "offload": "none", "away": (), "ratio": (),
}  # fmt: skip


def parse(line: str) -> Request:
    """The request that a line asks for."""
    from trainplan.plan.systems import SYSTEMS  # systems are rows in this same form

    request = Request()
    seen: set[str] = set()
    for place, word in enumerate(line.split()):
        field, equals, value = word.partition("=")
        if not equals:
            for choice, what in (("schedule", "an order of work"), ("exchange", "a way to exchange gradients")):
                if field not in SYSTEMS and field in WORDS[choice]:
                    raise PlanError(f"plan {line!r}, word {word!r}", f"{field} is {what}", f"{choice}={field}")
            if place or field not in SYSTEMS:
                known = [key for key, row in SYSTEMS.items() if row.choices is not None]
                why = "a word without '=' is the name of a system, and stands first" if place else "no such system"
                raise PlanError(f"plan {line!r}, word {word!r}", why, nearest(field, known))
            row = SYSTEMS[field]
            if row.choices is None:
                instead = f"partition={field}, which cuts as it does" if field in PARTITIONS else "trainplan systems"
                raise PlanError(f"plan {line!r}", f"the system {field} ({row.name}) is not built yet", instead)
            request = replace(parse(row.choices), key=field)
            continue
        if field not in _ORDER:
            raise PlanError(f"plan {line!r}", f"there is no choice named {field!r}", nearest(field, _ORDER))
        if field in seen:
            raise PlanError(f"plan {line!r}", f"{field} is given twice", f"only {word}")
        seen.add(field)
        if field == "dp" and "," in value:
            request = replace(request, dp=1, spread=_spread(value, f"plan {line!r}, {word}"))
            continue
        if field == "schedule" and (value.endswith(".csv") or "," in value):
            given = from_file(value) if value.endswith(".csv") else read(value.replace("|", "\n"), "order of work")
            request = replace(request, schedule=GIVEN, order=given.lines)
            continue
        request = replace(request, **{field: _value(field, value, line)})
    if request.order:  # what the name of a system says is not what was asked
        pp, micro = (getattr(request, field) if field in seen else None for field in ("pp", "micro"))
        request = replace(request, pp=pp, micro=micro)
    return settled(request, f"plan {line!r}")


def settled(request: Request, asked: str) -> Request:
    """A request with what an order of work that is given says: ranks and micro-batches."""
    if (copies := _copies(request)) > _MOST:  # before tables of that many places are made
        raise PlanError(asked, f"it asks for {copies:,} copies of stages, and {_MOST:,} are the most", "dp=2")
    if not request.order:
        return request
    given = known(tuple(request.order))
    says = {
        "pp": (given.ranks, f"{some(given.ranks, 'line')}, one for each rank"),
        "micro": (given.micro, some(given.micro, "micro-batch")),
    }
    for field, (said, what) in says.items():
        if getattr(request, field) not in (None, said):
            why = f"{field}={getattr(request, field)}, and the order of work has {what}"
            raise PlanError(asked, why, f"{field}={said}, or leaving it out")
    return replace(request, schedule=GIVEN, order=given.lines, pp=given.ranks, micro=given.micro)


def _copies(choices: Request | Plan) -> int:
    """Of stages, on all ranks together."""
    counts = (choices.dp, choices.pp, choices.chunks, choices.pairs, choices.tp, max(choices.spread or (1,)))
    return math.prod(count or 1 for count in counts)


def _value(field: str, value: str, line: str) -> Any:
    from trainplan.plan.systems import SYSTEMS

    asked = f"plan {line!r}, {field}={value}"
    words = PARTITIONS if field == "partition" else WORDS.get(field, ())
    if words:
        if value not in words:
            if field == "schedule" and value in SYSTEMS and SYSTEMS[value].choices is not None:
                raise PlanError(asked, f"{value} is a system, and stands first", f"{value} pp=4")
            other = ", or a file.csv" if field == "schedule" else ""
            raise PlanError(asked, f"{field} is one of {', '.join(words)}{other}", f"{field}={closest(value, words)}")
        return value
    if field in _SIZES:
        try:
            return parse_bytes(value)
        except InputError as error:
            # Only these have a size that no model refuses: what is larger than all gradients is, but for one MiB.
            such = f", or one such as {field}=1MiB" if field in ("bucket", "threshold") else ""
            raise PlanError(asked, error.why, f"leaving {field} out{such}") from None
    if field == "cycle":
        try:
            return parse_seconds(value)
        except InputError as error:
            raise PlanError(asked, error.why, "cycle=5ms") from None
    if field == "away":
        return parse_away(value, asked)
    if field == "fused":
        why = "the number of gradients of every fused tensor was expected"
        return _numbers(value, asked, why, "fused=3,1,2")
    if field == "ratio":
        why = "the samples of every replica, in proportion, were expected"
        return _numbers(value, asked, why, "ratio=3,3,2,2")
    if field == "stages":  # one stage has no cuts
        return _numbers(value, asked, "the first block of every stage but the first was expected", "stages=2,5")
    if field == "bound":
        return _steps(value, asked)
    if field == "placement":
        ranks = _numbers(value, asked, "the rank of every stage was expected", "placement=0,1,1,0")
        own = sorted(set(ranks))
        why = f"the ranks of a replica count from 0 without gaps, and these are {own}"
        if len(own) < 2:
            why = f"a pipeline needs two ranks or more, and the table has {some(len(own), 'rank')}"
        if own != list(range(len(own))) or len(own) < 2:
            raise PlanError(asked, why, "placement=0,1,1,0")
        return ranks
    if field == "slices" and "," in value:
        why = "the number of slices, or the tokens of each, was expected"
        return _numbers(value, asked, why, "slices=4 or slices=512,256,256")
    if not value.removeprefix("-").isdecimal():
        raise PlanError(asked, "a whole number was expected", f"{field}=2")
    number = int(value)
    if field == "zero":
        if not 0 <= number <= 3:
            why = f"zero is 0 (nothing is shared out), 1, 2 or 3, not {number}"
            raise PlanError(asked, why, f"zero={0 if number < 0 else 3}")
        return number
    if number < 1 and field != "node":  # which nodes there could be: `exchanges.py`
        raise PlanError(asked, f"{field} counts from 1, and is {number}", f"{field}=1")
    return number


def _steps(value: str, asked: str) -> tuple[int, ...]:
    """Bounds, which may be out of range here: how many there are and how large they may be is for `served.py`."""
    words = value.split(",")
    if all(word.removeprefix("-").isdecimal() for word in words):
        return tuple(map(int, words))
    why = "the steps that a worker may be ahead were expected, in whole numbers"
    try:
        asked_for = [max(0.0, float(word)) for word in words]
        fewer, more = (",".join(str(whole(steps)) for steps in asked_for) for whole in (math.floor, math.ceil))
    except (ValueError, OverflowError):  # no number, or none that is finite
        raise PlanError(asked, why, "bound=3, or bound=3,15 for dssp") from None
    raise PlanError(asked, why, f"bound={fewer}, or bound={more}" if fewer != more else f"bound={fewer}")


def _spread(value: str, asked: str) -> tuple[int, ...]:
    counts = _numbers(value, asked, "the number of ranks of every stage was expected", "dp=2,1,1")
    if min(counts) < 1:
        raise PlanError(asked, "every stage has at least one rank", "dp=2,1,1")
    return counts


def _numbers(value: str, asked: str, why: str, instead: str) -> tuple[int, ...]:
    words = value.split(",") if value else []
    if not all(word.isdecimal() for word in words):
        raise PlanError(asked, why, instead)
    return tuple(int(word) for word in words)


def _size(value: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if value % unit == 0 and value:
            return f"{value // unit}{name}"
    return f"{value}B"


def _seconds(value: float) -> str:
    """
    >>> _seconds(0.005), _seconds(1 / 3)
    ('5ms', '0.3333333333333333s')
    """
    short = f"{value * 1e3:g}ms"
    return short if parse_seconds(short) == value else f"{value!r}s"


def text(choices: Request | Plan) -> str:
    """The shortest line that says the same.

    Of a request: the system that it began as, and what differs from its choices; what is open is left out. Of a plan:
    what is not as usual.

    >>> from trainplan.plan.plan import plan
    >>> text(plan(dp=4)), text(plan(pp=2, schedule="gpipe", micro=8, stages=(3,), blocks=6))
    ('dp=4 bucket=25MiB', 'pp=2 schedule=gpipe micro=8 stages=3')
    >>> text(plan(pp=2, stages=(3,), blocks=6))
    'pp=2 schedule=naive micro=1 stages=3'
    """
    if isinstance(choices, Plan):
        usual = dict(_USUAL)
        if choices.pp > 1:  # a pipeline says its order of work and its micro-batches: they are searched for otherwise
            del usual["schedule"], usual["micro"]
        if not choices.replicated or choices.exchange in EXCHANGE_FIELDS:  # there is nothing to put into buckets
            usual["bucket"] = choices.bucket
        for field in EXCHANGE_FIELDS.get(choices.exchange, ()):  # and of such an exchange all its numbers are said
            usual.pop(field)
        return _words(choices, usual) or "single"
    usual = {field: getattr(parse(choices.key), field) for field in _ORDER} if choices.key else {}
    return f"{choices.key} {_words(choices, usual)}".strip()


@lru_cache(maxsize=64)
def brief(choices: Request | Plan) -> str:
    """The same for people: an order of work that was given is not written out. Asked for whenever a plan is checked, so
    it is kept with it."""
    known: str | None = choices.__dict__.get("_brief")
    if known is None:
        known = choices.__dict__["_brief"] = _brief(choices)
    return known


def _brief(choices: Request | Plan) -> str:
    given = f"schedule={GIVEN}" if choices.order else ""
    return " ".join(given if given and word.startswith("schedule=") else word for word in text(choices).split())


def _own_table(plan: Plan) -> tuple[int, ...] | None:
    """The rank of every stage within a replica, where it is not as usual and one line can say it."""
    if not plan.placement or plan.dp < 1 or plan.placement == usual_placement(plan):
        return None
    own = tuple(stage[0] // (plan.dp * plan.tp) for stage in plan.placement[0] if stage)
    local = (own,) if plan.takes_any_table else renamed(usual_lines(plan), own)
    return own if local is not None and table(plan.dp, local, plan.tp) == plan.placement else None


def _words(choices: Request | Plan, usual: dict[str, object]) -> str:
    words = []
    for field in _ORDER:
        value = getattr(choices, field, None)
        if field == "placement" and isinstance(choices, Plan):
            value = _own_table(choices)
        if field == "schedule" and choices.order:
            value = "|".join(choices.order)
        if field == "dp" and choices.spread:
            words.append(f"dp={','.join(map(str, choices.spread))}")
            continue
        if value is None or (field in usual and value == usual[field]):
            continue
        if field in _SIZES:
            value = _size(int(value))
        elif field == "cycle":
            value = _seconds(float(value))
        elif field == "away":
            value = away_text(value)
        elif isinstance(value, tuple):
            value = ",".join(map(str, value))
        words.append(f"{field}={value}")
    return " ".join(words)


def title(choices: Request | Plan) -> str:
    """What a table shows: a plan without its cuts and buckets."""
    drop = ("stages=", "bucket=", "fused=", "away=")
    words = [word for word in brief(choices).split() if not word.startswith(drop)]
    return " ".join(words) or "single"


def to_json(plan: Plan) -> dict[str, object]:
    """Every choice of a plan, for files."""
    usual = plan.placement == usual_placement(plan)  # which is as long as there are ranks, and need not be said
    data = files.to_json(replace(plan, placement=()) if usual else plan)
    data["text"] = text(plan)
    if usual:
        del data["placement"]
    return data


def from_json(data: dict[str, object], where: str = "plan") -> Plan:
    """The plan that `to_json` wrote."""
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key != "text"}
        if "placement" not in data:
            made = _counted(files.from_json(Plan, {**data, "placement": []}, where), where)
            return replace(made, placement=usual_placement(made))
    return _counted(files.from_json(Plan, data, where), where)


def _counted(plan: Plan, where: str) -> Plan:
    """The plan, if its numbers can be some of ranks, stages and bytes; whether it is legal is for `rules` to say."""
    bad = untrue(plan)
    if bad is not None:
        raise InputError(f"{where}{bad[0]}", f"it is {bad[1]!r:.60}, and {POSSIBLE}", "1")
    for name in ("dp", "pp", "micro", "chunks", "pairs", "tp", "blocks"):
        if not 1 <= getattr(plan, name) <= _MOST:
            raise InputError(f"{where}.{name}", f"it is {getattr(plan, name)}, and counts from 1 to {_MOST:,}", "1")
    if min(plan.spread, default=1) < 1:
        raise InputError(f"{where}.spread", f"it is {plan.spread}, and every stage has a rank or more", "[2, 1, 1]")
    if any(rank >= _MOST for line in plan.placement for stage in line for rank in stage):
        raise InputError(f"{where}.placement", f"ranks count from 0, and {_MOST:,} are the most", "leaving it out")
    if (copies := _copies(plan)) > _MOST:
        raise InputError(where, f"it asks for {copies:,} copies of stages, and {_MOST:,} are the most", '"dp": 1')
    return plan


assert set(_ORDER) == {f.name for f in fields(Request)} - {"key", "spread", "order"}
