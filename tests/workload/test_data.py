"""Data sets on disk and in memory, and the loader that reads them."""

import os
import pickle
import threading
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainplan.errors import InputError
from trainplan.workload import noise
from trainplan.workload.batch import join, tensors
from trainplan.workload.datasets import DATASETS, data_root, dataset, open_data
from trainplan.workload.images import random_box
from trainplan.workload.load import load
from trainplan.workload.loader import Position, loader, random_for
from trainplan.workload.noise import write_noise
from trainplan.workload.workload import Batch

GPT = "gpt:layers=1,hidden=8,heads=2,seq=4,vocab=1000"


def same(one, two):
    pairs = zip(tensors(one).items(), tensors(two).items(), strict=True)
    return one.samples == two.samples and all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_the_table_is_the_thesis():
    rows = {key: (row.classes, row.shape, row.training, row.test, row.batch) for key, row in DATASETS.items()}
    assert rows == {
        "mnist": (10, (1, 28, 28), 60_000, 10_000, 128),
        "cifar10": (10, (3, 32, 32), 50_000, 10_000, 64),
        "imagenet": (1_000, (3, 224, 224), 1_281_000, 50_000, 32),
        "highres": (1_000, (3, 512, 512), 50_000, 10_000, 32),
    }
    with pytest.raises(InputError, match="Try cifar10"):
        dataset("cifar-100")


# -- noise on disk -------------------------------------------------------------------------------------------------


def test_noise_is_written_once(tmp_path):
    seen = []
    place = write_noise(tmp_path, "cifar10", 23, progress=lambda done, samples: seen.append((done, samples)))
    assert seen == [(23, 23)]
    folders = sorted(path.name for path in (place / "train").iterdir())
    assert folders == [str(label) for label in range(10)]
    images = sorted((place / "train").rglob("*.jpg"))
    assert len(images) == 23
    with Image.open(images[0]) as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (32, 32), "RGB")
        assert 100 < np.asarray(image).mean() < 155  # noise about the middle
    before = [(path, path.stat().st_mtime_ns) for path in images]
    assert write_noise(tmp_path, "cifar10", 23) == place
    assert [(path, path.stat().st_mtime_ns) for path in sorted((place / "train").rglob("*.jpg"))] == before
    assert write_noise(tmp_path, "cifar10", 24) != place
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_half_a_data_set_is_never_seen(tmp_path, monkeypatch):
    def fail(entry, seed, index):
        if index == 5:
            raise OSError(28, "No space left on device")
        return b"jpeg"

    monkeypatch.setattr(noise, "_noise", fail)
    with pytest.raises(InputError, match="No space left on device"):
        write_noise(tmp_path, "mnist", 8)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_something_else_is_left_alone(tmp_path):
    (tmp_path / "mnist-4-seed0").mkdir()
    (tmp_path / "mnist-4-seed0" / "precious").write_text("data")
    with pytest.raises(InputError, match="is not this data set"):
        write_noise(tmp_path, "mnist", 4)
    assert (tmp_path / "mnist-4-seed0" / "precious").read_text() == "data"


def test_a_disk_that_is_too_small_is_said_beforehand(tmp_path):
    with pytest.raises(InputError, match=r"need about .* GiB, and .* are free. Try \d+ images"):
        write_noise(tmp_path, "highres", 10**9)
    assert list(tmp_path.iterdir()) == []


