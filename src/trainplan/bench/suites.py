"""The plans whose predictions are held against measurements: lists of lines, as a user would type them."""

from __future__ import annotations

from collections.abc import Sequence


def suite(ranks: Sequence[int], micro: int = 4) -> list[str]:
    """The plans that are measured: one device, replicas, and each order of work, on so many ranks."""
    lines = ["dp=1 pp=1 micro=1"]
    for count in ranks:
        lines += [
            f"dp={count} pp=1 micro=1",
            f"pp={count} dp=1 schedule=naive micro={micro}",
            f"pp={count} dp=1 schedule=gpipe micro={micro}",
            f"pp={count} dp=1 schedule=1f1b micro={micro}",
        ]
    return lines


def orders(ranks: int, micro: int = 8) -> list[str]:
    """Every order of work on so many ranks (an even number), but for that of slices of sequences."""
    words = [
        "schedule=naive", "schedule=gpipe", "schedule=lockstep", "schedule=looped chunks=2", "schedule=1f1b",
        "schedule=1f1b-early", "schedule=interleaved chunks=2", "schedule=zb-h1", "schedule=zb-h2",
        "schedule=zb-v chunks=2", "schedule=gems", "schedule=chimera", "schedule=chimera-doubled",
    ]  # fmt: skip
    lines = [f"pp={ranks} dp=1 {word} micro={micro}" for word in words]
    if ranks > 2:
        lines.append(f"dp=2,{','.join(['1'] * (ranks - 2))} pp={ranks - 1} schedule=1f1b micro={micro}")
    return lines


def exchanges(ranks: int) -> list[str]:
    """Every way to train replicas on so many ranks: who sums gradients, in what order, and what is shared out."""
    words = [
        "", "exchange=ring", "exchange=tree", "exchange=all-to-all", "exchange=all-to-all-sliced",
        "exchange=halving-doubling", "exchange=horovod", "exchange=p3", "exchange=bytescheduler", "exchange=pace",
        "exchange=dataparallel", "zero=1", "zero=2", "zero=3",
        # ZeRO-R as if memory were short: what the first blocks save, which is most of it, goes away and comes back.
        "zero=3 offload=activations away=4",
    ]  # fmt: skip
    if ranks % 2 == 0 and ranks > 2:
        words += [f"exchange=hierarchical node={ranks // 2}", f"zero=3 shard={ranks // 2}"]
    lines = [f"dp={ranks} pp=1 micro=1 {word}".strip() for word in words]
    if ranks > 2:  # a server is a rank, too
        served = ("ps-bsp", "ps-asp", "ssp bound=2", "dssp bound=1,3")
        lines += [
            f"dp={ranks - servers} pp=1 micro=1 exchange={word} servers={servers}"
            for servers in (1, 2) if ranks > servers + 1
            for word in served
        ]  # fmt: skip
    return lines
