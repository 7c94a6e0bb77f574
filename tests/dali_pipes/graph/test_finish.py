"""Images that are finished on the CPU: by any number of threads, in memory that is used again, or not at all."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import dali_pipes as dp
from dali_pipes.reader.buffers import Buffers
from tests.lazy import Lazy
from tests.loaders import batches_of, open_loader
from tests.programs import start_python

if TYPE_CHECKING:
    from tests.shards import Sample

torch, fn, types = Lazy("torch"), Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")


def own_graph(mirror: Any = None, **options: Any) -> Any:
    """A graph of a user's own."""

    def graph(components: Any, random: Any) -> dict[str, Any]:
        pixels = fn.decoders.image(components["image.jpg"], device=components.device, output_type=types.RGB)
        return {
            "image": dp.image(components, pixels, mirror=random.coin_flip(0.5) if mirror is None else mirror, **options)
        }

    return graph


@pytest.mark.parametrize("graph", [dp.classification_train(crop=32), dp.classification_eval(resize=45, crop=40)])
def test_pixels_do_not_depend_on_threads(small_shards: Path, graph: Any) -> None:
    one, three = (
        list(batches_of(small_shards, graph, batch_size=5, seed=3, decode=dp.Decode(threads=threads)))
        for threads in (1, 3)
    )
    for first, second in zip(one, three, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first if name != "key")


def test_crop_of_a_region_equals_that_of_the_whole_photo() -> None:
    """Bit for bit, whether the resize makes a photo smaller or larger."""
    from dali_pipes.graph.finish import resized_crop
    from dali_pipes.graph.pipelines import crop_regions, resized_shape

    rng, num_parts = np.random.default_rng(0), 0
    for _ in range(300):
        side = int(rng.integers(2, 64))
        size, crop = rng.integers(1, 200, (1, 2)), rng.integers(1, side + 1, 2).tolist()
        shape = resized_shape(size, side)
        region = np.stack(crop_regions(size, shape, crop), axis=1)[0]
        _, (top, left), (rows, columns), (crop_top, crop_left) = region.tolist()
        photo = torch.from_numpy(rng.integers(0, 256, (1, *size[0], 3), dtype=np.uint8)).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(photo, size=shape[0].tolist(), mode="bilinear", antialias=True)
        pixels = photo[:, :, top : top + rows, left : left + columns].contiguous(memory_format=torch.channels_last)
        expected = resized[:, :, crop_top : crop_top + crop[0], crop_left : crop_left + crop[1]]
        assert torch.equal(resized_crop(pixels, shape[0].tolist(), crop, region), expected), (size, side, crop)
        num_parts += [rows, columns] != size[0].tolist()
    assert num_parts > 100


def test_graph_of_ones_own_gives_torchvisions_pixels(small_shards: Path, small_samples: list[Sample]) -> None:
    options, v2 = {"mean": (0.5,) * 3, "std": (0.25,) * 3}, Lazy("torchvision.transforms.v2")
    steps = [
        v2.PILToTensor(),
        v2.Resize((32, 24)),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(*options.values()),
    ]
    photos = {sample.key: Image.open(BytesIO(sample.components["image.jpg"])) for sample in small_samples}
    for batch in batches_of(small_shards, own_graph(size=(32, 24), layout="HWC", **options), batch_size=5):
        assert batch["image"].shape[1:] == (32, 24, 3)
        for key, image in zip(batch["key"], batch["image"].permute(0, 3, 1, 2), strict=True):
            expected = v2.Compose(steps)(photos[key])
            assert min((image - flipped).abs().max() for flipped in (expected, expected.flip(-1))) <= 1e-6
    with pytest.raises(ValueError, match="crop must be positive"):
        batches_of(small_shards, own_graph(size=(0, 3)))


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_images_are_normalised_on_the_models_side_to_the_bit(small_shards: Path, layout: Any) -> None:
    options = {"crop": 40, "resize": 48, "layout": layout}
    made = batches_of(small_shards, dp.classification_eval(**options))
    pixels = batches_of(small_shards, dp.classification_eval(dtype="uint8", **options))
    for whole, small in zip(made, pixels, strict=True):
        found = dp.normalise(small["image"], layout=layout)
        assert torch.equal(found, whole["image"] if layout == "CHW" else whole["image"].permute(0, 3, 1, 2))
    assert found.is_contiguous(memory_format=torch.channels_last) == (layout == "HWC")
    with pytest.raises(ValueError, match=r"with layout='HWC', got \["):
        dp.normalise(pixels[0]["image"], layout="CHW" if layout == "HWC" else "HWC")