def test_several_writers_at_once(tmp_path):
    places = []
    threads = [threading.Thread(target=lambda: places.append(write_noise(tmp_path, "mnist", 12))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 4
    assert len(set(places)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mnist-12-seed0"]
    assert len(list(places[0].rglob("*.jpg"))) == 12


def test_where_data_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINPLAN_DATA", raising=False)
    assert data_root() == tmp_path / "trainplan" / "data"
    monkeypatch.setenv("TRAINPLAN_DATA", str(tmp_path / "here"))
    data = open_data("synthetic", load("resnet18:mnist"), samples=5)
    assert len(data) == 5
    assert (tmp_path / "here" / "mnist-5-seed0").is_dir()


# -- images --------------------------------------------------------------------------------------------------------


def test_images_are_normalised_and_labelled(tmp_path):
    for label, value in (("cat", 0), ("dog", 255)):
        (tmp_path / label).mkdir()
        Image.new("RGB", (64, 48), (value,) * 3).save(tmp_path / label / "one.png")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    workload = load("resnet18:cifar10,batch=2")
    data = open_data(f"folder:{tmp_path}", workload)
    batch = data.fetch([0, 1], epoch=0, seed=0)
    assert batch.targets.tolist() == [0, 1]
    assert batch.args[0].shape == (2, 3, 32, 32)
    row = DATASETS["cifar10"]
    for channel in range(3):
        low, high = batch.args[0][0, channel], batch.args[0][1, channel]
        assert torch.allclose(low, torch.tensor(-row.mean[channel] / row.deviation[channel]))
        assert torch.allclose(high, torch.tensor((1 - row.mean[channel]) / row.deviation[channel]))


def test_grey_images_and_the_middle_of_wide_ones(tmp_path):
    (tmp_path / "only").mkdir()
    pixels = np.zeros((28, 84), np.uint8)
    pixels[:, 28:56] = 255
    Image.fromarray(pixels).save(tmp_path / "only" / "wide.png")
    batch = open_data(f"folder:{tmp_path}", load("resnet18:mnist")).fetch([0], 0, 0)
    assert batch.args[0].shape == (1, 1, 28, 28)
    assert batch.args[0].min() == batch.args[0].max() > 0  # the white third


def test_crops_depend_on_seed_epoch_and_index_alone(tmp_path):
    data = open_data("synthetic", load("resnet18:imagenet"), samples=3, root=tmp_path)
    one = data.fetch([0, 1], epoch=2, seed=7)
    assert one.args[0].shape == (2, 3, 224, 224)
    assert same(one, join([data.fetch([0], 2, 7), data.fetch([1], 2, 7)]))
    assert not same(one, data.fetch([0, 1], 3, 7))
    assert not same(one, data.fetch([0, 1], 2, 8))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 10**6))
def test_crops_lie_in_the_image(width, height, seed):
    left, top, right, bottom = random_box((width, height), random_for(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_what_is_wrong_with_a_folder(tmp_path):
    workload = load("resnet18:cifar10")
    with pytest.raises(InputError, match="no such folder"):
        open_data(f"folder:{tmp_path / 'none'}", workload)
    with pytest.raises(InputError, match="hold no images"):
        open_data(f"folder:{tmp_path}", workload)
    for label in range(11):
        (tmp_path / f"class{label:02}").mkdir()
    (tmp_path / "class00" / "broken.jpg").write_bytes(b"not a picture")
    with pytest.raises(InputError, match="11 classes, and the model 10"):
        open_data(f"folder:{tmp_path}", workload)
    (tmp_path / "class10").rmdir()
    data = open_data(f"folder:{tmp_path}", workload)
    with pytest.raises(InputError, match="it has 1"):
        open_data(f"folder:{tmp_path}", workload, samples=2)
    # The message is ours, also from a worker process.
    for workers in (0, 1):
        with pytest.raises(InputError, match=r"^image .*broken.jpg: it cannot be decoded"):
            next(loader(workload, data, 1, workers=workers))
    with pytest.raises(InputError, match="takes no images"):
        open_data(f"folder:{tmp_path}", load(GPT))
    with pytest.raises(InputError, match="only the image sets"):
        open_data("synthetic", load(GPT))
    with pytest.raises(InputError, match="not a kind of data"):
        open_data("disk", workload)


# -- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uint16", "uint32", "npy"])
def test_tokens(tmp_path, kind):
    numbers = np.arange(23, dtype="<u4" if kind == "uint32" else "<u2")
    path = tmp_path / ("tokens.npy" if kind == "npy" else "tokens.bin")
    np.save(path, numbers) if kind == "npy" else numbers.tofile(path)
    data = open_data(f"tokens:{path}" + (",dtype=uint32" if kind == "uint32" else ""), load(GPT))
    assert len(data) == 5  # 22 tokens have one that follows
    batch = pickle.loads(pickle.dumps(data)).fetch([4, 0], 0, 0)
    assert batch.args[0].tolist() == [[16, 17, 18, 19], [0, 1, 2, 3]]
    assert batch.targets.tolist() == [[17, 18, 19, 20], [1, 2, 3, 4]]
    assert batch.targets.dtype == torch.int64


def test_what_is_wrong_with_tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    workload = load(GPT)
    with pytest.raises(InputError, match="cannot be read"):
        open_data(f"tokens:{path}", workload)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="not a file of uint16 tokens"):
        open_data(f"tokens:{path}", workload)
    path.write_bytes(b"123")
    with pytest.raises(InputError, match="not a file of uint16 tokens"):
        open_data(f"tokens:{path}", workload)
    path.write_text("What a tokenizer has not yet seen.\n" * 3)
    with pytest.raises(InputError, match=r"it is text, not yet in tokens. Try its tokens, .*dtype='uint32'"):
        open_data(f"tokens:{path},dtype=uint32", workload)
    np.array([1, 2, 3, 4], "<u2").tofile(path)
    with pytest.raises(InputError, match="its 4 tokens hold 0 windows of 4"):
        open_data(f"tokens:{path}", workload)
    np.array([1, 2, 3, 4, 1000], "<u2").tofile(path)
    with pytest.raises(InputError, match="token 1000: the model's vocabulary has 1000 tokens"):
        next(loader(workload, open_data(f"tokens:{path}", workload), 1, workers=0))
    with pytest.raises(InputError, match="Try uint16"):
        open_data(f"tokens:{path},dtype=int16", workload)
    with pytest.raises(InputError, match="takes no tokens"):
        open_data(f"tokens:{path}", load("resnet18:mnist"))
    np.save(tmp_path / "floats.npy", np.zeros(9))
    with pytest.raises(InputError, match="it holds float64"):
        open_data(f"tokens:{tmp_path / 'floats.npy'}", workload)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_tokens_become_what_transformers_models_take(tmp_path, kind):
    pytest.importorskip("transformers")
    path = tmp_path / "tokens.bin"
    np.arange(100, 200, dtype="<u2").tofile(path)
    workload = load(f"hf:{kind},seq=8,vocab_size=300")
    data = open_data(f"tokens:{path}", workload)
    batch = data.fetch([0, 1], 0, 0)
    synthetic = workload.inputs(2, 0)
    assert {k: (v.shape, v.dtype) for k, v in tensors(batch).items()} == {
        k: (v.shape, v.dtype) for k, v in tensors(synthetic).items()
    }
    ids, labels = batch.kwargs["input_ids"], batch.kwargs["labels"]
    if kind == "gpt2":
        assert torch.equal(ids, labels)
        assert ids[1].tolist() == list(range(108, 116))
    elif kind == "t5":
        assert (ids[1, 0].item(), labels[1, 0].item()) == (116, 124)
    else:
        original = torch.arange(100, 116).view(2, 8)
        assert torch.equal(torch.where(labels == -100, ids, labels), original)
        assert not same(batch, data.fetch([0, 1], 1, 0))  # other tokens are masked in the next epoch


def test_images_become_what_transformers_models_take(tmp_path):
    pytest.importorskip("transformers")
    workload = load("hf:vit,image_size=32,patch_size=8")
    data = open_data(f"folder:{write_noise(tmp_path, 'cifar10', 4)}", workload)
    batch = data.fetch([1, 3], 0, 0)
    assert batch.kwargs["pixel_values"].shape == (2, 3, 32, 32)
    assert batch.kwargs["labels"].tolist() == [1, 3]


# -- the loader ----------------------------------------------------------------------------------------------------


class Numbers:
    """Sample i is the number i, with what is random about it."""

    decodes = False

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def fetch(self, indices, epoch, seed):
        random = [torch.rand(1, generator=random_for(seed, epoch, index)) for index in indices]
        return Batch(len(indices), args=(torch.tensor(indices),), targets=torch.cat(random))


def numbers(batches):
    return [batch.args[0].tolist() if batch.samples else [] for batch in batches]


def test_an_epoch_holds_every_sample_once_and_epochs_differ():
    workload = load(GPT)
    run = loader(workload, Numbers(10), 4, seed=3, epochs=2)
    batches = numbers(run)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert run.position == Position(2, 0)
    assert run.steps_per_epoch == 3
    assert numbers(loader(workload, Numbers(10), 4, seed=3, epochs=2)) == batches
    assert numbers(loader(workload, Numbers(10), 4, seed=4, epochs=2)) != batches
    plain = loader(workload, Numbers(10), 4, shuffle=False, drop_last=True, epochs=1)
    assert numbers(plain) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 8), st.booleans(), st.integers(0, 12), st.integers(1, 4), st.integers(0, 3))
