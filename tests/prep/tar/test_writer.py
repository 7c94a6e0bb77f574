"""Members to a tar's bytes: TarWriter's, in pieces, and never of another length than announced."""

import io
import tarfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.errors import DataError, StoreError
from prep.pack.target import plan_shards
from prep.tar.writer import CHUNK_BYTES, Entry, Range, member_header, stream_tar, tar_bytes


def _tar(entries: list[Entry], num_bytes: int) -> bytes:
    return b"".join(bytes(piece) for piece in stream_tar(entries, shard="s.tar", num_bytes=num_bytes))


def _planned(entries: list[Entry], sizes: dict[str, int]) -> int:
    total = sum(tar_bytes(f"{key}.{name}", sizes[f"{key}.{name}"]) for key, parts in entries for name, _ in parts)
    [plan] = plan_shards([total], max_count=1, max_bytes=1)
    return plan.num_bytes


@given(
    name=st.one_of(
        st.text(st.characters(max_codepoint=0x17F, exclude_characters="\0"), min_size=1, max_size=130),
        # As a file system gives bytes that are not UTF-8: 'caf\xe9.jpg'.
        st.text(st.sampled_from(["a", "/", ".", "\udce9", "\udcff"]), min_size=1, max_size=110),
    ),
    size=st.one_of(st.integers(0, 1 << 20), st.integers((1 << 33) - 2, (1 << 33) + 2)),
    mode=st.integers(0, 0o7777),
    mtime_s=st.integers(0, 1 << 34),
)
def test_member_header_is_tarfiles(name: str, size: int, mode: int, mtime_s: int) -> None:
    """Most are made without it, in a tenth of the time, for pack, shuffle, the node and transforms: the same bytes."""
    member = tarfile.TarInfo(name)
    member.mode, member.size, member.mtime = mode, size, mtime_s
    expected = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    assert member_header(name, size, mode=mode, mtime_s=mtime_s) == expected
    member.mode, member.mtime = 0o644, 0
    expected = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    assert member_header(name, size) == expected
    assert tar_bytes(name, size) == len(expected) + -(-size // 512) * 512


@given(
    samples=st.dictionaries(
        st.text("ab/é", min_size=1, max_size=120).filter(lambda key: not key.endswith("/")),
        st.dictionaries(st.sampled_from(["jpg", "cls", "seg.png", "json"]), st.binary(max_size=2000), min_size=1),
        min_size=1,
        max_size=5,
    )
)
def test_stream_tar_gives_the_bytes_of_tarwriter(samples: dict[str, dict[str, bytes]]) -> None:
    stream = io.BytesIO()
    with webdataset.TarWriter(stream, encoder=False, mtime=0, user="", group="", mode=0o644) as writer:
        for key, parts in samples.items():
            writer.write({"__key__": key, **parts})
    entries: list[Entry] = [(key, sorted(parts.items())) for key, parts in samples.items()]
    sizes = {f"{key}.{name}": len(data) for key, parts in samples.items() for name, data in parts.items()}
    assert _tar(entries, _planned(entries, sizes)) == stream.getvalue()


@pytest.mark.parametrize(
    "size", [0, 1, 511, 512, CHUNK_BYTES - 512, CHUNK_BYTES - 511, CHUNK_BYTES, 3 * CHUNK_BYTES + 7]
)
def test_stream_tar_of_files_and_ranges_has_pieces_of_one_size(tmp_path: Path, size: int) -> None:
    """A piece may end in a header, at a member's last byte, or in its fill."""
    data = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / "whole").write_bytes(data[:size])
    (tmp_path / "longer").write_bytes(b"before" + data[:size] + b"after")
    entries: list[Entry] = [
        ("a", [("bin", str(tmp_path / "whole")), ("raw", Range(tmp_path / "longer", 6, size)), ("txt", data[:size])]),
        ("b", [("bin", str(tmp_path / "whole"))]),
    ]
    sizes = dict.fromkeys(("a.bin", "a.raw", "a.txt", "b.bin"), size)
    num_bytes = _planned(entries, sizes)
    pieces = [bytes(piece) for piece in stream_tar(entries, shard="s.tar", num_bytes=num_bytes)]
    assert {len(piece) for piece in pieces[:-1]} <= {CHUNK_BYTES}
    assert sum(map(len, pieces)) == num_bytes
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
        assert archive.getnames() == list(sizes)
        for member in archive:
            stream = archive.extractfile(member)
            assert stream is not None
            assert stream.read() == data[:size]


@pytest.mark.parametrize("change", [-30_000, -12_000, 12_000, 30_000])
def test_stream_tar_of_a_file_that_changed_is_an_error_before_its_end(tmp_path: Path, change: int) -> None:
    """So many bytes as announced are never given out: no store takes it for complete."""
    (tmp_path / "a").write_bytes(bytes(50_000 + change))
    [plan] = plan_shards([tar_bytes("a.bin", 50_000)], max_count=1, max_bytes=1)
    pieces = stream_tar([("a", [("bin", str(tmp_path / "a"))])], shard="s.tar", num_bytes=plan.num_bytes)
    received: list[int] = []
    with pytest.raises(DataError, match=rf"shard 's.tar' came out at .*, {plan.num_bytes} were planned: source files"):
        received.extend(map(len, pieces))
    assert sum(received) < plan.num_bytes


def test_stream_tar_of_a_file_that_is_gone_or_cut_names_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"cannot read '{tmp_path}/gone': No such file"):
        _tar([("a", [("bin", str(tmp_path / "gone"))])], 10240)
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(DataError, match=rf"'{tmp_path}/short' ends at byte 100: it was cut while it was packed"):
        _tar([("a", [("bin", Range(tmp_path / "short", 50, 100))])], 10240)
    with pytest.raises(StoreError, match="Is a directory"):
        _tar([("a", [("bin", Range(tmp_path, 0, 100))])], 10240)