def test_constant_mirror_flips_all(small_shards: Path) -> None:
    kept, flipped = (batches_of(small_shards, own_graph(mirror, size=(9, 8)))[0]["image"] for mirror in (0, 1))
    assert torch.equal(kept.flip(-1), flipped)


def test_memory_is_used_again_when_no_tensor_is_left(small_shards: Path) -> None:
    """A batch that is held keeps its pixels, also by a view."""
    graph = dp.classification_train(crop=48)
    with open_loader(small_shards, graph=graph, batch_size=5, last_batch_policy="DROP") as loader:
        batches = [batch["image"] for _ in range(6) for batch in loader.as_dicts()]
        held, copy = batches[0][2, 1:], batches[0][2, 1:].clone()
        del batches
        places = {batch["image"].data_ptr() for _ in range(5) for batch in loader.as_dicts()}
        assert torch.equal(held, copy)
        assert held.untyped_storage().data_ptr() not in places
        assert len(places) <= 10


def test_of_many_buffers_that_come_back_some_stay() -> None:
    """A loop that has held all batches of an epoch would else leave their memory with the loader."""
    made = []

    def allocate(num_bytes: int) -> Any:
        memory = np.empty(num_bytes, np.uint8)
        made.append(weakref.ref(memory))
        return memory

    buffers = Buffers(allocate)
    held = [buffers.take(9) for _ in range(20)]
    held.clear()
    held.append(buffers.take(9))
    assert sum(memory() is not None for memory in made) < 10


def test_pixels_that_cannot_be_images_are_refused(small_shards: Path) -> None:
    """Before they are broadcast or cut."""
    decode = fn.decoders.image
    cases = {
        r"made of uint8 pixels \[H, W, 3\], got uint8 \[.*, 1\]": lambda data: decode(data, output_type=types.GRAY),
        r"got float32 \[.*, 3\]": lambda data: fn.cast(decode(data), dtype=types.FLOAT),
    }
    for text, pixels in cases.items():

        def graph(components: Any, random: Any, pixels: Any = pixels) -> dict[str, Any]:
            return {"image": dp.image(components, pixels(components["image.jpg"]), size=(8, 8))}

        with pytest.raises(ValueError, match=text):
            batches_of(small_shards, graph)


def test_decoders_alone_finish_no_images(small_shards: Path) -> None:
    """`dali-pipes profile` takes their time for that of decoding."""
    internals = Lazy("dali_pipes.graph.dali_internals")
    with open_loader(small_shards, graph=dp.classification_train(crop=8), batch_size=5) as loader:
        for only, number in ((True, 0), (False, 1)):
            with contextlib.closing(loader.delivery.parts.decode.second_pipeline(only_decoders=only)) as pipeline:
                names = map(internals.operator_name, internals.operators_of(pipeline.pipeline))
                assert sum("PythonFunction" in name for name in names) == number


