"""Whole grids of replicas × slices × stages × micro-batches: Megatron-DeepSpeed on 2, 4 and 8 A100 in one node.

Every row of `vtrain_single_node_subset.csv` goes the way that any question goes: a GPT by shape is traced and
estimated, the row's choices are a plan, the plan is lowered, and the clock plays the program.

Two things are known of the rows and not in the file. The logits of 50,257 words are padded to a multiple of 128 × tp
where they are cut, and otherwise not (a layer of theirs runs at a third of the speed). And the label "full
recomputation" cannot be: with it products would have to run at 1.1 of the peak. So it is taken as none.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainplan.bench.published.elsewhere import AS_ASKED
from trainplan.bench.published.rows import FITTED, Constants, Row, as_asked, fit, gpts, regrets, score
from trainplan.cluster.parse import cluster
from trainplan.plan.plan import plan

VTRAIN = "vtrain_single_node_subset.csv"
WORDS = 50257


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


def single_node(folder: Path, say: Callable[[str], None]) -> dict[str, object]:
    """The single-node grids: with 20 labelled rows, with one, with none, and from one width to the other.

    Constants that nothing is said of are those of the package (`profile/efficiency.py`). Where none is given at all, an
    A100 is scaled from the device file of the package, as for everybody who asks.
    """
    begin = time.perf_counter()
    rows = vtrain(folder)
    say(f"{len(rows)} rows traced and estimated in {time.perf_counter() - begin:.0f} s")
    found: dict[str, object] = {}

    def told(own: Sequence[Row], constants: Constants) -> dict[str, object]:
        return {**score(own, constants), **regrets(own, constants)}

    none: Constants = {"product": 0.85}
    found[AS_ASKED] = {**as_asked(rows), **regrets(rows, {})}
    found["no labelled row, from its data sheet"] = told(rows, none)
    believed = {name: FITTED[name][2] for name in FITTED if name != "issue_s"}
    slow = [r for r in rows if r.group == (12, 1024, 2, 16) and (r.plan.tp, r.plan.pp, r.micro) == (1, 1, 1)]
    one = fit(slow, ["issue_s"], believed, prior=0.0)
    others = [r for r in rows if r not in slow]
    found["one labelled row"] = told(others, one) | {"constants": one}
    shipped = fit(slow, ["issue_s"], none, prior=0.0)
    found["one labelled row, all else as it comes"] = told(others, shipped) | {"constants": shipped}
    few = labelled(rows, ((12, 1024, (1, 4)), (24, 2048, (2, 8))))
    constants = fit(few, list(FITTED), {})
    found[f"{len(few)} labelled rows"] = told([r for r in rows if r not in few], constants) | {"constants": constants}
    narrow = labelled(rows, ((12, 1024, (1, 4)), (24, 1024, (2, 8))))
    carried = fit(narrow, list(FITTED), {})
    wide = [r for r in rows if r.width == 2048]
    found["width 1024 fitted, width 2048 predicted"] = told(wide, carried) | {"constants": carried}
    return found
