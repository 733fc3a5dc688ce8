"""Saved under one plan, resumed under another: training goes on as if nothing had happened."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.engine import jobs
from tests.engine.systems import BLOCKS
from tests.engine.test_equality import CLOSE, Case, alone
from trainplan.bench.pool import pool
from trainplan.engine import checkpoint
from trainplan.engine.checkpoint_servers import refuse_asynchronous
from trainplan.engine.trainer import Trainer
from trainplan.errors import InputError, RunError
from trainplan.plan.keys import part_of
from trainplan.plan.plan import Plan, plan

SIZES = [8, 7, 8, 8]
CHOICES = {
    "single": {},
    "dp": {"dp": 2, "bucket": 300},
    "pipeline": {"pp": 2, "micro": 2, "schedule": "1f1b", "stages": (2,)},
    "both": {"dp": 2, "pp": 2, "micro": 1, "schedule": "gpipe", "stages": (4,), "bucket": 300, "recompute": "full"},
}
# Whatever was shared out is saved whole, and whoever resumes takes its own part of it.
SHARED_OUT = {
    "zero1 on two": {"dp": 2, "zero": 1, "bucket": 300},
    "zero2 in a pipeline": {**CHOICES["both"], "zero": 2, "micro": 1},
    "zero3 on four": {"dp": 4, "zero": 3, "bucket": 300},
    "in groups": {"dp": 4, "shard": 2, "zero": 3, "bucket": 10_000},
    "offloaded": {"dp": 2, "zero": 3, "bucket": 300, "micro": 2, "offload": "activations", "away": ((3,),)},
}
# What is on servers is saved as if it were whole: parameters of eight elements or more are in pieces there.
SERVED = {**CHOICES["pipeline"], "stages": (4,), "bucket": 300, "exchange": "ps-bsp", "servers": 2, "split": 8}
CHOICES |= SHARED_OUT | {"servers": SERVED}
GROUPED = ("grouped_adamw", "onecycle")


def trainer_of(chosen: Plan, model: str, optimizer: str, schedule: str = "", seed: int = 7) -> Trainer:
    job, module, captured = jobs.built(model, optimizer, schedule=schedule)
    shape = jobs.shape_of(model)
    return Trainer(chosen, job, captured, lambda names: jobs.values_of(module), shape=shape, seed=seed)


def part_of_a_run(
    rank: int, world: int, chosen: Plan, first: int, last: int, folder: str, resume: bool, kind: tuple[str, ...]
):
    model, *training = kind
    # Another seed, so that whoever resumes has to take the one in the checkpoint.
    trainer = trainer_of(chosen, model, *training, seed=7 if not resume else 99)
    if resume:
        trainer.load(folder)
        assert trainer.steps_done == first
        assert trainer.place == {"batch": first}
    losses = []
    for number in range(first, last):
        losses.append(trainer.step(trainer.workload.inputs(SIZES[number], seed=number)).loss)
        trainer.place = {"batch": number + 1}
    if not resume:
        trainer.save(folder)
    trainer.gather()
    values = {n: p.detach().clone() for n, p in trainer.parameters.items()}
    if trainer.replica == 0:  # running statistics are those of replica 0
        values |= {n: b.detach().clone() for n, b in trainer.buffers.items()}
    holder = trainer.part.shard or next(iter(trainer.part.held.values()))
    # The optimizer of a worker whose weights are on servers never runs.
    steps = trainer.part.shard is not None or trainer.part.layout.steps_at(rank)
    assert steps or trainer.plan.servers
    groups = holder.optimizer.param_groups if steps else []
    rates = {trainer.optimizer_groups[i]: group["lr"] for i, group in enumerate(groups)}
    if world > 1:
        trainer.close()
    return losses, values, rates


def run(choices: str, *arguments):
    kind = arguments[-1]
    chosen = plan(blocks=BLOCKS[kind[0]], **CHOICES[choices])
    if chosen.world == 1:
        return [part_of_a_run(0, 1, chosen, *arguments)]
    return pool(chosen.world).run(part_of_a_run, chosen, *arguments)


def hold(ranks: list, want, first: int = 2) -> None:
    """Weights, buffers and losses are those of a run that was not interrupted; the rates are the same on every rank."""
    assert any(losses != [None, None] for losses, _, _ in ranks)
    expected = {**want.weights, **want.buffers}
    for losses, values, rates in ranks:
        if losses[0] is not None:
            torch.testing.assert_close(losses, want.losses[first:], **CLOSE)
        for name, value in values.items():
            whole = part_of(name, expected)
            torch.testing.assert_close(value, whole, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
        assert rates in ({}, ranks[-1][2])
    assert ranks[-1][2]


@pytest.mark.parametrize("training", [("sgd",), GROUPED], ids="-".join)
@pytest.mark.parametrize(
    ("before", "after"),
    [("single", "both"), ("both", "dp"), ("dp", "pipeline"), ("pipeline", "single"), ("pipeline", "dp")],
)
def test_resumed_under_another_plan(before: str, after: str, training: tuple[str, ...], tmp_path: Path) -> None:
    """No dropout and no batch norm here, so every plan is the same training."""
    folder, kind = str(tmp_path / "checkpoint"), ("tied", *training)
    run(before, 0, 2, folder, False, kind)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]  # nothing half-written beside it
    fields = {"schedule": training[1]} if len(training) > 1 else {}
    want = alone(Case("single", "tied", {}, sizes=tuple(SIZES), optimizer=training[0], fields=fields))
    hold(run(after, 2, 4, folder, True, kind), want)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero3 on four", "zero1 on two"),
        ("offloaded", "zero2 in a pipeline"),
        ("in groups", "offloaded"),
        ("servers", "single"),
        ("zero1 on two", "servers"),
    ],
)
def test_what_was_shared_out_is_resumed_by_others(before: str, after: str, tmp_path: Path) -> None:
    """With another number of ranks, another stage of sharing out, or none; on servers, on others, or on none."""
    test_resumed_under_another_plan(before, after, GROUPED, tmp_path)


@pytest.mark.parametrize("schedule", ["lambda", "cosine", "steps", "sequence"])
def test_every_scheduler_goes_on_where_it_stopped(schedule: str, tmp_path: Path) -> None:
    kind = ("tied", "grouped_sgd", schedule)
    run("single", 0, 2, str(tmp_path / "c"), False, kind)
    want = alone(Case("single", "tied", {}, sizes=tuple(SIZES), optimizer="grouped_sgd", fields={"schedule": schedule}))
    hold(run("single", 2, 4, str(tmp_path / "c"), True, kind), want)


@pytest.mark.parametrize("choices", ["single", "pipeline"])
def test_dropout_draws_the_numbers_of_a_run_that_was_not_interrupted(choices: str, tmp_path: Path) -> None:
    kind = ("residual", "adamw")
    run(choices, 0, 2, str(tmp_path / "c"), False, kind)
    want = alone(Case(choices, "residual", CHOICES[choices], sizes=tuple(SIZES), optimizer="adamw"))
    hold(run(choices, 2, 4, str(tmp_path / "c"), True, kind), want)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of the chain."""
    trainer = trainer_of(plan(blocks=6), "chain", "grouped_sgd")
    trainer.step(trainer.workload.inputs(8, 0))
    trainer.save(tmp_path / "checkpoint-1")
    return tmp_path / "checkpoint-1"


