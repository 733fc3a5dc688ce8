"""Batches that come ahead of their steps: in a loop of one's own, from the data of a run, and what is refused."""

import pytest
import torch
import torch.distributed as dist

from tests.engine import jobs
from tests.engine.systems import BLOCKS
from trainplan.bench.pool import pool
from trainplan.engine.copies import Reading, moved
from trainplan.engine.feed import batches
from trainplan.engine.inputs import steps_of
from trainplan.engine.job import Job
from trainplan.engine.trainer import Trainer
from trainplan.errors import PlanError, RunError
from trainplan.plan.plan import plan
from trainplan.workload.workload import Batch


def trainer_of(preload: str = "on", **choices) -> Trainer:
    job, model, captured = jobs.built("tied", "sgd")
    chosen = plan(blocks=BLOCKS["tied"], preload=preload, **choices)
    return Trainer(chosen, job, captured, lambda names: jobs.values_of(model), shape=jobs.shape_of("tied"), seed=7)


def test_the_same_losses_in_a_loop_of_ones_own() -> None:
    """Batch by batch, ahead by hand, and `run`, which looks ahead by itself."""
    three = [trainer_of("given").workload.inputs(8, number) for number in range(3)]
    given = trainer_of("given")
    want = [given.step(batch).loss for batch in three]
    late = trainer_of()
    assert [late.step(batch).loss for batch in three] == want
    by_hand, found = trainer_of(), []
    by_hand.preload(three[0])
    for batch in three[1:]:
        by_hand.preload(batch)
        found.append(by_hand.step().loss)
    assert [*found, by_hand.step().loss] == want
    taken = []

    def one_by_one():
        for number, batch in enumerate(three):
            taken.append(number)
            yield batch

    results = trainer_of().run(one_by_one())
    assert next(results).loss == want[0]
    assert taken == [0, 1]  # the second one came before the first was trained
    assert [result.loss for result in results] == want[1:]


def test_two_batches_are_there_at_a_time() -> None:
    trainer = trainer_of()
    batch = trainer.workload.inputs(8, 0)
    trainer.preload(batch)
    trainer.preload(batch)
    (load,) = [op for op in trainer.program(8).ops() if str(op) == "0LOAD"]
    copies = [future.result() for fed in trainer.inputs._ahead for future in fed.ahead.values()]
    assert [copy.span.bytes for copy in copies] == [load.bytes, load.bytes]
    assert not {t.data_ptr() for t in copies[0].tensors} & {t.data_ptr() for t in copies[1].tensors}
    with pytest.raises(RunError, match=r"third batch.*a step first"):
        trainer.preload(batch)
    with pytest.raises(RunError, match=r"2 preloaded before it.*trainer.step\(\)"):
        trainer.step(batch)
    trainer.step()
    trainer.step()
    with pytest.raises(RunError, match=r"none was preloaded"):
        trainer.step()


def test_batches_are_not_preloaded_under_another_plan() -> None:
    with pytest.raises(PlanError, match=r"preload=off: a batch comes with its step.*preload=on"):
        trainer_of("off").preload(Batch(8))


def test_a_checkpoint_does_not_skip_what_came_ahead() -> None:
    """Whoever feeds a run says where the data goes on: behind the batch that was trained, not the one that came."""
    trainer = trainer_of()

    def data():
        for number in range(4):
            trainer.place = {"next": number + 1}
            yield trainer.workload.inputs(8, number), None

    places = []
    for step in steps_of(trainer, data()):
        step()
        places.append(trainer.place["next"])
    assert places == [1, 2, 3, 4]


def test_what_is_not_read_is_not_there() -> None:
    source = Batch(4, (torch.ones(4, 3),), {"scale": torch.ones(())}, torch.ones(4))
    copy = Reading(frozenset({"args[0]", "kwargs[scale]"}), (True, False)).copied(source, (1, 3), torch.device("cpu"))
    first, second = copy.parts
    assert (first.args[0].tolist(), first.kwargs["scale"].item()) == ([[1.0, 1.0, 1.0]], 1.0)
    assert first.targets.is_meta
    assert second.args[0].is_meta
    assert second.args[0].shape == (3, 3)
    assert copy.span.bytes == 4 * 3 + 4
    with pytest.raises(RunError, match=r"on meta already.*preload=given"):
        moved(first.targets, torch.device("cpu"))


def fed_by_run(rank: int, world: int) -> list[tuple[int, list[float | None]]]:
    """What this rank is given of made-up batches under two plans, and the losses."""
    found = []
    for preload in ("on", "off"):
        trainer = trainer_of(preload, dp=2, bucket=300, exchange="dataparallel")
        source = batches(trainer, Job("tied", {}, 8, 3, ""), 3)
        given, losses = [], []
        for step in steps_of(trainer, ((given.append(batch.samples) or batch, whole) for batch, whole in source)):
            losses.append(step().loss)
        found.append((given[0], losses))
        dist.barrier()
        trainer.close()
    return found


def test_a_run_gives_the_root_the_whole_batch_where_it_scatters() -> None:
    first, second = pool(2).run(fed_by_run)
    assert [samples for samples, _ in first] == [4, 8]
    assert [samples for samples, _ in second] == [4, 0]
    assert first[0][1] == pytest.approx(first[1][1])
    assert first[0][1] == pytest.approx(second[0][1])


def wrong_shape(rank: int, world: int) -> str:
    trainer = trainer_of("off", dp=2, bucket=300, exchange="dataparallel")
    trainer.program(8)  # which all ranks make together
    batch = trainer.workload.inputs(8, 0)
    batch.targets = batch.targets.repeat(1, 2)
    said = ""
    if rank == 0:
        with pytest.raises(RunError) as caught:
            trainer.step(batch)
        said = str(caught.value)
    dist.barrier()
    trainer.close()
    return said


def test_the_root_refuses_what_the_others_do_not_expect() -> None:
    said, _ = pool(2).run(wrong_shape)
    assert "targets is (8, " in said
    assert "the other workers expect" in said
    assert "preload=on" in said
