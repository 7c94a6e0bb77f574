"""Only JPEG, PNG, WEBP, BMP and PNM reach DALI's decoders, by their bytes; others only on request, by Pillow."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn, types

import dali_pipes as dp
from dali_pipes.data_set import tar_index
from dali_pipes.formats import photo_rules
from dali_pipes.formats.photo_header import PhotoHeader
from dali_pipes.processes import pillow, pillow_worker
from tests.conftest import Sample, make_samples, photo_bytes, write_shards
from tests.hostile_photos import (
    animated_png,
    broken_jpeg2000,
    encoded,
    gif,
    jpeg2000,
    large_png,
    pixels_of,
    tiff,
    undecodable,
)

SIZE = (50, 40)
OTHERS = {"jpeg2000": jpeg2000, "tiff": tiff, "gif": gif, "apng": animated_png}
SHOWN = {"jpeg2000": "a JPEG 2000", "tiff": "a TIFF", "gif": "a GIF", "apng": "an animated PNG"}


def as_it_is(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """The photo, decoded and nothing else."""
    name = "image.jpg"
    photo = fn.decoders.image(components[name], device=components.device, output_type=types.RGB)
    return {"image": photo}


def with_photos(photos: dict[int, bytes], *, num: int = 8, component: str = "image.jpg") -> list[Sample]:
    """Good samples, some of them with another photo."""
    return [
        Sample(sample.key, sample.components | ({component: photos[number]} if number in photos else {}))
        for number, sample in enumerate(make_samples([SIZE] * num))
    ]


def open_loader(shards: Path, graph: Any = as_it_is, *, on_error: str = "substitute", **options: Any) -> dp.Loader:
    defaults = {
        "batch_size": 4,
        "device": "cpu",
        "shuffle": False,
        "outputs": dp.Outputs(keys=True),
        "bad_samples": dp.BadSamples(on_error=on_error, quarantine=shards / "q.tsv"),  # type: ignore[arg-type]
    }
    return dp.loader(shards, graph, **(defaults | options))


def by_a_lying_index(monkeypatch: pytest.MonkeyPatch, shards: Path, samples: list[Sample]) -> Path:
    """Shards whose indexes call every photo a JPEG of `SIZE`."""
    monkeypatch.setattr(tar_index, "read_whole_photo_header", lambda data: PhotoHeader("JPEG", SIZE[1], SIZE[0]))
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
        rf"or PNM \(to read it nevertheless: Decode\(formats=\['{name}'\]\), --format {name}\)"
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


def test_photos_of_a_large_batch_are_judged_as_those_of_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large batches are judged together. The index knows nothing; photo and mask are judged."""
    photo = photo_bytes(5, *SIZE)
    bad = {3: photo[:-2], 7: gif(), 8: b"", 20: large_png(9000, 9000), 21: photo_bytes(6, 40, 50), 39: jpeg2000()}
    samples = with_photos(bad | {4: photo + b"x", 5: encoded(pixels_of(), "WEBP")}, num=40)
    samples[11] = Sample("s00011", samples[11].components | {"trimap.png": large_png(9000, 9000)})
    by_a_lying_index(monkeypatch, tmp_path, samples)
    graph = dp.segmentation(crop=20, dtype="uint8", layout="HWC")
    found = []
    for batch_size in (4, 40):
        with open_loader(tmp_path, graph, batch_size=batch_size) as loader:
            assert sum(len(batch["key"]) for (batch,) in loader) == 40
            found.append({str(bad) for bad in loader.bad_samples})
    assert found[0] == found[1]
    assert len(found[0]) == 7


@pytest.mark.parametrize("name", OTHERS)
def test_formats_that_are_asked_for_are_decoded_as_pillow_does(tmp_path: Path, name: str) -> None:
    """Every pixel; beside JPEGs in the same batch, which are the same as without them."""
    write_shards(tmp_path / "good", with_photos({}), per_shard=8)
    write_shards(tmp_path / "mixed", with_photos({1: OTHERS[name](1), 6: OTHERS[name](2)}), per_shard=8)
    with open_loader(tmp_path / "good") as loader:
        expected = torch.cat([batch["image"] for (batch,) in loader]).numpy()
    expected[[1, 6]] = [
        np.asarray(pixels_of(seed, mode="L" if name == "gif" else "RGB").convert("RGB")) for seed in (1, 2)
    ]
    with open_loader(tmp_path / "mixed", on_error="raise", decode=dp.Decode(formats=[name])) as loader:
        found = torch.cat([batch["image"] for (batch,) in loader]).numpy()
    assert (found == expected).all()


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "I;16"])
def test_modes_of_a_tiff(tmp_path: Path, mode: str) -> None:
    """8 bits of RGB: alpha is dropped, a palette gives its colours, 16 bits their high byte."""
    if mode == "I;16":
        sixteen = np.random.default_rng(0).integers(0, 1 << 16, (SIZE[1], SIZE[0])).astype(np.uint16)
        photo = pillow_image(sixteen)
        expected = np.repeat((sixteen >> 8).astype(np.uint8)[..., None], 3, axis=2)
    else:
        photo = pixels_of(3, mode="RGB").convert(mode)
        expected = np.asarray(photo.convert("RGB"))
    write_shards(tmp_path, with_photos({0: encoded(photo, "TIFF")}), per_shard=8)
    with open_loader(tmp_path, on_error="raise", decode=dp.Decode(formats=("tiff",))) as loader:
        assert (next(loader)[0]["image"][0].numpy() == expected).all()


