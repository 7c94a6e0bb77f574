"""The index as a program: lines in any order, repeated, from anywhere in the file; both readers read exactly those."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.reader.feed import Lines, SegmentReader
from tests.lazy import Lazy

if TYPE_CHECKING:
    from dali_pipes.reader.aio_reader import Aio

aio_reader, memory = Lazy("dali_pipes.reader.aio_reader"), Lazy("dali_pipes.reader.buffers")
tensors = Lazy("nvidia.dali.tensors")

BLOCKS = 64
KINDS = ["aio", "webdataset"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "file"
    path.write_bytes(os.urandom(512 * BLOCKS))
    return path


@pytest.fixture(scope="module")
def readers(file: Path) -> Iterator[dict[str, SegmentReader]]:
    with contextlib.ExitStack() as opened:
        made = {kind: aio_reader.open_reader(str(file), kind=kind) for kind in KINDS}
        for reader in made.values():
            opened.callback(reader.close)
        yield made


def lines(offsets: list[np.ndarray], sizes: list[np.ndarray]) -> Lines:
    return Lines(np.arange(len(offsets[0])), offsets, sizes)


def as_dali(encoded: Any) -> Any:
    """The batch as the decode pipeline is fed with it."""
    return getattr(encoded, "tensor_list", encoded)


def holders(path: Path) -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            found += str(link.readlink()) == str(path)
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_segment_reads_exactly_its_lines(
    readers: dict[str, SegmentReader], file: Path, kind: str, data: st.DataObject
) -> None:
    """The batches hold exactly the bytes of the lines, in their order, also if lines repeat.

    A batch does not change while later batches are read, or after the segment is closed.
    """
    batch_size, num_batches, num_components = (data.draw(st.integers(1, limit)) for limit in (5, 9, 3))
    num = batch_size * num_batches
    places = st.lists(st.integers(0, BLOCKS - 2), min_size=num, max_size=num)
    offsets = [np.array(data.draw(places)) * 512 for _ in range(num_components)]
    sizes = [np.array(data.draw(st.lists(st.integers(0, 1000), min_size=num, max_size=num))) for _ in offsets]
    content = file.read_bytes()
    with contextlib.closing(readers[kind].open(lines(offsets, sizes), batch_size=batch_size)) as segment:
        batches = [segment.read() for _ in range(num_batches)]
    for number, outputs in enumerate(batches):
        assert len(outputs) == num_components
        rows = range(number * batch_size, (number + 1) * batch_size)
        for output, offset, size in zip(outputs, offsets, sizes, strict=True):
            found = [np.asarray(output[i]).tobytes() for i in range(batch_size)]
            as_tensors = [np.asarray(as_dali(output)[i]).tobytes() for i in range(batch_size)]
            assert found == as_tensors == [content[offset[row] : offset[row] + size[row]] for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_file_that_is_too_short_is_an_error(tmp_path: Path, kind: str) -> None:
    """Never a batch of other bytes, or of what was in the buffer before."""
    path = tmp_path / "file"
    path.write_bytes(b"a" * 1000)
    with contextlib.closing(aio_reader.open_reader(str(path), kind=kind)) as reader:
        good = reader.open(lines([np.array([0])], [np.array([1000])]), batch_size=1)
        assert np.asarray(good.read()[0][0]).tobytes() == b"a" * 1000
        good.close()
        with (
            contextlib.closing(reader.open(lines([np.array([512])], [np.array([1000])]), batch_size=1)) as bad,
            pytest.raises((OSError, RuntimeError), match=r"ends at byte 1000|Error reading"),
        ):
            bad.read()


@pytest.mark.parametrize("kind", KINDS)
def test_close_closes_the_file(file: Path, kind: str) -> None:
    """A shard may be evicted after its last reader: the reader's descriptor is gone, not just unused."""
    before = holders(file)
    reader = aio_reader.open_reader(str(file), kind=kind)
    segment = reader.open(lines([np.zeros(9, np.int64)], [np.full(9, 5)]), batch_size=1)
    segment.read()
    assert holders(file) == before + 1
    for _ in range(2):
        segment.close()
        reader.close()
    assert holders(file) == before


