"""Many plans at once, on all cores.

Processes are forked from this one, so each begins with all that is known here, and only its answers are sent. Plans
that have much in common (the profile of a rank, then their cuts) are dealt together, a hand at a time to whoever has
none left: what they share is worked out in few processes, and none waits long for the others.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from trainplan.cluster.cluster import Cluster
from trainplan.cluster.probe.machine import cores as cores_here
from trainplan.errors import InputError, RunError
from trainplan.plan.plan import Plan
from trainplan.predict.occupancy import Occupancy, Tools
from trainplan.predict.predict import Prediction, predict
from trainplan.predict.prompt import Hosts, Prompt
from trainplan.profile.profile import Profile
from trainplan.uninterrupted import uninterrupted

FEWEST = 16  # plans that a process is worth: to fork one takes as long as some of them
_HANDS = 8  # that each process is dealt, about
_SENT = tuple(field.name for field in fields(Prediction) if field.name not in ("plan", "played", "tools", "hosts"))


def predictions(
    plans: Sequence[Plan], profile: Profile, cluster: Cluster, batch: int | None = None, cores: int | None = None,
    occupied: bool = False,
) -> list[Prediction]:  # fmt: skip
    """`predict` of each of these plans, in their order and to the last bit, on as many cores; None: on all there are.

    What is refused is refused as there: of several plans the first. `occupied`: how full tools show the fullest device
    is worked out in the processes, too, of what may fit. Otherwise it is when it is first asked for, and takes as long
    as to predict the plan anew.
    """
    if cores is not None and cores < 1:
        raise InputError(f"predictions on cores={cores}", "at least one core has to work", "cores=1, or none given")
    crew = min(cores or cores_here(), len(plans) // FEWEST)
    alone = partial(predict, profile=profile, cluster=cluster, batch=batch)
    answers = dict[int, tuple[Any, ...]]()
    if crew > 1 and "fork" in multiprocessing.get_all_start_methods():

        def answer(number: int) -> tuple[Any, ...]:
            found = alone(plans[number])
            full = found.occupancy if occupied and found.tensors_fit else None
            return found.tools is not None, found.hosts is not None, full, *(getattr(found, name) for name in _SENT)

        answers = _on_cores(answer, dealt(plans, crew), crew)
    made = list[Prediction]()
    with uninterrupted():
        for number, plan in enumerate(plans):
            if number not in answers:  # no other process was asked; or it raised there, and does so here
                made.append(alone(plan))
                if occupied and made[-1].tensors_fit:
                    made[-1].occupancy  # noqa: B018
                continue
            has_tools, has_hosts, full, *sent = answers[number]
            tools = Tools(partial(_occupancy, full, partial(alone, plan))) if has_tools else None
            hosts = Hosts(partial(_prompt, partial(alone, plan))) if has_hosts else None
            made.append(Prediction(plan=plan, tools=tools, hosts=hosts, **dict(zip(_SENT, sent, strict=True))))
    return made


def _occupancy(known: Occupancy | None, again: Callable[[], Prediction]) -> Occupancy:
    found = known or again().occupancy
    assert found is not None  # it has tools here as there
    return found


def _prompt(again: Callable[[], Prediction]) -> Prompt:
    found = again().hosts
    assert found is not None  # it has hosts here as there
    return found.prompt


def dealt(plans: Sequence[Plan], crew: int) -> list[list[int]]:
    """Places of plans in hands of about the same size, those together that have most in common."""

    def alike(plan: Plan) -> tuple[Any, ...]:
        return plan.tp, plan.sequence, plan.precision, plan.recompute, plan.stages, plan.dp * plan.micro, plan.schedule

    order = sorted(range(len(plans)), key=lambda number: alike(plans[number]))
    size = max(1, -(-len(plans) // (crew * _HANDS)))
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def _on_cores(
    answer: Callable[[int], tuple[Any, ...]], hands: list[list[int]], crew: int
) -> dict[int, tuple[Any, ...]]:  # fmt: skip
    """The answers of as many processes; what raised there has none."""
    context = multiprocessing.get_context("fork")
    taken = context.Value("q", 0)  # hands

    def work(pipe: Connection) -> None:
        found = dict[int, tuple[Any, ...]]()
        with uninterrupted():
            while True:
                with taken.get_lock():
                    mine, taken.value = taken.value, taken.value + 1
                if mine >= len(hands):
                    break
                for number in hands[mine]:
                    with suppress(Exception):  # whoever asked sees it: see `predictions`
                        found[number] = answer(number)
        pipe.send(found)

    pipes, processes = list[Connection](), []
    answers = dict[int, tuple[Any, ...]]()
    try:
        for _ in range(crew):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(theirs,), daemon=True)
            with warnings.catch_warnings():
                # From Python 3.12 on it warns of threads, which are not forked: torch's, which no prediction asks.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            pipes.append(ours)
            processes.append(process)
        left = list(pipes)
        while left:
            there = wait(left)
            for pipe in (pipe for pipe in pipes if pipe in there):
                answers |= pipe.recv()
                left.remove(pipe)
    except EOFError:
        asked, why = f"{sum(map(len, hands))} predictions on {crew} cores", "a process ended without an answer"
        raise RunError(asked, why, "cores=1, if memory was short") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
    return answers
