"""Splitting and joining batches."""

import collections

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainplan.errors import InputError, PlanError
from trainplan.workload.batch import as_batch, join, samples, split, take, tensors, to_device
from trainplan.workload.workload import Batch

Pair = collections.namedtuple("Pair", "left right")


def equal(one, two):
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict | collections.UserDict):
        return type(one) is type(two) and list(one) == list(two) and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(equal, one, two))
    return one == two


def same(one, two):
    parts = zip((one.args, one.kwargs, one.targets), (two.args, two.kwargs, two.targets), strict=True)
    return one.samples == two.samples and all(equal(a, b) for a, b in parts)


@st.composite
def batches(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    count = sum(sizes)
    numbers = iter(range(10**6))

    def tensor(shape):
        start = next(numbers) * 1000
        return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)

    tail = st.lists(st.integers(0, 3), max_size=2)
    leaf = st.one_of(
        tail.map(lambda shape: tensor([count, *shape])),  # split
        tail.map(lambda shape: tensor([count + 7, *shape])),  # goes along whole
        st.integers(1, 3).map(lambda length: tensor([length])),  # either, as it happens
        st.just(torch.tensor(0.5)),
        st.sampled_from([None, 3, "word", 0.25]),
    )
    nested = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(collections.UserDict),
            st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        ),
        max_leaves=6,
    )
    args = tuple(draw(st.lists(nested, max_size=3)))
    kwargs = draw(st.dictionaries(st.sampled_from("xyz"), nested, max_size=3))
    return Batch(count, args, kwargs, draw(nested)), sizes


@settings(max_examples=150, deadline=None)
@given(batches())
def test_split_then_join_is_identity(case):
    batch, sizes = case
    parts = split(batch, sizes)
    assert [part.samples for part in parts] == sizes
    for part in parts:
        for place, tensor in tensors(part).items():
            whole = tensors(batch)[place]
            rows = part.samples if whole.dim() and whole.shape[0] == batch.samples else None
            assert tensor.shape[:1] == ((rows,) if rows is not None else whole.shape[:1])
    assert same(join(parts), batch)


@settings(max_examples=50, deadline=None)
@given(batches(), st.data())
def test_take_in_order_is_split(case, data):
    batch, sizes = case
    which = data.draw(st.integers(0, len(sizes) - 1))
    start = sum(sizes[:which])
    assert same(take(batch, range(start, start + sizes[which])), split(batch, sizes)[which])


def test_parts_are_views():
    batch = Batch(4, args=(torch.arange(4),))
    split(batch, [3, 1])[1].args[0].fill_(9)
    assert batch.args[0].tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize(
    ("sizes", "why"),
    [([2, 0, 2], "at least one sample"), ([5, -1], "at least one sample"), ([2, 3], "sum to 5"), ([], "sum to 0")],
)
def test_sizes_that_do_not_fit_are_refused(sizes, why):
    with pytest.raises(PlanError, match=why):
        split(Batch(4, args=(torch.zeros(4),)), sizes)


def test_what_is_shared_goes_along_whole_however_long_it_is():
    mask = torch.ones(4, 4)
    batch = Batch(
        4, (torch.arange(4), {"mask": mask}), {"bias": mask}, shared=frozenset({"args[1][mask]", "kwargs[bias]"})
    )
    one, three = split(batch, [1, 3])
    assert (one.args[1]["mask"] is mask, three.kwargs["bias"] is mask, three.args[0].tolist()) == (
        True,
        True,
        [1, 2, 3],
    )
    assert take(batch, [2, 0]).args[1]["mask"] is mask
    copies = [to_device(part, "cpu", torch.float64) for part in split(batch, [2, 2])]  # of 4 rows, and equal
    assert join(copies).kwargs["bias"].shape == (4, 4)
    again = [Batch(4, ({"m": torch.eye(4)},), shared=frozenset({"args[0][m]"})) for _ in range(2)]
    assert join(again).args[0]["m"].shape == (4, 4)
    assert split(join(again), [3, 5])[0].args[0]["m"].shape == (4, 4)


def test_batch_encoding():
    transformers = pytest.importorskip("transformers")
    encoded = transformers.BatchEncoding({"input_ids": torch.arange(6).reshape(3, 2), "note": "kept"})
    batch = Batch(3, args=(encoded,))
    parts = split(batch, [1, 2])
    assert isinstance(parts[1].args[0], transformers.BatchEncoding)
    assert parts[1].args[0].input_ids.tolist() == [[2, 3], [4, 5]]
    assert join(parts).args[0]["input_ids"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert encoded["input_ids"].shape == (3, 2)  # the original is left alone


def test_parts_that_do_not_match_are_refused():
    one = Batch(1, kwargs={"x": torch.zeros(1, 2)})
    with pytest.raises(InputError, match="keys differ"):
        join([one, Batch(1, kwargs={"y": torch.zeros(1, 2)})])
    with pytest.raises(InputError, match=r"kwargs\[x\].*shapes are \(1, 2\), \(3,\)"):
        join([one, Batch(1, kwargs={"x": torch.zeros(3)})])
    with pytest.raises(InputError, match="types differ"):
        join([Batch(1, targets=1), Batch(1, targets="1")])
    with pytest.raises(InputError, match="no tensor"):
        join([Batch(1, targets=1), Batch(1, targets=2)])
    assert join([]).samples == 0


def test_to_device_changes_only_floating_point_types():
    batch = Batch(2, args=(torch.zeros(2), [torch.zeros(2, dtype=torch.long)]), targets={"y": torch.zeros(2)})
    moved = to_device(batch, "meta", dtype=torch.float64)
    assert [tensor.device.type for tensor in tensors(moved).values()] == ["meta"] * 3
    assert [tensor.dtype for tensor in tensors(moved).values()] == [torch.float64, torch.long, torch.float64]
    assert tensors(batch)["args[0]"].dtype == torch.float32


def test_batches_from_what_loops_pass_around():
    x, y = torch.zeros(5, 2), torch.zeros(5)
    assert as_batch((x, y)).args == (x,)
    assert as_batch([x, y]).targets is y
    assert as_batch(((x, y), y)).args == (x, y)
    assert as_batch(({"a": x}, y)).kwargs == {"a": x}
    assert as_batch({"a": x}).targets is None
    assert as_batch(x).samples == samples(x) == 5
    with pytest.raises(InputError, match="a pair"):
        as_batch((x, y, y))
    with pytest.raises(InputError, match="no tensor"):
        as_batch((1, 2))
