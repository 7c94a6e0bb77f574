"""Bad samples: named or substituted, each once in the quarantine; all others come once, and nothing crashes."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn, types
from PIL import Image

import dali_pipes as dp
import dali_pipes.bad_samples
from dali_pipes.bad_samples import Repair
from dali_pipes.graph.decode import DecodePipeline
from tests import loaders
from tests.hostile_photos import undecodable
from tests.loaders import keys_of, substituting
from tests.shards import Sample, image_bytes, make_samples, samples_and_shards, write_shards

NUM_SAMPLES = 12
BATCH_SIZE = 4


def cut(data: bytes) -> bytes:
    """Cut off near its end: the header is right, the last pixels are not there."""
    return data[: len(data) * 9 // 10]


def gif(data: bytes) -> bytes:
    """A GIF: known to be bad since the shards were indexed."""
    return image_bytes(Image.new("P", (20, 20)), "GIF")


def bomb(data: bytes) -> bytes:
    """A PNG that says it has 10,000 million pixels."""
    png = bytearray(image_bytes(Image.new("L", (1, 1))))
    png[16:24] = (100_000).to_bytes(4, "big") * 2
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4)
    return bytes(png)


def garbage(data: bytes) -> bytes:
    """No image at all."""
    return b"nothing of the kind" * 10


def nothing(data: bytes) -> bytes:
    """A file of no bytes."""
    return b""


KINDS = {"undecodable": undecodable, "cut": cut, "gif": gif, "bomb": bomb, "garbage": garbage, "nothing": nothing}


def spoilt(
    samples: Sequence[Sample], numbers: Sequence[int], *, how: Callable[[bytes], bytes], component: str = "image.jpg"
) -> list[Sample]:
    """The samples, some of them with a bad component."""
    return [
        Sample(sample.key, sample.components | {component: how(sample.components[component])})
        if number in numbers
        else sample
        for number, sample in enumerate(samples)
    ]


good_samples, good_shards = samples_and_shards(
    [(40 + 3 * (i % 5), 50 + 2 * (i % 3)) for i in range(NUM_SAMPLES)], per_shard=6
)


def open_loader(shards: Any, **options: Any) -> dp.Loader:
    policy = options.pop("bad_samples", None) or substituting(shards)
    usual = {"batch_size": BATCH_SIZE, "shuffle": False, "decode": dp.Decode(threads=2)}
    return loaders.open_loader(shards, bad_samples=policy, **(usual | options))


def stand_in(keys: Sequence[str], bad: set[str], *, shard_of: Callable[[str], list[str]]) -> list[str]:
    """The rule, written out plainly: what a batch of these keys is delivered as."""
    delivered = []
    for position in range(len(keys)):
        before = [other for other in keys[: position + 1] if other not in bad]
        after = [other for other in keys[position:] if other not in bad]
        if before or after:
            delivered.append(before[-1] if before else after[0])
            continue
        shard = shard_of(keys[0])
        place = shard.index(keys[0])
        order = shard[:place][::-1] + shard[place + 1 :]
        delivered.append(next(other for other in order if other not in bad))
    return delivered


def shard_of(key: str) -> list[str]:
    number = int(key[1:])
    return [f"s{i:05d}" for i in range(number - number % 6, number - number % 6 + 6)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "numbers",
    [
        [0],  # the first of the epoch: the one after it stands in
        [5],
        [3, 7],  # the last of two batches
        [4, 5, 6],  # most of a batch
        [8, 9, 10, 11],  # nothing but bad ones: a neighbour in the shard
        [4, 5, 6, 7],  # likewise, over two shards
    ],
)
def test_others_stand_in(
    tmp_path: Path, good_samples: list[Sample], good_shards: Path, kind: str, numbers: list[int]
) -> None:
    """Batches keep number and size; all others are bit-equal to those of a good data set; the repeats are marked."""
    shards = write_shards(tmp_path, spoilt(good_samples, numbers, how=KINDS[kind]), per_shard=6)
    bad = {f"s{number:05d}" for number in numbers}
    with open_loader(good_shards, bad_samples=dp.BadSamples(on_error="raise")) as loader:
        whole = {key: batch["image"][i] for (batch,) in loader for i, key in enumerate(batch["key"])}
        labels = {s.key: int(s.components["cls"]) for s in good_samples}
    with open_loader(shards) as loader:
        for epoch in range(2):
            batches = []
            for first, (batch,) in zip(range(0, NUM_SAMPLES, BATCH_SIZE), loader, strict=True):
                keys = [f"s{number:05d}" for number in range(first, first + BATCH_SIZE)]
                assert batch["key"] == stand_in(keys, bad, shard_of=shard_of)
                assert list(loader.substituted) == [i for i, key in enumerate(keys) if key in bad]
                batches.append(batch)
            for batch in batches:
                for i, key in enumerate(batch["key"]):
                    assert torch.equal(batch["image"][i], whole[key])
                    assert batch["label"][i] == labels[key]
            assert loader.num_substituted == (epoch + 1) * len(bad)
        assert sorted(sample.key for sample in loader.bad_samples) == sorted(bad)
        assert {sample.component for sample in loader.bad_samples} == {"image.jpg"}
    lines = [line.split("\t") for line in (shards / "q.tsv").read_text().splitlines() if line[0] != "#"]
    assert sorted(line[1] for line in lines) == sorted(bad)
    assert all(line[0] == f"s-{int(line[1][1:]) // 6:06d}.tar" and line[2] == "image.jpg" for line in lines)


@pytest.mark.parametrize("kind", ["undecodable", "gif"])
@pytest.mark.parametrize("policy", ["PARTIAL", "FILL"])
def test_bad_sample_in_a_filled_batch(tmp_path: Path, good_samples: list[Sample], kind: str, policy: str) -> None:
    """Bad samples that fill the last batch, or are alone in it."""
    shards = write_shards(tmp_path, spoilt(good_samples, [0, 10, 11], how=KINDS[kind]), per_shard=6)
    with open_loader(shards, batch_size=5, last_batch_policy=policy) as loader:
        *_, (last,) = list(loader)
        assert (
            last["key"]
            == {
                "PARTIAL": ["s00009", "s00009"],  # nothing but bad ones: the neighbour before the first
                "FILL": ["s00001", "s00001", "s00001", "s00001", "s00002"],  # 10 11 and again 0 1 2
            }[policy]
        )
        assert loader.substituted == {"PARTIAL": (0, 1), "FILL": (0, 1, 2)}[policy]


@pytest.mark.parametrize("kind", ["undecodable", "gif", "nothing"])
def test_other_ranks_bad_samples_are_theirs(tmp_path: Path, good_samples: list[Sample], kind: str) -> None:
    """A batch of bad samples only, and the neighbours that could replace them are bad: each rank lists its own."""
    # Rank 0 reads 0 1 and 4 5, rank 1 reads 2 3 and 6 7: 0 to 4 are bad, so that 0 and 1 are replaced by 5.
    shards = write_shards(tmp_path, spoilt(good_samples[:8], [0, 1, 2, 3, 4], how=KINDS[kind]), per_shard=8)
    expected = [["s00000", "s00001", "s00004"], ["s00002", "s00003"]]
    for rank in range(2):
        quarantine = tmp_path / f"own-{rank}.tsv"
        bad_samples = substituting(shards, quarantine=quarantine, max_bad=len(expected[rank]))
        with open_loader(shards, batch_size=2, rank=rank, world_size=2, bad_samples=bad_samples) as loader:
            for _ in range(2):  # in the second epoch they are known
                delivered = [batch["key"] for (batch,) in loader]
                assert delivered == [[["s00005"] * 2, ["s00005"] * 2], [["s00005"] * 2, ["s00006", "s00007"]]][rank]
            assert sorted(bad.key for bad in loader.bad_samples) == expected[rank]
        assert [line.split("\t")[1] for line in quarantine.read_text().splitlines()[1:]] == expected[rank]


def test_bad_sample_that_only_fills_a_batch_is_not_listed(tmp_path: Path, good_samples: list[Sample]) -> None:
    """Of the last step, two ranks: rank 1 has only samples that FILL repeats, and rank 0 has listed the bad one."""
    shards = write_shards(tmp_path, spoilt(good_samples[:6], [0], how=undecodable), per_shard=6)
    for rank, expected in enumerate([["s00000"], []]):
        with open_loader(
            shards, batch_size=2, rank=rank, world_size=2, last_batch_policy="FILL", bad_samples=substituting(shards)
        ) as loader:
            *_, (last,) = list(loader)
            assert last["key"] == [["s00004", "s00005"], ["s00001", "s00001"]][rank]
            assert (loader.num_valid, loader.substituted) == [(2, ()), (0, (0,))][rank]
            assert [bad.key for bad in loader.bad_samples] == expected


@pytest.mark.parametrize("kind", ["undecodable", "gif"])
def test_mask_alone_is_bad(tmp_path: Path, good_samples: list[Sample], kind: str) -> None:
    """The component is named; photo, mask and label of the one that stands in belong together."""
    shards = write_shards(tmp_path, spoilt(good_samples, [6], how=KINDS[kind], component="trimap.png"), per_shard=6)
    with open_loader(shards) as loader:
        second = [batch for (batch,) in loader][1]
        assert [sample.component for sample in loader.bad_samples] == ["trimap.png"]
        assert second["key"] == ["s00004", "s00005", "s00005", "s00007"]
        for name in ("image", "mask", "label"):
            assert torch.equal(second[name][1], second[name][2])


@pytest.mark.parametrize("kind", ["undecodable", "gif"])
def test_crops_are_those_of_the_samples(
    tmp_path: Path, good_samples: list[Sample], good_shards: Path, kind: str
) -> None:
    """A repaired batch has each sample's own random numbers; what stands in is an exact repeat."""
    shards = write_shards(tmp_path, spoilt(good_samples, [2, 9], how=KINDS[kind]), per_shard=6)
    graph = dp.classification_train(crop=24)
    with open_loader(
        good_shards, graph=graph, shuffle=True, seed=5, bad_samples=dp.BadSamples(on_error="raise")
    ) as loader:
        whole = {key: batch["image"][i] for (batch,) in loader for i, key in enumerate(batch["key"])}
    with open_loader(shards, graph=graph, shuffle=True, seed=5) as loader:
        for (batch,) in loader:
            for i, key in enumerate(batch["key"]):
                assert torch.equal(batch["image"][i], whole[key])
        assert loader.num_substituted == 2


