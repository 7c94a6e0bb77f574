"""Only JPEG, PNG, WEBP, BMP and PNM reach DALI's decoders, by their bytes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvidia.dali import fn, types

import dali_pipes as dp
from dali_pipes.data_set import indexing
from dali_pipes.formats.photo_header import PhotoHeader
from tests import builders
from tests.builders import Sample, image_bytes, make_samples, photo_bytes, substituting, with_data, write_shards
from tests.hostile_photos import (
    animated_png,
    broken_jpeg2000,
    gif,
    jpeg2000,
    large_png,
    pixels_of,
    tiff,
    with_wrong_checksum,
)

SIZE = (50, 40)
OTHERS = {"jpeg2000": jpeg2000, "tiff": tiff, "gif": gif, "apng": animated_png}
SHOWN = {"jpeg2000": "a JPEG 2000", "tiff": "a TIFF", "gif": "a GIF", "apng": "an animated PNG"}


def as_it_is(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """The photo, decoded and nothing else."""
    name = "image.jpg"
    photo = fn.decoders.image(components[name], device=components.device, output_type=types.RGB)
    return {"image": photo}


def with_photos(photos: dict[int, bytes], *, num: int = 8) -> list[Sample]:
    """Good samples, some of them with another photo."""
    return with_data(make_samples([SIZE] * num), photos)


def open_loader(shards: Path, graph: Any = as_it_is, *, on_error: str = "substitute", **options: Any) -> dp.Loader:
    policy = substituting(shards, on_error=on_error)
    return builders.open_loader(shards, graph, shuffle=False, bad_samples=policy, **options)


def by_a_lying_index(monkeypatch: pytest.MonkeyPatch, shards: Path, samples: list[Sample]) -> Path:
    """Shards whose indexes call every photo a JPEG of `SIZE`."""
    monkeypatch.setattr(indexing, "read_whole_photo_header", lambda data: PhotoHeader("JPEG", SIZE[1], SIZE[0]))
    write_shards(shards, samples, per_shard=8)
    monkeypatch.undo()
    return shards


@pytest.mark.parametrize("lies", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lies: bool) -> None:
    """Whatever the file and the index call them; shard, key, component and cause are named."""
    samples = with_photos({5: OTHERS[name]()})
    if lies:
        by_a_lying_index(monkeypatch, tmp_path, samples)
    else:
        write_shards(tmp_path, samples, per_shard=8)
    text = (
        f"shard 's-000000.tar', key 's00005': component 'image.jpg' holds {SHOWN[name]}, expected JPEG, PNG, WEBP, BMP "
        r"or PNM \(to make it a JPEG: prep make or pack --convert\)"
    )
    with open_loader(tmp_path) as loader:
        assert [batch["key"] for (batch,) in loader][1] == ["s00004", "s00004", "s00006", "s00007"]
        assert [str(bad) for bad in loader.bad_samples] == [text.replace("\\", "")]
    if lies:
        with open_loader(tmp_path, on_error="raise") as loader:
            next(loader)
            with pytest.raises(dp.DecodeError, match=text):
                next(loader)
    else:
        with pytest.raises(dp.DataError, match=text):
            open_loader(tmp_path, on_error="raise")


@pytest.mark.parametrize("graph", ["image", "slice", "peek", "data"])
def test_a_broken_jpeg_2000_does_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: str
) -> None:
    """It is never given to a decoder, nor to the operator that reads sizes; also where the index does not know it."""
    component = "data" if graph == "data" else "image.jpg"
    samples = [
        Sample(sample.key, {component: sample.components["image.jpg"]})
        for sample in with_photos({2: broken_jpeg2000()}, num=4)
    ]
    by_a_lying_index(monkeypatch, tmp_path, samples)
    program = (
        "import sys, dali_pipes as dp\n"
        "from nvidia.dali import fn, types\n"
        "kind, shards, component = sys.argv[1:]\n"
        "def graph(components, random):\n"
        "    data = components[component]\n"
        "    if kind == 'slice':\n"
        "        return {'image': fn.decoders.image_slice(data, (0, 0), (8, 8), axes=(0, 1))}\n"
        "    if kind == 'peek':\n"
        "        return {'image': fn.peek_image_shape(data)}\n"
        "    return {'image': fn.decoders.image(data)}\n"
        "bad_samples = dp.BadSamples(on_error='substitute', quarantine=shards + '/q.tsv')\n"
        "outputs = dp.Outputs(keys=True)\n"
        "with dp.loader(shards, graph, batch_size=4, shuffle=False, device='cpu', bad_samples=bad_samples,"
        " outputs=outputs) as loader:\n"
        "    print(next(loader)[0]['key'])\n"
    )
    arguments = [sys.executable, "-c", program, graph, str(tmp_path), component]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "['s00000', 's00001', 's00001', 's00003']\n"), run.stderr


def test_bytes_that_no_decoder_gets_are_not_judged(tmp_path: Path) -> None:
    """A graph that returns the bytes of a component gets them unchanged, whatever they are."""
    samples = [Sample(sample.key, {"jpg": jpeg2000(7)}) for sample in make_samples([SIZE] * 4)]
    write_shards(tmp_path, samples, per_shard=4)

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        return {"bytes": components["jpg"]}

    with open_loader(tmp_path, graph, on_error="raise") as loader:
        assert bytes(next(loader)[0]["bytes"][3].numpy()) == jpeg2000(7)


def test_an_index_that_names_another_size_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG of 81 megapixels that the index calls small is not decoded: crops and memory are planned by the index."""
    by_a_lying_index(monkeypatch, tmp_path, with_photos({1: large_png(9000, 9000)}))
    with open_loader(tmp_path) as loader:
        assert next(loader)[0]["key"] == ["s00000", "s00000", "s00002", "s00003"]
        assert loader.bad_samples[0].cause == (
            "has 9000 x 9000 pixels, its index says 40 x 50; index it anew: dali-pipes prep index URL --anew"
        )