def refused(trainer: Trainer, path: Path) -> str:
    before = {name: value.clone() for name, value in {**trainer.parameters, **trainer.buffers}.items()}
    with pytest.raises(InputError) as error:
        trainer.load(path)
    assert all(torch.equal(value, before[name]) for name, value in {**trainer.parameters, **trainer.buffers}.items())
    return str(error.value)


def test_another_model_is_refused_by_its_first_tensor(saved: Path) -> None:
    said = refused(trainer_of(plan(blocks=BLOCKS["tied"]), "tied", "grouped_sgd"), saved)
    assert "it is of chain, and this run trains tied: there is no 'embed.weight' in it. Try the checkpoint of" in said
    # The other way round nothing is missing, but there is one too many.
    said = refused(trainer_of(plan(blocks=6), "chain", "grouped_sgd"), _of(saved, "idle"))
    assert "it has a 'unused', which this model has not" in said


def _of(saved: Path, model: str) -> Path:
    trainer = trainer_of(plan(blocks=6), model, "grouped_sgd")
    trainer.save(saved.with_name(model))
    return saved.with_name(model)


def test_another_shape_or_type_is_refused_by_name(saved: Path) -> None:
    trainer = trainer_of(plan(blocks=6), "chain", "grouped_sgd")
    name = list(trainer.captured.exported.held)[4]
    held = dict(trainer.captured.exported.held)
    for changes, said in (
        ({"shape": (3, 5)}, f"{name!r} is (5, 5) torch.float64 there, and (3, 5) torch.float64 here"),
        ({"dtype": torch.float32}, f"{name!r} is (5, 5) torch.float64 there, and (5, 5) torch.float32 here"),
    ):
        item = held[name]
        trainer.captured.exported.held[name] = type(item)(**{**vars(item), **changes})
        try:
            assert said in refused(trainer, saved)
        finally:
            trainer.captured.exported.held[name] = item