def test_a_tiff_mask_keeps_its_class_ids(tmp_path: Path) -> None:
    """Photo and mask of another format, through a built-in graph."""
    samples = [
        Sample(
            sample.key,
            sample.components | {"image.jpg": jpeg2000(number), "trimap.png": tiff(number, mode="L")},
        )
        for number, sample in enumerate(make_samples([SIZE] * 4))
    ]
    write_shards(tmp_path, samples, per_shard=4)
    graph = dp.segmentation(crop=20, dtype="uint8", layout="HWC")
    with open_loader(tmp_path, graph, on_error="raise", decode=dp.Decode(formats=("tiff", "jpeg2000"))) as loader:
        (batch,) = next(loader)
    for number in range(4):
        crop = slice(10, 30), slice(15, 35)
        assert (batch["image"][number].numpy() == np.asarray(pixels_of(number))[crop]).all()
        assert (batch["mask"][number, ..., 0].numpy() == np.asarray(pixels_of(number, mode="L"))[crop]).all()


def pillow_image(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda data: broken_jpeg2000(), "cannot be decoded by Pillow: "),
        (lambda data: data[: len(data) // 2], "cannot be decoded by Pillow: "),
    ],
)
def test_a_broken_photo_of_a_format_that_is_asked_for_is_bad(
    tmp_path: Path, spoil: Callable[[bytes], bytes], cause: str
) -> None:
    """It has its cause, others of the batch are decoded, and so are those after it."""
    photos = {number: jpeg2000(number) for number in range(8)} | {2: spoil(jpeg2000(2))}
    write_shards(tmp_path, with_photos(photos), per_shard=8)
    with open_loader(tmp_path, decode=dp.Decode(formats=("jpeg2000",))) as loader:
        keys = [key for (batch,) in loader for key in batch["key"]]
        assert keys == ["s00000", "s00001", "s00001", *(f"s{number:05d}" for number in range(3, 8))]
        (bad,) = loader.bad_samples
        assert bad.cause.startswith(cause)


def test_pixels_from_pillow_in_a_repaired_batch_are_no_file_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken JPEG beside a GIF whose pixels have more bytes than a file may have: only the JPEG is bad."""
    broken, _, good = (photo_bytes(number, *SIZE, quality=20) for number in range(3))
    samples = with_photos({0: undecodable(broken), 1: gif(1), 2: good}, num=3)
    write_shards(tmp_path, samples, per_shard=3)
    most = max(len(sample.components["image.jpg"]) for sample in samples)
    assert most < 3 * SIZE[0] * SIZE[1]
    monkeypatch.setattr(photo_rules, "MAX_PHOTO_BYTES", most)
    with open_loader(tmp_path, batch_size=3, decode=dp.Decode(formats=("gif",))) as loader:
        assert [batch["key"] for (batch,) in loader] == [["s00001", "s00001", "s00002"]]
        assert [bad.key for bad in loader.bad_samples] == ["s00000"]


def test_a_process_with_less_memory_than_its_own_limit_decodes() -> None:
    """As after ``ulimit -v``: the system refuses to raise the limit."""
    program = (
        "import os, resource, sys\n"
        "from PIL import Image\n"
        "from dali_pipes.processes import pillow_worker\n"
        "Image.init()\n"  # reads files that another user may not read
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "os.geteuid() == 0 and os.setuid(65534)\n"  # root may raise it
        "sys.argv[1:] = [str(1 << 40)]\n"
        "pillow_worker.main()\n"
    )
    data = tiff(1)
    request = pillow_worker.REQUEST.pack(b"TIFF", 1, len(data)) + data
    run = subprocess.run([sys.executable, "-c", program], input=request, capture_output=True, check=True)
    assert pillow_worker.ANSWER.unpack(run.stdout[: pillow_worker.ANSWER.size])[0]


def test_a_process_that_dies_is_a_bad_sample_and_another_is_started() -> None:
    """By a signal, or because it takes too long; the photo after it is decoded."""
    header = PhotoHeader("TIFF", SIZE[1], SIZE[0])
    data = tiff(1)
    with pillow.PillowProcess(max_pixels=10_000) as process:
        expected = process.decode(data, header).tobytes()
        first = process._running()
        first.kill()
        with pytest.raises(pillow.Undecodable, match="cannot be decoded: Pillow's process ended by SIGKILL"):
            process.decode(data, header)
        assert process.decode(data, header).tobytes() == expected
        assert process._running().pid != first.pid
        second = process._running()
    assert second.poll() is not None


def test_a_photo_that_takes_too_long_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended, and the next photo gets a new one."""
    header = PhotoHeader("TIFF", SIZE[1], SIZE[0])
    with pillow.PillowProcess(max_pixels=10_000) as process:
        process.decode(tiff(1), header)
        stuck = process._running().pid
        os.kill(stuck, 19)  # SIGSTOP
        monkeypatch.setattr(pillow, "TIMEOUT_S", 0.2)
        with pytest.raises(pillow.Undecodable, match=r"cannot be decoded: Pillow takes longer than 0.2 s"):
            process.decode(tiff(1), header)
        monkeypatch.undo()
        assert process.decode(tiff(1), header).size > 0


def test_the_process_sees_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works on strangers' data."""
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "secret")
    with pillow.PillowProcess(max_pixels=10_000) as process:
        process.decode(tiff(1), PhotoHeader("TIFF", SIZE[1], SIZE[0]))
        environment = Path(f"/proc/{process._running().pid}/environ").read_bytes()
    assert b"secret" not in environment


@pytest.mark.parametrize("formats", ["tiff", ("jpeg",), ("jpg2000",)])
def test_formats_must_be_known(formats: Any) -> None:
    """A text is not a list of names, and JPEG needs no asking."""
    with pytest.raises((TypeError, ValueError), match="'jpeg2000', 'tiff', 'gif', 'apng'"):
        dp.Decode(formats=formats)
