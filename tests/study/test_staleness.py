"""Studies of staleness: the order of pushes, what they are trained to, and what a table makes of it."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from trainplan import study
from trainplan.errors import InputError
from trainplan.report.staleness import Staleness
from trainplan.study.staleness import RULES, Paces, Reached, Training, middles, pushes, reach
from trainplan.study.tasks import TASKS, Task, images


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(RULES)), st.integers(1, 9), st.integers(0, 99))
def test_nobody_leads_by_more_than_the_rule_allows(rule: str, workers: int, seed: int) -> None:
    _, upper = RULES[rule]
    done, busy, last = [0] * workers, [True] * workers, 0.0
    for push in islice(pushes(workers, RULES[rule], Paces(0.5, 0.5), seed), 60):
        assert push.moment >= last
        assert busy[push.worker]
        assert push.number == done[push.worker]
        last, busy[push.worker] = push.moment, False
        done[push.worker] += 1
        for worker in push.released:
            busy[worker] = True
            # Who goes on has pushed so often, and is about to do so once more.
            assert done[worker] - min(done) <= upper + (rule == "dssp")
        assert any(busy)


def test_in_step_is_training_with_the_sum_of_all_gradients() -> None:
    """Against plain SGD, whose loss is the sum of the workers' mean losses."""
    task, workers = images(samples=200), 3
    training = Training(task, workers, seed=4)
    torch.manual_seed(4)
    alone = task.build()
    optimizer = torch.optim.SGD(alone.parameters(), lr=task.rate)
    for step in range(4):
        batches = [training.batch(worker, step) for worker in range(workers)]
        optimizer.zero_grad()
        sum(F.cross_entropy(alone(x), y) for x, y in batches).backward()
        optimizer.step()
    for push in islice(pushes(workers, RULES["in step"], Paces(), seed=4), 4 * workers):
        training.apply(push)
    for own, expected in zip(training.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


def test_every_sample_is_learned_once_an_epoch() -> None:
    task = images(samples=400)
    numbered = Task(
        "n", torch.arange(320), torch.zeros(320), *(torch.zeros(1),) * 2, task.build, 0.1, 16, 0.5
    )  # fmt: skip
    training = Training(numbered, 4, seed=0)
    seen = torch.cat([training.batch(worker, number)[0] for number in range(5) for worker in range(4)])
    assert sorted(seen.tolist()) == list(range(320))


def test_staleness_costs_epochs_and_waiting_costs_time() -> None:
    task = images(samples=800)
    found = [reach(task, rule, w, seed, 20.0) for rule, w in (("ps-asp", 1), ("ps-asp", 12)) for seed in range(2)]
    alone, stale = middles(found)
    assert alone.staleness == 0
    assert stale.staleness == pytest.approx(11, rel=0.2)
    assert stale.epochs > 1.2 * alone.epochs
    assert 1 < stale.speedup < 12


def test_what_was_not_reached_has_no_median() -> None:
    runs = [Reached("t", "ssp", 2, s, e, e, 1.0, 0.5) for s, e in enumerate((None, 4.0, None))]
    (row,) = middles(runs)
    assert (row.epochs, row.reached, row.seeds, row.least, row.speedup) == (None, 1, 3, 4.0, None)
    assert "1 of 3" in str(Staleness(tuple(runs), {"t": 0.9}, "", ""))


def test_the_command(tmp_path: Path) -> None:
    file, picture = tmp_path / "study.json", tmp_path / "study.svg"
    answer = study("staleness", "digits", "ps-asp", "1,2", 1, 0.3, str(file), [str(picture)])
    assert {run.workers for run in answer.found} == {1, 2}
    assert all(run.epochs is None for run in answer.found)  # in a third of an epoch nobody learns that much
    assert file.exists()
    assert "<svg" in picture.read_text()
    assert set(TASKS) == {"digits", "images"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"what": "stale"}, "the studies are"),
        ({"tasks": "digit"}, "digits"),
        ({"rules": "asp"}, "ps-asp"),
        ({"workers": "two"}, "whole"),
        ({"workers": "0,2"}, "from 1 to 256"),
        ({"seeds": 0}, "at least one"),
        ({"epochs": 0.0}, "given up"),
        ({"picture": ["a.txt"]}, "pictures end in"),
    ],
)
def test_refusals(words: dict, why: str) -> None:
    with pytest.raises(InputError, match=why):
        study(**words)
