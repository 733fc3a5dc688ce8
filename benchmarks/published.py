"""Published step times, predicted: how far off are we on machines that nobody here has?

    python benchmarks/published.py --data FOLDER [--out FILE.json] [--only vtrain|mpt]

FOLDER has `vtrain_single_node_subset.csv` (Megatron-DeepSpeed on 2, 4 and 8 A100 in one node: 16 whole grids of
replicas × slices × stages × micro-batches) and `llm_foundry_mpt_subset.csv` (FSDP on A100 and H100). Every row goes the
way that any question goes: a GPT by shape is traced and estimated, the row's choices are a plan, the plan is lowered,
and the clock plays the program.

What is fitted are constants of the device and its host (`profile/efficiency.py`), to a few labelled rows, and never
reported on these. No constant is keyed by slices, width or micro-batch; shares stay below measured ceilings.

Two things are known of the rows and not in the file. The logits of 50,257 words are padded to a multiple of 128 × tp
where they are cut, and otherwise not (a layer of theirs runs at a third of the speed). And the label "full
recomputation" cannot be: with it products would have to run at 1.1 of the peak. So it is taken as none.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from statistics import mean, median

import numpy as np
from scipy.optimize import least_squares
from torch.optim import AdamW

from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.plan.plan import Plan, plan
from trainplan.predict.predict import predict
from trainplan.profile.estimate import priced, traced
from trainplan.profile.profile import Profile
from trainplan.profile.repeated import TRACED, expanded
from trainplan.profile.roofline import speed_of
from trainplan.profile.traced import Traced
from trainplan.workload.load import load

Constants = dict[str, float]
VTRAIN, MPT = "vtrain_single_node_subset.csv", "llm_foundry_mpt_subset.csv"
WORDS = 50257
# Constants that are fitted, with their bounds and what is thought of them beforehand (a mean, and how sure).
FITTED: dict[str, tuple[float, float, float, float]] = {
    "product": (0.6, 0.87, 0.85, 0.02),
    "stream": (0.5, 0.9, 0.72, 0.06),
    "misaligned": (0.2, 1.0, 0.36, 0.05),
    "issue_s": (20e-6, 100e-6, 55e-6, 20e-6),
    "sharing": (0.0, 0.2, 0.04, 0.04),
    "overlap": (1.5, 10.0, 4.0, 2.0),
    "overlap_sharing": (1.5, 10.0, 2.2, 0.6),
    "step_s": (0.0, 8e-3, 2e-3, 2e-3),
    "loss_issue_s": (0.0, 8e-3, 3e-3, 3e-3),
}
SETTING = (2048, 4096, 7168)  # widths of MPT-1b, 7b and 30b, whose rows with 2,048 tokens set a clock
# Known of a device beforehand: FlashAttention-2 reaches 35 % of an H100 (Shah et al. 2024, FlashAttention-3).
KNOWN: dict[str, Constants] = {"H100-SXM": {"attention": 0.35}}
PRIOR = 0.02  # a constant one deviation off weighs as much as an error of 2 % in one row


@dataclass(frozen=True)
class Row:
    """A published step, and the plan that it ran."""

    group: tuple[int, ...]  # rows that answer the same question: layers, width, devices, batch
    seconds: float
    plan: Plan
    profile: Profile
    cluster: Cluster
    batch: int
    micro: int
    width: int
    layers: int  # or, of sharded rows, tokens

    def predicted(self, constants: Constants) -> float:
        there = _with(self.cluster.name, tuple(sorted(constants.items())))
        return predict(self.plan, self.profile, there, self.batch).step_s


@lru_cache(maxsize=64)
def _with(name: str, constants: tuple[tuple[str, float], ...]) -> Cluster:
    """A cluster whose devices have these constants."""
    place = cluster(name)
    nodes = tuple(
        replace(node, devices=tuple(replace(d, efficiency=dict(constants)) for d in node.devices))
        for node in place.nodes
    )
    return replace(place, nodes=nodes)


@cache
def layer(width: int, heads: int, tokens: int, words: int, attention: str) -> Traced:
    """A GPT of few layers, traced."""
    name = f"gpt:layers={TRACED},hidden={width},heads={heads},seq={tokens},vocab={words},attention={attention}"
    workload = load(f"{name},dropout={0.1 if attention == 'eager' else 0.0}")
    fused = replace(workload, optimizer=lambda parameters: AdamW(parameters, fused=True))
    return traced(fused, (1, 2, 4, 8), gpu=True)


def gpts(shapes: Sequence[tuple[int, int, int, int, int, str]], device: str) -> dict[tuple[int, ...], Profile]:
    """Profiles of GPTs by (layers, width, heads, tokens, words), each kind of layer traced once."""
    made = {}
    place = cluster(f"1x{device}").device(0)
    speed = speed_of(place, "fp32")
    for layers, width, heads, tokens, words, attention in shapes:
        many = expanded(layer(width, heads, tokens, words, attention), "h", layers)
        made[layers, width, heads, tokens, words] = priced(many, place, speed, (1, 2, 4, 8, 16, 32, 64))
    return made


def vtrain(folder: Path) -> list[Row]:
    """The rows of the single-node grids."""
    table = list(csv.DictReader((folder / VTRAIN).open(encoding="utf-8")))

    def words(tp: int) -> int:
        return WORDS if tp == 1 else -(-WORDS // (128 * tp)) * 128 * tp

    def shape(row: dict[str, str]) -> tuple[int, int, int, int, int]:
        layers, width, heads, tokens = (int(row[k]) for k in ("layers", "hidden", "heads", "seq_len"))
        return layers, width, heads, tokens, words(int(row["tp"]))

    profiles = gpts(sorted({(*shape(row), "eager") for row in table}), "A100-80")
    places = {n: cluster(f"{n}xA100-80") for n in (2, 4, 8)}
    rows = []
    for row in table:
        tp, pp, dp, micro, batch, devices = (
            int(row[k]) for k in ("tp", "pp", "dp", "micro_batch", "global_batch", "n_accel")
        )
        profile = profiles[shape(row)]
        layers, width = int(row["layers"]), int(row["hidden"])
        chosen = plan(
            dp=dp, tp=tp, pp=pp, micro=batch // dp // micro, schedule="1f1b" if pp > 1 else "naive", precision="fp16",
            stages=tuple(1 + layers // pp * stage for stage in range(1, pp)), blocks=len(profile.blocks),
        )  # fmt: skip
        group = (layers, width, devices, batch)
        seconds = float(row["iter_time_s"])
        rows.append(Row(group, seconds, chosen, profile, places[devices], batch, micro, width, layers))
    return rows


def labelled(rows: Sequence[Row], shapes: Sequence[tuple[int, int, tuple[int, int]]]) -> list[Row]:
    """Rows to fit to: of two models (layers, width, micro-batches), slices over 1, 2, 4 and 8 ranks, each alone on its
    devices, with two micro-batches; and two pipelines without slices."""
    found: list[Row] = []
    for layers, width, sizes in shapes:
        own = [r for r in rows if (r.layers, r.width, r.batch) == (layers, width, 16)]
        for tp in (1, 2, 4, 8):
            few = [r for r in own if (r.plan.tp, r.plan.pp, r.cluster.world) == (tp, 1, max(2, tp))]
            there = sorted({r.micro for r in few})
            wanted = {size if size in there else there[-1] for size in sizes}
            found += [r for r in few if r.micro in (wanted if len(wanted) > 1 else {there[0], there[-1]})]
        for pp, dp in ((2, 4), (4, 1)):
            few = sorted((r for r in own if (r.plan.tp, r.plan.pp, r.plan.dp) == (1, pp, dp)), key=lambda r: r.micro)
            found.append(few[0 if layers == 12 else min(1, len(few) - 1)])
    return found


def fit(rows: Sequence[Row], names: Sequence[str], start: Constants, prior: float = PRIOR) -> Constants:
    """The constants with which these rows come out best, in logarithms and with little weight on outliers."""
    seconds = np.array([row.seconds for row in rows])

    def constants(place: np.ndarray) -> Constants:
        values = {n: FITTED[n][0] + (FITTED[n][1] - FITTED[n][0]) * float(x) for n, x in zip(names, place, strict=True)}
        return start | values

    def off(place: np.ndarray) -> np.ndarray:
        now = constants(place)
        errors = np.log(np.array([row.predicted(now) for row in rows]) / seconds)
        beliefs = [prior * (now[n] - FITTED[n][2]) / FITTED[n][3] for n in names]
        return np.concatenate([errors, beliefs])

    begin = [(start.get(n, FITTED[n][2]) - FITTED[n][0]) / (FITTED[n][1] - FITTED[n][0]) for n in names]
    best = least_squares(
        off, np.clip(begin, 0.02, 0.98), bounds=(0, 1), loss="soft_l1", f_scale=0.05, diff_step=0.01, max_nfev=12
    )
    return constants(best.x)


def score(rows: Sequence[Row], constants: Constants) -> dict[str, float]:
    """Errors of the rows, and what it costs to follow the prediction in each group."""
    found = [row.predicted(constants) for row in rows]
    errors = [p / row.seconds - 1 for p, row in zip(found, rows, strict=True)]
    regrets = []
    for group in sorted({row.group for row in rows}):
        own = [(p, row.seconds) for p, row in zip(found, rows, strict=True) if row.group == group]
        regrets.append(min(own)[1] / min(seconds for _, seconds in own) - 1)
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(rows), "mean": mean(sizes), "median": median(sizes), "worst": max(sizes), "bias": mean(errors),
        "regret": mean(regrets), "worst_regret": max(regrets),
    }  # fmt: skip


def single_node(folder: Path, say: Callable[[str], None]) -> dict[str, object]:
    """The single-node grids: with 20 labelled rows, with one, with none, and from one width to the other."""
    begin = time.perf_counter()
    rows = vtrain(folder)
    say(f"{len(rows)} rows traced and estimated in {time.perf_counter() - begin:.0f} s")
    found: dict[str, object] = {}
    none: Constants = {"product": 0.85}
    found["no labelled row"] = score(rows, none)
    believed = {name: FITTED[name][2] for name in FITTED if name != "issue_s"}
    slow = [r for r in rows if r.group == (12, 1024, 2, 16) and (r.plan.tp, r.plan.pp, r.micro) == (1, 1, 1)]
    one = fit(slow, ["issue_s"], believed, prior=0.0)
    found["one labelled row"] = score([r for r in rows if r not in slow], one) | {"constants": one}
    few = labelled(rows, ((12, 1024, (1, 4)), (24, 2048, (2, 8))))
    constants = fit(few, list(FITTED), {})
    found[f"{len(few)} labelled rows"] = score([r for r in rows if r not in few], constants) | {"constants": constants}
    narrow = labelled(rows, ((12, 1024, (1, 4)), (24, 1024, (2, 8))))
    carried = fit(narrow, list(FITTED), {})
    wide = [r for r in rows if r.width == 2048]
    found["width 1024 fitted, width 2048 predicted"] = score(wide, carried) | {"constants": carried}
    return found


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
    """FSDP: one constant for each accelerator, the clock that it sustains, from its rows of three of nine models."""
    begin = time.perf_counter()
    rows = mpt(folder)
    say(f"{len(rows)} rows traced and estimated in {time.perf_counter() - begin:.0f} s")
    found: dict[str, object] = {}
    errors: list[float] = []
    for name in sorted({name for name, _ in rows}):
        own = [row for which, row in rows if which == name]
        few = [row for row in own if row.width in SETTING and row.layers == 2048]  # tokens
        known = KNOWN.get(name, {})
        sustained = median(row.predicted(known | {"sustained": 1.0}) / row.seconds for row in few)
        constants = known | {"sustained": min(1.0, sustained)}
        rest = [row for row in own if row not in few]
        scores = score(rest, constants)
        errors += [abs(row.predicted(constants) / row.seconds - 1) for row in rest]
        plain = score(own, known | {"sustained": 1.0})
        found[name] = {"labelled": len(few), "sustained": sustained, "without": plain["mean"]} | {
            key: scores[key] for key in ("rows", "mean", "median", "worst", "bias")
        }
    found["mean"] = mean(errors)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the published tables")
    parser.add_argument("--out", type=Path, help="a file for the results")
    parser.add_argument("--only", choices=("vtrain", "mpt"), help="one of the tables")
    asked = parser.parse_args()
    found: dict[str, object] = {}
    if asked.only != "mpt":
        found[VTRAIN] = single_node(asked.data, print)
    if asked.only != "vtrain":
        found[MPT] = sharded(asked.data, print)
    words = [
        "--data FOLDER",
        *([f"--out {asked.out}"] if asked.out else []),
        *([f"--only {asked.only}"] if asked.only else []),
    ]
    found |= {"command": f"python benchmarks/published.py {' '.join(words)}", "made": f"{date.today()}"}
    print(json.dumps(found, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
