"""Ranks that share blocks (`tp`, `sequence`), other precisions and selective recomputation: closed forms of Shoeybi et
al. 2019 and Korthikanti et al. 2022, from operators that were traced and not from the formulas.

One GPT with one layer and attention in operators is estimated once; all that follows needs no torch.
"""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.program.strategies import examples
from tests.synthetic import chain
from trainplan import api, files
from trainplan.cluster.catalogue import device
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import plan
from trainplan.plan.rules import check
from trainplan.plan.sliced import check_runs
from trainplan.plan.text import from_json, parse, text, to_json
from trainplan.predict.collectives import all_gather, all_reduce, reduce_scatter
from trainplan.predict.planned import planned
from trainplan.predict.predict import predict
from trainplan.profile.device.file import Issue
from trainplan.profile.device.known import model_of
from trainplan.profile.device.model import Model
from trainplan.profile.estimate import estimate
from trainplan.profile.profile import Profile
from trainplan.profile.variant import Choice, variant
from trainplan.program.lower import lower
from trainplan.program.ops import Kind, Value
from trainplan.program.traffic import sent
from trainplan.solve.resolve import solve
from trainplan.workload.load import load

S, H, A, V = 64, 128, 8, 256  # tokens, width, heads, vocabulary
A100 = device("A100-80")
EIGHT = cluster("8xA100-80")
LAYER, HEAD = 1, -1
choices = st.builds(
    Choice,
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
    st.booleans(),
)


@pytest.fixture(scope="module")
def gpt() -> Profile:
    name = f"gpt:layers=2,hidden={H},heads={A},seq={S},vocab={V},dropout=0.1,attention=eager,batch=32"
    return estimate(load(name), A100, samples=[1, 2, 4, 8])


def layer_bytes(b: int, t: int, sequence: bool, selective: bool) -> float:
    """What a layer keeps in 16 bits (Korthikanti et al., table 2); masks are of one byte."""
    whole = 10 / t if sequence else 10
    return S * b * H * (whole + 24 / t + (0 if selective else 5 * A * S / (H * t)))


@pytest.mark.system("megatron", "P")
@pytest.mark.system("sequence", "P")
@examples(40)
@given(choices, st.sampled_from([1, 2, 8]))
def test_megatron_sequence_memory_of_a_layer(gpt, choice, samples):
    choice = replace(choice, precision="bf16", sequence=choice.sequence and choice.tp > 1)
    rank = variant(gpt, A100, choice)
    kept = rank.total("saved_bytes", LAYER, LAYER + 1, samples)
    kept += next(c for c in rank.crossings if LAYER in c.consumers).bytes(samples)  # the input, which counts once
    # Beside it: mean and deviation of two norms, and which scores look ahead.
    beside = 2 * 2 * 4 * S * samples + S * S
    expected = layer_bytes(samples, choice.tp, choice.sequence, choice.selective)
    assert expected - 1 <= kept <= expected + beside
    # What is not kept is there again while the backward pass of the layer needs it, and of one layer only.
    plain = variant(gpt, A100, replace(choice, selective=False)).blocks[LAYER]
    more = rank.blocks[LAYER].backward_workspace_bytes[0] - plain.backward_workspace_bytes[0]
    assert more == pytest.approx(5 * A * S * S / choice.tp if choice.selective else 0)


@pytest.mark.system("megatron", "P")
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_megatron_weights_gradients_and_states(gpt, tp):
    rank = variant(gpt, A100, Choice(tp, precision="fp16"))
    layer = 12 * H * H / tp + 7 * H / tp + 2 * H + 4 * H  # columns' biases are cut, rows' and norms' are not
    weights = V * H / tp + S * H + 2 * layer + 2 * H
    assert sum(p.count for p in rank.parameters) == weights
    assert sum(p.bytes for p in rank.parameters) == 2 * weights
    assert rank.state_bytes_per_parameter == pytest.approx(4 + 8, abs=0.01)  # a copy in 32 bits, and Adam's two
    program = lower(plan(tp=tp, precision="fp16", blocks=len(gpt.blocks)), rank, 8, "nccl")
    assert program.bytes_at_start(0, Value.WEIGHTS) == 2 * weights
    assert program.bytes_at_start(0, Value.OPTIMIZER) == pytest.approx(12 * weights, rel=1e-3)