@pytest.mark.parametrize("kind", ["undecodable", "gif"])
def test_resume_around_bad_samples(tmp_path: Path, good_samples: list[Sample], kind: str) -> None:
    """Resumed at every batch, by a loader that has met no bad sample yet, the rest is bit-equal."""
    shards = write_shards(tmp_path, spoilt(good_samples, [1, 4, 5, 6, 7, 11], how=KINDS[kind]), per_shard=6)
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "batch_size": 2}
    with open_loader(shards, **options) as loader:
        states, whole = [loader.state_dict()], []
        for (batch,) in loader:
            whole.append((batch, loader.substituted))
            states.append(loader.state_dict())
    for number, state in enumerate(states[:-1]):
        with open_loader(shards, **options) as loader:
            loader.load_state_dict(state)
            for (kept, substituted), (batch,) in zip(whole[number:], loader, strict=True):
                assert batch["key"] == kept["key"]
                assert torch.equal(batch["image"], kept["image"])
                assert loader.substituted == substituted


@pytest.mark.parametrize("kind", ["undecodable", "gif"])
def test_a_whole_shard_is_bad(tmp_path: Path, good_samples: list[Sample], kind: str) -> None:
    """Then the first good sample of the next shard stands in, and after the last shard comes the first."""
    shards = write_shards(tmp_path, spoilt(good_samples, [0, *range(6, 12)], how=KINDS[kind]), per_shard=6)
    with open_loader(shards, batch_size=3) as loader:
        batches = [batch for (batch,) in loader]
        assert [batch["key"] for batch in batches[2:]] == [["s00001"] * 3] * 2
        assert all(torch.equal(batch["image"][0], batches[0]["image"][1]) for batch in batches[2:])
    assert len((shards / "q.tsv").read_text().splitlines()) == 1 + 7


