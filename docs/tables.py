"""Rewrite the tables in docs/ that come from data: `python docs/tables.py` (a test keeps them current)."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from trainplan.bench.published.elsewhere import as_asked, inside, told
from trainplan.plan.systems import SYSTEMS
from trainplan.plan.text import parse
from trainplan.predict.accuracy import ELSEWHERE, plan_kind, with_more
from trainplan.report.influence import TITLES
from trainplan.report.influence import lines as influences

HERE = Path(__file__).parent
DATA = HERE.parent / "benchmarks" / "data"
SLOW = "exchanges-slow", "exchanges-slow-and-late"
MACHINES = {  # what is told together of them
    "two cores": ("accuracy-2-cores",),
    "sixteen cores": ("accuracy-16-cores", "accuracy-16-cores-gpt", "orders-cores", "exchanges-cores"),
    "slices of an H200": ("orders-gpu", "exchanges-gpu", "exchanges-gpu-gpt", "exchanges-gpu-mobilenet"),
    "two cores, 1 Gbit/s": (*SLOW, *(f"{name}-servers" for name in SLOW), "exchanges-slow-four"),
}
ACCURACY = tuple(name for names in MACHINES.values() for name in names)
ESTIMATED = "estimates-blind"  # on one device, by a file of it
ALONE = "all, nothing known beforehand"
ESTIMATED_IN = {"tf32": "precision=tf32", "bf16": "autocast to bf16", "pure-bf16": "weights in bf16"}


def systems() -> str:
    """For every key, what carries it in the design."""
    lines = ["| group | key | system | what carries it | here |", "|---|---|---|---|---|"]
    for row in SYSTEMS.values():
        here = f"`{row.choices}`" if row.choices else ""
        lines.append(f"| {row.group} | `{row.key}` | {row.name} | {row.carried_by} | {here} |")
    return "\n".join(lines)


def _origin(data: dict[str, Any]) -> list[str]:
    """On what, when and by which command a table was measured."""
    return [f"{data['machine']}, torch {data['torch']}, {data['made']}: `{data['command']}`", ""]


def accuracy(name: str) -> str:
    """Predicted against measured, from a file of benchmarks/accuracy.py."""
    data = json.loads((DATA / f"{name}.json").read_text())["data"]
    lines = [
        *_origin(data),
        "| workload | plan | predicted ms | measured ms | error | raw error | noise floor |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in data["rows"]:
        plan, name = re.sub(r" stages=\S+", "", row["plan"]), row["workload"].partition(":layers")[0]
        noise = row["noise_floor"]
        lines.append(
            f"| {name} | `{plan}` | {row['predicted_s'] * 1e3:.1f} | {row['measured_s'] * 1e3:.1f} | "
            f"{row['error']:+.1%} | {row['raw_error']:+.1%} | {noise:.1%} |"
        )
    for name, asked, why in data.get("failures", []):
        lines.append(f"| {name.partition(':layers')[0]} | `{asked}` | fails: {why} | | | | |")
    errors = [abs(row["error"]) for row in data["rows"]]
    noise = median(row["noise_floor"] for row in data["rows"])
    shapes = dict.fromkeys(name for name in (row["workload"] for row in data["rows"]) if ":layers" in name)
    lines += ["", f"gpt is {' and '.join(f'`{shape}`' for shape in shapes)}."] if shapes else []
    lines += ["", f"Median |error| {median(errors):.1%}, worst {max(errors):.1%}; median noise floor {noise:.1%}."]
    return "\n".join(lines)


def medians() -> str:
    """By kind of plan and machine: the median |error| of all rows that were measured, and how many they are."""
    found: dict[str, dict[str, list[float]]] = {}
    for machine, names in MACHINES.items():
        for name in names:
            for row in json.loads((DATA / f"{name}.json").read_text())["data"]["rows"]:
                for kind in (plan_kind(parse(row["plan"])), "all of them"):
                    found.setdefault(kind, {}).setdefault(machine, []).append(abs(row["error"]))
    found["all of them"] = found.pop("all of them")  # the last row
    lines = [f"| plan | {' | '.join(MACHINES)} |", f"|---|{'--:|' * len(MACHINES)}"]
    for kind, by_machine in found.items():
        cells = [f"{median(own):.1%} ({len(own)})" if (own := by_machine.get(m)) else "" for m in MACHINES]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def engine(name: str) -> str:
    """Our engine against torch's own, from a file of benchmarks/engine.py."""
    data = json.loads((DATA / f"{name}.json").read_text())
    lines = [
        *_origin(data),
        "| system | ranks | ours ms | theirs ms | ratio | 95 % interval | ours busy ms | theirs busy ms |",
        "|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for row in data["rows"]:
        busy = [f"{row[key] * 1e3:.1f}" if key in row else "" for key in ("ours_busy_s", "torch_busy_s")]
        lines.append(
            f"| {row['system']} | {row['ranks']} | {row['ours_s'] * 1e3:.2f} | {row['torch_s'] * 1e3:.2f} | "
            f"{row['ratio']:.3f} | {row['low']:.3f} to {row['high']:.3f} | {busy[0]} | {busy[1]} |"
        )
    return "\n".join(lines)


def exchanges(name: str) -> str:
    """Every exchange by itself, from a file of benchmarks/exchanges.py: how long, and how far predictions are off."""
    data = json.loads((DATA / f"{name}.json").read_text())["data"]
    rows = data["rows"]
    sizes = sorted({_about(row["bytes"]) for row in rows})
    titles = [f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB" for size in sizes]
    lines = [
        *_origin(data),
        "Milliseconds as measured, and the errors of the clock and of the closed form:",
        "",
        f"| exchange | ranks | {' | '.join(titles)} |",
        f"|---|--:|{'--:|' * len(sizes)}",
    ]
    for exchange, ranks in dict.fromkeys((row["exchange"], row["ranks"]) for row in rows):
        own = {_about(r["bytes"]): r for r in rows if (r["exchange"], r["ranks"]) == (exchange, ranks)}
        cells = [_exchanged(own[size]) if size in own else "" for size in sizes]
        lines.append(f"| {exchange} | {ranks} | {' | '.join(cells)} |")
    for key, words in (("predicted_s", "the clock"), ("closed_s", "the closed form")):
        errors = [abs(row[key] / row["measured_s"] - 1) for row in rows]
        lines += ["", f"Median |error| of {words} {median(errors):.1%}, worst {max(errors):.1%}."]
    return "\n".join([*lines, "", f"Median noise floor {median(row['noise_floor'] for row in rows):.1%}."])


def _about(size: int) -> int:
    """The size that was meant: shares are equal, so a tensor may be some elements shorter."""
    return 1 << (size - 1).bit_length()


def _exchanged(row: dict[str, float]) -> str:
    errors = [f"{row[key] / row['measured_s'] - 1:+.0%}" for key in ("predicted_s", "closed_s")]
    return f"{row['measured_s'] * 1e3:.3f} ({errors[0]}, {errors[1]})"


def directions(name: str) -> str:
    """Gathering a tensor three ways, from a file of benchmarks/directions.py."""
    data = json.loads((DATA / f"{name}.json").read_text())
    lines = [*_origin(data), "| way | two ranks come | median ms | least | most |", "|---|---|--:|--:|--:|"]
    for row in data["rows"]:
        seconds = row["median_s"], min(row["seconds"]), max(row["seconds"])
        lines.append(f"| {row['way']} | {row['when']} | {' | '.join(f'{s * 1e3:.0f}' for s in seconds)} |")
    return "\n".join([*lines, "", f"At the link's rate it would be {data['least_s'] * 1e3:.0f} ms, without headers."])


def overlap(name: str) -> str:
    """How much of an exchange is hidden, from a file of benchmarks/overlap.py."""
    data = json.loads((DATA / f"{name}.json").read_text())
    alone = sum(data["alone_s"].values())
    lines = [
        *_origin(data),
        f"The layers of a step take {data['layers_s'] * 1e3:.0f} ms; with no exchange it takes {alone * 1e3:.0f} ms.",
        f"Half of a layer passes the link in {data['share_s'] * 1e3:.1f} ms.",
        "",
        "| | measured ms | predicted ms | ideal ms | of the ideal |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in data["rows"]:
        predicted = f"{row['predicted_s'] * 1e3:.1f}" if row["predicted_s"] else ""
        cells = f"{row['seconds'] * 1e3:.1f} | {predicted} | {row['ideal_s'] * 1e3:.1f}"
        lines.append(f"| {row['name']} | {cells} | {row['seconds'] / row['ideal_s']:.3f} |")
    return "\n".join(lines)


def preload(name: str) -> str:
    """What loading the next batch ahead is worth, from a file of benchmarks/preload.py."""
    data = json.loads((DATA / f"{name}.json").read_text())
    lines = [
        *_origin(data),
        "| device | workload | plan | off ms | of it inputs | on ms | of it inputs | ratio | 95 % interval |",
        "|---|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in data["rows"]:
        cells = [f"{row['device']} | {row['model']}, {row['batch']} | `{row['asked']}`"]
        for word in ("off", "on"):
            kinds = row["kinds_s"][word]
            inputs = sum(kinds.get(kind, 0.0) for kind in ("LOAD", "SEND_INPUT", "RECV_INPUT"))
            cells.append(f"{row[f'{word}_s'] * 1e3:.2f} | {inputs / row[f'{word}_s']:.1%}")
        lines.append(f"| {' | '.join(cells)} | {row['ratio']:.3f} | {row['low']:.3f} to {row['high']:.3f} |")
    return "\n".join(lines)


def staleness(name: str) -> str:
    """Epochs to an accuracy under asynchronous rules, from a file of `trainplan study staleness`."""
    data = json.loads((DATA / f"{name}.json").read_text())["data"]
    lines = [f"{data['made']}: `{data['command']}`"]
    for task, target in data["targets"].items():
        rows = [row for row in data["rows"] if row["task"] == task]
        counts = sorted({row["workers"] for row in rows})
        lines += ["", f"| {task}, to {target:.0%} | {' | '.join(map(str, counts))} |", f"|---|{'--:|' * len(counts)}"]
        for rule in dict.fromkeys(row["rule"] for row in rows):
            own = {row["workers"]: row for row in rows if row["rule"] == rule}
            lines.append(f"| {rule} | {' | '.join(_epochs(own[count]) for count in counts)} |")
    return "\n".join(lines)


def _epochs(row: dict[str, Any]) -> str:
    """Epochs, and the speed-up; of a target that most seeds did not reach, how many did."""
    if row["epochs"] is None:
        return f"{row['reached']} of {row['seeds']}"
    return f"{row['epochs']:.2g} ({row['speedup']:.1f} ×)"


def movement(name: str) -> str:
    """Shares of a step that inputs and the model take, from a file of `trainplan study data-movement`."""
    data = json.loads((DATA / f"{name}.json").read_text())["data"]
    rows = [row for row in data["rows"] if row["how"] == "predicted"]
    counts = sorted({row["devices"] for row in rows})
    lines = [f"No machine: predictions, {data['made']}: `{data['command']}`", ""]
    lines += [f"| input, model in % | preload | {' | '.join(map(str, counts))} |", f"|---|---|{'--:|' * len(counts)}"]
    for network, preload in dict.fromkeys((row["network"], row["preload"]) for row in rows):
        own = {r["devices"]: r for r in rows if (r["network"], r["preload"]) == (network, preload)}
        cells = [f"{100 * r['input']:.1f}, {100 * r['model']:.1f}" if r["fits"] else "×" for r in own.values()]
        lines.append(f"| {network} | {preload} | {' | '.join(cells)} |")
    return "\n".join(lines)


def influence(name: str) -> str:
    """What every method raises and lowers, from a file of `trainplan study methods`."""
    data = json.loads((DATA / f"{name}.json").read_text())["data"]
    lines = [f"No machine: predictions, {data['made']}: `{data['command']}`", ""]
    lines += [f"{data['workload']} on {data['cluster']}; bytes in GiB.", ""]
    titles = [title.strip(">") for title in TITLES.values()]
    lines += [f"| method | plan | {' | '.join(titles)} | survey says |", f"|---|---|{'--:|' * len(titles)}---|"]
    for row in influences(data["rows"]):
        plan = f"`{re.sub(r' (stages|bucket)=[^ ]+', '', row['plan'])}`" if row["cells"] else row["plan"]
        cells = " | ".join(row["cells"] or [""] * len(titles))
        lines.append(f"| {row['method']} | {plan} | {cells} | {row['differs']} |")
    return "\n".join(lines)


def clock(name: str) -> str:
    """How fast plans are simulated, from a file of benchmarks/clock.py."""
    data = json.loads((DATA / f"{name}.json").read_text())
    parts = ("lower", "wire", "check", "play", "total")
    lines = [
        f"One core of: {data['machine']}, {data['made']}: `{data['command']}`",
        "",
        f"| schedule | operations | {' | '.join(parts)} | million operations a second |",
        f"|---|--:|{'--:|' * len(parts)}--:|",
    ]
    for row in data["rows"]:
        cells = " | ".join(f"{row[part] * 1e3:.1f}" for part in parts)
        rate = row["operations"] / row["play"] / 1e6
        lines.append(f"| {row['schedule']} | {row['operations']:,} | {cells} | {rate:.1f} |")
    return "\n".join(lines)


def searches(name: str) -> str:
    """How a search grows with devices and layers, from a file of benchmarks/searches.py."""
    data = json.loads((DATA / f"{name}.json").read_text())
    lines = [
        f"One core of: {data['machine']}, {data['made']}: `{data['command']}`",
        "",
        "| devices | layers | plans | cannot fit | simulated | may have a place | may be better by | s of one core |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in data["grow"]:
        counts = " | ".join(f"{row[key]:,}" for key in ("devices", "layers", "plans", "too_big", "simulated", "left"))
        better = f"{row['gap']:.1%}" if row["step_s"] else "–"
        lines.append(f"| {counts} | {better} | {row['seconds']:.2f} |")
    return "\n".join(lines)


def published(name: str) -> str:
    """Published step times against predictions, from a file of `trainplan bench published`."""
    data = json.loads((DATA / f"{name}.json").read_text())
    grids, sharded = data["vtrain_single_node_subset.csv"], data["llm_foundry_mpt_subset.csv"]
    lines = [
        f"No machine: predictions, {data['made']}: `{data['command']}`",
        "",
        "| Megatron on A100, one node | rows predicted | mean | median | worst | regret, mean | worst |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for what, row in grids.items():
        cells = " | ".join(f"{row[key]:.1%}" for key in ("mean", "median", "worst", "regret", "worst_regret"))
        lines.append(f"| {what} | {row['rows']} | {cells} |")
    lines += ["", "| FSDP | labelled rows | sustained | rows predicted | mean | median | worst |", f"|---|{'--:|' * 6}"]
    for what, row in sharded.items():
        if isinstance(row, dict):
            cells = " | ".join(f"{row[key]:.1%}" for key in ("mean", "median", "worst"))
            lines.append(f"| {what} | {row['labelled']} | {row['sustained']:.2f} | {row['rows']} | {cells} |")
    lines += [f"| {word} | | | | {sharded[key]:.1%} | | |" for word, key in (("all", "mean"), (ALONE, "one_constant"))]
    errors = as_asked(data)
    head = "| steps as anybody asks for them | rows | half within | nine of ten within | worst | inside | held out |"
    lines += ["", head, f"|---|{'--:|' * 6}"]
    whole = told(errors)
    for file, own in errors.items():
        rest = told({name: other for name, other in errors.items() if name != file})
        shares = [f"{inside(own, by['median']):.0%}, {inside(own, by['within']):.0%}" for by in (whole, rest)]
        cells = " | ".join(f"{told({file: own})[key]:.1%}" for key in ("median", "within", "worst"))
        lines.append(f"| `{file}` | {len(own)} | {cells} | {' | '.join(shares)} |")
    cells = " | ".join(f"{whole[key]:.1%}" for key in ("median", "within", "worst"))
    lines.append(f"| all, each table alike: told | {whole['runs']} | {cells} | | |")
    titles = {
        "timm_train_rtx3090_subset.csv": "timm's networks on an RTX 3090, fp16",
        "pipedream_profile_totals.csv": "pipedream's sums of layers, a V100",
        "pipedream_profile_layers_vgg16_alexnet.csv": "pipedream's layers, forward",
        "pytorch_gpu_benchmark_ryujaehun_subset.csv": "forward and backward of 12 images",
        "lambda_labs_pytorch_subset.csv": "ResNet-50 on several devices",
        "matmul_mamf.csv": "the fastest product of three devices",
    }
    head = "| one device | | rows | left out | constant | rank | ratios | mean | median | worst | |"
    lines += ["", head, f"|---|---|{'--:|' * 8}---|"]
    for file, title in titles.items():
        for what, row in data[file].items():
            shares = " | ".join(f"{row[key]:.1%}" for key in ("ratios", "mean", "median", "worst"))
            # Where layers were timed one by one, the constant is how long each of them waits.
            constant = f"{row['constant']:.2f}" if "constant" in row else f"{1e6 * row['wait_s']:.0f} µs a layer"
            counts = f"{row['rows']} | {len(row['left_out'])} | {constant} | {row['rank']:.2f}"
            lines.append(f"| {title} | {what} | {counts} | {shares} | {row['worst_is']} |")
    lines += [
        "",
        "| NCCL's collectives, nothing fitted | sizes, 1 MiB on | mean | median | worst | at | mean, 64 MiB on |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for file in ("vtrain_nccl_allreduce_lut_subset.csv", "nccl_collectives_published.csv"):
        for what, row in data[file].items():
            shares = " | ".join(f"{row[key]:.1%}" for key in ("mean", "median", "worst"))
            lines.append(f"| {what} | {row['rows']} | {shares} | {row['worst_is']} | {row['large']:.1%} |")
    return "\n".join(lines)


def cpu_to_gpu(name: str) -> str:
    """Whether a measurement on a CPU helps, from a file of benchmarks/cpu_to_gpu.py."""
    data = json.loads((DATA / f"{name}.json").read_text())
    head = f"{data['machine']}, torch {data['versions']['torch']}, {data['made']}: `{data['command']}`, then `show`"
    lines = [head, "", "| seconds on the GPU from | networks | mean error | median | worst |", f"|---|{'--:|' * 4}"]
    for what, row in [*data["scores"].items(), *((f"{what}, blind", row) for what, row in data["blind"].items())]:
        shares = " | ".join(f"{row[key]:.1%}" for key in ("mean", "median", "worst"))
        lines.append(f"| {what} | {row['networks']} | {shares} |")
    return "\n".join(lines)


def gaps(name: str) -> str:
    """How far heuristics are from the best, and how long solvers take, from a file of benchmarks/partitioners.py."""
    data = json.loads((DATA / f"{name}.json").read_text())
    lines = [
        f"`{data['command']}`",
        "",
        "| partitioner | against the best of | instances | best found | mean gap | worst gap | no answer |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in data["gaps"]:
        share = row["best"] / row["instances"]
        lines.append(
            f"| {row['partitioner']} | {row['against']} | {row['instances']} | {share:.1%} | {row['mean_gap']:.2%} | "
            f"{row['worst_gap']:.1%} | {row['unanswered']} |"
        )
    speed = data["speed"]
    slowest = max(speed["seconds"], key=speed["seconds"].get)
    size = f"{speed['blocks']} blocks on {speed['devices']} devices"
    took = f"{speed['seconds'][slowest]:.2f} s at most ({slowest}); the goal is {speed['goal_s']:g} s"
    return "\n".join([*lines, "", f"{size} take {took}."])


def estimates(name: str) -> str:
    """Steps of one device: estimated before any was measured, and measured twice."""
    first = json.loads((DATA / f"{name}.json").read_text())["data"]
    second = {_case(row): row for row in json.loads((DATA / f"{name}-repeated.json").read_text())["data"]}
    lines = [
        "| model | samples | precision | estimated ms | measured ms | error | once more ms | error | memory |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in first:
        runs = row, second[_case(row)]
        errors = [row["estimated_s"] / one["measured_s"] - 1 for one in runs]
        taken = row["estimated_bytes"] / row["measured_bytes"] - 1
        host = row["estimated_issue_s"] > 0.9 * row["estimated_s"]
        model = row["workload"].removeprefix("benchmarks/networks.py:").removesuffix(",vocab=50257")
        cells = [f"{one['measured_s'] * 1e3:.1f} | {error:+.1%}" for one, error in zip(runs, errors, strict=True)]
        lines.append(
            f"| {model}{' (host)' if host else ''} | {row['samples']} | {row['precision']} | "
            f"{row['estimated_s'] * 1e3:.1f} | {' | '.join(cells)} | {taken:+.1%} |"
        )
        for side, (one, error) in enumerate(zip(runs, errors, strict=True)):
            groups = {"all": error, f"bound by the {'host' if host else 'device'}": error, "memory": taken}
            if not host and one["issue_s"] <= 0.9 * one["measured_s"]:
                groups["bound by the device as measured, too"] = error
            for group, off in groups.items():
                found.setdefault(group, ([], []))[side].append(abs(off))
    lines += ["", "| | cases | median | worst | cases once more | median | worst |", f"|---|{'--:|' * 6}"]
    for group, sides in found.items():
        cells = [f"{len(side)} | {median(side):.1%} | {max(side):.1%}" for side in sides]
        lines.append(f"| {group} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _case(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["workload"], row["samples"], row["precision"]


def rewritten(text: str) -> str:
    """A page with every table between <!-- NAME ARGUMENT --> and <!-- /NAME --> made anew."""
    makers = {
        "systems": systems, "medians": medians, "accuracy": accuracy, "engine": engine, "clock": clock, "gaps": gaps,
        "exchanges": exchanges, "overlap": overlap, "preload": preload, "published": published,
        "cpu_to_gpu": cpu_to_gpu, "staleness": staleness, "movement": movement, "estimates": estimates,
        "influence": influence, "searches": searches, "directions": directions,
    }  # fmt: skip

    def table(match: re.Match[str]) -> str:
        maker, argument = makers[match[1]], (match[2] or "").strip()
        measured = not argument or (DATA / f"{argument}.json").exists()
        made = maker(*filter(None, [argument])) if measured else "Not measured yet."
        return f"<!-- {(match[1] + ' ' + argument).strip()} -->\n{made}\n<!-- /{match[1]} -->"

    return re.sub(
        rf"<!-- ({'|'.join(makers)})( [\w.-]+)? -->.*?<!-- /\1 -->", lambda m: table(m), text, flags=re.DOTALL
    )


def known_errors(*names: str) -> str:
    """What every prediction says of its own error (src/trainplan/bench/accuracy.json), from the same files."""
    paths = [DATA / f"{name}.json" for name in names]
    runs = [json.loads(path.read_text())["data"] for path in paths if path.exists()]
    found: dict[str, list[tuple[float, str, float]]] = {}
    for data in runs:
        for row in data["rows"]:
            kind = f"measured {data['device']} eager {plan_kind(parse(row['plan']))}"
            found.setdefault(kind, []).append((abs(row["error"]), data["machine"], row["measured_s"]))
    for row in json.loads((DATA / f"{ESTIMATED}.json").read_text())["data"]:
        error = abs(row["estimated_s"] / row["measured_s"] - 1)
        kind = with_more("estimated H200 eager single", ESTIMATED_IN[row["precision"]])
        found.setdefault(kind, []).append((error, "NVIDIA H200", row["measured_s"]))
    table = {}
    for kind, rows in sorted(found.items()):
        errors, took = [error for error, *_ in rows], [seconds for *_, seconds in rows]
        machines = " and ".join(dict.fromkeys(machine for _, machine, _ in rows))
        table[kind] = {
            "median": round(median(errors), 3), "worst": round(max(errors), 3), "runs": len(errors),
            "source": f"{machines}; docs/accuracy.md",
            "shortest_s": float(f"{min(took):.3g}"), "longest_s": float(f"{max(took):.3g}"),
        }  # fmt: skip
    table[ELSEWHERE] = told(as_asked(json.loads((DATA / "published.json").read_text())))
    return json.dumps(table, indent=1) + "\n"


def main() -> None:
    (HERE.parent / "src" / "trainplan" / "bench" / "accuracy.json").write_text(known_errors(*ACCURACY))
    for page in HERE.glob("*.md"):
        text = page.read_text()
        if (new := rewritten(text)) != text:
            page.write_text(new)
            print(f"rewrote {page.name}")


if __name__ == "__main__":
    main()