@pytest.mark.parametrize("refused", ["io_setup", "io_submit"])
def test_auto_takes_dalis_reader_where_the_system_allows_no_other(
    file: Path, refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container may filter either system call; a user who asked for them is told."""
    from dali_pipes.reader.webdataset import WebdatasetReader

    call = aio_reader.Aio._call
    calls = aio_reader._CALLS[platform.machine()]
    number = dict(zip(["io_setup", "io_destroy", "io_submit"], calls, strict=False))[refused]

    def filtered(self: Aio, called: int, *arguments: int | None) -> int:
        if called == number:
            raise PermissionError(1, "Operation not permitted")
        return call(self, called, *arguments)

    monkeypatch.setattr(aio_reader.Aio, "_call", filtered)
    assert isinstance(aio_reader.open_reader(str(file)), WebdatasetReader)
    assert "Operation not permitted" in caplog.text
    with pytest.raises(PermissionError):
        aio_reader.open_reader(str(file), kind="aio")


# Linux's asynchronous I/O


@pytest.fixture
def aio() -> Iterator[Aio]:
    with contextlib.closing(aio_reader.Aio()) as opened:
        yield opened


def read_all(aio: Aio, file: Path, offsets: np.ndarray, sizes: np.ndarray) -> list[bytes]:
    starts = np.cumsum(sizes) - sizes
    memory = np.full(int(sizes.sum()), 0xEE, np.uint8)
    with file.open("rb") as stream:
        aio.read(stream.fileno(), offsets=offsets, sizes=sizes, addresses=memory.ctypes.data + starts)
    return [memory[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True)]


def test_any_number_of_reads(aio: Aio, file: Path) -> None:
    """The kernel takes a limited number at a time."""
    content, most = file.read_bytes(), aio_reader.MAX_READS
    for num in (0, 1, most - 1, most, most + 1, 3 * most + 7):
        random = np.random.default_rng(num)
        offsets, sizes = random.integers(0, 512 * BLOCKS - 1000, num), random.integers(1, 1000, num)
        expected = [content[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        assert read_all(aio, file, offsets, sizes) == expected


def test_read_that_fails_is_an_error(aio: Aio, file: Path) -> None:
    """A descriptor that cannot be read, and a place behind the end."""
    one = np.array([1])
    memory = np.zeros(1, np.uint8)
    write_only = os.open(file, os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            aio.read(write_only, offsets=one, sizes=one, addresses=one * memory.ctypes.data)
    finally:
        os.close(write_only)
    with pytest.raises(OSError, match=re.escape(f"the file ends at byte {512 * BLOCKS}")):
        read_all(aio, file, np.array([512 * BLOCKS - 10]), np.array([20]))
    assert read_all(aio, file, np.array([5]), np.array([3])) == [file.read_bytes()[5:8]]


@pytest.mark.parametrize("num_refused", [1, 3, 1000])
def test_reads_that_the_kernel_refuses_are_tried_again_and_then_read_otherwise(
    aio: Aio, file: Path, monkeypatch: pytest.MonkeyPatch, num_refused: int
) -> None:
    """``io_submit`` fails with EAGAIN, at first or after some reads were taken: the bytes are those of the file."""
    call, submitted = aio_reader.Aio._call, []

    def scarce(self: Aio, number: int, *arguments: int | None) -> int:
        if number != self._submit:
            return call(self, number, *arguments)
        submitted.append(number)
        if len(submitted) > 1 and len(submitted) <= num_refused + 1:
            raise BlockingIOError(11, os.strerror(11))
        context, num, pointers = arguments
        return call(self, number, context, min(3, num or 0), pointers)

    monkeypatch.setattr(aio_reader.Aio, "_call", scarce)
    offsets, sizes = np.arange(8) * 512, np.full(8, 100)
    content = file.read_bytes()
    for _ in range(2):
        assert read_all(aio, file, offsets, sizes) == [content[start : start + 100] for start in offsets]


# Buffers


def test_buffer_is_used_again_when_nothing_views_it() -> None:
    """Neither a slice nor a tensor of DALI's."""
    made: list[int] = []
    buffers = memory.Buffers(lambda num_bytes: made.append(num_bytes) or np.zeros(num_bytes, np.uint8))
    first = buffers.take(1000)
    view = tensors.TensorListCPU([tensors.TensorCPU(first[10:20])], contiguous=False)
    del first
    second = buffers.take(1000)
    assert len(made) == 2
    del view
    third = buffers.take(1000)
    assert len(made) == 2
    second[:], third[:] = 1, 2
    assert set(second.tolist()) == {1}
    del second, third
    larger = buffers.take(10 * made[0])
    assert len(made) == 3
    assert len(larger) >= 10 * made[0]


def test_ordinary_memory_is_private() -> None:
    """A forked child's writes do not reach the parent. The buffer requests huge pages if the kernel has them."""
    buffer = memory.Buffers().take(16 << 20)
    buffer[:] = 1
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        maps = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) [^V]*VmFlags:(.*)", Path("/proc/self/smaps").read_text(), re.M)
        (flags,) = (flags for start, stop, flags in maps if int(start, 16) <= buffer.ctypes.data < int(stop, 16))
        assert "hg" in flags.split()
    if not (child := os.fork()):
        try:
            buffer[0] = 2
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert buffer[0] == 1


def test_page_locked_batches_are_made_with_the_loaders_device(
    file: Path, aio: Aio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI and torch ask for the thread's CUDA device, which is 0 in a new thread; a stand-in answers here."""
    current, made = threading.local(), []
    empty, tensor = Lazy("torch").empty, tensors.TensorCPU

    def allocate(num_bytes: int, *, pin_memory: bool, **options: Any) -> Any:
        made.append((pin_memory, getattr(current, "device", 0)))
        return empty(num_bytes, **options)

    def make_tensor(data: Any, *, is_pinned: bool = False) -> Any:
        made.append((is_pinned, getattr(current, "device", 0)))
        return tensor(data)

    monkeypatch.setattr("torch.cuda.set_device", lambda device: setattr(current, "device", device))
    monkeypatch.setattr("torch.empty", allocate)
    monkeypatch.setattr("dali_pipes.reader.encoded_batch.TensorCPU", make_tensor)
    read = lines([np.arange(8) * 512], [np.full(8, 100)])
    with contextlib.closing(aio_reader.AioReader(str(file), aio=aio, buffers=memory.pinned_buffers(1))) as reader:
        segment = reader.open(read, batch_size=4)
        for _ in range(2):
            segment.read()
        segment.close()
    assert len(made) >= 9
    assert set(made) == {(True, 1)}
