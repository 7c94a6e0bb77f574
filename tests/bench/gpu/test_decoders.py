"""Test who decoded, by nvImageCodec's log: real lines of a CPU, and lines that only its sources show."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

from bench.gpu.devices import LOG_LEVEL, logged, who_decoded
from tests.builders import mask_bytes, photo_bytes


def lines(text: str) -> str:
    """Write a log as nvImageCodec does, with colours."""
    return "".join(f"\x1b[0;32m[INFO] \x1b[0m[nvimgcodec] {line.strip()}\n" for line in text.strip().splitlines())


# Read in the sources: a release build has no line for a photo of the engines.
ON_A_GPU = """
    Framework is registering decoder (id:nvjpeg_hw_decoder codec:jpeg)
    Framework is registering decoder (id:nvjpeg_cuda_decoder codec:jpeg)
    Framework is registering decoder (id:libjpeg_turbo_decoder codec:jpeg)
    Framework is registering decoder (id:opencv_png_decoder codec:png)
    create nvjpeg_hw_decoder load_hint 0.5 load_hint_policy 1
    create nvjpeg_cuda_decoder load_hint 1 load_hint_policy 2
    create libjpeg_turbo_decoder load_hint 1 load_hint_policy 2
    ImageGenericDecoder::decode num_samples=6
    decode num_samples=6
    nvjpeg_hw_decoder selecting max batch size to 3 mini_bs=1
    1: nvjpeg_cuda_decoder process #4
    0: nvjpeg_cuda_decoder process #5
"""


def decode(*, num_threads: int) -> None:
    """Decode three batches of two photos and a mask, 64 times."""
    photos = [photo_bytes(0, 96, 64), photo_bytes(1, 64, 96, progressive=True), mask_bytes(2, 96, 64)]
    data = [np.frombuffer(photo, np.uint8) for photo in photos] * 64
    pipeline = Pipeline(batch_size=len(data), num_threads=num_threads, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(source=lambda: data, batch=True, dtype=types.UINT8, ndim=1)
        pipeline.set_outputs(fn.decoders.image(encoded, output_type=types.RGB))
    pipeline.build()
    for _ in range(3):
        pipeline.run()


@pytest.mark.parametrize("num_threads", [1, 16])
def test_every_photo_of_a_real_log_is_counted(num_threads: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Many threads write into one line; no photo is lost. Decoders made before and afterwards do not log."""
    decode(num_threads=num_threads)
    with logged() as log:
        decode(num_threads=num_threads)
    decode(num_threads=num_threads)
    found = who_decoded(log[0])
    assert (found["num_photos"], found["masks"], found["cpu"]) == (3 * 128, 3 * 64, 3 * 128)
    assert (found["engines"], found["hybrid"], found["failed"], found["unknown"]) == (0, 0, 0, 0)
    assert "nvimgcodec" not in capfd.readouterr().err


def test_a_level_that_was_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is as before, also after an error."""
    monkeypatch.setenv(LOG_LEVEL, "1")
    with pytest.raises(KeyError), logged():
        raise KeyError
    assert os.environ[LOG_LEVEL] == "1"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"num_photos": 6, "engines": 4, "hybrid": 2, "cpu": 0}),
        (  # the engines fail on #1, and the hybrid decoder takes it
            """nvjpeg_hw_decoder failed #1. Trying next: nvjpeg_cuda_decoder
            2: nvjpeg_cuda_decoder process #1""",
            {"engines": 3, "hybrid": 3, "cpu": 0},
        ),
        (  # so does the hybrid decoder, and the CPU takes it
            """nvjpeg_hw_decoder failed #1. Trying next: nvjpeg_cuda_decoder
            2: nvjpeg_cuda_decoder process #1
            2: libjpeg_turbo_decoder process #1""",
            {"engines": 3, "hybrid": 2, "cpu": 1},
        ),
        ("Sample #2 can't be processed", {"engines": 3, "failed": 1}),
        (  # masks have a decoder of their own, whose samples have the same numbers
            """ImageGenericDecoder::decode num_samples=2
            decode num_samples=2
            0: opencv_png_decoder process #4
            0: opencv_png_decoder process #5""",
            {"num_photos": 6, "engines": 4, "hybrid": 2, "masks": 2},
        ),
        (  # the next batch
            """ImageGenericDecoder::decode num_samples=6
            decode num_samples=6
            nvjpeg_hw_decoder Using previous max batch size of 3
            1: nvjpeg_cuda_decoder process #4""",
            {"num_photos": 12, "engines": 9, "hybrid": 3},
        ),
    ],
)
def test_photos_without_a_line_are_the_engines(more: str, expected: dict[str, Any]) -> None:
    """The last decoder that has a line for a photo has decoded it."""
    found = who_decoded(lines(ON_A_GPU + more))
    assert {name: found[name] for name in expected} == expected
    assert found["unknown"] == 0


def test_without_engines_a_photo_without_a_line_is_unknown() -> None:
    """The report must not give a CPU's photos to engines that were never made."""
    without = "\n".join(line for line in ON_A_GPU.splitlines() if "create nvjpeg_hw" not in line)
    found = who_decoded(lines(without))
    assert (found["engines"], found["unknown"]) == (0, 4)
    assert who_decoded("")["num_photos"] == 0


def test_a_message_that_follows_a_number_is_not_a_part_of_it(tmp_path: Path) -> None:
    """``process #1`` and ``13: ...`` of another thread may share a line."""
    glued = lines(ON_A_GPU).replace("process #4\n\x1b[0;32m[INFO] \x1b[0m[nvimgcodec] 0:", "process #40:")
    assert "process #40: nvjpeg" in glued
    assert who_decoded(glued) == who_decoded(lines(ON_A_GPU))
    glued = lines(ON_A_GPU).replace(
        "::decode num_samples=6\n", "::decode num_samples=63: opencv_png_decoder process #0\n"
    )
    assert who_decoded(glued)["num_photos"] == 5
