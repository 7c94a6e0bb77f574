"""Bad samples: named or substituted, each once in the quarantine; all others come once, and nothing crashes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dali_pipes as dp
from tests import loaders
from tests.hostile_photos import undecodable
from tests.lazy import Lazy
from tests.loaders import keys_of, substituting
from tests.shards import Sample, image_bytes, make_samples, samples_and_shards, with_data, write_shards

torch, fn, types = Lazy("torch"), Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")

NUM_SAMPLES = 12
BATCH_SIZE = 4
RAISING: dict[str, Any] = {"on_error": "raise"}


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
    return b"nothing of the kind" * 10


def nothing(data: bytes) -> bytes:
    return b""


Spoil = Callable[[bytes], bytes]


def spoilt(samples: Sequence[Sample], numbers: Any, *, how: Any = None, component: str = "image.jpg") -> list[Sample]:
    """Spoil a component of the samples with these numbers; ``numbers`` may map each number to its own way to spoil."""
    ways: Mapping[int, Spoil] = numbers if isinstance(numbers, Mapping) else dict.fromkeys(numbers, how)
    data = {number: spoil(samples[number].components[component]) for number, spoil in ways.items()}
    return with_data(samples, data, component=component)


good_samples, good_shards = samples_and_shards(
    [(40 + 3 * (i % 5), 50 + 2 * (i % 3)) for i in range(NUM_SAMPLES)], per_shard=6
)


def open_loader(shards: Any, *, policy: dict[str, Any] | None = None, **options: Any) -> dp.Loader:
    bad_samples = substituting(shards, **(policy or {}))
    usual = {"batch_size": BATCH_SIZE, "shuffle": False, "decode": dp.Decode(threads=2)}
    return loaders.open_loader(shards, bad_samples=bad_samples, **(usual | options))


def rows_of(shards: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Read good samples; map each key to the sample's row of each output."""
    with open_loader(shards, policy=RAISING, **options) as loader:
        return {
            key: {name: batch[name][i] for name in batch} for (batch,) in loader for i, key in enumerate(batch["key"])
        }


def quarantined(shards: Path) -> list[list[str]]:
    """The fields of each line of the quarantine, sorted by key."""
    lines = [line.split("\t") for line in (shards / "q.tsv").read_text().splitlines() if line[0] != "#"]
    return sorted(lines, key=lambda fields: fields[1])


def stand_in(keys: Sequence[str], bad: set[str]) -> list[str]:
    """The rule, written out plainly: what a batch of these keys is delivered as."""
    delivered = []
    for position in range(len(keys)):
        before = [other for other in keys[: position + 1] if other not in bad]
        after = [other for other in keys[position:] if other not in bad]
        if before or after:
            delivered.append(before[-1] if before else after[0])
            continue
        first = int(keys[0][1:])
        shard = [f"s{i:05d}" for i in range(first - first % 6, first - first % 6 + 6)]
        order = shard[: first % 6][::-1] + shard[first % 6 + 1 :]
        delivered.append(next(other for other in order if other not in bad))
    return delivered


