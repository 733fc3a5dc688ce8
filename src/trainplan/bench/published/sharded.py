"""FSDP on A100 and H100: the rows of `llm_foundry_mpt_subset.csv`, each a plan that is predicted."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

from trainplan.bench.published.rows import Constants, Row, as_asked, gpts, score
from trainplan.cluster.parse import cluster
from trainplan.plan.plan import plan

MPT = "llm_foundry_mpt_subset.csv"
SETTING = (2048, 4096, 7168)  # widths of MPT-1b, 7b and 30b, whose rows with 2,048 tokens set a clock
# Known of a device beforehand: FlashAttention-2 reaches 35 % of an H100 (Shah et al. 2024, FlashAttention-3).
KNOWN: dict[str, Constants] = {"H100-SXM": {"attention": 0.35}}


def mpt(folder: Path) -> list[tuple[str, Row]]:
    """The rows of FSDP by accelerator, but for those in fp8."""
    names = {"A100-40GB": "A100-40", "A100-80GB": "A100-80", "H100-80GB": "H100-SXM"}
    table = [row for row in csv.DictReader((folder / MPT).open(encoding="utf-8")) if "fp8" not in row["precision"]]

    def shape(row: dict[str, str]) -> tuple[int, int, int, int, int]:
        layers, width, heads, tokens, words = (int(row[k]) for k in ("layers", "hidden", "heads", "seq_len", "vocab"))
        return layers, width, heads, tokens, words

    shapes = sorted({(*shape(row), "fused") for row in table})
    profiles = {name: gpts(shapes, name) for name in sorted(set(names.values()))}
    rows = []
    for row in table:
        name, devices, micro = names[row["accel"]], int(row["n_accel"]), int(row["micro_batch"])
        batch, profile = int(row["global_batch"]), profiles[names[row["accel"]]][shape(row)]
        zero = 2 if "zero2" in row["state_sharding"] else 3
        chosen = plan(
            dp=devices, micro=max(1, batch // devices // micro), zero=zero, recompute=row["recompute"],
            precision="bf16", blocks=len(profile.blocks),
        )  # fmt: skip
        place = cluster(f"{devices // 8}x8x{name}" if devices > 8 else f"{devices}x{name}")
        group = (int(row["layers"]), int(row["hidden"]), devices, batch)
        seconds = float(row["iter_time_s_derived"])
        width, tokens = int(row["hidden"]), int(row["seq_len"])
        rows.append((name, Row(group, seconds, chosen, profile, place, batch, micro, width, tokens)))
    return rows


def sharded(folder: Path, say: Callable[[str], None]) -> dict[str, object]:
    """FSDP: one constant for each accelerator, the clock that it sustains, from its rows of three of nine models; with
    what is known beforehand beside it, and without (`one_constant`)."""
    begin = time.perf_counter()
    rows = mpt(folder)
    say(f"{len(rows)} rows traced and estimated in {time.perf_counter() - begin:.0f} s")
    found: dict[str, object] = {}
    errors: dict[bool, list[float]] = {True: [], False: []}  # with what is known beforehand, and without
    for name in sorted({name for name, _ in rows}):
        own = [row for which, row in rows if which == name]
        few = [row for row in own if row.width in SETTING and row.layers == 2048]  # tokens
        rest = [row for row in own if row not in few]
        for informed in errors:
            known = KNOWN.get(name, {}) if informed else {}
            sustained = median(row.predicted(known | {"sustained": 1.0}) / row.seconds for row in few)
            constants = known | {"sustained": min(1.0, sustained)}
            scores = score(rest, constants)
            errors[informed] += [abs(row.predicted(constants) / row.seconds - 1) for row in rest]
            if informed:
                found[name] = {
                    "labelled": len(few), "sustained": sustained,
                    "without": score(own, known | {"sustained": 1.0})["mean"], "scaled": as_asked(own),
                    **{key: scores[key] for key in ("rows", "mean", "median", "worst", "bias")},
                }  # fmt: skip
            else:
                found[name] |= {"one_constant": scores["mean"]}  # type: ignore[operator]
    found["mean"], found["one_constant"] = mean(errors[True]), mean(errors[False])
    return found
