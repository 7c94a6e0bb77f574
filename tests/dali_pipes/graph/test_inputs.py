"""The windows that random crops draw, what arrays of a graph may be, and what it may make of its components."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import fn, ops, types
from nvidia.dali.pipeline import Pipeline
from PIL import Image
from torchvision.transforms import RandomResizedCrop

import dali_pipes as dp
from dali_pipes.graph.inputs import CROP_TRIES, refuse_any_data, resized_crop
from dali_pipes.graph.pipelines import center_crop_start
from tests.conftest import Sample, mask_bytes, photo_bytes, write_shards

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def windows(sizes: list[tuple[int, int]], uniforms: np.ndarray, **options: object) -> np.ndarray:
    height, width = (np.array(side, np.int32) for side in zip(*sizes, strict=True))
    return resized_crop(height, width, uniforms, **({"scale": SCALE, "ratio": RATIO} | options))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=8), st.integers(0, 2**32 - 1)
)
def test_resized_crop_lies_in_the_photo(sizes: list[tuple[int, int]], seed: int) -> None:
    """Whatever the photo's shape: a window of at least one pixel, inside it."""
    uniforms = np.random.default_rng(seed).random((len(sizes), 2 * CROP_TRIES + 2))
    for (height, width), (top, left, rows, columns) in zip(sizes, windows(sizes, uniforms).tolist(), strict=True):
        assert rows >= 1
        assert columns >= 1
        assert 0 <= top <= height - rows
        assert 0 <= left <= width - columns


def test_resized_crop_is_distributed_as_torchvisions() -> None:
    """Area share, ratio and place have torchvision's means and spreads: 4,000 draws of each for one photo."""
    height, width, count = 375, 500, 4000
    ours = windows([(height, width)] * count, np.random.default_rng(1).random((count, 22))).astype(float)
    torch.manual_seed(1)
    photo = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(photo, list(SCALE), list(RATIO)) for _ in range(count)], float)

    def features(drawn: np.ndarray) -> np.ndarray:
        top, left, rows, columns = drawn.T
        return np.stack([rows * columns / (height * width), np.log(columns / rows), top, left], axis=1)

    a, b = features(ours), features(theirs)
    error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / count)
    assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4.5 * error).all()
    assert np.allclose(a.std(axis=0), b.std(axis=0), rtol=0.06)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((10, 1000), (0, 493, 10, 13)),  # too wide for any try: the centre, of the widest ratio allowed
        ((1000, 10), (493, 0, 13, 10)),
    ],
)
def test_resized_crop_falls_back_to_the_centre_as_torchvision_does(size: tuple, expected: tuple) -> None:
    """A photo so narrow that no try fits."""
    uniforms = np.full((1, 22), 0.999)
    assert tuple(windows([size], uniforms, scale=(0.9, 1.0))[0].tolist()) == expected
    torch.manual_seed(0)
    assert RandomResizedCrop.get_params(torch.empty(3, *size), [0.9, 1.0], list(RATIO)) == expected