@pytest.mark.system("megatron", "P")
@pytest.mark.system("sequence", "P")
@pytest.mark.parametrize("sequence", ["off", "on"])
def test_megatron_sequence_exchanges_are_inside_passes(gpt, sequence):
    """Two sums a layer each way; with `sequence` as many scatterings and gatherings, which take as long in a ring."""
    asked = plan(tp=4, sequence=sequence, micro=2, precision="bf16", blocks=len(gpt.blocks))
    program = lower(asked, planned(asked, gpt, EIGHT), 8, "nccl")
    assert program.world == 1
    assert program.slicers == 4
    passes = {kind: program.classes[int(program.cost[program.kind == kind][0])] for kind in (Kind.F, Kind.B)}
    size, tokens = 2 * S * H * 4, 4 * S * 4  # of a micro-batch of four
    sums = {"off": {"all_reduce"}, "on": {"all_reduce", "reduce_scatter", "all_gather"}}[sequence]
    assert {part.what for c in passes.values() for part in c.inside} == sums
    whole = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    for kind, c in passes.items():
        assert c.sharing == (0, 1, 2, 3)
        large = sum(whole[p.what] * p.times for p in c.inside if p.bytes == size and not p.hidden)
        # Forward: two a layer and the embedding; back: two a layer and the output layer. In halves with `sequence`,
        # where the first is at the other end: forward also gathers for the output layer, backward for the embedding.
        assert large == 2 * (2 * 2 + 1)
        assert [(p.bytes, p.times) for p in c.inside if p.bytes == tokens] == ([(tokens, 3)] if kind is Kind.F else [])
    again = [part for part in passes[Kind.B].inside if part.hidden]
    assert sum(part.times for part in again) == (2 * 2 + 1 if sequence == "on" else 0)
    forward = int((program.kind == Kind.F).argmax())
    assert set(sent(program, forward)) == {0, 1, 2, 3}
    expected = 5 * 2 * 3 / 4 * size + 3 * 2 * 3 / 4 * tokens
    assert sent(program, forward)[0] == pytest.approx(expected)


@pytest.mark.system("megatron", "P")
def test_megatron_step_is_its_passes_and_its_sums(gpt):
    """One micro-batch of one stage: seconds of the operators on slices, and of the sums between them."""
    asked = plan(tp=4, precision="bf16", blocks=len(gpt.blocks))
    found, rank = predict(asked, gpt, EIGHT, 8), planned(asked, gpt, EIGHT)
    run = sum(rank.total(part, 0, len(rank.blocks), 8) for part in ("forward_s", "backward_s"))
    talk = 10 * all_reduce(EIGHT, (0, 1, 2, 3), 2 * S * H * 8).seconds
    talk += 3 * all_reduce(EIGHT, (0, 1, 2, 3), 4 * S * 8).seconds
    assert found.seconds_by_kind["INSIDE"] == pytest.approx(4 * talk)
    assert found.seconds_by_kind["F"] + found.seconds_by_kind["B"] >= 4 * run * (1 - 1e-9)
    issue = sum(rank.total(part, 0, len(rank.blocks), 8) for part in ("forward_issue_s", "backward_issue_s"))
    update = sum(max(b.update_s, b.update_issue_s) for b in rank.blocks)
    assert max(run + talk, issue) <= found.step_s <= run + talk + issue + update + 1e-3
    assert found.plan.world == 4
    assert len(found.peaks) == 1


@examples(12)
@given(choices)
def test_a_share_takes_no_more_than_the_whole(gpt, choice):
    choice = replace(choice, sequence=choice.sequence and choice.tp > 1)
    rank, whole = variant(gpt, A100, choice), variant(gpt, A100, replace(choice, tp=1, sequence=False))
    for part in ("forward_s", "backward_s", "saved_bytes"):
        assert rank.total(part, 0, 4, 4) <= whole.total(part, 0, 4, 4) * (1 + 1e-9)
    assert variant(gpt, A100, choice) is rank  # worked out once


def test_a_device_of_the_same_name_with_other_rates_is_another_one(gpt):
    choice = Choice(precision="bf16")
    slow = replace(
        A100, flops={name: rate / 20 for name, rate in A100.flops.items()}, memory_rate=A100.memory_rate / 20
    )
    fast, slower = (variant(gpt, where, choice).total("forward_s", 0, 4, 4) for where in (A100, slow))
    assert slower > 1.5 * fast
    assert variant(gpt, A100, choice).total("forward_s", 0, 4, 4) == fast


def test_a_variant_is_estimated_with_the_file_that_its_profile_was():
    """Which may be the user's own: here one whose host takes three times as long."""
    known = model_of(A100)
    host = {family: Issue(3 * one.forward_s, 3 * one.backward_s) for family, one in known.file.host.items()}
    own = Model(replace(known.file, host=host), A100)
    name = f"gpt:layers=2,hidden={H},heads={A},seq={S},vocab={V},batch=32"
    made = [estimate(load(name), A100, samples=[1], model=model) for model in (known, own)]
    issues = [variant(one, A100, Choice(precision="bf16")).total("forward_issue_s", 0, 4, 1) for one in made]
    assert issues[1] == pytest.approx(3 * issues[0])