@pytest.mark.parametrize(
    "ways",
    [
        {0: undecodable},  # the first of the epoch: the next sample replaces it
        {3: undecodable, 7: undecodable},  # the last sample of each of two batches
        dict.fromkeys((8, 9, 10, 11), undecodable),  # a whole batch: a neighbour in the shard replaces it
        dict.fromkeys((4, 5, 6, 7), undecodable),  # a whole batch, from two shards
        {0: gif, 3: gif, 4: gif, 5: gif, 6: gif},  # found bad before the batch is decoded
        dict.fromkeys((8, 9, 10, 11), gif),
        {1: cut, 5: bomb, 6: nothing, 7: garbage, 9: undecodable, 10: gif},
    ],
    ids=lambda ways: " ".join(f"{number}={how.__name__}" for number, how in ways.items()),
)
def test_others_stand_in(tmp_path: Path, good_samples: list[Sample], good_shards: Path, ways: dict[int, Spoil]) -> None:
    """The number and size of batches stay; good samples keep their random crops and are bit-equal to the samples of a
    good data set; the loader marks the repeats.
    """
    options: dict[str, Any] = {"graph": dp.classification_train(crop=24), "seed": 5}
    shards = write_shards(tmp_path, spoilt(good_samples, ways), per_shard=6)
    bad = {f"s{number:05d}" for number in ways}
    whole = rows_of(good_shards, **options)
    with open_loader(shards, **options) as loader:
        for epoch in range(2):
            loader.set_epoch(0)
            for first, (batch,) in zip(range(0, NUM_SAMPLES, BATCH_SIZE), loader, strict=True):
                keys = [f"s{number:05d}" for number in range(first, first + BATCH_SIZE)]
                assert batch["key"] == stand_in(keys, bad)
                assert list(loader.substituted) == [i for i, key in enumerate(keys) if key in bad]
                for i, key in enumerate(batch["key"]):
                    assert torch.equal(batch["image"][i], whole[key]["image"])
                    assert batch["label"][i] == whole[key]["label"]
            assert loader.num_substituted == (epoch + 1) * len(bad)
        assert sorted((sample.key, sample.component) for sample in loader.bad_samples) == [
            (key, "image.jpg") for key in sorted(bad)
        ]
    assert [fields[:3] for fields in quarantined(shards)] == [
        [f"s-{int(key[1:]) // 6:06d}.tar", key, "image.jpg"] for key in sorted(bad)
    ]


@pytest.mark.parametrize(
    ("policy", "how", "expected"),
    [
        ("PARTIAL", undecodable, ["s00009", "s00009"]),  # only bad samples: the one before them in the shard
        ("FILL", gif, ["s00001", "s00001", "s00001", "s00001", "s00002"]),  # 10, 11, and 0, 1, 2 repeated
        ("FILL", undecodable, ["s00001", "s00001", "s00001", "s00001", "s00002"]),
    ],
)
def test_bad_sample_in_a_filled_batch(
    tmp_path: Path, good_samples: list[Sample], policy: str, how: Spoil, expected: list[str]
) -> None:
    """Bad samples that fill the last batch, or are alone in it."""
    shards = write_shards(tmp_path, spoilt(good_samples, [0, 10, 11], how=how), per_shard=6)
    with open_loader(shards, batch_size=5, last_batch_policy=policy) as loader:
        *_, (last,) = list(loader)
        assert last["key"] == expected
        assert loader.substituted == {"PARTIAL": (0, 1), "FILL": (0, 1, 2)}[policy]


@pytest.mark.parametrize("how", [undecodable, gif])
def test_other_ranks_bad_samples_are_theirs(tmp_path: Path, good_samples: list[Sample], how: Spoil) -> None:
    """A batch of bad samples only, and the neighbours that could replace them are bad: each rank lists its own."""
    # Rank 0 reads 0 1 and 4 5, rank 1 reads 2 3 and 6 7: 0 to 4 are bad, so that 0 and 1 are replaced by 5.
    shards = write_shards(tmp_path, spoilt(good_samples[:8], [0, 1, 2, 3, 4], how=how), per_shard=8)
    expected = [["s00000", "s00001", "s00004"], ["s00002", "s00003"]]
    for rank in range(2):
        policy = {"quarantine": tmp_path / f"own-{rank}.tsv", "max_bad": len(expected[rank])}
        with open_loader(shards, batch_size=2, rank=rank, world_size=2, policy=policy) as loader:
            for _ in range(2):  # in the second epoch they are known
                delivered = [batch["key"] for (batch,) in loader]
                assert delivered == [[["s00005"] * 2, ["s00005"] * 2], [["s00005"] * 2, ["s00006", "s00007"]]][rank]
            assert sorted(bad.key for bad in loader.bad_samples) == expected[rank]
        lines = (tmp_path / f"own-{rank}.tsv").read_text().splitlines()[1:]
        assert [line.split("\t")[1] for line in lines] == expected[rank]


