"""The lines that several answers share: the model and the cluster that were believed, what MFU means, our own error."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from trainplan.cluster.cluster import Cluster
from trainplan.cluster.describe import describe
from trainplan.predict.predict import MEMORY_MARGIN, Prediction
from trainplan.profile.profile import MIXED, Profile
from trainplan.search.answer import Recommendation
from trainplan.units import count, percent, seconds, significant

NOWHERE = "none: "  # machines of estimated profiles begin so


def model_line(profile: Profile, batch: int, planned: str = "fp32") -> str:
    """Size, work and batch of a model, what of it is trained in another form than it was written, and what its profile
    is; `planned` is the precision that a plan has."""
    words = f"{profile.workload}: {count(profile.parameter_count)} parameters in {len(profile.blocks)} blocks, "
    words += f"{_work(3 * profile.flops)} per {profile.sample} (forward and backward), batch {batch:,}"
    if profile.tokens_per_sample:
        words += f" × {profile.tokens_per_sample:,} = {count(batch * profile.tokens_per_sample)} tokens a step"
    notes = [f"note     {note}" for note in profile.notes]
    return "\n".join([f"model    {words}", *notes, f"profile  {profile_words(profile, planned)}"])


def profile_words(profile: Profile, planned: str = "fp32") -> str:
    """What a profile is worth."""
    made = profile.provenance
    where = f"{profile.kind} on {profile.device} ({made.machine})"
    if made.machine.startswith(NOWHERE):  # which says for what, and from what
        where = made.machine.removeprefix(NOWHERE)
    words = f"{where}, {'compiled' if profile.compiled else 'eager'}, "
    precision = profile.precision or f"{MIXED} types"
    precision += f" ({planned} by the plan)" if planned not in ("fp32", profile.precision) else ""
    words += f"{precision}, {profile.optimizer}, micro-batches of {_sizes(profile.samples)}"
    if made.spread:
        words += f", spread {percent(made.spread)}"
    return words


def _sizes(samples: tuple[int, ...]) -> str:
    return str(samples[0]) if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"


def _work(flops: float) -> str:
    for factor, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if flops >= factor:
            return f"{significant(flops / factor)} {unit}"
    return f"{significant(flops)} FLOP"


def cluster_lines(cluster: Cluster) -> str:
    """The cluster as it was believed, links and all."""
    return "cluster  " + describe(cluster).replace("\n", "\n         ")


def search_lines(found: Recommendation) -> list[str]:
    """What was searched: how large it is field by field, what was done with it, what is certain, what is left out."""
    pruned = f"{found.pruned:,} not, as they cannot be among the best"
    done = f"{found.considered:,} plans bounded, {found.simulated:,} simulated, {pruned}"
    lines = [f"search   {done}; {seconds(found.seconds)}"]
    sizes = " × ".join(f"{field} {size}" for field, size in found.sizes.items() if size > 1) or "one plan"
    lines.append(f"space    {sizes}, as far as they go together; {found.too_big:,} plans cannot fit")
    lines.append("         then cuts, buckets, exchanges and loading of the best, by the clock")
    lines.append(f"         not searched: {'; '.join(found.left_out)}")
    if found.predicted:
        lines.append("         tp, sequence, precision and recompute=selective are predicted, not yet run here")
    if found.wishes.words:
        lines.append(f"asked    {found.wishes.words}")
    objective = found.wishes.best
    if found.bound is not None and found.gap is not None:
        none = f"so none is {objective.than} than the first"
        if found.better:
            none = f"so one may be {percent(found.gap)} {objective.than} than the first that was found"
        lines.append(
            f"bound    with cuts and buckets as usual no plan that fits {objective.verb} less than "
            f"{objective.words(found.bound)}, {none}"
        )
        if found.ranked and objective.value(found.best) < found.bound:
            lines.append(f"         (others were tried out for it: {objective.words(objective.value(found.best))})")
    if found.left:
        of = f", {found.better:,} of them to be the best" if found.better else ", none of them to be the best"
        lines.append(f"         stopped early: {found.left:,} plans were left that may have a place in the table{of}")
    kept = f"tensors of plans that fit leave {percent(MEMORY_MARGIN)} of every device free, beside its own libraries"
    gpu = any(device.name != "cpu" for device in found.cluster.kinds.values())
    lines.append(f"margin   {kept}" + ("; and torch's allocator has room for those that are shown" if gpu else ""))
    return lines


def epoch_words(profile: Profile) -> str:
    """What an epoch is: seconds and prices of one rest on it."""
    return f"of {profile.samples_per_epoch:,} {profile.sample}s{', assumed' if profile.epoch_assumed else ''}"


def mfu_words(share: float | None) -> str:
    """MFU in percent, or a dash.

    >>> mfu_words(0.412), mfu_words(None)
    ('41.2', '–')
    """
    return "–" if share is None else significant(share * 100)


def mfu_line(predictions: Sequence[Prediction]) -> str:
    """The formula, with the peaks that it divides by; or why there is no number."""
    return next((p.mfu_note for p in predictions if p.mfu is not None), predictions[0].mfu_note)


def error_line(predictions: Iterable[Prediction]) -> str:
    """What we know of our own error, for the kinds of plan that are shown; what was measured together, together.

    Of one kind some steps may be like those that were measured, and some far from them.
    """
    errors = sorted((p.error for p in predictions), key=lambda error: error.kind)
    known = {error.kind: error for error in errors if error.median is not None}
    said = []
    for source in dict.fromkeys(error.source for error in known.values()):
        same: dict[str, list[str]] = {}
        for kind, error in known.items():
            if error.source == source:
                same.setdefault(error.numbers, []).append(kind)
        alike = [f"{', '.join(kinds)}: {numbers}" for numbers, kinds in same.items()]
        said.append(f"{'; '.join(alike)} ({source})")
    unknown: dict[str, list[str]] = {}
    for error in errors:
        if error.median is None and error.kind not in unknown.setdefault(error.source, []):
            unknown[error.source].append(error.kind)
    for source, alike in unknown.items():
        said.append(f"{', '.join(alike)} {'have' if len(alike) > 1 else 'has'} not been measured with {source}")
    return "error    " + "; ".join(said)


def command(name: str, *words: str, **options: object) -> str:
    """A command line that can be pasted.

    >>> command("run", "resnet18:cifar10", plan="dp=2 bucket=4MiB", cluster="local", batch=None)
    "trainplan run resnet18:cifar10 --plan 'dp=2 bucket=4MiB' --cluster local"
    """
    parts = ["trainplan", name, *words]
    for key, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                parts.append(f"--{key.replace('_', '-')}")
            elif item is not False and item not in (None, ""):
                parts += [f"--{key.replace('_', '-')}", str(item)]
    return shlex.join(parts)
