"""Checkpoints that ranks of `tp` have a share each of (ZeRO-R's P_a): the closed forms of Rajbhandari et al. 2020."""

import pytest

from trainplan.cluster.catalogue import device
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.rules import check
from trainplan.plan.sliced import check_runs
from trainplan.plan.systems import SYSTEMS
from trainplan.plan.text import parse, text
from trainplan.predict.collectives import all_gather
from trainplan.predict.planned import planned
from trainplan.predict.predict import predict
from trainplan.profile.estimate import estimate
from trainplan.profile.profile import Profile
from trainplan.program.check import check as check_program
from trainplan.program.lower import lower
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Program
from trainplan.program.text import parse as name_of
from trainplan.program.traffic import sent
from trainplan.solve.resolve import resolve
from trainplan.workload.load import load

S, H, LAYERS, BATCH = 64, 128, 3, 8
EIGHT = cluster("8xA100-80")
INPUT = 4 * S * H * BATCH  # bytes that a layer reads


@pytest.fixture(scope="module")
def gpt() -> Profile:
    name = f"gpt:layers={LAYERS},hidden={H},heads=8,seq={S},vocab=256,batch={BATCH}"
    return estimate(load(name), device("A100-80"), samples=[1, 2, 4, 8])


def planned_for(gpt: Profile, tp: int, offload: str = "partitioned", **more) -> Plan:
    return check(plan(tp=tp, recompute="full", offload=offload, blocks=len(gpt.blocks), **more), BATCH, 8)


def program_of(gpt: Profile, choices: Plan) -> Program:
    return check_program(lower(choices, planned(choices, gpt, EIGHT), BATCH, "nccl", steps=1))


def checkpoints(program: Program) -> list[int]:
    """Bytes that forward passes leave for recomputation, by block."""
    maker = program.value_maker
    left = (program.value_kind == Value.SAVED) & (maker >= 0)
    left[left] &= program.kind[maker[left]] == Kind.F
    return [int(size) for size in program.value_bytes[left] if size]


def again(program: Program) -> list[int]:
    return [op for op in range(len(program)) if program.kind[op] == Kind.R]


@pytest.mark.system("zero-r", "P")
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_zero_r_checkpoints_are_divided_and_gathered_once_a_block(gpt: Profile, tp: int) -> None:
    """Of every layer's input 1/tp stays, and before it is computed again one all-gather brings the whole: the volume of
    one input beside the twelve of Megatron's sums (two each way, and two again), which is less than a tenth."""
    whole, parts = (program_of(gpt, planned_for(gpt, tp, offload)) for offload in ("none", "partitioned"))
    assert INPUT in checkpoints(whole)
    assert checkpoints(parts) == [-(-size // tp) for size in checkpoints(whole)]
    assert sum(checkpoints(whole)) == checkpoints(whole).count(INPUT) * INPUT >= LAYERS * INPUT
    found = []
    for own, other in zip(again(whole), again(parts), strict=True):
        assert whole.name(own) == parts.name(other)
        before, after = sent(whole, own), sent(parts, other)
        assert set(after) == set(range(tp))
        found.append(after[0] - before.get(0, 0))
    assert [size for size in found if size] == pytest.approx([(tp - 1) / tp * INPUT] * checkpoints(whole).count(INPUT))
    layer = next(op for op in again(whole) if whole.classes[whole.cost[op]].first == 2)  # of the middle
    megatron = 3 * sent(whole, layer)[0]  # forward, forward again, backward
    assert megatron == pytest.approx(12 * (tp - 1) / tp * INPUT)
    assert max(found) < 0.1 * megatron


@pytest.mark.system("zero-r", "P")
def test_zero_r_partitioned_takes_less_memory_by_the_shares_of_others_and_longer_by_the_gathers(gpt: Profile) -> None:
    """When block k goes back, the inputs of blocks 1 to k are there (0 reads the batch), and its own was gathered:
    so k (1 - 1/tp) - 1 inputs less. And a gather for each of them is more, which a busy host may hide."""
    tp, two = 4, {"micro": 2}
    whole, parts = (predict(planned_for(gpt, tp, word, **two), gpt, EIGHT, BATCH) for word in ("none", "partitioned"))
    inputs = checkpoints(program_of(gpt, planned_for(gpt, tp, "none")))
    gather = all_gather(EIGHT, tuple(range(tp)), INPUT // 2).seconds
    more = parts.seconds_by_kind["INSIDE"] - whole.seconds_by_kind["INSIDE"]
    assert more == pytest.approx(tp * 2 * len(inputs) * gather)
    assert whole.step_s <= parts.step_s <= whole.step_s + 2 * len(inputs) * gather * (1 + 1e-6)
    worst = name_of(parts.peak.op)
    assert (worst, worst.kind) == (name_of(whole.peak.op), Kind.B)
    assert worst.unit >= LAYERS
    assert whole.peak_bytes - parts.peak_bytes == (worst.unit * (1 - 1 / tp) - 1) * INPUT / 2


REFUSED = {
    "dp=2 offload=partitioned": ("replicas of a model have those of their own samples", "offload=activations"),
    "tp=2 offload=partitioned": ("recompute=none keeps more", "recompute=full"),
    "tp=2 recompute=full sequence=on offload=partitioned": ("nothing left to partition", "offload=none"),
    "tp=2 recompute=full offload=partitioned away=2": ("stays on the devices", "leaving away out"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_partitioned(gpt: Profile, line: str) -> None:
    why, instead = REFUSED[line]
    with pytest.raises(PlanError) as refused:
        resolve(parse(line), gpt, EIGHT, BATCH)
    assert why in refused.value.why
    assert refused.value.instead.startswith(instead)


def test_the_line_says_so(gpt: Profile) -> None:
    found = resolve(parse("dp=2 tp=2 recompute=full offload=partitioned"), gpt, EIGHT, BATCH)
    assert "offload=partitioned" in text(found)
    assert resolve(parse(text(found)), gpt, EIGHT, BATCH) == found


def test_what_ranks_of_tp_have_a_share_each_of_is_not_said_to_run(gpt: Profile) -> None:
    """Only they have activations in common, and they are not run; so this is refused, and `systems` says so."""
    with pytest.raises(PlanError, match=r"tp=4 is predicted, not yet run here"):
        check_runs(planned_for(gpt, 4))
    assert "Partitioned (predicted, not yet run" in SYSTEMS["zero-r"].carried_by
