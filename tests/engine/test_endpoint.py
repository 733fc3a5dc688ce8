"""A port that is somebody else's: said at once, or after a short while, and never waited for without end."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.engine.test_launch import MODEL, PIPELINE
from trainplan.engine import endpoint
from trainplan.engine.job import Job
from trainplan.engine.launch import start
from trainplan.errors import InputError, RunError
from trainplan.plan.text import to_json


@pytest.fixture(params=["listens", "is about to"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that another program has: one that takes connections and says nothing, or one that has only bound it."""
    monkeypatch.setattr(endpoint, "PATIENCE", 1.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if request.param == "listens":
            other.listen()
        yield other.getsockname()[1]


def refused(port: int) -> str:
    return rf"port {port} of 127\.0\.0\.1 is in use by another program\. Try another port, such as \d+\."


def test_several_nodes_do_not_meet_at_a_port_of_somebody_else(taken: int, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match=refused(taken)):
        start(MODEL, PIPELINE, steps=1, batch=8, out=tmp_path, show=False, nnodes="2", endpoint=f"127.0.0.1:{taken}")
    assert time.monotonic() - started < 10
    assert list(tmp_path.glob("torchrun*")) == []


@pytest.mark.parametrize("taken", ["listens"], indirect=True)
def test_ranks_started_by_hand_say_that_their_port_is_taken(taken: int, tmp_path: Path) -> None:
    """Rank 0 wants to listen there. (The others: `test_a_rank_does_not_wait_without_end`.)"""
    job = Job(MODEL, to_json(PIPELINE), 8, 1, str(tmp_path)).save()
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken)}
    command = [sys.executable, "-m", "trainplan.run", str(job)]
    done = subprocess.run(
        command, env={**os.environ, **place}, capture_output=True, text=True, timeout=30, check=False
    )  # fmt: skip
    assert done.returncode == 2
    assert f"port {taken} of 127.0.0.1 is in use by another program" in done.stderr
    assert "Traceback" not in (tmp_path / "rank-0.error").read_text()


def test_a_rank_does_not_wait_without_end(taken: int) -> None:
    said = f"{refused(taken)}|nobody has answered for 1 s"
    with pytest.raises(RunError, match=said):
        endpoint.store("127.0.0.1", taken, 2, master=False, timeout=timedelta(seconds=1))


def test_a_store_and_a_free_port_are_welcome() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    endpoint.check(f"127.0.0.1:{store.port}")  # of the first node that came
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint.check(f"127.0.0.1:{port}")


@pytest.mark.parametrize("text", ["", ":80", "node:", "node:http", "node:0", "node:99999"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(InputError, match="it is not a host and a port"):
        endpoint.parse(text)


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(RunError, match=r"host 'nowhere\.invalid' is not known"):
        endpoint.check("nowhere.invalid:29400")