def test_a_data_set_of_bad_samples_is_an_error(tmp_path: Path, good_samples: list[Sample]) -> None:
    """GIFs: every one is known to be bad. Cut off: as likely it is the graph, and nothing is quarantined for that."""
    shards = write_shards(tmp_path / "gif", spoilt(good_samples, range(12), how=gif), per_shard=6)
    with open_loader(shards) as loader, pytest.raises(dp.DecodeError, match="the data set has no good sample left"):
        next(loader)
    shards = write_shards(tmp_path / "undecodable", spoilt(good_samples, range(12), how=undecodable), per_shard=6)
    text = "DALI fails on every sample that was tried, also on others than those of the batch of s00000, .*: Failed to"
    with open_loader(shards) as loader, pytest.raises(dp.DecodeError, match=text):
        next(loader)
    assert not (shards / "q.tsv").exists()


def test_repair_in_windows(tmp_path: Path, good_samples: list[Sample]) -> None:
    """The first shard has left the cache when a later one's batch is repaired: nothing is read of it."""
    shards = write_shards(tmp_path / "shards", spoilt(good_samples, [1, 4, 7, 10], how=undecodable), per_shard=2)
    options: dict[str, Any] = {
        "shuffle": dp.Shuffle(window_bytes=1),
        "cache": dp.Cache(directory=tmp_path, max_bytes=76_000),
        "batch_size": 2,
        "seed": 4,
    }
    with open_loader(shards, **options) as loader:
        for _ in range(2):
            keys = keys_of(loader)
            assert len(keys) == 12
            assert {"s00001", "s00004", "s00007", "s00010"}.isdisjoint(keys)
            assert len(set(keys)) == 8
        assert loader.parts.share.reserved < int(loader.parts.share.extent_bytes.sum())


