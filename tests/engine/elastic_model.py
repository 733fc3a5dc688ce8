"""A user's file whose workers come and go: what happens at which call of the loss is said by an environment variable.

EVENTS='[{"what": "kill", "rank": 2, "call": 4}]' FOLDER=… : each happens once, and not before those that stand first.

kill     the rank is killed
raise    the user's code goes wrong
ask      `count` workers are asked for. This attempt waits until somebody has planned for them (a file `planned`), and
         does not come past call `last`: the launcher has to end it
"""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from tests.engine.user_model import Net, inputs

LONGEST = 100.0  # seconds that a rank waits for the launcher
calls, last = 0, 0


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if output.device.type != "meta":
        happen()
    return nn.functional.mse_loss(output, targets)


def happen() -> None:
    global calls, last
    calls += 1
    if last and calls >= last:
        wait_for(Path("never"))
    folder = Path(os.environ.get("FOLDER", "."))
    events = json.loads(os.environ.get("EVENTS", "[]"))
    number = next((n for n in range(len(events)) if not (folder / f"event-{n}").exists()), None)
    if number is None or (int(os.environ["RANK"]), calls) != (events[number]["rank"], events[number]["call"]):
        return
    (folder / f"event-{number}").touch()
    event = events[number]
    if event["what"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if event["what"] == "raise":
        raise ValueError("the user's loss went wrong")
    last = event["last"]
    (folder / "run" / "workers").write_text(f"{event['count']}\n")
    wait_for(folder / "planned")


def wait_for(mark: Path) -> None:
    deadline = time.monotonic() + LONGEST
    while not mark.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody has planned for other workers, or ended this attempt ({mark})")
        time.sleep(0.01)


def build() -> dict:
    return {"model": Net(), "inputs": inputs, "loss": loss, "batch": 8, "optimizer": "adamw", "lr": 0.01}
