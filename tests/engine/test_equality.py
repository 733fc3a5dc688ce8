"""Every system equals the oracle in float64: loss, gradients, weights, buffers and optimizer state after 3 steps.

(After 4, where the timeline of the last 2 is kept: `runs.py`.)
"""

import copy
from collections.abc import Iterable

import pytest
import torch

from tests.engine import jobs
from tests.engine.runs import TIMED_DAILY, Run, longer, recorded, run
from tests.engine.systems import CASES, SCHEDULES, Case, ranks_of
from trainplan.engine.compare import state_of
from trainplan.engine.oracle import Trained, train_alone
from trainplan.plan.decided import DECIDED as DECIDED_WORDS
from trainplan.plan.keys import part_of
from trainplan.plan.plan import Plan
from trainplan.plan.rules import SLICED
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.served import SERVED as SERVED_WORDS
from trainplan.program.exchanges import BY_ROUNDS, HIERARCHICAL

SYNCHRONOUS = tuple(word for word in SERVED_WORDS if word not in ASYNCHRONOUS)
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def alone(case: Case, plan: Plan | None = None) -> Trained:
    job, model, captured = jobs.built(case.model, case.optimizer, **case.fields)
    values = jobs.values_of(copy.deepcopy(model))
    batches = [job.inputs(samples, seed=number) for number, samples in enumerate(case.sizes)]
    return train_alone(plan or case.plan, job, captured, values, batches, seed=7)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.system(c.key, "R"), id=str(c)) for c in CASES])
def test_equality(case: Case) -> None:
    if str(case) in TIMED_DAILY:
        hold(longer(case), alone(longer(case)), recorded(case))
    else:
        hold(case, alone(case), run(case))


