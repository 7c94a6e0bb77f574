"""`bench decode` on a few photos: what it measures, compares, leaves out and refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.compare.outputs import OutputError
from bench.decode.decoders import DECODERS, Decode, Decoder
from bench.decode.passes import DALI, OURS, Photos, opened
from bench.scenarios.decode import DecodeScenario, Difference, _pack, compared
from dali_pipes.cli import main
from dali_pipes.errors import PipesError
from tests.conftest import photo_bytes

SIZES = ((40, 30), (31, 47), (64, 64))


@pytest.fixture
def photos(tmp_path: Path) -> Photos:
    """Nine photos in three sizes; one is grey."""
    encoded = [photo_bytes(row, *SIZES[row % 3], mode="L" if row == 4 else "RGB") for row in range(9)]
    (tmp_path / "shards").mkdir()
    (tmp_path / "cache").mkdir()
    return Photos(encoded, _pack(encoded, tmp_path / "shards"), "image.jpg", tmp_path / "cache")


def _cases() -> Iterator[object]:
    for name in (*DECODERS, DALI, OURS):
        reason = DECODERS[name].reason_against() if name in DECODERS else None
        yield pytest.param(name, marks=[] if reason is None else [pytest.mark.skip(reason=f"'{name}' {reason}")])


@pytest.mark.parametrize("num_threads", [0, 2], ids=["one core", "workers"])
@pytest.mark.parametrize("name", list(_cases()))
def test_every_decoder_gives_every_photo_in_every_pass(name: str, num_threads: int, photos: Photos) -> None:
    """RGB of the photo's own size, close to Pillow's, once a pass."""
    wanted = DECODERS["pillow"].open()
    with opened(name, photos, num_threads=num_threads) as one_pass:
        for _ in range(2):
            # DALI uses its buffers again, so pixels are compared as they come.
            numbers = []
            for number, pixels in one_pass():
                expected = wanted(photos.encoded[number])
                assert (pixels.shape, pixels.dtype) == (expected.shape, np.uint8)
                assert np.abs(pixels.astype(int) - expected).mean() < 4
                numbers.append(number)
            assert sorted(numbers) == list(range(9))


def test_differences_are_counted_in_levels(photos: Photos, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three levels more in one value of the first photo, and Pillow's own pixels in all others."""
    pillow = DECODERS["pillow"].open()

    def brighter() -> Decode:
        def decode(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
            pixels = pillow(data)
            if data == photos.encoded[0]:
                pixels[0, 0, 0] ^= 3
            return pixels

        return decode

    monkeypatch.setitem(DECODERS, "brighter", Decoder(brighter, "PIL", "pillow"))  # type: ignore[arg-type]
    found = compared("brighter", photos)
    num_values = sum(pillow(data).size for data in photos.encoded)
    assert found.num_photos == 1
    assert 1 <= found.largest <= 3
    assert found.mean == pytest.approx(found.largest / num_values)
    assert compared("torchvision", photos) == Difference(0, 0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pixels: np.ascontiguousarray(pixels[:, :, ::-1]), "differs from Pillow by .* levels on average"),
        (lambda pixels: pixels[:, :-1], r"photo 0: expected uint8 \[30, 40, 3\], found uint8 \[30, 39, 3\]"),
        (lambda pixels: pixels.astype(np.float32), "found float32"),
    ],
    ids=["colours", "shape", "dtype"],
)
def test_decoder_of_other_pixels_is_refused(
    change: object, message: str, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is timed that decodes something else."""
    pillow = DECODERS["pillow"].open()
    monkeypatch.setitem(DECODERS, "wrong", Decoder(lambda: lambda data: change(pillow(data)), "PIL", "pillow"))  # type: ignore[arg-type, operator]
    with pytest.raises(OutputError, match=message):
        compared("wrong", photos)


def test_command_times_decoders(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On eight demo photos: a row for each decoder, with the better number of workers."""
    pytest.importorskip("skimage", reason="the demo photos are cut from scikit-image's photographs")
    path = tmp_path / "decode.json"
    small = ["--num-photos", "8", "--passes", "1", "--repeats", "1", "--workers", "1,2", "--cache", str(tmp_path)]
    assert main(["bench", "decode", "--decoders", "pillow,dali", *small, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row["decoder"] for row in found["records"]] == ["pillow", "dali"]
    for row in found["records"]:
        assert row["best_workers"] in (1, 2)
        assert set(row["repeats"]) == {"0", "1", "2"}
        assert all(turn["num_photos"] == 8 for turns in row["repeats"].values() for turn in turns)
        assert row["one_photos_per_s"] > 0
        assert row["all_photos_per_s"] > 0
    assert found["records"][1]["difference"]["num_photos"] <= 8
    table = capfd.readouterr().out
    assert "differs from Pillow" in table
    assert DecodeScenario.table(found).strip() in table


def test_decoders_that_are_not_installed_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out of the default, with the reason; an error if they were named."""
    monkeypatch.setitem(DECODERS, "gone", Decoder(DECODERS["pillow"].open, "no_such_package", "no-such"))  # type: ignore[arg-type]
    monkeypatch.setattr("bench.scenarios.decode.NAMES", ("pillow", "gone"))
    names, reasons = DecodeScenario().chosen
    assert names == ["pillow"]
    assert reasons == {"gone": "needs the package 'no_such_package', which is not installed; pip install no-such"}
    with pytest.raises(PipesError, match=r"decoder 'gone' needs the package 'no_such_package'.*pip install no-such"):
        DecodeScenario(decoders=("gone",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decoders": ("pil",)}, "decoders must be among pillow, .*, got 'pil'"),
        ({"decoders": ("pillow", "pillow")}, "decoders must name each once, got 'pillow,pillow'"),
        ({"workers": (0,)}, "workers must be at least 1, got 0"),
        ({"num_photos": 0}, "num_photos must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, object], message: str) -> None:
    """Before a photo is cut."""
    with pytest.raises(ValueError, match=message):
        DecodeScenario(**given)  # type: ignore[arg-type]
