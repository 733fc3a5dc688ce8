"""The public function about studies, which train small models. It belongs to `trainplan.api`, which names it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from trainplan.errors import InputError, nearest

if TYPE_CHECKING:
    from trainplan.report.staleness import Staleness

STUDIES = ("staleness",)
MOST = 256  # workers


def study(
    what: str = "staleness",
    tasks: str = "digits,images",
    rules: str = "in step,ssp,dssp,ps-asp",
    workers: str = "1,2,4,8,16",
    seeds: int = 5,
    epochs: float = 40.0,
    output: str | None = None,
    picture: Sequence[str] = (),
) -> Staleness:
    """Find out by training what no clock can tell. `staleness`: epochs to a target accuracy under asynchronous rules.

    `tasks`, `rules` and numbers of `workers` are lists with commas; a training is given up after so many `epochs`.
    `output` is a file for all that was found, each `picture` one that ends in .svg, .png or .pdf.
    """
    if what not in STUDIES:
        raise InputError(f"study {what}", f"the studies are: {', '.join(STUDIES)}", nearest(what, STUDIES))
    import time

    import torch

    from trainplan.report.lines import command
    from trainplan.report.picture import check_picture
    from trainplan.report.progress import progress
    from trainplan.report.staleness import Staleness, draw
    from trainplan.study.staleness import RULES, reach
    from trainplan.study.tasks import TASKS

    for path in picture:
        check_picture(path, "--picture")
    names, chosen = _words("tasks", tasks, TASKS), _words("rules", rules, RULES)
    counts = _counts(workers)
    if seeds < 1:
        raise InputError(f"--seeds {seeds}", "a study has at least one", "--seeds 5")
    if not 0 < epochs <= 1000:
        raise InputError(f"--epochs {epochs:g}", "a training is given up after 1 to 1000 of them", "--epochs 40")
    made, found, threads = [TASKS[name]() for name in names], [], torch.get_num_threads()
    every = [(task, rule, w, seed) for task in made for rule in chosen for w in counts for seed in range(seeds)]
    torch.set_num_threads(1)  # the models are small
    try:
        with progress() as report:
            for number, (task, rule, w, seed) in enumerate(every):
                report(f"{task.name}, {rule}, {w} workers", number / len(every))
                found.append(reach(task, rule, w, seed, epochs))
    finally:
        torch.set_num_threads(threads)
    typed = command("study", what, tasks=tasks, rules=rules, workers=workers, seeds=seeds, epochs=epochs)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    answer = Staleness(
        tuple(found), {task.name: task.target for task in made}, date, typed, (*filter(None, [output]), *picture)
    )
    if output:
        answer.save(output)
    for path in picture:
        draw(answer, path)
    return answer


def _words(option: str, text: str, known: Collection[str]) -> list[str]:
    """The words of a list with commas, all of which are known."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise InputError(f"--{option} {word}", f"they are: {', '.join(known)}", nearest(word, known))
    return words


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"--workers {text}", "numbers of workers are whole, with commas", "1,2,4,8,16") from None
    if min(counts) < 1 or max(counts) > MOST:
        raise InputError(f"--workers {text}", f"from 1 to {MOST} workers push", "1,2,4,8,16")
    return counts
