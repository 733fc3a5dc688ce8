"""What the ranks of a run decided is in its folder, and another run that is given the folder does the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainplan import files
from trainplan.engine.agendas import Log, check_again, line, load, read_line
from trainplan.engine.asynchronous import Applied
from trainplan.engine.launch import fresh, run
from trainplan.errors import InputError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import text
from trainplan.program.agenda import Agenda, Rule, check_agenda

MODEL = f"{Path(__file__).parent / 'user_model.py'}:build"
STEPS = 3
P3 = plan(dp=2, exchange="p3", slice=100, blocks=4)
SSP = plan(dp=2, servers=1, exchange="ssp", bound=(1,), blocks=4, bucket=200)

agendas = st.lists(st.lists(st.lists(st.integers(0, 5000), min_size=1, max_size=3), max_size=3), min_size=1, max_size=6)


@given(agendas.filter(lambda rounds: any(rounds)))
def test_an_agenda_is_read_as_it_was_written(rounds: list[list[list[int]]]) -> None:
    agenda: Agenda = tuple(tuple(tuple(buffer) for buffer in buffers) for buffers in rounds)
    assert read_line(line(agenda), "here") == agenda


@pytest.mark.parametrize("written", ["", "0 x", "0 / -1", "0,1", "1++2", "0 1 |"])
def test_what_is_no_agenda_is_refused(written: str) -> None:
    with pytest.raises(InputError, match="not a list of parts and rounds"):
        read_line(written, "here")


def test_together_goes_what_is_of_one_type() -> None:
    rule = Rule(sizes=(4, 4, 4), types=("float32", "float32", "bfloat16"), threshold=64)
    assert check_agenda(rule, (((0, 1), (2,)),))
    with pytest.raises(InputError, match="parts 1, 2 go together, which are bfloat16 and float32"):
        check_agenda(rule, (((0,), (1, 2)),))


def test_a_log_has_room_for_what_repeats_and_ends_where_it_has_no_more() -> None:
    """Never with a hole: what is kept are the first steps."""
    one, other = (((0,), (1,)),), (((1,), (0,)),)
    log = Log()
    for agenda in (one, one, other, one):
        log.add(agenda, most=3)
    assert (log.steps, log.lines) == (4, ["0 1", "0 1"])
    assert log.lines[0] is log.lines[1]


@pytest.mark.system("p3", "R")
@pytest.mark.usefixtures("quick_start")
def test_a_run_of_p3_is_repeated_from_its_folder(tmp_path: Path) -> None:
    """First as it decides; then in an order that nobody would decide, written into the files; and that is what the
    second run did, by its own files and by its timeline."""
    then, now = tmp_path / "then", tmp_path / "now"
    common: dict[str, Any] = {"steps": STEPS, "batch": 8, "show": False, "reference": False, "keep_state": True}
    run(MODEL, P3, out=then, **common)
    kept = [load(then, rank, P3) for rank in range(2)]
    assert {(own.plan, own.first, own.run, own.steps) for own in kept} == {(text(P3), 0, STEPS, STEPS)}
    assert kept[0].stages == kept[1].stages
    parts = sorted({part for buffers in read_line(kept[0].stages[0].steps[0], "") for b in buffers for part in b})
    assert parts == list(range(len(parts)))
    upside_down = line(tuple(((part,),) for part in reversed(parts)))
    for rank in range(2):
        edit(then, rank, lambda data: data["stages"][0].update(steps=[upside_down] * STEPS))
    result = run(MODEL, P3, out=now, again=str(then), **common)
    assert [load(now, rank, P3).stages[0].steps for rank in range(2)] == [(upside_down,) * STEPS] * 2
    sums = [e for e in result.timeline.events if e.kind == "REDUCE_GRAD" and e.rank == 0]
    names = [f"0REDUCE_GRAD.{part}" if part else "0REDUCE_GRAD" for part in reversed(parts)]
    assert [e.name for e in sorted(sums, key=lambda e: e.start)] == names
    weights = [torch.load(folder / "rank-0.pt", weights_only=False)["weights"] for folder in (then, now)]
    for name, tensor in weights[0].items():  # two numbers are summed, in whatever order they go
        assert torch.equal(tensor, weights[1][name])
    fresh(now)
    assert not list(now.glob("agendas-*"))


def edit(folder: Path, rank: int, change: Callable[[dict], object]) -> None:
    path = folder / f"agendas-{rank}.json"
    content = json.loads(path.read_text())
    change(content["data"])
    path.write_text(json.dumps(content))


def written(folder: Path, chosen: Plan = P3, steps: int = STEPS) -> None:
    """What a run would leave."""
    for rank in range(chosen.world):
        stages = [{"stage": 0, "steps": ["1 / 0"] * steps}]
        data = {"plan": text(chosen), "rank": rank, "first": 0, "run": steps, "stages": stages}
        files.write(folder / f"agendas-{rank}.json", "agendas", data)


BROKEN: dict[str, tuple[Callable[[dict], object], str]] = {
    "another plan": (lambda data: data.update(plan="dp=2"), r"it is of plan 'dp=2', and this is.*--plan 'dp=2'"),
    "another rank": (lambda data: data.update(rank=0), r"of rank 0.*agendas-0\.json"),
    "other steps": (lambda data: data.update(first=7), r"it has steps 8 to 10, and 1 to 3 are asked for"),
    "fewer steps": (lambda data: data["stages"][0]["steps"].pop(), r"it has steps 1 to 2, and 1 to 3.*--steps 2"),
    "no agenda": (
        lambda data: data["stages"][0].update(steps=["1 / 0", "what", "0"]),
        r"stage 0, step 2: .what. is",
    ),
    "no number": (lambda data: data.update(first="a"), r"int was expected, found 'a'"),
    "no key": (lambda data: data.pop("stages"), r"the key 'stages' is missing"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_record_of_something_else_is_refused(what: str, tmp_path: Path) -> None:
    """Before anything is started, or a folder made."""
    change, why = BROKEN[what]
    written(tmp_path / "then")
    check_again(P3, str(tmp_path / "then"), STEPS)
    edit(tmp_path / "then", 1, change)
    with pytest.raises(InputError, match=why):
        run(MODEL, P3, steps=STEPS, batch=8, out=tmp_path / "now", again=str(tmp_path / "then"))
    assert not (tmp_path / "now").exists()


def test_what_cannot_be_repeated_is_refused(tmp_path: Path) -> None:
    then = tmp_path / "then"
    with pytest.raises(InputError, match=r"agendas-0\.json.*cannot be read"):
        check_again(P3, str(then), STEPS)
    written(then)
    with pytest.raises(InputError, match=r"leaves nothing to be decided.*exchange=horovod"):
        check_again(plan(dp=2, blocks=4), str(then), STEPS)
    with pytest.raises(InputError, match=r"this is --out, too.*another --out"):
        check_again(P3, str(then), STEPS, then)
    with pytest.raises(InputError, match=r"several machines.*--nnodes 1"):
        check_again(P3, str(then), STEPS, nnodes="2")
    (then / "agendas-1.json").write_text("{")
    with pytest.raises(InputError, match="broken JSON"):
        check_again(P3, str(then), STEPS)


def test_servers_repeat_runs_of_as_many_steps_and_workers(tmp_path: Path) -> None:
    def record(*pushes: int) -> None:
        rows = [Applied(w, n, 0.0, 0, (w,)) for w, count in enumerate(pushes) for n in range(count)]
        files.write(tmp_path / "arrivals-0.json", "arrivals", [files.to_json(row) for row in rows])

    record(3, 3)
    check_again(SSP, str(tmp_path), 3)
    with pytest.raises(InputError, match=r"worker 0 has 3 updates in it, and --steps is 4.*--steps 3"):
        check_again(SSP, str(tmp_path), 4)
    record(3, 3, 3)
    with pytest.raises(InputError, match=r"it has workers \[2\], and the plan has 2 workers.*dp=3"):
        check_again(SSP, str(tmp_path), 3)