@pytest.mark.parametrize("lies", [False, True])
def test_a_photo_that_is_cut_off_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: bool) -> None:
    """Also where the crop lies before the cut, and where an index of an earlier version does not know of it."""
    photo = photo_bytes(5, *SIZE)
    samples = with_photos({5: photo[: len(photo) * 9 // 10], 6: photo + bytes(100)})
    if lies:
        by_a_lying_index(monkeypatch, tmp_path, samples)
    else:
        write_shards(tmp_path, samples, per_shard=8)

    def corner(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        photo = components["image.jpg"]
        return {"image": fn.decoders.image_slice(photo, (0, 0), (8, 8), axes=(0, 1), device=components.device)}

    text = "key 's00005': component 'image.jpg' is cut off: it has no end-of-image marker"
    with open_loader(tmp_path, corner) as loader:
        assert [batch["key"] for (batch,) in loader][1] == ["s00004", "s00004", "s00006", "s00007"]
        assert [str(bad) for bad in loader.bad_samples] == [f"shard 's-000000.tar', {text}"]
    if not lies:
        with pytest.raises(dp.DataError, match=text):
            open_loader(tmp_path, corner, on_error="raise")


def test_a_png_that_the_index_calls_damaged_is_not_decoded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the index has compared its checksums; libpng would write a line of its own."""
    png = with_wrong_checksum(image_bytes(pixels_of()), b"IDAT")
    write_shards(tmp_path, with_photos({1: png}), per_shard=8)
    with open_loader(tmp_path) as loader:
        assert next(loader)[0]["key"] == ["s00000", "s00000", "s00002", "s00003"]
        assert loader.bad_samples[0].cause.startswith("is damaged: it has no pixels, or a part of it has another")
    assert "libpng" not in capfd.readouterr().err
