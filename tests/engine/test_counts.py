"""Losses that are means over tokens: micro-batches in which few tokens count, or none."""

import copy

import torch

from tests.engine import jobs
from tests.engine.models import _tokens
from tests.engine.systems import BLOCKS
from trainplan.bench.pool import pool
from trainplan.engine.oracle import train_alone
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import Plan, plan
from trainplan.workload.workload import Batch


def sparse(samples: int, seed: int) -> Batch:
    """Only the first sample has tokens that count."""
    batch = _tokens(samples, seed)
    batch.targets[1:] = -100
    return batch


def train(rank: int, world: int, chosen: Plan):
    job, model, captured = jobs.built("tied", "sgd")
    trainer = Trainer(chosen, job, captured, lambda names: jobs.values_of(model), shape=jobs.shape_of("tied"), seed=7)
    losses = [trainer.step(sparse(8, seed)).loss for seed in range(2)]
    weights = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    trainer.close()
    return losses, weights


def test_replicas_and_micro_batches_without_a_token_that_counts() -> None:
    chosen = plan(dp=2, micro=2, bucket=300, blocks=BLOCKS["tied"])
    job, model, captured = jobs.built("tied", "sgd")
    whole = plan(blocks=BLOCKS["tied"])  # one piece: the oracle would divide by zero in the others, too
    want = train_alone(whole, job, captured, jobs.values_of(copy.deepcopy(model)), [sparse(8, 0), sparse(8, 1)], 7)
    for losses, weights in pool(2).run(train, chosen):
        torch.testing.assert_close(losses, want.losses, rtol=1e-9, atol=1e-12)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, want.weights[name], rtol=1e-9, atol=1e-12)
