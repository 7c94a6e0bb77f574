"""What of a batch lies on which device, and on whose stream."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from bench.gpu.devices import has_video_library
from bench.tools.repeat import draw_shards
from dali_pipes.commands.doctor import check_jpeg_engines

BATCH = 32
NUM_PHOTOS = 16 * BATCH
# About a tenth of a second of a GPU: longer than a batch of these photos takes to decode.
SLEEP_CYCLES = 200_000_000


def with_a_number(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """Outputs that are nodes and one that is none, as DALI's graphs may have."""
    from nvidia.dali import fn, types

    del random
    photo = fn.decoders.image(components["image.jpg"], device=components.device)
    return {"image": fn.resize(photo, size=(8, 8)), "two": 2, "three": types.Constant(3)}


def test_doctor_says_when_the_jpeg_engines_are_out_of_reach() -> None:
    """DALI says nothing: it decodes without them."""
    finding = check_jpeg_engines()
    if has_video_library():
        assert (finding.status, finding.found) == ("ok", "usable, if the GPU has any")
    else:
        assert (finding.status, finding.found) == ("warn", "not usable: no libnvcuvid.so.1")
        assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video" in finding.advice
        with pytest.raises(OSError, match=r"libnvcuvid\.so\.1"):
            ctypes.CDLL("libnvcuvid.so.1")


@pytest.mark.gpu
def test_a_number_among_the_outputs_on_a_gpu(gpu: None, small_shards: Path) -> None:
    with dp.loader(small_shards, with_a_number, batch_size=4, device="gpu") as loader:
        ((batch,), *_) = loader
    assert {name: values.device.type for name, values in batch.items()} == dict.fromkeys(batch, "cuda")
    assert (batch["two"].tolist(), batch["three"].tolist()) == ([2] * 4, [3] * 4)