@given(st.integers(1, 5000), st.integers(1, 2000))
def test_center_crop_start_is_torchvisions(size: int, crop: int) -> None:
    """Rounding half to even where it cuts, down where it pads: `torchvision.transforms.functional.center_crop`."""
    expected = round((size - crop) / 2) if size > crop else -((crop - size) // 2)
    assert center_crop_start(np.array([size], np.int32), crop).tolist() == [expected]


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

    with pytest.raises(TypeError, match=text):
        dp.loader(small_shards, graph, batch_size=5, device="cpu")


def test_array_may_look_at_keys(small_shards: Path) -> None:
    """The function is tried on a real sample when the pipeline is built, so natural code works."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        lengths = components.array(lambda batch: np.array([len(key) for key in batch.keys]))
        return {"bytes": components["cls"], "length": lengths}

    with dp.loader(small_shards, graph, batch_size=5, device="cpu") as loader:
        assert next(loader)[0]["length"].tolist() == [6] * 5


def test_uniform_never_reaches_its_upper_bound() -> None:
    """[low, high), in float32 too."""

    class Always:
        def array(self, function):
            class Batch:
                def uniforms(self, name: str, num: int) -> np.ndarray:
                    return np.array([[0.0], [1 - 2**-32]])

            return function(Batch())

    drawn = dp.Random(Always()).uniform(2.0, 3.0)
    assert drawn.tolist()[0] == 2.0
    assert math.nextafter(3.0, 0) > drawn.tolist()[1] > 2.99


def test_outputs_of_different_shapes_are_refused_by_name(small_shards: Path) -> None:
    """A graph that neither crops nor resizes: the output and what to do, not a complaint about the samples."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"photo": fn.decoders.image(components["image.jpg"], device=components.device)}

    text = "output 'photo' of the graph has samples of different shapes"
    with dp.loader(small_shards, graph, batch_size=5, device="cpu") as loader, pytest.raises(ValueError, match=text):
        next(loader)


def test_component_without_a_size_in_the_index_is_refused(tmp_path: Path) -> None:
    """A JPEG under a name that is no photo's: its height and width are not in the index, so no crop can be computed."""
    samples = [Sample("a", {"img": photo_bytes(0, 20, 20), "cls": b"1"})]
    shards = write_shards(tmp_path, samples, per_shard=1)
    with pytest.raises(dp.DataError, match="key 'a': component 'img' has no height and width in the index"):
        dp.loader(shards, dp.classification_eval(resize=16, crop=16, photo="img"), batch_size=1, device="cpu")


def test_output_named_key_is_refused_with_keys(small_shards: Path) -> None:
    """Two things of one name in a batch."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"key": components.label, "bytes": components["cls"]}

    with pytest.raises(ValueError, match="with_keys adds 'key', which is an output of the graph already"):
        dp.loader(small_shards, graph, batch_size=5, device="cpu", with_keys=True)


# --- components that are no photos ------------------------------------------------------------------------------------


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def rich_components(number: int) -> dict[str, bytes]:
    """Two photos, a caption, class ids, an embedding, points of varying number, a document and a blob."""
    draw = np.random.default_rng(number)
    return {
        "left.jpg": photo_bytes(number, 24, 20),
        "right.jpg": photo_bytes(100 + number, 30, 26),
        "txt": f"Größe {number}\n".encode() * (number % 3),
        "labels.json": json.dumps(sorted({number % 7, 3})).encode(),
        "emb.npy": npy(draw.random(16, np.float32)),
        "points.npy": npy(np.asfortranarray(draw.integers(0, 99, (number % 4, 2))).astype(">i4")),
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
    with dp.loader(
        rich_shards, rich, batch_size=4, seed=1, device="cpu", with_keys=True, last_batch_policy=policy
    ) as loader:
        for _ in range(2):
            keys = []
            for (batch,) in loader:
                size = len(batch["key"])
                assert list(batch) == [*rich_outputs(), "key"]
                assert all(len(values) == size for values in batch.values())
                for i, key in enumerate(batch["key"]):
                    check_rich({name: values[i] for name, values in batch.items()}, rich_samples[key])
                assert [type(batch[name]) for name in ("caption", "meta", "blob")] == [list] * 3
                keys += batch["key"]
            assert len(keys) == (14 if policy == "PARTIAL" else 16)
            assert set(keys) == set(rich_samples)


def rich_outputs() -> list[str]:
    return [
        *("left", "caption", "right", "classes", "embedding", "points", "meta", "box", "number", "blob", "sum"),
        *("length", "has"),
    ]


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


def test_component_that_is_taken_several_times_is_read_once(rich_shards: Path) -> None:
    """As a node, as bytes and parsed: one output of the reader half. What is only parsed is no input of uint8."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {
            "blob": components.bytes("blob.bin"),
            "length": components["blob.bin"].shape(),
            "sum": components.parsed("blob.bin", lambda data: int(data.sum()), dtype=np.int32, ndim=0),
            "text": components.text("txt"),
        }

    with dp.loader(rich_shards, graph, batch_size=14, shuffle=False, device="cpu") as loader:
        inputs = loader._decode.inputs
        assert inputs.read == ["blob.bin", "txt"]
        assert list(inputs.nodes) == ["component/blob.bin", "parsed/0"]
        ((batch,),) = list(loader)
    assert batch["blob"] == [bytes(range(number)) for number in range(14)]
    assert batch["length"].flatten().tolist() == list(range(14))
    assert batch["sum"].tolist() == [sum(range(number)) for number in range(14)]


