"""Messages of one trainer are no other's, though both send over the same processes; and what leaves by way of the host
arrives."""

import torch
import torch.distributed as dist

from tests.engine import jobs
from tests.engine.systems import BLOCKS
from trainplan.bench.pool import pool
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import plan

PIPELINE = plan(pp=2, micro=2, schedule="1f1b", stages=(4,), blocks=BLOCKS["tied"])


def left_behind(rank: int, world: int) -> tuple[list[float | None], list[float]]:
    """A trainer leaves receives posted, of the tags that its steps have used; another one trains on the same processes
    meanwhile. Its losses, and what arrives in the end for the first one."""
    trainers, losses, waiting = [], [], []
    for number in range(2):
        job, model, captured = jobs.built("tied", "sgd")
        trainer = Trainer(PIPELINE, job, captured, lambda names, model=model: jobs.values_of(model))
        losses.append(trainer.step(job.inputs(8, seed=0)).loss)
        trainers.append(trainer)
        if rank == 1 and number == 0:
            form = ((1,), torch.float64)
            waiting = [trainer.part.transport.receive([form], 0, tag) for tag in range(64)]
    if rank == 0:
        for tag in range(64):
            trainers[0].part.transport.send([torch.full((1,), float(tag), dtype=torch.float64)], 1, tag).wait()
    arrived = []
    for message in waiting:
        message.wait()
        arrived.append(float(message.take()[0]))
    dist.barrier()
    for trainer in trainers:
        trainer.close()
    return losses, arrived


def test_receives_that_a_trainer_left_behind_take_nothing_from_the_next() -> None:
    (_, nothing), (losses, arrived) = pool(2).run(left_behind)
    assert losses[0] is not None
    assert losses[0] == losses[1]  # from the same weights
    assert nothing == []
    assert arrived == [float(tag) for tag in range(64)]


def by_the_host(rank: int, world: int, backend: str) -> tuple[list[float | None], int, str]:
    """Losses of a pipeline whose messages leave in that way, how many bytes this rank has sent, and what becomes of a
    message that cannot be sent."""
    job, model, captured = jobs.built("tied", "sgd")
    trainer = Trainer(PIPELINE, job, captured, lambda names: jobs.values_of(model), backend=backend)
    losses = [trainer.step(job.inputs(8, seed=number)).loss for number in range(3)]
    talk = trainer.part.transport
    sent, failure = sum(talk.sent.values()), ""
    try:
        talk.send([torch.zeros(1)], rank, 0).wait()  # to itself
    except (RuntimeError, ValueError) as error:
        failure = str(error)
    dist.barrier()
    trainer.close()
    return losses, sent, failure


def test_what_leaves_by_way_of_the_host_arrives() -> None:
    directly, staged = (pool(2).run(by_the_host, backend) for backend in ("gloo", "gloo-staged"))
    assert [losses for losses, _, _ in staged] == [losses for losses, _, _ in directly]
    assert [sent for _, sent, _ in staged] == [sent for _, sent, _ in directly]
    assert all(sent > 0 and failure for _, sent, failure in staged)  # a thread's failure is told to whoever waits
