"""What arrays a graph may take, and what it may make of its components."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dali_pipes as dp
from dali_pipes.reader.buffers import Buffers
from tests.hostile_photos import undecodable
from tests.lazy import Lazy
from tests.loaders import batches_of, open_loader, substituting
from tests.shards import Sample, make_samples, npy_bytes, photo_bytes, write_shards

torch, fn, types = Lazy("torch"), Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")


def refused(shards: Path, graph: Any, error: type[Exception], text: str, **options: Any) -> None:
    """Check that making a loader with this graph raises this error."""
    with pytest.raises(error, match=text):
        open_loader(shards, graph, **options)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (lambda batch: batch.ordinals.astype(np.float64), r"dtype one of float32, .*got float64 \[1\]"),
        (lambda batch: batch.ordinals.tolist(), "got list; convert it"),
        (lambda batch: np.zeros(3, np.float32), r"one row for each of 1 samples, .*got float32 \[3\]"),
    ],
)
def test_array_that_dali_cannot_take_is_refused_when_it_is_built(small_shards: Path, array, text: str) -> None:
    """What it must be, what it is, and how to make it so."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"bytes": components["cls"], "array": components.array(array)}

    refused(small_shards, graph, TypeError, text)


# --- samples of different lengths in one tensor -----------------------------------------------------------------------


def files(components: dp.Components, random: dp.Random) -> dict[str, object]:
    return {"files": components.packed(components["image.jpg"])}


def test_packed_output_has_the_samples_one_after_the_other(small_shards: Path, small_samples: list[Sample]) -> None:
    """Any ragged node can be packed; a face delivers the offsets by name, too."""
    photos = {sample.key: sample.components["image.jpg"] for sample in small_samples}
    with open_loader(small_shards, files) as loader:
        for packed, offsets, keys in loader.as_dataloader(outputs=("files", "cu_seqlens", "key")):
            assert offsets.dtype == torch.int32
            assert len(packed) == offsets[-1]
            found = [bytes(own.numpy()) for own in torch.tensor_split(packed, offsets[1:-1].tolist())]
            assert found == [photos[key] for key in keys]


def pixels(components: dp.Components, random: dp.Random) -> dict[str, object]:
    photo = fn.decoders.image(components["image.jpg"], device=components.device, output_type=types.RGB)
    return {"pixels": components.packed(fn.reshape(photo, shape=[-1, 3], layout=""))}


def test_packed_output_of_a_batch_with_a_bad_sample(tmp_path: Path) -> None:
    """The sample before the bad one stands in, with its own length."""
    samples = make_samples([(20 + number, 10) for number in range(4)])
    samples[2].components["image.jpg"] = undecodable(samples[2].components["image.jpg"])
    shards = write_shards(tmp_path, samples, per_shard=4)
    with open_loader(shards, pixels, shuffle=False, bad_samples=substituting(shards)) as loader:
        (batch,) = next(loader)
    assert batch["cu_seqlens"].tolist() == [0, 200, 410, 620, 850]
    assert torch.equal(batch["pixels"][200:410], batch["pixels"][410:620])


def test_packed_samples_that_differ_in_another_axis_are_refused(small_shards: Path) -> None:
    """Whole photos, of several widths."""

    def photos(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"photo": components.packed(fn.decoders.image(components["image.jpg"], output_type=types.RGB))}

    text = r"output 'photo' of the graph: .* differ in their first axis only, got \[\d+, \d+, 3\] and \[\d+, \d+, 3\]"
    with open_loader(small_shards, photos) as loader, pytest.raises(ValueError, match=text):
        next(loader)