@pytest.mark.parametrize("leave", ["reset", "set_epoch", "load_state_dict"])
def test_leaving_with_an_error_decoded_ahead(tmp_path: Path, good_samples: list[Sample], leave: str) -> None:
    """The bad sample is among the batches decoded ahead, and nobody comes to it: what follows is whole."""
    shards = write_shards(tmp_path, spoilt(good_samples, [5], how=bomb), per_shard=6)
    graph = dp.segmentation(crop=16)
    with open_loader(
        shards, graph=graph, bad_samples=dp.BadSamples(on_error="raise"), select=dp.Select(exclude=())
    ) as loader:
        state = loader.state_dict()
        first = next(loader)[0]
        if leave == "reset":
            loader.reset()
        elif leave == "set_epoch":
            loader.set_epoch(0)
        else:
            loader.load_state_dict(state)
        again = next(loader)[0]
        assert again["key"] == first["key"]
        assert all(torch.equal(again[name], first[name]) for name in ("image", "mask", "label"))
        with pytest.raises(dp.DecodeError, match="s00005"):
            next(loader)
        assert next(loader)[0]["key"] == ["s00008", "s00009", "s00010", "s00011"]


def test_error_in_the_last_batch_and_the_end_is_told(tmp_path: Path, good_samples: list[Sample]) -> None:
    """A loop that goes on after errors gets the epoch's end, and not the next epoch's batches."""
    shards = write_shards(tmp_path, spoilt(good_samples, [11], how=bomb), per_shard=6)
    with open_loader(shards, bad_samples=dp.BadSamples(on_error="raise")) as loader:
        for _ in range(2):
            read, errors = 0, 0
            while True:
                try:
                    for _ in loader:
                        read += 1
                    break
                except dp.DecodeError:
                    errors += 1
            assert (read, errors) == (2, 1)