def test_failure_while_images_are_finished_is_an_error(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the graph's or the machine's fault, and no sample's: all fail."""
    monkeypatch.setattr("dali_pipes.graph.finish._write_image", lambda *_: 1 / 0)
    with (
        open_loader(small_shards, graph=dp.classification_train(crop=8), batch_size=5) as loader,
        pytest.raises(dp.DecodeError, match=r"the graph or the device is at fault: .*ZeroDivisionError"),
    ):
        next(loader)


def test_no_thread_reads_pixels_when_the_operator_has_failed(
    small_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI frees them then. The first photo fails while a second one is slow."""
    from dali_pipes.graph import finish

    slow, failed = threading.Event(), threading.Event()
    calls, at_work = itertools.count(), list[int]()

    def write_image(*_: Any) -> None:
        if next(calls) == 1:
            at_work.append(1)
            slow.set()
            failed.wait(60)
            at_work.pop()
        else:
            slow.wait(60)
            threading.Timer(0.2, failed.set).start()
            raise MemoryError

    monkeypatch.setattr(finish, "_write_image", write_image)
    images = finish._images
    left: list[int] = []

    def watched(*given: Any) -> Any:
        try:
            return images(*given)
        finally:
            left.append(len(at_work))

    monkeypatch.setattr(finish, "_images", watched)
    options = {"graph": dp.classification_train(crop=8), "batch_size": 5, "decode": dp.Decode(threads=2)}
    with open_loader(small_shards, **options) as loader, pytest.raises(dp.DecodeError):
        next(loader)
    assert left[0] == 0


def test_no_thread_reads_pixels_when_another_got_no_work() -> None:
    """The threads may end while the operator gives them a batch. Then one thread works, and the next `submit` fails."""
    from dali_pipes.graph import finish

    threads, reading, let_go, calls = finish.FinishThreads(2), threading.Event(), threading.Event(), itertools.count()
    submit, at_work = threads.pool.submit, list[int]()

    def read(*_: Any) -> None:
        at_work.append(1)
        reading.set()
        let_go.wait(60)
        at_work.pop()

    def submitted(work: Any) -> Any:
        if next(calls) == 1:
            reading.wait(60)
            threading.Timer(0.2, let_go.set).start()
            raise RuntimeError("cannot schedule new futures after shutdown")
        return submit(work)

    ones = np.ones(1, np.float32)
    output = finish.FinishedOutput(
        pixels=None, size=(8, 8), crop=None, region=None, mirror=0, factors=(ones, ones), dtype=np.uint8, is_chw=True
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(threads):
        patch.setattr(finish, "_write_image", read)
        patch.setattr(threads.pool, "submit", submitted)
        with pytest.raises(RuntimeError, match="cannot schedule"):
            finish._images(output, (), threads, Buffers(), [np.zeros((8, 8, 3), np.uint8)] * 2)
        assert not at_work


def test_the_garbage_collector_may_find_a_loader_in_its_own_operator(small_shards: Path) -> None:
    """A loop ended early, and the loader is in a cycle of references. It is closed, and no thread waits for itself."""
    script = """
import gc, itertools, sys, threading, time
import dali_pipes as dp
from dali_pipes.graph import finish

images, calls, dropped, collected = finish._images, itertools.count(), threading.Event(), threading.Event()

def collecting(*given):
    if next(calls):  # the first batch is delivered; the second one is being made when the loader is dropped
        dropped.wait(60)
        gc.collect()
        collected.set()
    return images(*given)

finish._images = collecting
gc.disable()
loader = dp.loader(sys.argv[1], dp.classification_train(crop=8), batch_size=5, device="cpu")
next(loader)
cycle = [loader]
cycle.append(cycle)
del loader, cycle
dropped.set()
assert collected.wait(60)
while any(thread.name.startswith("dali-pipes") for thread in threading.enumerate()):
    time.sleep(0.01)
print("closed")
"""
    process = start_python(script, small_shards)
    try:
        printed, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, printed) == (0, "closed\n"), errors


def test_a_closed_loader_keeps_no_images(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Buffers]] = []

    class Watched(Buffers):
        def __init__(self) -> None:
            super().__init__()
            made.append(weakref.ref(self))

    monkeypatch.setattr("dali_pipes.graph.finish.Buffers", Watched)
    with open_loader(small_shards, graph=dp.classification_train(crop=8), batch_size=5) as loader:
        next(loader)
        assert made[0]() is not None
    assert [buffers() for buffers in made] == [None]


def test_images_are_made_without_threads_of_openmp(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's threads spin while they wait. The number that the training has set for torch does not change."""
    from dali_pipes.graph import finish

    write_image, found, before = finish._write_image, set[int](), torch.get_num_threads()

    def watched(*given: Any) -> None:
        found.add(torch.get_num_threads())
        write_image(*given)

    monkeypatch.setattr(finish, "_write_image", watched)
    torch.set_num_threads(3)
    try:
        with open_loader(small_shards, graph=dp.classification_train(crop=8), batch_size=5) as loader:
            next(loader)
        assert (found, torch.get_num_threads()) == ({1}, 3)
        with ThreadPoolExecutor(1) as new:
            assert new.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_loaders_that_open_together_keep_the_number_of_torch_threads() -> None:
    from dali_pipes.graph.finish import FinishThreads

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(20):
            both, together = [FinishThreads(2), FinishThreads(2)], threading.Barrier(2)

            def start(one: Any, together: Any = together) -> None:
                together.wait()
                one.start()

            with ThreadPoolExecutor(2) as opening:
                list(opening.map(start, both))
            for threads in both:
                threads.close()
            with ThreadPoolExecutor(1) as new:
                assert new.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_that_cannot_start_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C while threads start, those that have started end: Python waits for them when it ends."""
    from dali_pipes.graph.finish import FinishThreads

    threads = FinishThreads(3)
    submit, calls = threads.pool.submit, iter([None, KeyboardInterrupt()])

    def submitted(*given: Any) -> Any:
        if (error := next(calls)) is not None:
            raise error
        return submit(*given)

    monkeypatch.setattr(threads.pool, "submit", submitted)
    with pytest.raises(KeyboardInterrupt):
        threads.start()
    threads.close()