def test_resumed_and_sharded_reading_is_the_same_reading(length, batch, drop, stop, replicas, seed):
    workload = load(GPT)
    if drop and length < batch:
        with pytest.raises(InputError, match="not one batch is full"):
            loader(workload, Numbers(length), batch, drop_last=True)
        return
    options = {"seed": seed, "drop_last": drop}
    run = loader(workload, Numbers(length), batch, **options)
    before = [next(run) for _ in range(stop)]
    resumed = loader(workload, Numbers(length), batch, start=run.position, **options)
    counted = loader(workload, Numbers(length), batch, start=stop, **options)
    shares = [
        loader(workload, Numbers(length), batch, start=run.position, **options,
               part=lambda samples, r=r: (samples * r // replicas, samples * (r + 1) // replicas))
        for r in range(replicas)
    ]  # fmt: skip
    for _ in range(4):
        whole = next(run)
        assert same(next(resumed), whole)
        assert same(next(counted), whole)
        parts = [next(share) for share in shares]
        assert same(join([part for part in parts if part.samples]), whole)
        assert {share.position for share in shares} == {run.position}
    assert sum(part.samples for part in before) == sum(len(part) for part in numbers(before))


def test_a_pair_is_cut_off_at_a_shorter_batch():
    parts = loader(load(GPT), Numbers(5), 4, part=(1, 3), shuffle=False, epochs=1)
    assert numbers(parts) == [[1, 2], []]
    assert [batch.samples for batch in loader(load(GPT), Numbers(5), 4, part=(1, 3), epochs=1)] == [2, 0]


def test_workers_read_the_same_and_end(tmp_path):
    workload = load("resnet18:cifar10,batch=4")
    data = open_data("synthetic", workload, samples=10, root=tmp_path)
    alone = list(loader(workload, data, epochs=1, seed=1, workers=0))
    run = loader(workload, data, epochs=1, seed=1, workers=2, prefetch=3)
    first = next(run)
    assert run.position == Position(0, 1)  # though the workers are ahead
    assert same(first, alone[0])
    assert all(same(a, b) for a, b in zip([*run], alone[1:], strict=True))
    with loader(workload, data, workers=1) as endless:
        next(endless)
        pids = [worker.pid for worker in endless._fetched._workers]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(endless) == []


def test_synthetic_samples_in_memory():
    workload = load("resnet18:highres")
    data = open_data("memory", workload, samples=1000)
    assert len(data) == 1000
    assert data.pool.samples == 21  # 64 MiB of images of 3 MiB
    assert same(data.fetch([3, 24], 0, 0), data.fetch([24, 3], 1, 1))
    assert len(open_data("memory", load("resnet18:mnist"))) == 60_000
    with pytest.raises(InputError, match="at least one"):
        open_data("memory", workload, samples=-1)


@pytest.mark.parametrize(
    ("batch", "start", "message"),
    [(-1, 0, "at least one sample"), (4, (0, 9), "an epoch has 3 steps"), (4, (-1, 0), "an epoch has 3 steps")],
)
def test_what_a_loader_refuses(batch, start, message):
    with pytest.raises(InputError, match=message):
        loader(load(GPT), Numbers(10), batch, start=start)


def test_a_part_outside_the_batch_is_refused():
    with pytest.raises(InputError, match="samples 2 to 9 of a batch: it has 4"):
        next(loader(load(GPT), Numbers(10), 4, part=lambda samples: (2, 9)))