def test_operator_that_fails_for_one_sample_is_named(tmp_path: Path, good_samples: list[Sample]) -> None:
    """The photo is sound and too small for the crop: not the component's fault, and it says whose."""
    small = make_samples([(10, 10)], first=2)[0]
    shards = write_shards(tmp_path, [*good_samples[:2], small, good_samples[3]], per_shard=4)

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        pixels = fn.decoders.image(components["image.jpg"], device=components.device, output_type=types.RGB)
        return {"image": fn.crop(pixels, crop=(32, 32))}

    with open_loader(shards, graph=graph) as loader:
        assert next(loader)[0]["key"] == ["s00000", "s00001", "s00001", "s00003"]
        (bad,) = loader.bad_samples
        assert bad.component == ""
        assert bad.cause.startswith("cannot be processed: fn.crop says:")
        assert "C++" not in bad.cause


def test_array_function_that_fails_names_the_batch(tmp_path: Path, good_shards: Path) -> None:
    """The error is the user's own, with a note; no batch is lost, so it comes again."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        def number(batch: Any) -> np.ndarray:
            if "s00005" in batch.keys:
                raise KeyError("boom")
            return np.zeros(len(batch), np.float32)

        return {**as_corner(components), "number": components.array(number)}

    with open_loader(
        good_shards, graph=graph, bad_samples=substituting(good_shards, quarantine=tmp_path / "q.tsv")
    ) as loader:
        assert next(loader)[0]["key"][0] == "s00000"
        for _ in range(2):
            with pytest.raises(KeyError, match="boom") as caught:
                next(loader)
            assert caught.value.__notes__ == [
                "in an array of the graph, for the batch of s00004, s00005, s00006, s00007"
            ]


def as_corner(components: dp.Components) -> dict[str, Any]:
    """Some pixels of the photo."""
    pixels = fn.decoders.image(components["image.jpg"], device=components.device, output_type=types.RGB)
    return {"image": fn.slice(pixels, [0, 0], [8, 8], axes=(0, 1))}


def test_quarantine_that_cannot_be_written_loses_nothing(tmp_path: Path, good_samples: list[Sample]) -> None:
    """The error is the disk's; when it can be written again the batch comes, and the line with it."""
    shards = write_shards(tmp_path / "shards", spoilt(good_samples, [5], how=undecodable), per_shard=6)
    folder = tmp_path / "quarantine"
    folder.mkdir()
    with open_loader(shards, bad_samples=substituting(shards, quarantine=folder / "q.tsv")) as loader:
        keys = list(next(loader)[0]["key"])
        folder.rmdir()
        with pytest.raises(dp.StoreError, match=r"cannot write the quarantine"):
            next(loader)
        folder.mkdir()
        keys += keys_of(loader)
    assert keys == [f"s{i:05d}" for i in (0, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10, 11)]
    assert "s00005" in (folder / "q.tsv").read_text()


@pytest.mark.parametrize("kind", ["undecodable", "gif"])
def test_too_many_are_an_error(tmp_path: Path, good_samples: list[Sample], kind: str) -> None:
    """Up to ``max_bad`` are allowed; the next one says how many, where they are listed, and the last of them."""
    shards = write_shards(tmp_path, spoilt(good_samples, [1, 5, 9], how=KINDS[kind]), per_shard=6)
    with open_loader(shards, bad_samples=substituting(shards, max_bad=2)) as loader:
        next(loader), next(loader)
        text = r"3 samples are bad, max_bad=2 are allowed, all in '.*q.tsv'; the last: shard 's-000001.tar', key"
        with pytest.raises(dp.DecodeError, match=text):
            next(loader)