def hold(case: Case, want: Trained, ranks: Run) -> None:
    """What every rank has after training is what the oracle has, and together they have all of it."""
    assert whole(trained.weights for trained, _, _ in ranks) == sizes(want.weights)
    assert {name.partition("[")[0] for trained, _, _ in ranks for name in trained.state} == want.state.keys()
    assert {name for trained, _, _ in ranks for name in trained.buffers} == want.buffers.keys()
    stepping = [trained for trained, _, _ in ranks if trained.gradients]  # the others push theirs there
    assert len(stepping) == {"dataparallel": 1}.get(case.plan.exchange, case.plan.servers or len(ranks))
    for step, gradients in enumerate(want.gradients):
        assert whole(trained.gradients[step] for trained in stepping) == sizes(gradients)
    assert any(case.plan.depth - 1 in stages for _, _, (_, stages) in ranks)
    for trained, _, (_, stages) in ranks:
        if case.plan.depth - 1 in stages:
            torch.testing.assert_close(trained.losses, want.losses, **CLOSE)
        assert trained.weights or case.plan.exchange == "dataparallel"  # whose root has them until the next step
        assert len(trained.gradients) in (0, len(case.sizes))
        for name, weight in trained.weights.items():
            expected = part_of(name, want.weights)
            torch.testing.assert_close(weight, expected, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
        for step, gradients in enumerate(trained.gradients):
            for name, gradient in gradients.items():
                expected = part_of(name, want.gradients[step])
                torch.testing.assert_close(gradient, expected, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
        for name, state in trained.state.items():
            assert state.keys() == want.state[name.partition("[")[0]].keys()
            for key, value in state.items():
                torch.testing.assert_close(value, state_of(name, key, want.state), **CLOSE)
        for name, buffer in trained.buffers.items():
            torch.testing.assert_close(buffer, want.buffers[name], **CLOSE)


def whole(parts: Iterable[dict[str, torch.Tensor]]) -> dict[str, int]:
    """Elements of every tensor that somebody has: pieces of one, on several servers, count together."""
    there = {name: tensor.numel() for tensors in parts for name, tensor in tensors.items()}
    found = {name: count for name, count in there.items() if "[" not in name}
    pieces: dict[str, int] = {}
    for name in there.keys() - found.keys():
        pieces[name.partition("[")[0]] = pieces.get(name.partition("[")[0], 0) + there[name]
    return pieces | found


def sizes(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in tensors.items()}


@pytest.mark.parametrize("word", SCHEDULES)
def test_every_order_of_work_is_among_the_cases(word: str) -> None:
    """A new one without cases fails here: on 2, 3 and 4 ranks, with dropout and batch norm, and with AdamW."""
    cases = [case for case in CASES if case.plan.schedule == word and not case.fields]
    plain = [case for case in cases if case.optimizer == "sgd" and case.plan.world == case.plan.pp]
    model, other = ("gpt", "gpt") if word == SLICED else ("tied", "residual")  # the model of tokens has dropout as well
    assert {case.plan.pp for case in plain if case.model == model} >= set(ranks_of(word)) >= {2, 4}
    assert max(case.plan.pp for case in plain if case.model == other) > 2  # so that a value skips a whole rank
    assert any(case.optimizer == "adamw" and case.plan.pp > 1 for case in cases)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_stage_of_sharing_out_is_among_the_cases(zero: int) -> None:
    """On 2 and 4 ranks, with micro-batches, pipelines, AdamW, clipping, batch norm and tied weights."""
    cases = [case for case in CASES if case.plan.zero == zero]
    assert {case.plan.world for case in cases} >= {2, 4}
    assert {case.model for case in cases if case.plan.pp == 1} >= {"tied", "residual"}
    assert any(case.optimizer == "adamw" and case.plan.micro > 1 for case in cases)
    assert any(case.plan.pp > 1 and case.model == "tied" for case in cases)
    assert any(case.plan.recompute == "full" for case in cases)
    assert any("clip_norm" in case.fields for case in cases)


@pytest.mark.parametrize("word", BY_ROUNDS)
def test_every_exchange_is_among_the_cases(word: str) -> None:
    """A new one without cases fails here: on 2, 3 and 4 replicas, with micro-batches, and under a pipeline."""
    cases = [case for case in CASES if case.plan.exchange == word]
    alone = [case.plan for case in cases if case.plan.pp == 1]
    assert {plan.dp for plan in alone} >= ({4} if word == HIERARCHICAL else {2, 3, 4})
    assert any(plan.micro > 1 for plan in alone)
    assert any(case.plan.pp > 1 and case.plan.replicated for case in cases)
    assert all(any(samples % case.plan.world for samples in case.sizes) for case in cases)  # uneven local batches


@pytest.mark.parametrize("word", SYNCHRONOUS)
def test_every_served_exchange_is_among_the_cases(word: str) -> None:
    """On 2 workers and on more, with dropout and batch norm, and with AdamW."""
    cases = [case for case in CASES if case.plan.exchange == word]
    assert {case.model for case in cases} >= {"tied", "residual"}
    assert {2, 3} <= {case.plan.dp for case in cases}
    assert any("adamw" in case.optimizer for case in cases)
    assert word == "dataparallel" or any(case.plan.servers > 1 for case in cases)
    assert word == "dataparallel" or {case.plan.dp for case in cases if case.plan.pp > 1} == {1, 2}


@pytest.mark.parametrize("word", DECIDED_WORDS)
def test_every_exchange_that_is_decided_while_running_is_among_the_cases(word: str) -> None:
    """On 2 and 4 ranks, with dropout and batch norm, with AdamW, and stage by stage under pipelines."""
    cases = [case for case in CASES if case.plan.exchange == word]
    assert {case.plan.world for case in cases} >= {2, 4}
    assert {case.model for case in cases} >= {"tied", "residual"}
    assert any("adamw" in case.optimizer for case in cases)
    assert any(case.plan.pp > 1 for case in cases)


def test_oracle_equals_the_plain_step_on_the_whole_batch() -> None:
    """Without batch norm and dropout the pieces add up to the whole: nobody's definition but torch's."""
    case = Case("dapple", "chain", {"dp": 2, "pp": 2, "micro": 2, "schedule": "1f1b", "stages": (3,)})
    job, model, _ = jobs.built(case.model, case.optimizer)
    optimizer = job.optimizer(list(model.named_parameters()))
    losses = []
    for number, samples in enumerate(case.sizes):
        batch = job.inputs(samples, seed=number)
        loss = torch.nn.functional.mse_loss(model(*batch.args), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    want = alone(case)
    torch.testing.assert_close(want.losses, losses, **CLOSE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(want.weights[name], parameter.detach(), **CLOSE)
