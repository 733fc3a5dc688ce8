"""What is legal, with the reason. One function a rule; `check` raises the first that is broken.

These are the rules that need only the plan, the number of blocks and the batch. Whether a plan fits in memory is for
`predict` to say.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from trainplan.errors import PlanError, closest
from trainplan.plan.decided import DECIDED, check_decided, check_decided_model
from trainplan.plan.exchanges import check_exchange
from trainplan.plan.offload import check_offload
from trainplan.plan.optimizers import check_optimizer
from trainplan.plan.order import GIVEN, known
from trainplan.plan.plan import WORDS, Plan, usual_lines, usual_placement
from trainplan.plan.served import ASYNCHRONOUS, check_served, check_served_model, fewer_devices
from trainplan.plan.sliced import check_sliced, check_sliced_model
from trainplan.plan.text import brief
from trainplan.profile.profile import Profile
from trainplan.units import some


def check(plan: Plan, batch: int, world: int | None = None) -> Plan:
    """The plan itself, if it is legal for this batch and this many devices."""
    asked = f"plan {brief(plan)!r}"
    for field, words in WORDS.items():
        word = getattr(plan, field)
        if word not in words and not (field == "schedule" and plan.order):
            why = f"{field} is one of {', '.join(words)}, not {word}"
            raise PlanError(asked, why, f"{field}={closest(word, words)}")
    for field in ("dp", "pp", "micro", "tp", *(("bucket",) if plan.replicated else ())):
        if getattr(plan, field) < 1:
            raise PlanError(asked, f"{field} counts from 1, and is {getattr(plan, field)}", f"{field}=1")
    check_order(plan, asked)
    check_decided(plan, asked)
    _placement(plan, asked)
    check_sharding(plan, asked)
    check_ratio(plan, asked)
    check_exchange(plan, asked)
    check_stages(plan, asked)
    check_served(plan, asked)
    check_sliced(plan, asked)
    check_preload(plan, asked)
    check_offload(plan, asked)
    _devices(plan, asked, world)
    _batch(plan, asked, batch)
    return plan


# What some orders of work need beyond several stages.
CHUNKED = ("looped", "interleaved", "zb-v")  # several stages a rank
SLICED = "terapipe"  # every sequence in slices of tokens
TWO_WAYS = ("gems", "chimera", "chimera-doubled")  # half of the micro-batches down, half up
SPREAD = ("1f1b", "gpipe", "naive")  # stages may have different numbers of ranks
SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v")  # backward in two parts


def splits_backward(plan: Plan) -> bool:
    """Whether backward passes come in two parts, all or some.

    >>> from trainplan.plan.plan import plan
    >>> splits_backward(plan(pp=2, schedule="zb-h1")), splits_backward(plan(order=("0F0,0I0,0W0", "1F0,1B0")))
    (True, True)
    """
    return plan.schedule in SPLIT_BACKWARD or any("I" in line for line in plan.order)


def _order(plan: Plan, asked: str) -> None:
    """An order of work that is given says how many ranks and micro-batches there are."""
    if plan.schedule != GIVEN:
        raise PlanError(
            asked, f"an order of work is given, and schedule={plan.schedule} is another", "only one of them"
        )
    given = known(plan.order)
    if given.ranks < 2:
        why = "it has one line, so one rank, and an order of work between stages needs several"
        raise PlanError(asked, why, f"micro={given.micro}, without a schedule")
    for field, said in (("pp", given.ranks), ("micro", given.micro), ("chunks", 1), ("pairs", 1), ("spread", ())):
        if getattr(plan, field) != said:
            why = f"{field} is {getattr(plan, field)}, and the order of work that is given has {said}"
            raise PlanError(asked, why, f"{field}={said}")


def check_order(plan: Plan, asked: str) -> None:
    """Refused where an order of work does not go with the numbers of ranks, chunks, pairs and micro-batches."""
    schedule, pp = plan.schedule, plan.pp
    if plan.order:
        _order(plan, asked)
    if pp == 1 and schedule != "naive":
        raise PlanError(asked, "an order of work between stages needs several stages", "leaving schedule out, or pp=2")
    if plan.chunks < 1 or plan.pairs < 1 or any(count < 1 for count in plan.spread):
        raise PlanError(asked, "chunks, pairs and the ranks of a stage count from 1", "leaving them out")
    if plan.chunks > 1 and schedule not in CHUNKED:
        instead = "schedule=interleaved" if pp > 1 else "leaving chunks out"
        raise PlanError(asked, f"{schedule} has one stage a rank, not {plan.chunks}", instead)
    if schedule == "zb-v" and plan.chunks != 2:
        raise PlanError(asked, f"zb-v has two stages a rank, not {plan.chunks}", "chunks=2")
    if schedule.startswith("chimera") and pp % 2:
        raise PlanError(
            asked, f"two directions meet in the middle of an even number of stages, not {pp}", f"pp={pp + 1}"
        )
    if plan.pairs > 1 and (schedule != "chimera" or pp // 2 % plan.pairs):
        raise PlanError(asked, *_why_no_pairs(plan))
    if plan.recompute != "none" and splits_backward(plan):
        why = "a backward pass in two parts would recompute everything twice"
        raise PlanError(asked, why, "schedule=1f1b, or recompute=none")
    _slices(plan, asked)
    if plan.spread:
        if schedule not in SPREAD:
            why = f"different numbers of ranks a stage are for {', '.join(SPREAD)}, not {schedule}"
            raise PlanError(asked, why, "schedule=1f1b")
        if len(plan.spread) != pp:
            raise PlanError(asked, f"{len(plan.spread)} numbers of ranks for {pp} stages", f"pp={len(plan.spread)}")
    least = least_micro(plan)
    if plan.micro < least:
        why = f"with {some(plan.micro, 'micro-batch')} some copy of a stage has no work"
        raise PlanError(asked, why, f"micro={least}")


def check_ratio(plan: Plan, asked: str) -> None:
    """Refused where replicas cannot have different numbers of samples as asked."""
    if not plan.ratio:
        return
    ratio = ",".join(map(str, plan.ratio))
    if len(plan.ratio) != plan.dp:
        several = len(plan.ratio) > 1
        instead = f"dp={len(plan.ratio)} ratio={ratio}" if several else f"dp={plan.dp} without a ratio"
        raise PlanError(asked, f"{some(len(plan.ratio), 'number')} for {some(plan.dp, 'replica')}", instead)
    if min(plan.ratio) < 1:
        at_least = ",".join(str(max(1, part)) for part in plan.ratio)
        raise PlanError(asked, "every replica has samples, and the ratio counts from 1", f"ratio={at_least}")
    if plan.exchange in ASYNCHRONOUS:
        why = f"under exchange={plan.exchange} a worker that is faster takes more steps, all of them alike"
        raise PlanError(asked, why, f"exchange={plan.exchange} without a ratio")


def check_sharding(plan: Plan, asked: str) -> None:
    """Refused where replicas cannot share out their states as asked."""
    zero, shard = plan.zero, plan.sharers
    if not 0 <= zero <= 3:
        why = f"zero is 0 (nothing is shared out), 1, 2 or 3, not {zero}"
        raise PlanError(asked, why, f"zero={0 if zero < 0 else 3}")
    if not zero:
        if plan.shard:
            why = f"shard={plan.shard} says how many replicas share out, and nothing says what"
            whose = plan.exchange == "all-reduce"  # no other exchange shares out
            raise PlanError(asked, why, f"zero=3 shard={plan.shard}" if whose else "leaving shard out")
        return
    if plan.exchange != "all-reduce":
        why = (
            f"exchange={plan.exchange} sums whole gradients, and under zero={zero} each rank gets its share of the sum"
        )
        raise PlanError(asked, why, "exchange=all-reduce, or zero=0")
    if plan.lines > 1:
        what = "different numbers of ranks a stage" if plan.spread else "pipelines in two directions"
        why = f"zero={zero} shares out the states of a stage among its replicas, one rank of each; {what} have several"
        raise PlanError(asked, why, f"schedule=1f1b zero={zero}, or zero=0")
    if plan.schedule in ("lockstep", SLICED):
        raise PlanError(asked, f"schedule={plan.schedule} has no place for gathering weights in it", "schedule=1f1b")
    if zero > 1 and splits_backward(plan):
        why = f"zero={zero} sums gradients as backward goes, and {plan.schedule} has them only in its second part"
        raise PlanError(asked, why, "zero=1, or schedule=1f1b")
    if plan.dp == 1:
        raise PlanError(asked, f"zero={zero} shares out among replicas, and there is one", "dp=2, or zero=0")
    if shard == 1 or plan.dp % shard:
        fits = [str(count) for count in range(2, plan.dp + 1) if plan.dp % count == 0]
        why = f"{plan.dp} replicas cannot be put into groups of {shard}"
        if shard == 1:
            why = "one replica alone has nothing to share out"
        raise PlanError(asked, why, f"shard={' or '.join(fits)}")


def can_share(plan: Plan) -> bool:
    """Whether replicas can share out their states as a plan says.

    >>> from trainplan.plan.plan import plan
    >>> [can_share(plan(dp=dp, zero=1)) for dp in (1, 2)], can_share(plan(dp=2, pp=2, schedule="gems", zero=1))
    ([False, True], False)
    """
    try:
        check_sharding(plan, "")
    except PlanError:
        return False
    return True


def check_sketch(plan: Plan, asked: str) -> None:
    """The same of a plan whose slices may still be open."""
    check_order(replace(plan, slices=plan.slices or ((1, 1) if plan.schedule == SLICED else ())), asked)


def _why_no_pairs(plan: Plan) -> tuple[str, str]:
    """Why a plan cannot have so many pairs of pipelines, and what it could have."""
    if plan.schedule != "chimera":
        why = f"pairs of pipelines in opposite directions are chimera's, not {plan.schedule}'s"
        return why, "schedule=chimera, or leaving pairs out"
    half = plan.pp // 2
    fits = [str(pairs) for pairs in range(1, half + 1) if half % pairs == 0]
    why = (
        f"pairs={plan.pairs} must divide half of pp={plan.pp}, which is {half}, so that all have as many micro-batches"
    )
    return why, f"pairs={' or '.join(fits)}"


def takes_slices(schedule: str, asked: str) -> None:
    """Refused where an order of work does not cut sequences."""
    if schedule != SLICED:
        why = f"{schedule} takes sequences whole: nothing carries keys and values from slice to slice"
        raise PlanError(asked, why, f"schedule={SLICED}, or no slices")


def _slices(plan: Plan, asked: str) -> None:
    if plan.slices:
        takes_slices(plan.schedule, asked)
    if plan.schedule != SLICED:
        return
    if len(plan.slices) < 2 or min(plan.slices) < 1:
        why = f"{SLICED} cuts every sequence into two slices or more, of at least one token, not {plan.slices}"
        raise PlanError(asked, why, "slices=4, or schedule=gpipe for whole sequences")


def check_model(plan: Plan, profile: Profile) -> Plan:
    """The plan itself, if its slices are slices of this model's sequences, and these can be cut (a sketch may leave
    the slices open); if its servers have something to serve; and if it asks for nothing that the model's training
    forbids."""
    asked = f"plan {brief(plan)!r} for {profile.workload}"
    check_served_model(plan, profile, asked)
    check_sliced_model(plan, profile, asked)
    check_optimizer(plan, profile, asked)
    if plan.exchange in DECIDED:
        check_decided_model(plan, profile)
    if plan.schedule != SLICED:
        return plan
    if profile.whole_sequences is not None:
        raise PlanError(asked, profile.whole_sequences, "schedule=1f1b or gpipe, which take sequences whole")
    tokens = profile.tokens_per_sample
    if plan.slices and sum(plan.slices) != tokens:
        why = f"the slices sum to {sum(plan.slices)} tokens, and a sequence has {tokens}"
        raise PlanError(asked, why, f"slices={','.join(map(str, split(tokens, min(len(plan.slices), tokens))))}")
    return plan


def is_order(plan: Plan) -> bool:
    """Whether a plan's order of work goes with its numbers of ranks, chunks, pairs and micro-batches.

    >>> from trainplan.plan.plan import plan
    >>> [is_order(plan(pp=pp, micro=8, schedule="chimera")) for pp in (2, 3)]
    [True, False]
    """
    try:
        check_order(plan, "")
    except PlanError:
        return False
    return True


def least_micro(plan: Plan) -> int:
    """The fewest micro-batches with which every copy of a stage has work.

    >>> from trainplan.plan.plan import plan
    >>> least_micro(plan(pp=4, schedule="chimera")), least_micro(plan(pp=2, spread=(3, 1))), least_micro(plan(pp=4))
    (2, 3, 1)
    """
    if plan.spread:
        return max(plan.spread)
    return 2 * plan.pairs if plan.schedule in TWO_WAYS else 1


def check_stages(plan: Plan, asked: str) -> None:
    """Refused where the cuts do not make the stages."""
    wanted = plan.wanted
    if wanted > plan.blocks:
        raise PlanError(asked, f"{wanted} stages, but the model has only {plan.blocks} blocks", fewer_stages(plan))
    if plan.depth != wanted:
        why = f"{wanted} stages need {wanted - 1} cuts, {len(plan.stages)} are given"
        raise PlanError(asked, why, "leaving stages open")
    wrong = [cut for before, cut in itertools.pairwise((0, *plan.stages)) if not before < cut < plan.blocks]
    if wrong:
        why = f"cuts must rise from 1 to {plan.blocks - 1}, so that each stage has at least one block"
        why += f": {wrong[0]} cannot be"
        raise PlanError(asked, why, "leaving stages open")


def fewer_stages(plan: Plan) -> str:
    """What a plan with more stages than blocks could be instead."""
    if plan.order:
        return f"an order of work with at most {plan.blocks} stages"
    if plan.wanted != plan.pp * plan.chunks:
        return f"a placement of at most {plan.blocks} stages"
    return f"pp={max(1, plan.blocks // plan.chunks)}"


def _placement(plan: Plan, asked: str) -> None:
    default = "leaving the placement out"
    usual = usual_placement(plan)
    if plan.placement is usual:
        return
    length = plan.wanted if plan.takes_any_table and plan.placement else len(usual[0])
    if len(plan.placement) != len(usual) or any(len(pipeline) != length for pipeline in plan.placement):
        sizes = ", ".join(str(len(pipeline)) for pipeline in plan.placement) or "none"
        why = f"a placement for this plan has {len(usual)} × {length} entries, and this one has {sizes}"
        raise PlanError(asked, why, default)
    others = [stage for pipeline in plan.placement for stage in pipeline if len(stage) != plan.tp]
    if others:
        many = "one rank" if plan.tp == 1 else some(plan.tp, "rank")
        why = f"a stage runs on {many}, and one is placed on {len(others[0])}"
        raise PlanError(asked, why, default)
    ranks = [rank for pipeline in plan.placement for stage in pipeline for rank in stage]
    wanted = [rank for pipeline in usual for stage in pipeline for rank in stage]
    if sorted(set(ranks)) != sorted(set(wanted)):
        why = f"a placement uses every rank from 0 to {max(wanted)}, and this one uses {sorted(set(ranks))}"
        raise PlanError(asked, why, default)
    if plan.takes_any_table:  # but replicas are alike
        first = [rank for stage in plan.placement[0] for rank in stage]
        wanted = [replica * plan.workers + rank for replica in range(plan.dp) for rank in first]
        if len(set(zip(ranks, wanted, strict=True))) != len(set(ranks)):
            raise PlanError(asked, "in every replica the same stages share a rank, and here they differ", default)
    # Else the order of work says which stages share a rank; the table may only say which rank that is.
    elif len(set(zip(ranks, wanted, strict=True))) != len(set(wanted)):
        raise PlanError(asked, *other_table(plan))


def other_table(plan: Plan) -> tuple[str, str]:
    """Why a table does not go with an order of work, and which does."""
    (first, *others), ranks = usual_lines(plan), ",".join
    if plan.spread:
        return "with different numbers of ranks a stage a table would need several ranks a stage", "leaving it out"
    why = f"schedule={plan.schedule} wants the stages on ranks {ranks(map(str, first))}"
    why += "".join(f" and {ranks(map(str, line))}" for line in others)
    instead = f"placement={ranks(map(str, first))}, with other names for the ranks"
    if not plan.order:
        instead += "; or schedule=1f1b, which takes any table"
    return f"{why}, or these ranks by other names", instead


def check_preload(plan: Plan, asked: str) -> None:
    """Refused where the next batch is to come while this one is trained, and nothing may go on meanwhile."""
    if plan.preload == "on" and plan.overlap == "off":
        why = "overlap=off has nothing on its way while anything is computed, and preload=on has the next batch"
        raise PlanError(asked, why, "preload=off, or overlap=on")


def _devices(plan: Plan, asked: str, world: int | None) -> None:
    if world is not None and plan.world > world:
        fits = [f"dp={dp} pp={pp}" for dp in range(plan.dp, 0, -1) for pp in range(plan.pp, 0, -1) if dp * pp <= world]
        why = f"it needs {plan.dp} × {plan.workers // plan.dp} = {plan.world} devices, and there are {world}"
        if plan.servers:
            why, fewer = fewer_devices(plan, world)
            fits = [fewer]
        if plan.order or plan.wanted != plan.pp * plan.chunks:  # which have their ranks in them
            fits = [f"a {'schedule' if plan.order else 'placement'} for {world} ranks"]
        raise PlanError(asked, why, fits[0])


def _batch(plan: Plan, asked: str, batch: int) -> None:
    if batch < 1:
        raise PlanError(f"batch {batch}", "a batch has at least one sample", "--batch 32")
    need = plan.dp * plan.micro
    if batch < need:
        parts = f"{some(plan.dp, 'replica')} × {some(plan.micro, 'micro-batch')}"
        why = f"a batch of {some(batch, 'sample')} cannot be split over {parts}"
        instead = f"--batch {need}" if plan.micro == 1 or batch < plan.dp else f"micro={batch // plan.dp}"
        raise PlanError(asked, why, instead)


def split(samples: int, parts: int) -> tuple[int, ...]:
    """Sizes as equal as possible, the larger ones first: how a batch becomes replicas, and those micro-batches.

    >>> split(10, 4)
    (3, 3, 2, 2)
    """
    small, larger = divmod(samples, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def of_replicas(plan: Plan, batch: int) -> tuple[int, ...]:
    """How many samples of a batch each replica trains: as equal as possible, or in the plan's ratio; at least one for
    each of its micro-batches.

    >>> from trainplan.plan.plan import plan
    >>> of_replicas(plan(dp=4), 10), of_replicas(plan(dp=4, ratio=(3, 3, 2, 2)), 20)
    ((3, 3, 2, 2), (6, 6, 4, 4))
    >>> of_replicas(plan(dp=2, ratio=(2, 1)), 10), of_replicas(plan(dp=2, ratio=(99, 1), micro=2), 10)
    ((7, 3), (8, 2))
    """
    if not plan.ratio:
        return split(batch, plan.dp)
    whole = sum(plan.ratio)
    counts = [batch * part // whole for part in plan.ratio]
    left = sorted(range(plan.dp), key=lambda replica: -(batch * plan.ratio[replica] % whole))
    for replica in left[: batch - sum(counts)]:
        counts[replica] += 1
    while min(counts) < min(plan.micro, batch // plan.dp):
        counts[counts.index(min(counts))] += 1
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


def micro_batches(plan: Plan, batch: int) -> tuple[tuple[int, ...], ...]:
    """For every replica the sizes of its micro-batches.

    >>> from trainplan.plan.plan import plan
    >>> micro_batches(plan(dp=2, micro=2), 7)
    ((2, 2), (2, 1))
    """
    return tuple(split(samples, plan.micro) for samples in of_replicas(plan, batch))