@pytest.mark.parametrize(("num_bad", "is_error"), [(4, False), (5, True)])
def test_search_for_a_replacement_ends(
    tmp_path: Path, good_samples: list[Sample], monkeypatch: pytest.MonkeyPatch, num_bad: int, is_error: bool
) -> None:
    """For a batch of bad samples the loader tries others: two of them may be bad here, a third is an error."""
    monkeypatch.setattr("dali_pipes.bad_samples.MAX_UNFIT", 2)
    shards = write_shards(tmp_path, spoilt(good_samples[:8], range(num_bad), how=gif), per_shard=8)
    with open_loader(shards, batch_size=2) as loader:
        if is_error:
            with pytest.raises(dp.DecodeError, match="key 's00000': more than 2 samples that could replace the bad"):
                next(loader)
        else:
            assert next(loader)[0]["key"] == ["s00004"] * 2


@pytest.fixture
def repairs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one entry for each batch that DALI refused and the loader repaired."""
    from dali_pipes.bad_samples import Repair

    made: list[None] = []
    real = Repair.decode
    monkeypatch.setattr(Repair, "decode", lambda *args: made.append(None) or real(*args))
    return made


def test_bad_sample_that_only_fills_a_batch_is_not_listed(
    tmp_path: Path, good_samples: list[Sample], repairs: list[None]
) -> None:
    """Of the last step, two ranks: rank 1 has only samples that FILL repeats, and rank 0 has listed the bad one."""
    shards = write_shards(tmp_path, spoilt(good_samples[:6], [0], how=undecodable), per_shard=6)
    for rank, expected in enumerate([["s00000"], []]):
        repairs.clear()
        with open_loader(shards, batch_size=2, rank=rank, world_size=2, last_batch_policy="FILL") as loader:
            for _ in range(2):
                *_, (last,) = list(loader)
                assert last["key"] == [["s00004", "s00005"], ["s00001", "s00001"]][rank]
                assert (loader.num_valid, loader.substituted) == [(2, ()), (0, (0,))][rank]
                assert [bad.key for bad in loader.bad_samples] == expected
                assert len(repairs) == 1, "in the second epoch it is known"


def test_only_the_bad_ones_of_a_large_batch_are_replaced(tmp_path: Path) -> None:
    """DALI decodes parts of two samples each; if it refuses a part, it decodes each sample of the part."""
    shards = write_shards(tmp_path, spoilt(make_samples([(40, 30)] * 32), [3, 20, 21], how=undecodable), per_shard=32)
    with open_loader(shards, batch_size=32) as loader:
        next(loader)
        assert loader.substituted == (3, 20, 21)


def test_mask_alone_is_bad(tmp_path: Path, good_samples: list[Sample]) -> None:
    """The component is named; photo, mask and label of the one that stands in belong together."""
    shards = write_shards(tmp_path, spoilt(good_samples, [6], how=undecodable, component="trimap.png"), per_shard=6)
    with open_loader(shards) as loader:
        _, (second,), _ = loader
        assert [sample.component for sample in loader.bad_samples] == ["trimap.png"]
        assert second["key"] == ["s00004", "s00005", "s00005", "s00007"]
        for name in ("image", "mask", "label"):
            assert torch.equal(second[name][1], second[name][2])


def test_resume_around_bad_samples(tmp_path: Path, good_samples: list[Sample]) -> None:
    """A new loader, which knows no bad sample yet, resumes anywhere and gives bit-equal batches."""
    ways = {1: undecodable, 4: undecodable, 5: gif, 6: undecodable, 7: gif, 11: gif}
    shards = write_shards(tmp_path, spoilt(good_samples, ways), per_shard=6)
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "batch_size": 2}
    with open_loader(shards, **options) as loader:
        states, whole = [loader.state_dict()], []
        for (batch,) in loader:
            whole.append((batch, loader.substituted))
            states.append(loader.state_dict())
    for number in (1, 2, 4):
        with open_loader(shards, **options) as loader:
            loader.load_state_dict(states[number])
            for (kept, substituted), (batch,) in zip(whole[number:], loader, strict=True):
                assert batch["key"] == kept["key"]
                assert torch.equal(batch["image"], kept["image"])
                assert loader.substituted == substituted


def test_a_whole_shard_is_bad(tmp_path: Path, good_samples: list[Sample]) -> None:
    """Then the first good sample of the next shard stands in, and after the last shard comes the first."""
    ways = {0: gif} | dict.fromkeys((6, 7, 8), undecodable) | dict.fromkeys((9, 10, 11), gif)
    shards = write_shards(tmp_path, spoilt(good_samples, ways), per_shard=6)
    with open_loader(shards, batch_size=3) as loader:
        batches = [batch for (batch,) in loader]
        assert [batch["key"] for batch in batches[2:]] == [["s00001"] * 3] * 2
        assert all(torch.equal(batch["image"][0], batches[0]["image"][1]) for batch in batches[2:])
    assert len(quarantined(shards)) == 7


def test_a_data_set_of_bad_samples_is_an_error(tmp_path: Path, good_samples: list[Sample]) -> None:
    """GIFs are known to be bad. If nothing can be decoded, the graph may be wrong, so nothing is quarantined."""
    shards = write_shards(tmp_path / "gif", spoilt(good_samples, range(12), how=gif), per_shard=6)
    with open_loader(shards) as loader, pytest.raises(dp.DecodeError, match="the data set has no good sample left"):
        next(loader)
    shards = write_shards(tmp_path / "one", spoilt(good_samples[:1], [0], how=undecodable), per_shard=6)
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
    cache = dp.Cache(directory=tmp_path, max_bytes=76_000)
    shuffle = dp.Shuffle(window_bytes=1)
    with open_loader(shards, shuffle=shuffle, cache=cache, batch_size=2, seed=4) as loader:
        for _ in range(2):
            keys = keys_of(loader)
            assert len(keys) == 12
            assert {"s00001", "s00004", "s00007", "s00010"}.isdisjoint(keys)
            assert len(set(keys)) == 8
        assert loader.parts.share.reserved < int(loader.parts.share.extent_bytes.sum())


def test_error_in_the_last_batch_and_the_end_is_told(tmp_path: Path, good_samples: list[Sample]) -> None:
    """A loop that goes on after errors gets the epoch's end, and not the next epoch's batches."""
    shards = write_shards(tmp_path, spoilt(good_samples, [11], how=bomb), per_shard=6)
    with open_loader(shards, policy=RAISING) as loader:
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

        return {"bytes": components["cls"], "number": components.array(number)}

    with open_loader(good_shards, graph=graph, policy={"quarantine": tmp_path / "q.tsv"}) as loader:
        assert next(loader)[0]["key"][0] == "s00000"
        for _ in range(2):
            with pytest.raises(KeyError, match="boom") as caught:
                next(loader)
            assert caught.value.__notes__ == [
                "in an array of the graph, for the batch of s00004, s00005, s00006, s00007"
            ]


def test_quarantine_that_cannot_be_written_loses_nothing(tmp_path: Path, good_samples: list[Sample]) -> None:
    """The error is the disk's; when it can be written again the batch comes, and the line with it."""
    shards = write_shards(tmp_path / "shards", spoilt(good_samples, [5], how=undecodable), per_shard=6)
    folder = tmp_path / "quarantine"
    folder.mkdir()
    with open_loader(shards, policy={"quarantine": folder / "q.tsv"}) as loader:
        keys = list(next(loader)[0]["key"])
        folder.rmdir()
        with pytest.raises(dp.StoreError, match=r"cannot write the quarantine"):
            next(loader)
        folder.mkdir()
        keys += keys_of(loader)
    assert keys == [f"s{i:05d}" for i in (0, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10, 11)]
    assert "s00005" in (folder / "q.tsv").read_text()