def test_another_optimizer_scheduler_or_grouping_is_refused(saved: Path) -> None:
    assert "saved with SGD, and this run has AdamW" in refused(trainer_of(plan(blocks=6), "chain", "adamw"), saved)
    said = refused(trainer_of(plan(blocks=6), "chain", "grouped_sgd", "cosine"), saved)
    assert "saved with no scheduler, and this run has CosineAnnealingLR" in said
    said = refused(trainer_of(plan(blocks=6), "chain", "sgd"), saved)
    assert "'layers.0.0.weight' is in group 2 of the optimizer there, and in group 0 here" in said


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("__0_0.distcp", "half", r"it is broken: __0_0.distcp has [\d,]+ of [\d,]+ bytes. Try the checkpoint before"),
        ("__0_0.distcp", None, r"__0_0.distcp has 0 of [\d,]+ bytes"),
        (".metadata", "noise", "the table of its tensors cannot be read"),
        ("training.pt", "noise", "training.pt cannot be read"),
        ("__0_0.distcp", "noise", "it is broken: rank 0"),
        ("trainplan.json", "half", "broken JSON"),
        ("trainplan.json", None, "there is no trainplan.json in it, so it is not one of trainplan's"),
    ],
)
def test_a_broken_checkpoint_is_refused(saved: Path, name: str, content: str | None, said: str) -> None:
    file = saved / name
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(whole[: len(whole) // 2] if content == "half" else b"\1" * len(whole))
    with pytest.raises(InputError, match=said):
        trainer_of(plan(blocks=6), "chain", "grouped_sgd").load(saved)


def test_a_folder_that_is_not_there_or_of_somebody_else(saved: Path) -> None:
    trainer = trainer_of(plan(blocks=6), "chain", "grouped_sgd")
    assert "it is not there. Try" in refused(trainer, saved.with_name("checkpoint-2"))
    assert str(saved) in refused(trainer, saved.parent)  # the folder of the run: the checkpoint in it is offered
    about = json.loads((saved / "trainplan.json").read_text())
    (saved / "trainplan.json").write_text(json.dumps({**about, "data": {**about["data"], "step": -1}}))
    assert "step: it is -1, and a number from 0" in refused(trainer, saved)
    del about["data"]["seed"]
    (saved / "trainplan.json").write_text(json.dumps(about))
    assert "the key 'seed' is missing" in refused(trainer, saved)


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    trainer = trainer_of(plan(blocks=6), "chain", "sgd")
    trainer.part.held[next(iter(trainer.stages))].optimizer.param_groups[0]["odd"] = Path("x")
    with pytest.raises(RunError, match="more than numbers, words, tensors"):
        trainer.save(tmp_path / "c")
    assert not (tmp_path / "c").exists()


# -- whole or not at all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", ["writing", "between the renames"])
def test_a_kill_while_saving_leaves_the_old_one(saved: Path, killed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(plan(blocks=6), "chain", "grouped_sgd")
    trainer.load(saved)
    trainer.step(trainer.workload.inputs(8, 1))

    class Killed(BaseException):
        pass

    def killing(*arguments, **named):
        raise Killed

    replace = checkpoint.os.replace
    with monkeypatch.context() as patch:
        if killed == "writing":
            patch.setattr(checkpoint.dcp, "save", killing)
        else:
            patch.setattr(
                checkpoint.os, "replace", lambda a, b: killing() if ".partial" in Path(a).name else replace(a, b)
            )
        with pytest.raises(Killed):
            trainer.save(saved)
    again = trainer_of(plan(blocks=6), "chain", "grouped_sgd")
    again.load(saved)
    assert again.steps_done == 1
    # The next save is not held up by what was left behind.
    trainer.save(saved)
    again.load(saved)
    assert again.steps_done == 2
    assert sorted(path.name for path in saved.parent.iterdir()) == ["checkpoint-1"]


def test_asynchronous_workers_have_no_moment_that_could_be_saved() -> None:
    with pytest.raises(RunError, match=r"workers are at different steps.*exchange=ps-bsp"):
        refuse_asynchronous(plan(dp=2, exchange="ssp", bound=(1,), servers=1))


def test_saving_where_nobody_can_write_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(plan(blocks=6), "chain", "sgd")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"saving .*file/c: Not a directory. Try a folder that"):
        trainer.save(tmp_path / "file" / "c")
    partial = tmp_path / ".c.partial"
    monkeypatch.setattr(checkpoint, "_barrier", lambda: (shutil.rmtree(partial), partial.touch()))  # it has gone since
    with pytest.raises(RunError, match=r"saving .*c: rank 0: FileExistsError"):
        trainer.save(tmp_path / "c")