def test_graph_of_nothing_but_text(rich_shards: Path, rich_samples: dict[str, dict[str, bytes]]) -> None:
    """No tensor at all: the batches are as many and as long as any graph's."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"caption": components.text("txt")}

    with dp.loader(rich_shards, graph, batch_size=4, shuffle=False, device="cpu") as loader:
        captions = [caption for (batch,) in loader for caption in batch["caption"]]
    assert captions == [components["txt"].decode() for components in rich_samples.values()]


def test_arrays_of_different_shapes_must_be_padded_to_be_an_output(rich_shards: Path) -> None:
    """As pixels of different sizes must."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"points": components.npy("points.npy", dtype=np.int32, ndim=2)}

    text = "output 'points' of the graph has samples of different shapes; crop, resize or pad"
    with dp.loader(rich_shards, graph, batch_size=4, device="cpu") as loader, pytest.raises(ValueError, match=text):
        next(loader)


@pytest.mark.parametrize(
    ("take", "text"),
    [
        (
            lambda components: components.npy("emb.npy", dtype=np.float64),
            r"component 'emb.npy' cannot be parsed: expected float64 \[\*\], found float32 \[16\]",
        ),
        (
            lambda components: components.multi_hot("labels.json", num_classes=6),
            r"component 'labels.json' cannot be parsed: expected class ids in \[0, 6\), found 6",
        ),
        (
            lambda components: components.json("meta.json", to=lambda found: found["boxes"]),
            r"component 'meta.json' cannot be parsed: KeyError: 'boxes'",
        ),
    ],
)
def test_component_that_cannot_be_parsed_is_named(rich_shards: Path, take, text: str) -> None:
    """Shard, key, component; what was expected and what found."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"length": components["blob.bin"].shape(), "parsed": take(components)}

    with (
        dp.loader(rich_shards, graph, batch_size=14, shuffle=False, device="cpu") as loader,
        pytest.raises(dp.PipesError, match=rf"shard 's-00000\d.tar', key 'r0\d\d': {text}"),
    ):
        next(loader)


def test_bad_sample_is_replaced_in_all_its_outputs(
    tmp_path: Path, rich_samples: dict[str, dict[str, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """A document that is cut off, with ``on_error="substitute"``: the sample before it stands in, whole."""
    samples = [Sample(key, components) for key, components in rich_samples.items()]
    bad = samples[6]
    samples[6] = Sample(bad.key, bad.components | {"meta.json": bad.components["meta.json"][:-1]})
    shards = write_shards(tmp_path, samples, per_shard=7)
    with dp.loader(
        shards,
        rich,
        batch_size=7,
        shuffle=False,
        device="cpu",
        with_keys=True,
        on_error="substitute",
        quarantine=tmp_path / "quarantine.tsv",
    ) as loader:
        batches = [batch for (batch,) in loader]
        assert loader.num_substituted == 1
        (met,) = loader.bad_samples
    expected = [*list(rich_samples)[:6], "r005", *list(rich_samples)[7:]]
    assert [key for batch in batches for key in batch["key"]] == expected
    for batch in batches:
        for i, key in enumerate(batch["key"]):
            check_rich({name: values[i] for name, values in batch.items()}, rich_samples[key])
    assert (met.key, met.component) == ("r006", "meta.json")
    assert met.cause.startswith('cannot be parsed: expected JSON, found b\'{"number": 6')


def test_sample_that_lacks_components_has_empty_ones(tmp_path: Path, rich_samples: dict[str, dict[str, bytes]]) -> None:
    """With ``missing="empty"``: of every kind, and `present` says so."""
    lacking = {key: number % 3 == 1 for number, key in enumerate(rich_samples)}
    absent = ("txt", "labels.json", "emb.npy", "points.npy", "meta.json", "blob.bin")
    samples = [
        Sample(key, {name: data for name, data in components.items() if not (lacking[key] and name in absent)})
        for key, components in rich_samples.items()
    ]
    shards = write_shards(tmp_path, samples, per_shard=5)

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        embedding = components.npy("emb.npy")
        points = components.npy("points.npy", dtype=np.int32, ndim=2)  # of none there is not even a second column
        outputs = rich(components, random)
        return outputs | {
            "points": fn.pad(points, axes=(0, 1), shape=(3, 2), fill_value=-1),
            "embedding": fn.pad(embedding, axes=(0,), shape=(16,), fill_value=-1),
            "box": fn.pad(outputs["box"], axes=(0,), shape=(4,)),
            "length": embedding.shape(),
        }

    with dp.loader(shards, graph, batch_size=5, shuffle=False, device="cpu", with_keys=True, missing="empty") as loader:
        rows = [
            {name: values[i] for name, values in batch.items()} for (batch,) in loader for i in range(len(batch["key"]))
        ]
    assert [row["key"] for row in rows] == list(rich_samples)
    for row in rows:
        assert row["has"] == (not lacking[row["key"]])
        assert row["length"].tolist() == [0 if lacking[row["key"]] else 16]
        if not lacking[row["key"]]:
            check_rich(
                row | {"length": torch.tensor([len(rich_samples[row["key"]]["blob.bin"])])}, rich_samples[row["key"]]
            )
            continue
        assert (row["caption"], row["meta"], row["blob"]) == ("", None, b"")
        assert row["classes"].tolist() == [0] * 7
        assert (row["embedding"] == -1).all()
        assert (row["points"] == -1).all()
        assert (row["box"].tolist(), row["number"], row["sum"]) == ([0] * 4, 0, 0)


def test_input_that_no_output_depends_on_is_left_alone(small_shards: Path) -> None:
    """Taken and not used: DALI never asks for it, and it does not pile up, nor stand in the way of a next epoch."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        assert components.label is not None
        assert components["image.jpg"] is not None
        return {"bytes": components["cls"]}

    with dp.loader(small_shards, graph, batch_size=5, device="cpu") as loader:
        next(loader)
        loader.reset()
        assert len(list(loader)) == len(loader)


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
def test_bad_arguments_of_parsed_components_are_refused(rich_shards: Path, take, error: type, text: str) -> None:
    """When the loader is made, before any shard is read."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"length": components["blob.bin"].shape(), "parsed": take(components)}

    with pytest.raises(error, match=text):
        dp.loader(rich_shards, graph, batch_size=2, device="cpu")


# --- ANY_DATA ---------------------------------------------------------------------------------------------------------

DECODERS = {
    "fn.image": lambda data, kind: fn.decoders.image(data, output_type=kind),
    "fn.image_crop": lambda data, kind: fn.decoders.image_crop(data, crop=(4, 4), output_type=kind),
    "fn.image_random_crop": lambda data, kind: fn.decoders.image_random_crop(data, output_type=kind),
    "fn.image_slice": lambda data, kind: fn.decoders.image_slice(data, [0.0, 0.0], [0.5, 0.5], output_type=kind),
    "fn.experimental": lambda data, kind: fn.experimental.decoders.image(data, output_type=kind),
    "ops": lambda data, kind: ops.decoders.Image(output_type=kind)(data),
    "called": lambda data, kind: ops.decoders.Image()(data, output_type=kind),
    "number": lambda data, kind: fn.decoders.image(data, output_type=int(kind)),
}


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
def test_any_data_is_refused_wherever_it_stands(decode, recwarn: pytest.WarningsRecorder) -> None:
    """Every decoder, however it is made, behind other operators, also those that DALI warns of as deprecated; the same
    decoder of another type is let pass.
    """
    for kind in (types.RGB, types.GRAY, types.ANY_DATA):
        pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True)
        with pipeline:
            data = fn.external_source(source=lambda: [np.frombuffer(mask_bytes(0, 8, 8), np.uint8)], batch=True)
            size = fn.cast(decode(data, kind).shape(), dtype=types.FLOAT)
            pipeline.set_outputs(data, size * 2)
        if kind == types.ANY_DATA:
            text = r"decoder '.*' of the graph has output_type=types.ANY_DATA, .*; give it output_type=types.RGB, or t"
            with pytest.raises(ValueError, match=text):
                refuse_any_data(pipeline)
        else:
            refuse_any_data(pipeline)
            assert len(pipeline.run()) == 2  # it can still be built and run


def test_any_data_is_refused_when_the_loader_is_made(small_shards: Path) -> None:
    """Before a gray JPEG ends the process."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"pixels": fn.decoders.image(components["image.jpg"], output_type=types.ANY_DATA)}

    with pytest.raises(ValueError, match=r"output_type=types\.ANY_DATA"):
        dp.loader(small_shards, graph, batch_size=5, device="cpu")
