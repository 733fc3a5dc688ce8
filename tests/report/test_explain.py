"""Explanations name what is there, with the right numbers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from search.models import model
from synthetic import chain
from trainplan.cluster.catalogue import device
from trainplan.cluster.overrides import with_overrides
from trainplan.cluster.parse import cluster
from trainplan.plan.plan import WORDS
from trainplan.plan.text import parse
from trainplan.predict.accuracy import Accuracy
from trainplan.predict.predict import predict
from trainplan.profile.estimate import estimate
from trainplan.report.explain import _ORDERS, explain
from trainplan.report.lines import error_line
from trainplan.solve.resolve import resolve
from trainplan.units import gib
from trainplan.workload.load import load


def explained(line, profile=None, where="2x2xTitanRTX", batch=16):
    profile, there = profile or model(), cluster(where)
    prediction = predict(resolve(parse(line), profile, there, batch), profile, there, batch, keep=True)
    return explain(prediction, profile, there), prediction


def test_every_block_and_parameter_sits_somewhere():
    found, _ = explained("pp=4 micro=4")
    assert [s.blocks[0] for s in found.stages] == [0, *(s.blocks[1] for s in found.stages[:-1])]
    assert found.stages[-1].blocks[1] == 8
    assert sum(s.parameters for s in found.stages) == model().parameter_count
    assert [s.ranks for s in found.stages] == [(0,), (1,), (2,), (3,)]


def test_replicas_of_a_pipeline():
    found, p = explained("dp=2 pp=2 micro=4 schedule=1f1b")
    text = str(found)
    assert "2 replicas of a pipeline of 2 stages, each takes 8 of 16 samples, in 4 micro-batches of 2" in text
    assert "stage 0 → 1: 97.7 KiB forward and 97.7 KiB back for every micro-batch" in text
    assert "summed over ranks 0, 1" in text
    assert "summed over ranks 2, 3" in text
    assert max(s.peak_bytes for s in found.stages) == p.peak_bytes
    assert all(sum(s.breakdown.values()) == s.peak_bytes for s in found.stages)


def test_who_sums_and_what_a_rank_sends_for_it():
    whole = sum(p.bytes for p in model().parameters if p.trainable)
    for word, sent in (("ring", 1.5), ("all-to-all", 3.0), ("tree", 2.0)):
        found, _ = explained(f"dp=4 exchange={word}")
        (line,) = [line for line in found.moves if "gradients" in line]
        assert f"summed over ranks 0–3 by {word} " in line
        assert line.endswith(f"a rank sends {gib(sent * whole)}")


def test_what_goes_to_servers_is_told_with_them():
    line, tied = "ps-bsp dp=2 pp=2 schedule=1f1b micro=2 servers=1", chain(4, tied=((0, 3),))
    said = " ".join(explained(line, tied, "5xcpu")[0].moves)
    assert "from ranks 0, 1 to rank 4 by ps-bsp" in said
    assert "from ranks 2, 3 to rank 4 by ps-bsp" in said
    assert "tied weights" not in said  # which are among what is pushed
    assert "from rank 1 to rank 0 by dataparallel" in " ".join(explained("dataparallel dp=2", tied, "2xcpu")[0].moves)


def test_one_device_moves_nothing():
    found, _ = explained("single", where="1xTitanRTX")
    assert found.moves == ()
    assert "nothing: there is one rank" in str(found)
    assert "1 of 1 devices of 1xTitanRTX is used" in str(found)


def test_inputs_are_told_with_who_loads_them():
    profile = replace(model(), input_bytes_per_sample=1024.0)
    assert "8.00 KiB of the batch loaded from the host by each of ranks 0, 1 during" in str(
        explained("dp=2 preload=on", profile)[0]
    )
    assert "stage 1: 16.0 KiB of the batch loaded from the host by rank 1 before a step" in str(
        explained("pp=2 micro=2 preload=off", profile)[0]
    )
    scattered = str(explained("dataparallel dp=2", profile)[0])
    assert (
        "16.0 KiB of inputs and targets, the whole batch, loaded by rank 0 before a step; 8.00 KiB of it" in scattered
    )


def test_recomputation_and_orders_are_in_words():
    text = str(explained("gpipe micro=4")[0])
    assert "every block runs forward once more" in text
    assert "all micro-batches go forward" in text
    assert "recompute ms" in text


def test_parts_of_backward_are_told_where_a_plan_does_them_apart():
    """Here they take 0.7 and 0.6 of the whole: more than it."""
    parts = {"backward_input_s": 0.7, "backward_weight_s": 0.6}
    blocks = [replace(b, **{k: tuple(f * s for s in b.backward_s) for k, f in parts.items()}) for b in model().blocks]
    profile = replace(model(), blocks=tuple(blocks))
    found, _ = explained("pp=4 micro=4 schedule=zb-h1", profile)
    assert found.stages[0].backward_parts_s == (0, found.stages[0].backward_s)  # nothing goes further back
    for stage in found.stages[1:]:
        assert stage.backward_parts_s == pytest.approx((0.7 * stage.backward_s, 0.6 * stage.backward_s))
    head, _, _, row = str(found).splitlines()[3:7]
    assert "backward ms   as input ms   and weights ms   update ms" in head
    numbers = [float(word) for word in row.split()[-5:]]
    assert numbers[2:4] == pytest.approx([0.7 * numbers[1], 0.6 * numbers[1]], rel=0.01)
    assert "as input ms" not in str(explained("pp=4 micro=4 schedule=1f1b", profile)[0])


def test_every_order_of_work_has_words():
    assert set(WORDS["schedule"]) <= set(_ORDERS)


def test_slices_are_told():
    profile = chain(blocks=4, device="TitanRTX", tokens_per_sample=64, whole_sequences=None)
    text = str(explained("terapipe pp=2 micro=2 slices=32,20,12", profile, batch=8)[0])
    assert "in 2 micro-batches of 4, each sequence in 3 slices of 32 to 12 tokens; slices of every sequence" in text


def test_skips_and_tied_weights_are_told():
    profile = chain(blocks=4, skips=((0, 3),), tied=((0, 3),), device="TitanRTX")
    found, _ = explained("pp=4 micro=2", profile, batch=8)
    assert any(line.startswith("stage 0 → 3") for line in found.moves)
    assert any(line.startswith("tied weights tied0") and "ranks 0, 3" in line for line in found.moves)


def test_pieces_of_the_step_add_up():
    found, p = explained("pp=4 micro=4 schedule=1f1b")
    shares = [float(line.split("(")[1].split(" %")[0]) for line in found.time[:-1]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert "in all" in found.time[-1]
    assert found.to_json()["plan"].startswith("pp=4")
    assert p.plan.pp == 4


def test_uneven_batches_say_so():
    text = str(explained("pp=2 micro=4", batch=10)[0])
    assert "in 4 micro-batches of 3 to 2" in text


def test_known_errors_are_told_by_order_of_work():
    """The source of several once; and what nobody measured has no number."""

    def one(kind, median, source="two machines"):
        return SimpleNamespace(error=Accuracy(kind, median, median, 14 if median else 0, source))

    rows = [one("gpipe", 0.05), one("1f1b", 0.04), one("gpipe", 0.05), one("terapipe", None, "such a profile")]
    assert error_line(rows) == (
        "error    1f1b: median 4%, worst 4% over 14 runs; gpipe: median 5%, worst 5% over 14 runs (two machines); "
        "terapipe has not been measured with such a profile"
    )


def test_of_one_kind_some_steps_may_be_unlike_any_that_were_measured():
    like, unlike = Accuracy("dp", 0.05, 0.1, 9, "a machine"), Accuracy("dp", None, None, 0, "steps under 40 ms")
    for rows in ([like, unlike], [unlike, like]):
        assert error_line(SimpleNamespace(error=row) for row in rows) == (
            "error    dp: median 5%, worst 10% over 9 runs (a machine); dp has not been measured with steps under 40 ms"
        )


def test_what_ranks_that_share_a_stage_exchange_is_named_and_all_of_them_are_listed():
    profile = estimate(
        load("gpt:layers=2,hidden=512,heads=8,seq=128,vocab=512,batch=8"), device("A100-80"), samples=[4]
    )
    slow, text = {"link": "1GB/s"}, "tp=2 dp=2"
    there = with_overrides(cluster("4xA100-80"), slow)
    prediction = predict(resolve(parse(text), profile, there, 8), profile, there, 8, keep=True)
    found = explain(prediction, profile, there)
    assert found.stages[0].ranks == (0, 1, 2, 3)
    assert "exchanges inside passes over NVSwitch 1.00 GB/s" in found.time[-1]
    assert "(none)" not in str(found)
