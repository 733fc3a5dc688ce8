"""Make the drawings of docs/orders.md anew: `python docs/drawings.py` (a test keeps them current).

A drawing stands between <!-- timeline OPTIONS --> and <!-- /timeline -->: the command, and what it prints.

They are of a made-up model, eight equal blocks, so that nothing is seen but the order of work: on four ranks a stage
takes 1 s forward and 2 s back, of which 1 s is for the input and 1 s for the weights. What crosses has no bytes. Where
sequences are cut, a slice takes half of its time by its length, and half by its length and what it attends to.
"""

import contextlib
import json
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from trainplan import cli, files
from trainplan.profile.profile import Block, Crossing, Parameter, Profile
from trainplan.profile.provenance import Provenance

ROOT = Path(__file__).parents[1]
PROFILE = "docs/equal.profile.json"
COMMAND = f"trainplan timeline {PROFILE} --cluster 4xA100-80"
BLOCKS = 8


def equal() -> Profile:
    """The model. Its times do not depend on the size of a micro-batch."""
    half, whole, none = (0.5, 0.5), (1.0, 1.0), (0.0, 0.0)
    block = Block(
        "block", 1e9, half, whole, 0.0, 0.0, none, none, 0.0, (2.0**20, 2.0**20), none, none,
        backward_input_s=half, backward_weight_s=half, slice_forward=(0.0, 0.5, 0.5), slice_backward=(0.0, 0.5, 0.5),
    )  # fmt: skip
    return Profile(
        workload="equal", sample="sample", tokens_per_sample=1024, batch=8, samples_per_epoch=80, device="A100-80",
        kind="estimated", compiled=False, precision="fp32", optimizer="sgd", state_bytes_per_parameter=0.0,
        samples=(1, 1000), blocks=(block,) * BLOCKS,
        crossings=tuple(Crossing(f"h{b}", b, (b + 1,), 0.0, 0) for b in range(BLOCKS - 1)),
        parameters=tuple(Parameter(f"w{b}", (b,), 250, 1000) for b in reversed(range(BLOCKS))),
        input_bytes_per_sample=0.0, provenance=Provenance("made up", "2026-11-15"), whole_sequences=None,
    )  # fmt: skip


def profile() -> str:
    """The file that the commands read."""
    return json.dumps({"trainplan": "profile", "format": files.FORMAT, "data": files.to_json(equal())}, indent=1) + "\n"


def drawing(options: str) -> str:
    """The command with these options, and what it prints."""
    command = f"{COMMAND} {options}"
    with contextlib.chdir(ROOT):
        done = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    return f"```\n$ {command}\n{done.stdout.rstrip()}\n```"


def rewritten(text: str) -> str:
    """A page with every drawing made anew."""

    def drawn(match: re.Match[str]) -> str:
        return f"<!-- timeline {match[1]} -->\n{drawing(match[1])}\n<!-- /timeline -->"

    return re.sub(r"<!-- timeline (.*?) -->.*?<!-- /timeline -->", drawn, text, flags=re.DOTALL)


def main() -> None:
    (ROOT / PROFILE).write_text(profile())
    page = ROOT / "docs" / "orders.md"
    page.write_text(rewritten(page.read_text()))


if __name__ == "__main__":
    main()