def test_failure_to_make_an_output_is_not_taken_for_a_refused_batch(
    small_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may be out of memory, for example. The next call gives the same batch, with its own pixels."""
    finish = Lazy("dali_pipes.graph.finish")
    take, failures = finish.Finisher.take, [RuntimeError("no memory")]

    def taken(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return take(*given)

    with open_loader(small_shards, files, shuffle=False) as loader:
        expected = [(batch["key"], batch["files"]) for (batch,) in loader]
    monkeypatch.setattr(finish.Finisher, "take", taken)
    with open_loader(small_shards, files, shuffle=False) as loader:
        with pytest.raises(ValueError, match="output 'files' of the graph: no memory"):
            next(loader)
        found = [(batch["key"], batch["files"]) for (batch,) in loader]
    assert [keys for keys, _ in found] == [keys for keys, _ in expected]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, expected, strict=True))


def test_samples_that_are_joined_on_a_gpu_are_checked_as_on_the_cpu() -> None:
    """Samples without rows may have any shape. Samples without an axis are refused."""
    packed = Lazy("dali_pipes.graph.finish").Packed.on_gpu
    with pytest.raises(ValueError, match=r"first axis only, got \[2, 3\] and \[2, 4\]"):
        packed([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(ValueError, match="got single numbers"):
        packed([torch.zeros(())])
    joined = packed([torch.zeros(0, 0), torch.ones(2, 4), torch.zeros(0, 0)])
    assert (joined.tensor.shape, joined.lengths) == ((2, 4), [0, 2, 0])


@pytest.mark.parametrize("dtype", ["UINT64", "FLOAT16", "BOOL"])
def test_packed_outputs_have_any_type(small_shards: Path, dtype: str) -> None:
    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"files": components.packed(fn.cast(components["image.jpg"], dtype=getattr(types, dtype)))}

    with open_loader(small_shards, graph) as loader:
        (batch,) = next(loader)
    assert str(batch["files"].dtype) == f"torch.{dtype.lower()}"


def test_small_packed_batches_take_no_buffer() -> None:
    """A loop that keeps all of them would keep 2 MiB for each."""
    packed, made = Lazy("dali_pipes.graph.finish").Packed.on_cpu, list[int]()
    buffers = Buffers(lambda num_bytes: made.append(num_bytes) or bytearray(num_bytes))
    packed([np.ones(9, np.int64), np.ones(4, np.int64)], buffers=buffers)
    assert not made
    packed([np.ones(1 << 20, np.uint8)], buffers=buffers)
    assert made == [2 << 20]


@pytest.mark.gpu
def test_packed_output_of_a_gpu_has_its_offsets_there(gpu: None, small_shards: Path) -> None:
    """The same offsets as on the CPU."""
    with (
        dp.loader(small_shards, pixels, batch_size=7, device="cpu") as cpu,
        dp.loader(small_shards, pixels, batch_size=7, device="gpu") as other,
    ):
        for (expected,), (found,) in zip(cpu, other, strict=True):
            assert {found["pixels"].device.type, found["cu_seqlens"].device.type} == {"cuda"}
            assert torch.equal(found["cu_seqlens"].cpu(), expected["cu_seqlens"])
            assert len(found["pixels"]) == expected["cu_seqlens"][-1]


def twice(components: dp.Components, random: dp.Random) -> dict[str, object]:
    node = components["image.jpg"]
    return {"a": components.packed(node), "b": components.packed(node)}


def named(components: dp.Components, random: dp.Random) -> dict[str, object]:
    return {"a": components.packed(components["image.jpg"]), "cu_seqlens": components.label}


def keyed(components: dp.Components, random: dp.Random) -> dict[str, object]:
    return {"key": components.label, "bytes": components["cls"]}


def any_data(components: dp.Components, random: dp.Random) -> dict[str, object]:
    return {"pixels": fn.decoders.image(components["image.jpg"], output_type=types.ANY_DATA)}


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (twice, "a graph can have one packed output and adds 'cu_seqlens' beside it, got a, b"),
        (named, "adds 'cu_seqlens' beside it, got a, cu_seqlens"),
        (keyed, r"Outputs\(keys=True\) adds 'key', which is an output of the graph already"),
        (any_data, r"output_type=types\.ANY_DATA"),  # refused before a gray JPEG ends the process
    ],
)
def test_outputs_that_cannot_be_are_refused(small_shards: Path, graph: Any, text: str) -> None:
    refused(small_shards, graph, ValueError, text)


# --- components that are not photos -----------------------------------------------------------------------------------


def rich_components(number: int) -> dict[str, bytes]:
    """Two photos, a caption, class ids, an embedding, points of varying number, a document and a blob."""
    draw = np.random.default_rng(number)
    return {
        "left.jpg": photo_bytes(number, 24, 20),
        "right.jpg": photo_bytes(100 + number, 30, 26),
        "txt": f"Größe {number}\n".encode() * (number % 3),
        "labels.json": json.dumps(sorted({number % 7, 3})).encode(),
        "emb.npy": npy_bytes(draw.random(16, np.float32)),
        "points.npy": npy_bytes(np.asfortranarray(draw.integers(0, 99, (number % 4, 2))).astype(">i4")),
        "meta.json": json.dumps({"number": number, "box": [number, 0.5, 2, 3]}).encode(),
        "blob.bin": bytes(range(number)),
    }


@pytest.fixture(scope="session")
def rich_samples() -> dict[str, dict[str, bytes]]:
    return {f"r{number:03d}": rich_components(number) for number in range(14)}


@pytest.fixture(scope="session")
def rich_shards(tmp_path_factory: pytest.TempPathFactory, rich_samples: dict[str, dict[str, bytes]]) -> Path:
    """14 samples with much beside their photos, in three shards."""
    samples = [Sample(key, components) for key, components in rich_samples.items()]
    return write_shards(tmp_path_factory.mktemp("rich"), samples, per_shard=5)


RICH_OUTPUTS = "left caption right classes embedding points meta box number blob sum length has"


def rich(components: dp.Components, random: dp.Random) -> dict[str, object]:
    """All of it."""

    def photo(component: str) -> object:
        decoded = fn.decoders.image(components[component], device=components.device, output_type=types.RGB)
        return fn.crop(decoded, crop=(20, 24))

    return {
        "left": photo("left.jpg"),
        "caption": components.text("txt"),
        "right": photo("right.jpg"),
        "classes": components.multi_hot("labels.json", num_classes=7),
        "embedding": components.npy("emb.npy"),
        "points": fn.pad(components.npy("points.npy", dtype=np.int32, ndim=2), axes=(0,), shape=(3,), fill_value=-1),
        "meta": components.json("meta.json"),
        "box": components.json("meta.json", to=lambda found: found["box"]),
        "number": components.json("meta.json", to=lambda found: found["number"], dtype=np.int64, ndim=0),
        "blob": components.bytes("blob.bin"),
        "sum": components.parsed("blob.bin", lambda data: int(data.sum()), dtype=np.int32, ndim=0),
        "length": components["blob.bin"].shape(),
        "has": components.present("emb.npy"),
    }


@pytest.mark.parametrize("policy", ["PARTIAL", "FILL"])
def test_graph_takes_arrays_text_and_objects_beside_photos(
    rich_shards: Path, rich_samples: dict[str, dict[str, bytes]], policy: str
) -> None:
    """Every kind at once, two photos among them, over two epochs: each sample's own, in the order of the graph."""
    with open_loader(rich_shards, rich, seed=1, last_batch_policy=policy) as loader:
        for _ in range(2):
            keys = []
            for (batch,) in loader:
                assert " ".join(batch) == RICH_OUTPUTS + " key"
                assert all(len(values) == len(batch["key"]) for values in batch.values())
                check_batch(batch, rich_samples)
                assert [type(batch[name]) for name in ("caption", "meta", "blob")] == [list] * 3
                keys += batch["key"]
            assert len(keys) == (14 if policy == "PARTIAL" else 16)
            assert set(keys) == set(rich_samples)


def check_batch(batch: dict[str, Any], samples: dict[str, dict[str, bytes]]) -> None:
    for i, key in enumerate(batch["key"]):
        check_rich({name: values[i] for name, values in batch.items()}, samples[key])


def check_rich(row: dict[str, object], components: dict[str, bytes]) -> None:
    for name in ("left", "right"):
        pixels = np.asarray(Image.open(io.BytesIO(components[f"{name}.jpg"])))
        top, left = (round((size - crop) / 2) for size, crop in zip(pixels.shape, (20, 24), strict=False))
        assert np.array_equal(row[name], pixels[top : top + 20, left : left + 24])
    assert row["caption"] == components["txt"].decode()
    assert np.flatnonzero(row["classes"]).tolist() == json.loads(components["labels.json"])
    assert row["classes"].dtype == torch.float32
    assert np.array_equal(row["embedding"], np.load(io.BytesIO(components["emb.npy"])))
    points = np.load(io.BytesIO(components["points.npy"]))
    assert row["points"].dtype == torch.int32
    assert row["points"].tolist() == points.tolist() + [[-1, -1]] * (3 - len(points))
    assert row["meta"] == json.loads(components["meta.json"])
    assert row["box"].tolist() == row["meta"]["box"]
    assert row["number"].dtype == torch.int64
    assert row["number"] == row["meta"]["number"]
    assert row["blob"] == components["blob.bin"]
    assert row["sum"] == sum(components["blob.bin"])
    assert row["length"].tolist() == [len(components["blob.bin"])]
    assert row["has"] == 1


def test_graph_of_nothing_but_text(rich_shards: Path, rich_samples: dict[str, dict[str, bytes]]) -> None:
    """No tensor at all: the batches are as many and as long as any graph's."""
    with open_loader(
        rich_shards, lambda components, random: {"caption": components.text("txt")}, shuffle=False, outputs=dp.Outputs()
    ) as loader:
        captions = [caption for (batch,) in loader for caption in batch["caption"]]
    assert captions == [components["txt"].decode() for components in rich_samples.values()]


def test_arrays_of_different_shapes_must_be_padded_to_be_an_output(rich_shards: Path) -> None:
    """As pixels of different sizes must."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"points": components.npy("points.npy", dtype=np.int32, ndim=2)}

    text = "output 'points' of the graph has samples of different shapes; crop, resize or pad"
    with open_loader(rich_shards, graph) as loader, pytest.raises(ValueError, match=text):
        next(loader)


def test_bad_sample_is_replaced_in_all_its_outputs(tmp_path: Path, rich_samples: dict[str, dict[str, bytes]]) -> None:
    """A document that is cut off, with ``on_error="substitute"``: the sample before it stands in, whole."""
    samples = [Sample(key, components) for key, components in rich_samples.items()]
    bad = samples[6]
    samples[6] = Sample(bad.key, bad.components | {"meta.json": bad.components["meta.json"][:-1]})
    shards = write_shards(tmp_path, samples, per_shard=7)
    options = {"batch_size": 7, "shuffle": False, "bad_samples": substituting(tmp_path)}
    with open_loader(shards, rich, **options) as loader:
        batches = [batch for (batch,) in loader]
        assert loader.num_substituted == 1
        (met,) = loader.bad_samples
    expected = [*list(rich_samples)[:6], "r005", *list(rich_samples)[7:]]
    assert [key for batch in batches for key in batch["key"]] == expected
    for batch in batches:
        check_batch(batch, rich_samples)
    assert (met.key, met.component) == ("r006", "meta.json")
    assert met.cause.startswith('cannot be parsed: expected JSON, found b\'{"number": 6')


@pytest.mark.parametrize(
    ("take", "error", "text"),
    [
        (lambda c: c.npy("emb.npy", dtype=np.complex64), ValueError, "dtype must be one of float32, .*, got complex64"),
        (lambda c: c.npy("emb.npy", ndim=-1), ValueError, "ndim must not be negative, got -1"),
        (lambda c: c.multi_hot("labels.json", num_classes=0), ValueError, "num_classes must be positive, got 0"),
        (lambda c: c.text("nope"), dp.DataError, "no component 'nope'"),
        (lambda c: c.present("nope"), dp.DataError, "no component 'nope'"),
    ],
)
def test_bad_arguments_of_parsed_components_are_refused(rich_shards: Path, take: Any, error: Any, text: str) -> None:
    """When the loader is made, before any shard is read."""
    refused(rich_shards, lambda components, random: {"parsed": take(components)}, error, text)


def test_parsed_component_is_computed_beside_the_samples_crop(rich_shards: Path) -> None:
    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        start, shape = random.resized_crop("left.jpg")
        found = components.json("meta.json", to=lambda found, at: [found["number"], *at], beside=(start,))
        return {"found": found, "start": start, "shape": shape}

    for batch in batches_of(rich_shards, graph):
        for found, key, start in zip(batch["found"], batch["key"], batch["start"], strict=True):
            assert found.tolist() == [int(key[1:]), *start.tolist()]


def test_node_that_is_computed_by_the_pipeline_cannot_stand_beside(rich_shards: Path) -> None:
    """Its values are known too late, so it is refused when the graph is built."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        twice = random.uniform() * 2
        return {"meta": components.parsed("meta.json", lambda data, number: number, beside=(twice,))}

    refused(rich_shards, graph, ValueError, r"beside takes nodes of components\.array, components\.label and random")