def test_second_epoch_knows_them(tmp_path: Path, good_samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found once is substituted before DALI sees it, and is written down once."""
    shards = write_shards(tmp_path, spoilt(good_samples, [1, 5, 9], how=undecodable), per_shard=6)
    repairs = []
    real = Repair.decode
    monkeypatch.setattr(Repair, "decode", lambda *args: repairs.append(1) or real(*args))
    with open_loader(shards) as loader:
        first = [batch for (batch,) in loader]
        assert len(repairs) == 3
        second = [batch for (batch,) in loader]
        assert len(repairs) == 3
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(first, second, strict=True))
    with open_loader(shards) as loader:
        list(loader)
    assert len((shards / "q.tsv").read_text().splitlines()) == 1 + 3


@pytest.mark.parametrize("batch_size", [BATCH_SIZE, 1])
def test_a_batch_without_a_bad_sample_is_the_same(
    good_shards: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, batch_size: int
) -> None:
    """DALI fails once and nobody is to blame: the batch, decoded again apart and without JPEG engines, is bit-equal."""
    graph = dp.classification_train(crop=24)
    with open_loader(good_shards, graph=graph, shuffle=True, batch_size=batch_size) as loader:
        whole = [batch for (batch,) in loader]
    real = DecodePipeline.take
    calls = []

    def fail_once(self: DecodePipeline) -> Any:
        calls.append(self)
        taken = real(self)
        if len(calls) != 2:
            return taken
        self.scheduled.appendleft(taken[0])
        raise RuntimeError("encountered: something passing")

    monkeypatch.setattr(DecodePipeline, "take", fail_once)
    with open_loader(good_shards, graph=graph, shuffle=True, batch_size=batch_size) as loader:
        again = [batch for (batch,) in loader]
        assert not loader.bad_samples
        retries = {one for one in calls if one is not loader.parts.decode}
    assert [one._hw_decoder_load for one in retries] == [0.0]
    (line,) = [record.getMessage() for record in caplog.records if "DALI failed" in record.getMessage()]
    assert line.endswith("(something passing), and then decoded each of its samples: none is replaced")
    for a, b in zip(whole, again, strict=True):
        assert a["key"] == b["key"]
        assert torch.equal(a["image"], b["image"])


def test_a_broken_device_is_no_sample_s_fault(good_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If what was decoded before cannot be decoded any more, nothing is quarantined, and the error says what it is."""
    real = DecodePipeline.take
    calls = []

    def fail_from_now_on(self: DecodePipeline) -> Any:
        calls.append(self)
        taken = real(self)
        if len(calls) == 1:
            return taken
        self.scheduled.appendleft(taken[0])
        raise RuntimeError("encountered: CUDA runtime API error cudaErrorLaunchFailure")

    monkeypatch.setattr(DecodePipeline, "take", fail_from_now_on)
    with open_loader(good_shards, bad_samples=substituting(good_shards, max_bad=1)) as loader:
        next(loader)
        with pytest.raises(dp.DecodeError, match=r"fails on every sample that was tried, .* cudaErrorLaunchFailure"):
            next(loader)
        assert not loader.bad_samples
    assert not (good_shards / "q.tsv").exists()


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("undecodable", "component 'image.jpg' cannot be decoded: Failed to decode"),
        ("cut", "component 'image.jpg' is cut off: it has no end-of-image marker"),
        ("gif", "component 'image.jpg' holds a GIF"),
        (
            "bomb",
            r"component 'image.jpg' holds a photo of 100000 x 100000 pixels, expected at most max_pixels=89478485",
        ),
        ("garbage", "component 'image.jpg' holds no photo of a known format"),
        ("nothing", "component 'image.jpg' holds no photo of a known format"),
    ],
)
def test_raise_names_shard_key_component_and_cause(
    tmp_path: Path, good_samples: list[Sample], kind: str, cause: str
) -> None:
    """What the manifest knows of is refused at once; what only the shard's index or DALI tells, with its batch."""
    shards = write_shards(tmp_path, spoilt(good_samples, [6, 7], how=KINDS[kind]), per_shard=6)
    text = f"shard 's-000001.tar', key 's00006': {cause}"
    if kind in ("cut", "gif", "garbage", "nothing"):
        with pytest.raises(dp.DataError, match=rf"{text}.*; pass bad_samples=BadSamples\(on_error="):
            open_loader(shards, bad_samples=dp.BadSamples(on_error="raise"))
        return
    with open_loader(shards, bad_samples=dp.BadSamples(on_error="raise")) as loader:
        assert next(loader)[0]["key"] == ["s00000", "s00001", "s00002", "s00003"]
        with pytest.raises(dp.DecodeError, match=f"{text}.*; bad in this batch as well: 's00007'; leave it out"):
            next(loader)
        assert next(loader)[0]["key"] == ["s00008", "s00009", "s00010", "s00011"]
    assert not (shards / "q.tsv").exists()
