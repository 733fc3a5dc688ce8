"""The public function about studies, which find out what a single prediction does not tell. It belongs to
`trainplan.api`, which names it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from trainplan.errors import InputError, nearest, refuse_unheard

if TYPE_CHECKING:
    from trainplan.report.influence import Influences
    from trainplan.report.movement import Movement
    from trainplan.report.staleness import Staleness
    from trainplan.situation import Changes

STUDIES = ("staleness", "data-movement", "methods")
MOST = 256  # workers
WORKERS = {"staleness": "1,2,4,8,16", "data-movement": "1,2,3,4", "methods": "4"}
# Of Xu 2021, table 2, who named the GTX 1080 Ti. Batches of 256.
NETWORKS = "resnet34:imagenet,resnet50:imagenet,vgg19:imagenet,mobilenetv2:imagenet"
GPT = "gpt:layers=24,hidden=2048,heads=16,seq=1024,vocab=50304"  # whose states take as much as its activations
# What only some of them take.
TRAINED, ON_DEVICES = ("tasks", "rules", "seeds", "epochs"), ("models", "device", "batch", "set")
UNHEARD = {
    "staleness": ((*ON_DEVICES, "steps"), "it trains small models of its own"),
    "data-movement": (TRAINED, "it predicts steps, and trains nothing"),
    "methods": (TRAINED, "it predicts steps, and trains nothing"),
}
# What else is predicted on what, where nothing is said: models, device, samples of a step.
PREDICTED = {"data-movement": (NETWORKS, "GTX1080Ti", 256), "methods": (GPT, "A100-80", 8)}


def study(
    what: str = "staleness",
    tasks: str = "digits,images",
    rules: str = "in step,ssp,dssp,ps-asp",
    workers: str = "",
    seeds: int = 5,
    epochs: float = 40.0,
    output: str | None = None,
    picture: Sequence[str] = (),
    models: str = "",
    device: str = "",
    batch: int = 0,
    steps: int = 0,
    set: Changes = (),
) -> Staleness | Movement | Influences:
    """Find out what a single prediction does not tell. `staleness`: epochs to a target accuracy under asynchronous
    rules, by training. `data-movement`: the shares of a step that inputs and the model take under nn.DataParallel.
    `methods`: what each raises and lowers, of communication, batch, FLOPs and memory.

    `tasks`, `rules`, `models` and numbers of `workers` (of the first study) or of devices (of the others) are lists
    with commas (`methods` takes one of each); a training is given up after so many `epochs`. `device` is one of the
    catalogue; where it is here, so many `steps` are run on real workers, too. `output` is a file for all that was
    found, each `picture` one that ends in .svg, .png or .pdf.
    """
    if what not in STUDIES:
        raise InputError(f"study {what}", f"the studies are: {', '.join(STUDIES)}", nearest(what, STUDIES))
    given = {"tasks": tasks, "rules": rules, "seeds": seeds, "epochs": epochs, "models": models, "device": device}
    names, why = UNHEARD[what]
    instead = f"study {'data-movement' if what == 'staleness' else 'staleness'} with them, or leaving them out"
    given |= {"batch": batch, "steps": steps, "set": set}
    refuse_unheard(study, given, names, f"study {what}", why, instead)
    from trainplan.report.picture import check_picture

    for path in picture:
        check_picture(path, "--picture")
    workers = workers or WORKERS[what]
    if what in PREDICTED:
        usual = PREDICTED[what]
        models, device, batch = models or usual[0], device or usual[1], batch or usual[2]
    if what == "data-movement":
        return _data_movement(models, workers, device, batch, steps, set, output, picture)
    if what == "methods":
        return _methods(models, workers, device, batch, steps, set, output, picture)
    return _staleness(tasks, rules, workers, seeds, epochs, output, picture)


def _data_movement(
    models: str, workers: str, device: str, batch: int, steps: int, set: Changes, output: str | None,
    picture: Sequence[str],
) -> Movement:  # fmt: skip
    import time

    from trainplan.movements import moved
    from trainplan.report.lines import command
    from trainplan.report.movement import Movement, draw
    from trainplan.report.progress import progress

    counts = _counts(workers)
    with progress() as report:
        found = moved(_models(models), counts, batch, device, set, steps, report)
    changes = [f"{key}={value}" for key, value in set.items()] if isinstance(set, Mapping) else list(set)
    words = {"models": models, "workers": workers, "device": device, "batch": batch, "steps": steps, "set": changes}
    typed, date = command("study", "data-movement", **words), time.strftime("%Y-%m-%d", time.gmtime())
    answer = Movement(tuple(found), device, date, typed, (*filter(None, [output]), *picture))
    if output:
        answer.save(output)
    for path in picture:
        draw(answer, path)
    return answer


def _methods(
    models: str, workers: str, device: str, batch: int, steps: int, set: Changes, output: str | None,
    picture: Sequence[str],
) -> Influences:  # fmt: skip
    import time

    from trainplan.report.influence import Influences
    from trainplan.report.lines import command
    from trainplan.report.progress import progress
    from trainplan.situation import cluster_for, profile_for, refuse_fixed
    from trainplan.study.influence import influences

    names, counts = _models(models), _counts(workers)
    if len(names) > 1 or len(counts) > 1:
        why = "methods are compared on one model and one number of devices"
        raise InputError(f"--models {models} --workers {workers}", why, f"--models {names[0]} --workers {counts[-1]}")
    if counts[0] < 2:
        raise InputError(f"--workers {workers}", "most methods are of several devices", "--workers 4")
    if steps or picture:
        raise InputError("study methods with --steps or --picture", "it counts, and runs nothing", "leaving them out")
    there = cluster_for(f"{counts[0]}x{device}", set)
    profile = profile_for(models, there, batch)
    refuse_fixed(profile, set, saved=False)
    with progress() as report:
        found = tuple(influences(profile, there, batch, report))
    changes = [f"{key}={value}" for key, value in set.items()] if isinstance(set, Mapping) else list(set)
    words = {"models": models, "workers": workers, "device": device, "batch": batch, "set": changes}
    typed, date = command("study", "methods", **words), time.strftime("%Y-%m-%d", time.gmtime())
    answer = Influences(found, profile.workload, there.name, batch, date, typed, tuple(filter(None, [output])))
    if output:
        answer.save(output)
    return answer


def _staleness(
    tasks: str, rules: str, workers: str, seeds: int, epochs: float, output: str | None, picture: Sequence[str]
) -> Staleness:
    import time

    import torch

    from trainplan.report.lines import command
    from trainplan.report.progress import progress
    from trainplan.report.staleness import Staleness, draw
    from trainplan.study.staleness import RULES, reach
    from trainplan.study.tasks import TASKS

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
    typed = command("study", "staleness", tasks=tasks, rules=rules, workers=workers, seeds=seeds, epochs=epochs)
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


def _models(text: str) -> list[str]:
    """Names of models, whose options have commas, too.

    >>> _models("vgg11:mnist,bn=0, resnet18:mnist")
    ['vgg11:mnist,bn=0', 'resnet18:mnist']
    """
    found: list[str] = []
    for word in text.split(","):
        if found and "=" in word and ":" not in word:
            found[-1] += f",{word.strip()}"
        else:
            found.append(word.strip())
    return found


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"--workers {text}", "numbers of workers are whole, with commas", "1,2,4,8,16") from None
    if min(counts) < 1 or max(counts) > MOST:
        raise InputError(f"--workers {text}", f"from 1 to {MOST} workers push", "1,2,4,8,16")
    return counts
