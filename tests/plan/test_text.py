"""One-line form and JSON: round trips, and what is refused."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.program.strategies import cases, examples
from trainplan import files
from trainplan.errors import InputError, PlanError
from trainplan.plan import plan as plans
from trainplan.plan.offload import shortest
from trainplan.plan.placement import placement
from trainplan.plan.plan import WORDS, Plan, Request, open_fields, plan
from trainplan.plan.rules import check
from trainplan.plan.systems import SYSTEMS
from trainplan.plan.text import from_json, parse, text, title, to_json

KEYS = [key for key, row in SYSTEMS.items() if row.choices is not None]
positive = st.integers(1, 10**6)
ranks = st.integers(1, 500)  # together no more copies of stages than there may be


@st.composite
def requests(draw) -> Request:
    """Anything that can be asked: every field open or given, perhaps begun as a system."""
    sizes = st.integers(0, 2**50)
    values = {
        "dp": ranks, "pp": ranks, "micro": positive, "bucket": sizes, "memory": sizes,
        "stages": st.lists(st.integers(0, 99), max_size=5).map(tuple),
        **{field: st.sampled_from(words) for field, words in WORDS.items()},
    }  # fmt: skip
    given_fields = {name: draw(value) for name, value in values.items() if draw(st.booleans())}
    base = parse(draw(st.sampled_from(KEYS))) if draw(st.booleans()) else Request()
    return dataclasses.replace(base, **given_fields)


@examples(300)
@given(requests())
def test_requests_are_read_back(request: Request) -> None:
    line = text(request)
    assert parse(line) == request
    assert text(parse(line)) == line
    assert files.from_json(Request, json.loads(json.dumps(files.to_json(request)))) == request


@examples(100)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple))
def test_what_goes_away_is_read_back(away) -> None:
    made = plan(offload="activations", away=away)
    assert made.away == shortest(away)
    assert parse(text(made)).away == (made.away or None)


@pytest.mark.parametrize("word", ["away=", "away=a", "away=3x", "away=2,,1", "away=1:"])
def test_what_goes_away_is_numbers(word: str) -> None:
    with pytest.raises(PlanError, match="the sections that go") as caught:
        parse(f"offload=activations {word}")
    parse(f"offload=activations {str(caught.value).split('Try ')[-1].split(',')[0]}")


@examples(100)
@given(cases())
def test_plans_are_read_back(case) -> None:
    made = case.plan
    assert from_json(json.loads(json.dumps(to_json(made)))) == made
    assert to_json(made)["text"] == text(made)
    # The line says every choice that is not as usual: with the usual ones it is the plan again.
    said = parse(text(made))
    given_fields = {f.name: getattr(said, f.name) for f in dataclasses.fields(Request)}
    given_fields = {name: value for name, value in given_fields.items() if value is not None and name != "memory"}
    table = given_fields.pop("placement", None)  # said where the replicas are alike, and not as usual
    if table:
        assert placement(made.dp, (table,)) == made.placement
    again = plan(**{**given_fields, "key": made.key}, blocks=made.blocks, placement=made.placement)
    assert again == (made if made.dp > 1 else dataclasses.replace(made, bucket=again.bucket))


@pytest.mark.parametrize("key", KEYS)
def test_the_name_of_a_system_stands_for_its_choices(key: str) -> None:
    request = parse(key)
    assert request.key == key
    assert dataclasses.replace(request, key="") == parse(SYSTEMS[key].choices)
    assert text(request) == key
    assert text(parse(f"{key} dp=3 memory=7GiB")).startswith(key)
    assert parse(f"{key} pp=2").pp == 2  # what follows overrides


def test_lines_that_people_type() -> None:
    request = parse("  dp=2   pp=4 schedule=1f1b micro=16 stages=3,5,9 bucket=4MiB memory=12GiB ")
    assert request == Request(
        dp=2, pp=4, schedule="1f1b", micro=16, stages=(3, 5, 9), bucket=4 * 2**20, memory=12 * 2**30
    )  # fmt: skip
    assert parse("") == Request()
    assert text(Request()) == ""
    assert open_fields(parse("dp=2")) == (
        "pp", "micro", "schedule", "chunks", "pairs", "slices", "stages", "recompute", "exchange", "bucket",
        "updates", "precision", "overlap",
    )  # fmt: skip
    assert text(plan()) == "single"
    assert title(plan(dp=4)) == "dp=4"
    assert title(plan(pp=2, stages=(3,), blocks=6, schedule="gpipe", micro=4)) == "pp=2 schedule=gpipe micro=4"


# line → what was asked, why not, and what would work
BAD = {
    "dp=0": ("dp=0", "dp counts from 1", "dp=1"),
    "dp=-1": ("dp=-1", "dp counts from 1, and is -1", "dp=1"),
    "dp=": ("dp=", "a whole number was expected", "dp=2"),
    "dp=2.5": ("dp=2.5", "a whole number was expected", "dp=2"),
    "dp=two": ("dp=two", "a whole number was expected", "dp=2"),
    "dp=2,x": ("dp=2,x", "the number of ranks of every stage was expected", "dp=2,1,1"),
    "dp=2,0": ("dp=2,0", "at least one rank", "dp=2,1,1"),
    "dp=2 dp=3": ("dp=2 dp=3", "dp is given twice", "only dp=3"),
    "pd=2": ("pd=2", "there is no choice named 'pd'", "dp"),
    "schedul=gpipe": ("schedul=gpipe", "no choice named 'schedul'", "schedule"),
    "schedule=gpip": ("schedule=gpip", "schedule is one of naive, gpipe, lockstep, looped", "schedule=gpipe"),
    "recompute=all": ("recompute=all", "recompute is one of none, full", "recompute=full"),
    "overlap=yes": ("overlap=yes", "overlap is one of on, off", "overlap="),
    "stages=1,x": ("stages=1,x", "the first block of every stage but the first", "stages=2,5"),
    "stages=1,,2": ("stages=1,,2", "the first block of every stage but the first", "stages=2,5"),
    "bucket=5parsec": ("bucket=5parsec", "unknown unit 'parsec'", "leaving bucket out, or one such as bucket=1MiB"),
    "memory=much": ("memory=much", "not a number with a unit", "leaving memory out"),
    "memory=-1GiB": ("memory=-1GiB", "zero or more", "leaving memory out"),
    "gpip": ("word 'gpip'", "no such system", "gpipe"),
    "pp=2 gpipe": ("word 'gpipe'", "a word without '=' is the name of a system, and stands first", "gpipe"),
    "schedule=dapple": ("schedule=dapple", "dapple is a system, and stands first", "dapple pp=4"),
    "schedule=torchgpipe-as-found": ("schedule=torch", "torchgpipe-as-found is a system", "torchgpipe-as-found pp=4"),
    "pp=2 schedule=looped-bfs": ("schedule=looped-bfs", "looped-bfs is a system", "looped-bfs pp=4"),
    "schedule=pipedream": ("schedule=pipedream", "schedule is one of naive", "schedule="),  # a system that is not built
    "ring dp=2": ("word 'ring'", "ring is a way to exchange gradients", "exchange=ring"),
    "lockstep pp=2": ("word 'lockstep'", "lockstep is an order of work", "schedule=lockstep"),
    "pp=2 zb-h3": ("word 'zb-h3'", "the name of a system, and stands first", "zb-h"),
    "placement=0,0": ("placement=0,0", "a pipeline needs two ranks or more, and the table has 1 rank", "placement=0,1"),
    "tofu": ("tofu", "not built yet", "trainplan systems"),
}


@pytest.mark.parametrize("line", BAD)
def test_bad_lines_are_refused_in_three_parts(line: str) -> None:
    asked, why, instead = BAD[line]
    with pytest.raises(PlanError) as caught:
        parse(line)
    assert repr(line) in caught.value.asked
    assert asked in caught.value.asked
    assert why in caught.value.why
    assert instead in caught.value.instead


def test_the_words_of_a_plan_are_those_of_a_request() -> None:
    assert set(WORDS) <= {f.name for f in dataclasses.fields(Request)}
    solved_for = {"memory", "partition"}
    assert {f.name for f in dataclasses.fields(Request)} - solved_for <= {f.name for f in dataclasses.fields(Plan)}
    for field, words in WORDS.items():
        assert getattr(plans.plan(), field) in words


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dp": "2"}, "plan.dp: int was expected, found '2'"),
        ({"dp": True}, "plan.dp: int was expected, found True"),
        ({"dp": None}, "plan.dp: int was expected, found None"),
        ({"stages": [1, 2.5]}, r"plan.stages\[1\]: int was expected, found 2.5"),
        ({"stages": "1,2"}, "plan.stages: a list was expected"),
        ({"placement": [[1]]}, r"plan.placement\[0\]\[0\]: a list was expected, found 1"),
        ({"shedule": "gpipe"}, "plan.shedule: there is no such key"),
    ],
)
def test_broken_json_says_where(change: dict, why: str) -> None:
    data = {**to_json(plan(pp=3, stages=(1, 2), blocks=4, schedule="gpipe")), **change}
    with pytest.raises(InputError, match=why):
        from_json(data)


def test_json_that_is_no_plan() -> None:
    with pytest.raises(InputError, match="the key 'micro' is missing"):
        from_json({k: v for k, v in to_json(plan()).items() if k != "micro"})
    for other in ([1, 2], "dp=2", 7, None):
        with pytest.raises(InputError, match="a mapping was expected"):
            from_json(other)


def test_an_empty_placement_is_none() -> None:
    made = from_json({**to_json(plan(pp=2, stages=(1,), blocks=2, schedule="gpipe")), "placement": []})
    with pytest.raises(PlanError, match="has 1 × 2 entries, and this one has none"):
        check(made, 8)


def test_a_placement_of_ones_own_is_kept() -> None:
    own = plan(dp=2, placement=(((1,),), ((0,),)))
    assert "placement" not in to_json(plan(dp=2))
    assert to_json(own)["placement"] == [[[1]], [[0]]]
    assert from_json(to_json(own)).replicas_of(0) == (1, 0)


@pytest.mark.parametrize(
    "line",
    [
        "dp=1000000000", "dp=1000000 pp=1000000", "dp=1000000000,1", "pp=2 chunks=1000000000 schedule=interleaved",
        "pp=2 pairs=1000000000 schedule=chimera", "tp=1000000000",
    ],
)  # fmt: skip
def test_more_ranks_than_any_machine_has_are_refused_at_once(line: str) -> None:
    """A table of their places would take all memory before anything else is said."""
    with pytest.raises(PlanError, match=r"copies of stages, and 1,048,576 are the most\. Try dp=2"):
        parse(line)


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("dp", 0, ".dp"),
        ("dp", 10**9, ".dp"),
        ("micro", -1, ".micro"),
        ("bucket", -1, ".bucket"),
        ("cycle", float("nan"), ".cycle"),
        ("spread", [0, 0], ".spread"),
        ("spread", [10**9, 1], ""),
        ("placement", [[[0], [10**9]]], ".placement"),
    ],
)
def test_a_file_whose_numbers_are_of_no_plan_is_refused_by_the_place(field: str, value: object, place: str) -> None:
    written = to_json(plan(dp=2, pp=2, micro=2, schedule="1f1b", stages=(2,), blocks=4))
    with pytest.raises(InputError) as caught:
        from_json({**written, field: value})
    assert caught.value.asked == f"plan{place}"