@pytest.mark.gpu
def test_a_batch_is_taken_without_waiting_for_the_gpu(gpu: None, small_shards: Path) -> None:
    """Nor is `valid`: a copy from ordinary memory would hold the host up until the step before has run."""
    import torch

    graph = dp.classification_eval(crop=8, resize=8)
    options = {"outputs": dp.Outputs(valid=True), "bad_samples": dp.BadSamples(on_error="substitute")}
    with dp.loader(small_shards, graph, batch_size=4, device="gpu", **options) as loader:
        batches = iter(loader)
        next(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            (batch,) = next(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert batch["valid"].device.type == "cuda"


def open_drawn(shards: Path, device: str = "cuda:0", **options: Any) -> dp.Loader:
    # engine_share=0: no photo goes to the JPEG engines, so that one decoder decodes all.
    usual = {"shuffle": False, "decode": dp.Decode(engine_share=0.0)}
    return dp.loader(shards, dp.segmentation(), batch_size=BATCH, device=device, **(usual | options))


def sums(shards: Path, *, device: str = "cuda:0", is_held_up: bool) -> list[float]:
    """The sum of each batch, by kernels that begin late if the stream is held up."""
    import torch

    with open_drawn(shards, device) as loader:
        found = []
        for (batch,) in loader:
            if is_held_up:
                with torch.cuda.device(batch["image"].device):
                    torch.cuda._sleep(SLEEP_CYCLES)
            found.append(batch["image"].double().sum())
            del batch
            if not is_held_up:
                torch.cuda.synchronize(device)
        return [float(value) for value in found]


@pytest.mark.gpu
def test_masks_are_the_same_by_either_decoder(gpu: None, small_shards: Path) -> None:
    """On the CPU and then copied, or by the decoder of the photos."""
    import torch

    def masks(mask_device: Any) -> list[torch.Tensor]:
        graph = dp.segmentation(crop=48, mask_device=mask_device)
        with dp.loader(small_shards, graph, batch_size=4, device="gpu", shuffle=False) as loader:
            return [batch["mask"].cpu() for (batch,) in loader]

    for one, other in zip(masks("cpu"), masks("mixed"), strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """The directory of `NUM_PHOTOS` photos in shards."""
    return Path(draw_shards(tmp_path, num=NUM_PHOTOS).store.locate(""))


@pytest.mark.gpu
def test_a_batch_keeps_its_values_until_the_kernels_that_read_it_have_run(gpu: None, drawn: Path) -> None:
    """The stream is held up, so that the host runs ahead and drops batches whose kernels have not begun."""
    assert sums(drawn, is_held_up=True) == sums(drawn, is_held_up=False)


@pytest.mark.gpu
def test_a_device_that_is_not_the_current_one(gpu: None, drawn: Path) -> None:
    """A rank that never called `set_device` has its batches on its device, and torch's current device stays."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    torch.cuda.set_device(0)
    assert sums(drawn, device="cuda:1", is_held_up=True) == sums(drawn, device="cuda:0", is_held_up=False)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_batches_are_dropped_while_a_cuda_graph_is_captured(gpu: None, drawn: Path) -> None:
    """A device cannot be synchronised then, as DALI does before it frees them; neither graph nor batches suffer."""
    import torch

    expected = sums(drawn, is_held_up=False)
    with open_drawn(drawn) as loader:
        images = [next(loader)[0]["image"] for _ in range(3)]
        found = [float(image.double().sum()) for image in images]
        still = images[0].clone()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            doubled = still * 2
            images.clear()
            time.sleep(0.1)  # DALI's thread tries to free them every millisecond
        captured.replay()
        assert torch.equal(doubled, still + still)
        found += [float(batch["image"].double().sum()) for (batch,) in loader]
    assert found == expected


ENGINES = """
import sys
import dali_pipes as dp
options = {"batch_size": 64, "device": "cuda:0", "decode": dp.Decode(engine_share=0.5), "shuffle": False}
graph = dp.classification_eval(crop=8, resize=8)
with dp.loader(sys.argv[1], graph, **options) as loader:
    for _ in range(8):
        next(loader)
    state = loader.state_dict()
print("resumed", file=sys.stderr, flush=True)
with dp.loader(sys.argv[1], graph, state=state, **options) as loader:
    print(len(next(loader)[0]["label"]))
    next(iter(loader))
"""


@pytest.mark.gpu
def test_engines_keep_their_share_after_a_short_first_batch(gpu: None, tmp_path: Path) -> None:
    """nvImageCodec fixes the number of photos for the engines with the first batch that it decodes, and logs it."""
    shards = draw_shards(tmp_path, num=8 * 64 + 3)
    done = subprocess.run(
        [sys.executable, "-c", ENGINES, shards.store.locate("")],
        env=os.environ | {"DALI_NVIMGCODEC_LOG_LEVEL": "3"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-1] == "3", "the job resumes into a short batch"
    log = (done.stdout + done.stderr).partition("resumed")[2]
    chosen = [int(number) for number in re.findall(r"hw.*selecting max batch size to (\d+)", log)]
    if not chosen:
        pytest.skip("no JPEG engines")
    assert chosen[0] >= 32


@pytest.mark.gpu
def test_page_locked_buffers_hold_the_right_bytes(gpu: None, drawn: Path) -> None:
    """However far the host runs ahead: the pixels are those of DALI's own reader, whose memory is its own."""
    import torch

    def images(reader: str) -> list[float]:
        with open_drawn(drawn, shuffle=True, decode=dp.Decode(engine_share=0.0, reader=reader)) as loader:
            found = []
            for _ in range(4):
                for (batch,) in loader:
                    torch.cuda._sleep(SLEEP_CYCLES // 10)
                    found.append(batch["image"].double().sum())
            return [float(value) for value in found]

    assert images("aio") == images("webdataset")


@pytest.mark.parametrize(
    ("num_devices", "current", "device", "local_rank", "expected"),
    [
        (8, 0, "gpu", 3, 3),  # the launcher's number, since device 0 is current until a program sets another one
        (8, 0, "auto", 3, 3),
        (8, 5, "gpu", 3, 5),
        (1, 0, "gpu", 3, 0),  # each process sees only its own
        (1, 0, "gpu", 1, 0),
        (8, 0, "cuda:6", 3, 6),
        (8, 0, "cpu", 3, None),
        (0, 0, "auto", 3, None),
        (8, 0, "cuda:8", 0, "device='cuda:8', and torch finds 8 CUDA devices, from cuda:0"),
        (0, 0, "gpu", 0, "device='gpu', and torch finds no CUDA device; pass device='cpu' or 'auto'"),
    ],
)
def test_each_rank_decodes_on_its_own_gpu(
    num_devices: int,
    current: int,
    device: str,
    local_rank: int,
    expected: int | str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from dali_pipes.opening import _device_id

    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            _device_id(device, local_rank)
    else:
        assert _device_id(device, local_rank) == expected