def test_too_many_are_an_error(tmp_path: Path, good_samples: list[Sample]) -> None:
    """Up to ``max_bad`` are allowed; the next one says how many, where they are listed, and the last of them."""
    shards = write_shards(tmp_path, spoilt(good_samples, [1, 5, 9], how=undecodable), per_shard=6)
    with open_loader(shards, policy={"max_bad": 2}) as loader:
        next(loader), next(loader)
        text = r"3 samples are bad, max_bad=2 are allowed, all in '.*q.tsv'; the last: shard 's-000001.tar', key"
        with pytest.raises(dp.DecodeError, match=text):
            next(loader)


def fail_at(monkeypatch: pytest.MonkeyPatch, *, is_failing: Callable[[int, int], bool], text: str) -> list[Any]:
    """Let DALI fail where ``is_failing(batch number from 1, number of samples)``; return the pipeline of each call."""
    from dali_pipes.graph.decode import DecodePipeline

    real = DecodePipeline.take
    calls: list[Any] = []

    def take(self: Any) -> Any:
        calls.append(self)
        taken = real(self)
        if not is_failing(len(calls), len(next(iter(taken[0].encoded.values())))):
            return taken
        self.scheduled.appendleft(taken[0])
        raise RuntimeError(f"encountered: {text}")

    monkeypatch.setattr(DecodePipeline, "take", take)
    return calls


