"""The operators that a GPU really runs, from a profiler, to hold our lists against (`profile/listing.py`).

    python benchmarks/operators.py --out benchmarks/data/operators-gpu.json

One training step of each model in each precision, after one that is not looked at: operator by operator its name, the
shapes of its arguments, and how many kernels it started. Takes two minutes; needs transformers for some models (those
are left out by name without it), and no network. Written after every model; what is in the file is not recorded again.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainplan.bench.command import command
from trainplan.errors import TrainplanError
from trainplan.profile import machine
from trainplan.profile.listing import profiled
from trainplan.workload.load import load

SMALL = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,intermediate_size=128"
MODELS = {
    "resnet18:cifar10": 4,
    "resnet50:cifar10": 4,
    "vgg11:cifar10": 4,
    "mobilenetv2:cifar10": 4,
    "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100": 4,
    "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100,dropout=0.1": 4,
    "hf:gpt2,n_layer=2,n_embd=64,n_head=4,n_positions=64,seq=32": 4,
    f"hf:llama,{SMALL},num_key_value_heads=2,vocab_size=100,seq=32": 4,
    f"hf:vit,{SMALL},image_size=32,patch_size=8": 4,
    f"hf:bert,{SMALL},vocab_size=100,seq=32": 4,
    "hf:t5,num_layers=2,d_model=64,d_kv=16,num_heads=4,d_ff=128,vocab_size=100,seq=32": 4,
    "hf:convnext,image_size=64": 4,
    "benchmarks/densenet.py:build": 4,
}
PRECISIONS = ("fp32", "bf16", "pure-bf16")  # in tf32 the operators are those of fp32


def recorded(name: str, samples: int, device: str) -> Iterator[dict[str, Any]]:
    """What a model runs, in every precision."""
    for precision in PRECISIONS:
        parts = profiled(load(name), samples, device, precision)
        operators = {part: [[op.name, op.shapes, kernels] for op, kernels in items] for part, items in parts.items()}
        print(f"{name} {precision}: {sum(map(len, operators.values()))} operators", flush=True)
        yield {"model": name, "samples": samples, "precision": precision, "operators": operators}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file that is written")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = machine.device_of(arguments.device)
    content = {
        "command": command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(device),
        "versions": {
            **machine.versions(),
            "transformers": version("transformers") if find_spec("transformers") else "",
        },
        "form": 2,  # by the form of an operator that was called, and with the casts that autocast makes for it
    }
    rows = json.loads(arguments.out.read_text(encoding="utf-8"))["rows"] if arguments.out.exists() else []
    known = {row["model"] for row in rows}
    for name, samples in MODELS.items():
        if name in known:
            continue
        try:
            rows += recorded(name, samples, str(device))
        except TrainplanError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        arguments.out.write_text(json.dumps({**content, "rows": rows}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