def test_a_profile_keeps_its_recipes_in_a_file(gpt):
    rank = variant(gpt, A100, Choice(tp=4, sequence=True, precision="bf16"))
    for profile in (gpt, rank):
        again = files.from_json(Profile, json.loads(json.dumps(files.to_json(profile))))
        assert again == profile
    assert variant(again, A100, Choice()) is again


def test_a_faster_link_never_makes_a_sliced_plan_slower(gpt):
    links = [replace(EIGHT.nodes[0].inside, rate=rate) for rate in (25e9, 100e9, 300e9)]
    places = [replace(EIGHT, nodes=(replace(EIGHT.nodes[0], inside=link),)) for link in links]
    for line in ("tp=8 precision=bf16", "tp=2 pp=2 dp=2 micro=4 schedule=1f1b sequence=on", "tp=4 dp=2 zero=3"):
        steps = [solve(parse(line), gpt, place, 32).step_s for place in places]
        assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(steps)), line
        scatter = [reduce_scatter(p, (0, 1), 2**24).seconds + all_gather(p, (0, 1), 2**24).seconds for p in places]
        assert scatter == sorted(scatter, reverse=True)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (Choice(tp=3), "heads of 8 cannot be shared equally by 3 ranks"),
        (Choice(tp=16), "heads of 8 cannot be shared equally by 16 ranks"),
    ],
)
def test_what_does_not_divide_is_refused(gpt, asked, why):
    with pytest.raises(PlanError, match=why):
        variant(gpt, A100, asked)


def test_refusals_say_what_is_missing(gpt):
    with pytest.raises(PlanError, match="does not say which operators"):
        predict(plan(tp=2, blocks=4), chain(device="A100-80"), EIGHT)
    odd = replace(gpt, recipes=tuple(replace(r, divides=(("vocabulary", 50257),)) for r in gpt.recipes))
    with pytest.raises(PlanError, match="a vocabulary of 50260"):
        variant(odd, A100, Choice(tp=4))
    whole = replace(gpt, recipes=tuple(replace(r, whole="it has a norm") for r in gpt.recipes))
    with pytest.raises(PlanError, match=r"no block can be shared by ranks; of .*: it has a norm"):
        variant(whole, A100, Choice(tp=2))
    for asked, why in (
        (plan(tp=1, sequence="on"), "tp=1 slices nothing"),
        (plan(tp=2, dp=2, exchange="ring"), "is for ranks with whole stages"),
        (plan(dp=2, tp=2, placement=(((0,),), ((1,),))), "a stage runs on 2 ranks"),
    ):
        with pytest.raises(PlanError, match=why):
            check(replace(asked, blocks=2), 8)
    with pytest.raises(PlanError, match="the profile is of ranks with tp=1"):
        lower(plan(tp=2, blocks=4), gpt, 8)
    with pytest.raises(PlanError, match=r"8 × 1 × 2 = 16 devices, and there are 8"):
        solve(parse("dp=8 tp=2"), gpt, EIGHT, 32)


def test_what_is_only_predicted_is_not_run():
    for line in ("tp=2", "precision=bf16", "recompute=selective"):
        with pytest.raises(PlanError, match=f"{line} is predicted, not yet run here"):
            check_runs(parse(line))
    check_runs(plan(dp=2))
    with pytest.raises(PlanError, match="predicted, not yet run here"):
        api.run("gpt", "tp=2", "2xcpu")
    with pytest.raises(PlanError, match="predicted, not yet run here"):
        api.build("tp=2", "gpt")


def test_tables_of_ranks_and_lines():
    made = plan(dp=2, tp=2, pp=2, schedule="1f1b", micro=4, stages=(2,), blocks=4)
    assert made.placement == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert made.world == 8
    assert made.leaders == (0, 2, 4, 6)
    assert made.slicers(5) == (4, 5)
    assert text(made).startswith("dp=2 tp=2 pp=2")
    assert parse(text(made)).tp == 2
    assert from_json(json.loads(json.dumps(to_json(made)))) == made


@pytest.mark.parametrize("line", ["tp=2 dp=2 pp=2 micro=4 schedule=1f1b recompute=full", "tp=2 dp=2 micro=2 zero=2"])
def test_other_choices_go_with_it(gpt, line):
    """Stages, replicas and what they share out are those of slices."""
    found = solve(parse(f"{line} precision=bf16"), gpt, EIGHT, 32)
    asked = found.plan
    program = lower(asked, planned(asked, gpt, EIGHT), 32, "nccl")
    sums = {c.members for c in program.classes if c.kind in (Kind.REDUCE_GRAD, Kind.SCATTER_GRAD)}
    assert sums
    assert all(set(members) <= set(asked.leaders) for members in sums)
    alone = solve(parse(f"{line} precision=bf16".replace("tp=2 ", "")), gpt, EIGHT, 32)
    assert found.peak_bytes < alone.peak_bytes
