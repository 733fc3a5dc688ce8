"""Single layers and products that others have timed, by the device model alone.

* `pipedream_profile_layers_vgg16_alexnet.csv`: forward seconds of each layer of two networks, timed one by one.
* `matmul_mamf.csv`: the fastest product of each accelerator, over very many shapes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainplan.bench.published.one_device import LIKELY, Say, searching, table
from trainplan.bench.published.ratios import Named, Timed, ratios, waits
from trainplan.cluster import catalogue
from trainplan.profile.device.families import convolution_flops, place
from trainplan.profile.device.known import packaged
from trainplan.profile.device.model import Model
from trainplan.profile.op import Op
from trainplan.profile.roofline import run_seconds, speed_of

MAMF = {"NVIDIA A100 SXM": "A100-80", "NVIDIA H100 SXM": "H100-SXM", "NVIDIA B200 SXM": "B200"}


def pipedream_layers(folder: Path, say: Say) -> dict[str, Any]:
    """Forward seconds of convolutions, linear layers, ReLUs and pooling, in two ways as the sums are."""
    device = catalogue.device(LIKELY)
    speeds = {
        "from its data sheet": speed_of(searching(device), "fp32"),
        "scaled": speed_of(device, "fp32", Model(packaged()[0], device)),
    }
    groups: dict[str, tuple[list[Timed], list[str]]] = {}
    rows = table(folder, "pipedream_profile_layers_vgg16_alexnet.csv")
    for name in dict.fromkeys(row["model"] for row in rows):
        for way, speed in speeds.items():
            named, out = groups.setdefault(f"{name}, {way}", ([], []))
            given = 0
            for row in rows:
                if row["model"] != name:
                    continue
                op = _layer(row["layer"], int(row["batch"]), given, int(row["output_bytes"]))
                given = int(row["output_bytes"])
                if op is None:
                    out.append(f"{row['layer_index']} {row['layer'].partition('(')[0]}")
                    continue
                label = f"{row['layer_index']} {row['layer'].partition('(')[0]}"
                named.append(Timed(label, 1, (run_seconds(op, speed), float(row["forward_s"]))))
        say(f"layers of {name}")
    return {name: waits(named, out) for name, (named, out) in groups.items()}


def _layer(text: str, batch: int, read: int, written: int) -> Op | None:
    """The forward operator of a layer by its text; None: it is none that takes time.

    >>> _layer("Linear(in_features=4, out_features=2, bias=True)", 8, 128, 64).shape
    (8, 4, 2)
    """
    kind, _, rest = text.partition("(")
    sizes = [int(size) for size in re.findall(r"(?<![\d.])\d+(?![\d.])", rest)]
    if kind == "Conv2d":
        ins, outs, high, wide, stride = sizes[:5]
        places = written // 4 // batch // outs
        shape = (batch, ins, outs, places, high * wide, stride, 1)
        # An image comes from nobody's output; what is read is what the stride passes over.
        read = read or 4 * batch * ins * places * stride**2
        return Op("convolution", float(convolution_flops(shape)), read, written, shape, precision="fp32")
    if kind == "Linear":
        ins, outs = sizes[:2]
        flops = 2.0 * batch * ins * outs
        return Op("addmm", flops, 4 * (batch * ins + ins * outs), written, (batch, ins, outs), 1.0, "fp32", "nt")
    if kind == "ReLU":
        return Op("relu_", 0.0, written, written, precision="fp32")
    if kind == "MaxPool2d":
        return Op("max_pool2d_with_indices", 0.0, read, 3 * written, (9,), precision="fp32")
    return None


def products(folder: Path, say: Say) -> dict[str, Any]:
    """FLOP/s of the fastest products, by device."""
    rows: list[Named] = []
    left_out = []
    for row in table(folder, "matmul_mamf.csv"):
        name = MAMF.get(row["accel"])
        if name is None or row["precision"] != "bf16":
            left_out.append(f"{row['accel']} {row['precision']}")
            continue
        device = catalogue.device(name)
        many, columns, inner = (int(size) for size in row["best_shape_MxNxK"].split("x"))
        at = place("product", "nt", "bf16", (1, many, inner, columns))
        predicted = Model(packaged()[0], device).seconds(at)
        rows.append((name, predicted, at.flops / float(row["max_achieved_matmul_flop_per_s"])))
        say(f"the fastest product of a {name}")
    return {"bf16": ratios(rows, left_out)} if len(rows) > 1 else {}