def test_a_batch_without_a_bad_sample_is_the_same(
    good_shards: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """DALI fails once without a bad sample: a retry pipeline without JPEG engines gives a bit-equal batch."""
    options = {"graph": dp.classification_train(crop=24), "shuffle": True}
    with open_loader(good_shards, **options) as loader:
        whole = [batch for (batch,) in loader]
    calls = fail_at(monkeypatch, is_failing=lambda number, num_samples: number == 2, text="something passing")
    with open_loader(good_shards, **options) as loader:
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
    text = "CUDA runtime API error cudaErrorLaunchFailure"
    fail_at(monkeypatch, is_failing=lambda number, num_samples: number > 1, text=text)
    with open_loader(good_shards, policy={"max_bad": 1}) as loader:
        next(loader)
        with pytest.raises(dp.DecodeError, match=r"fails on every sample that was tried, .* cudaErrorLaunchFailure"):
            next(loader)
        assert not loader.bad_samples
    assert not (good_shards / "q.tsv").exists()


def test_samples_that_are_decoded_only_alone_are_an_error(good_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, is_failing=lambda number, num_samples: number > 1 and num_samples > 1, text="no memory")
    with open_loader(good_shards) as loader:
        next(loader)
        with pytest.raises(dp.DecodeError, match=r"cannot decode one of the 4 samples s00004, .*s00007: no mem"):
            next(loader)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (undecodable, "cannot be decoded: Failed to decode"),
        (bomb, r"holds a photo of 100000 x 100000 pixels, expected at most max_pixels=89478485"),
        (cut, "is cut off: it has no end-of-image marker"),
    ],
)
def test_raise_names_shard_key_component_and_cause(
    tmp_path: Path, good_samples: list[Sample], how: Spoil, cause: str
) -> None:
    """What the manifest knows of is refused at once; what only the shard's index or DALI tells, with its batch."""
    shards = write_shards(tmp_path, spoilt(good_samples, [6, 7], how=how), per_shard=6)
    text = f"shard 's-000001.tar', key 's00006': component 'image.jpg' {cause}"
    if how is cut:
        with pytest.raises(dp.DataError, match=rf"{text}.*; pass bad_samples=BadSamples\(on_error="):
            open_loader(shards, policy=RAISING)
        return
    with open_loader(shards, policy=RAISING) as loader:
        assert next(loader)[0]["key"] == ["s00000", "s00001", "s00002", "s00003"]
        with pytest.raises(dp.DecodeError, match=f"{text}.*; bad in this batch as well: 's00007'; leave it out"):
            next(loader)
        assert next(loader)[0]["key"] == ["s00008", "s00009", "s00010", "s00011"]
    assert not (shards / "q.tsv").exists()
