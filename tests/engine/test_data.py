"""Real files, read by loader processes beside real ranks: the same training as in one process."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainplan.engine.feed import batches
from trainplan.engine.job import Job
from trainplan.engine.launch import check_data, run
from trainplan.engine.trainer import build
from trainplan.errors import InputError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import to_json
from trainplan.workload.load import load

STEPS = 4
USER = Path(__file__).parent / "user_model.py"


def alone(model: str, chosen: Plan, data: str) -> list[float]:
    """The losses of one process that is given the same data."""
    workload = load(model)
    trainer = build(chosen, workload)
    job = Job(model, to_json(chosen), workload.batch, STEPS, "", data=data)
    return [trainer.step(batch, whole).loss for batch, whole in batches(trainer, job, STEPS)]


def images(folder: Path) -> str:
    """Twenty pictures in two classes: two whole batches an epoch, and four pictures that wait for the next."""
    random = np.random.default_rng(0)
    for number in range(20):
        place = folder / "train" / f"class-{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return f"folder:{folder}"


def tokens(folder: Path) -> str:
    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, 11, 8 * 10 + 1, dtype=np.uint16).tofile(path)
    return f"tokens:{path}"


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize(
    ("write", "model", "chosen", "blocks"),
    [
        (images, f"{USER}:seeing", partial(plan, dp=2, bucket=300), 2),
        (tokens, "gpt:layers=1,hidden=8,heads=1,seq=8,vocab=11,batch=4",
         partial(plan, pp=2, micro=2, schedule="1f1b", stages=(2,)), 3),
    ],
    ids=["images under dp", "tokens under pp"],
)  # fmt: skip
def test_files_are_trained_on_as_in_one_process(write, model: str, chosen, blocks: int, tmp_path: Path) -> None:
    data = write(tmp_path / "data") if write is images else write(tmp_path)
    result = run(model, chosen(blocks=blocks), steps=STEPS, batch=load(model).batch, show=False, data=data)
    assert result.losses == pytest.approx(alone(model, plan(blocks=blocks), data), rel=1e-4)
    assert len(set(result.losses)) == STEPS


def test_tokens_of_another_vocabulary_are_refused_before_ranks_are_started(tmp_path: Path) -> None:
    """Wherever in the file they are, as far as a few samples from all over it tell."""
    data = tokens(tmp_path)
    check_data("gpt:layers=1,hidden=8,heads=1,seq=8,vocab=11", 4, data)
    with pytest.raises(
        InputError, match=rf"^--data {data}: token \d+: the model's vocabulary has 9 tokens. Try a model"
    ):
        check_data("gpt:layers=1,hidden=8,heads=1,seq=8,vocab=9", 4, data)
