"""Archives made by hand, to do harm or by mistake: what a header claims is held against what is there."""

import io
import random
import resource
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.data_set.indexing import index_shard
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import checksum
from dali_pipes.formats.names import split_key
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.tar_reader import MAX_EXTENDED_BYTES, ArchiveReader
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards

END = bytes(1024)


def header(
    name: bytes, size: int | bytes, *, kind: bytes = b"0", prefix: bytes = b"", magic: bytes = b"ustar\x0000"
) -> bytes:
    """One block; a size is written in octal, or as the bytes of its field."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = bytearray(512)
    block[:100] = name.ljust(100, b"\0")
    block[100:124] = b"0000644\0" * 3
    block[124:136] = field.ljust(12, b"\0")
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[257:265] = magic
    block[345:500] = prefix.ljust(155, b"\0")
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def base256(size: int) -> bytes:
    """GNU tar's form of a size past 8 GiB, or of a negative one."""
    field = bytearray(size.to_bytes(12, signed=True))
    field[0] |= 0x80
    return bytes(field)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def member(name: bytes, data: bytes = b"5", *, kind: bytes = b"0", **fields: bytes) -> bytes:
    return header(name, len(data), kind=kind, **fields) + padded(data)


def signed(data: bytes) -> bytes:
    """This member with the checksum of old writers, which summed signed characters."""
    total = int(data[148:154], 8) - 256 * sum(byte >> 7 for byte in data[:512])
    return data[:148] + b"%06o\0 " % total + data[156:]


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    """An extended header of ``key=value`` records."""
    content = b""
    for record in records:
        length = next(n for n in range(1, 2000) if len(b"%d %s\n" % (n, record)) == n)
        content += b"%d %s\n" % (length, record)
    return member(b"PaxHeaders/x", content, kind=kind)


def index_of(data: bytes, *, is_known: bool = True) -> ShardIndex:
    return index_shard(io.BytesIO(data), shard="t.tar", size=len(data) if is_known else None)


def contents(data: bytes) -> dict[str, bytes]:
    return {f"{found.key}|{found.component}": found.read() for found in ArchiveReader(io.BytesIO(data), shard="t.tar")}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 256 MiB more than now: what a header claims is never allocated."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


CLAIMS = {
    "one-more": header(b"a.cls", 1025),
    "8-GiB": header(b"a.cls", 8**11 - 1),
    "base-256": header(b"a.cls", base256(2**62)),
    "largest": header(b"a.cls", base256(2**94 - 1)),
    "photo": header(b"a.jpg", base256(2**40)),
    "no-sample": header(b"README", base256(2**62)),
    "unknown-kind": header(b"a.cls", base256(2**62), kind=b"Z"),
    "pax-size": pax(b"size=4611686018427387904") + header(b"a.cls", 1),
    "pax-size-of-a-photo": pax(b"size=99999999999") + header(b"a.jpg", 1),
    "global-pax-size": pax(b"size=2000000", kind=b"g") + header(b"a.cls", 1),
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.usefixtures("little_memory")
def test_size_beyond_the_shard_is_refused(claim: bytes) -> None:
    """Without reading, allocating or counting up to it, whether or not the shard's size is known before."""
    text = r"shard 't\.tar' is cut off: .*member '(a\.cls|a\.jpg|README)' claims bytes"
    for is_known in (True, False):
        with pytest.raises(DataError, match=f"{text}.*, the shard has " if is_known else text):
            index_of(claim + padded(b"5") + END[:512], is_known=is_known)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (header(b"a.cls", base256(-1)), "the header at byte 0 claims a size that is -1"),
        (header(b"a.cls", b"-0000000001"), "the header at byte 0 claims a size that is not a number"),
        (header(b"a.cls", b"00000000009"), "claims a size that is not a number"),  # no octal digit
        (pax(b"size=-1") + member(b"a.cls"), "member 'a.cls' claims a size that is '-1'"),
        (pax(b"size=1e9") + member(b"a.cls"), "claims a size that is '1e9'"),
        (header(b"x", 2**33 - 1, kind=b"x"), f"claims 8589934591 bytes, at most {MAX_EXTENDED_BYTES} are read"),
        (member(b"x", b"99 path=a.cls\n", kind=b"x"), "no PAX record at byte 512"),
        (member(b"x", b"7 path=a.cls\n", kind=b"x"), "no PAX record at byte 512"),
        (member(b"x", b"13 path=a.cls" + b"9" * 5000, kind=b"x"), "no PAX record"),
        (member(b"a.cls") + b"\1" * 512, "no header at byte 1024"),  # tarfile's end of the archive
        (b"\x1f\x8b" + b"\1" * 1022, "no header at byte 0"),
    ],
)
@pytest.mark.usefixtures("little_memory")
def test_header_that_makes_no_sense_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(DataError, match=rf"shard 't\.tar' is not a readable tar: .*{text}"):
        index_of(data + END)


@pytest.mark.parametrize("kind", [b"x", b"L", b"K"])
def test_extended_header_without_its_member_is_refused(kind: bytes) -> None:
    """The member is lost, and no end-of-archive block tells: there is one."""
    content = b"16 path=a/b.cls\n" if kind == b"x" else b"a/b.cls"
    with pytest.raises(DataError, match="the last extended header describes a member that does not follow"):
        index_of(member(b"a.cls") + member(b"x", content, kind=kind) + END)
    with pytest.raises(DataError, match=r"is cut off: .*, the extended header at byte 512 claims 5000 bytes"):
        index_of(header(b"x", 5000, kind=kind) + END)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (member(b"d/", b"", kind=b"5"), {}),
        (member(b"a.cls", b"", kind=b"1") + member(b"b.cls"), {"b|cls": b"5"}),  # a hard link to another member
        (header(b"a.cls", 99, kind=b"1") + member(b"b.cls"), {"b|cls": b"5"}),  # which repeats that one's size
        (header(b"a.cls", base256(2**62), kind=b"2"), {}),
        (b"".join(member(b"a.cls", b"", kind=kind) for kind in (b"2", b"3", b"4", b"6")), {}),
        (member(b"a.cls/", b"", kind=b"\0"), {}),  # a directory, before there were kinds
        (member(b"a.cls", kind=b"\0"), {"a|cls": b"5"}),
        (member(b"n" * 96 + b".cls"), {f"{'n' * 96}|cls": b"5"}),  # the longest name has no NUL after it
        (signed(member("é.cls".encode())), {"é|cls": b"5"}),
        (member(b"a.jpg\0/../../b.cls"), {"a|jpg": b"5"}),  # NUL ends a name
        (member(b"a.cls", kind=b"7"), {"a|cls": b"5"}),
        (member(b"a.cls", kind=b"Z") + member(b"b.cls"), {"b|cls": b"5"}),  # a kind of nobody's: passed over
        (member(b"a.cls", magic=b"ustar  \0", prefix=b"12345670123"), {"a|cls": b"5"}),  # GNU: times, no folder
        (member(b"a.cls", prefix=b"d"), {"d/a|cls": b"5"}),
        (pax(b"path=p/q.cls") + member(b"a.cls"), {"p/q|cls": b"5"}),
        (pax(b"path=") + member(b"a.cls"), {"a|cls": b"5"}),
        (pax(b"path=p.cls") + member(b"a.cls") + member(b"b.cls"), {"p|cls": b"5", "b|cls": b"5"}),
        (pax(b"comment=x", kind=b"g") + member(b"a.cls"), {"a|cls": b"5"}),
        (pax(b"size=1") + header(b"a.cls", base256(0)) + padded(b"5"), {"a|cls": b"5"}),
        (member(b"././@LongLink", b"l/m.cls\0", kind=b"L") + member(b"a.cls"), {"l/m|cls": b"5"}),
        (member(b"././@LongLink", b"l.cls\0", kind=b"K") + member(b"a.cls"), {"a|cls": b"5"}),
        (header(b"a.cls", base256(1)) + padded(b"5"), {"a|cls": b"5"}),
    ],
)
def test_members_of_every_kind(data: bytes, expected: dict[str, bytes]) -> None:
    """Files are samples' components; links, directories, devices, pipes are passed over, whatever they claim."""
    assert contents(data + END) == expected


@pytest.mark.parametrize(
    "data",
    [
        member(b"a.jpg", kind=b"S"),
        pax(b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.name=a.jpg") + member(b"GNUSparseFile.0/a.jpg"),
    ],
    ids=["gnu", "pax"],
)
def test_sparse_file_is_refused(data: bytes) -> None:
    """Its bytes are not in one run, so no offset and size name them."""
    with pytest.raises(DataError, match=r"member '.*a\.jpg' is a sparse file, expected a file without gaps"):
        index_of(data + END)


ODD_NAMES = ("../../outside", "/etc/passwd", "a/../../b", "$(touch x);", "%s%n")


@pytest.mark.parametrize("format", ["header", "pax", "gnu"])
def test_odd_names_are_keys_and_nothing_else(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever header they stand in: indexed as they are, and no file is made but what an index consists of."""
    data = b""
    for key in ODD_NAMES:
        raw = f"{key}.jpg".encode()
        data += {
            "header": member(raw),
            "pax": pax(b"path=" + raw) + member(b"a.jpg"),
            "gnu": member(b"././@LongLink", raw + b"\0", kind=b"L") + member(b"a.jpg"),
        }[format]
    folder = tmp_path / "x" / "y"
    folder.mkdir(parents=True)
    (folder / "s-0.tar").write_bytes(data + END)
    monkeypatch.chdir(folder)
    assert tuple(index_of(data + END).keys) == ODD_NAMES
    index_shards(resolve_shards(folder, endpoint=None))
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "s-0.index.safetensors", "s-0.tar", "s-columns.safetensors", "s-manifest.safetensors"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shown"),
    [(b"a\nb.jpg", r"a\\nb\.jpg"), (b"a\0b.jpg", r"a\\x00b\.jpg"), (b"\x1b[2J.jpg", r"\\x1b\[2J\.jpg")],
)
def test_names_with_control_characters_are_refused(name: bytes, shown: str) -> None:
    """Keys stand in messages and in lists, one a line."""
    with pytest.raises(DataError, match=rf"member '{shown}': its name holds a control character; rename it"):
        index_of(pax(b"path=" + name) + member(b"a.jpg") + END)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text("abé./", min_size=1, max_size=130).filter(lambda name: name[-1] != "/"), st.binary(max_size=1100)
        ),
        max_size=6,
    ),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.integers(0, 2**32),
    st.integers(1, 700),
)
def test_archives_read_as_tarfile_reads_them(
    members: list[tuple[str, bytes]], format: int, seed: int, piece_bytes: int
) -> None:
    """Names, places and bytes, in every format, from a stream that gives a few bytes at a time."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = seed / 7 if format == tarfile.PAX_FORMAT else seed
            try:
                archive.addfile(info, io.BytesIO(data))
            except ValueError:  # a name too long for ustar
                continue
    whole = stream.getvalue()

    class Pieces(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, piece_bytes))

    reader = ArchiveReader(Pieces(whole), shard="t.tar", size=len(whole))
    leaving = random.Random(seed)  # members may be left unread
    found = [(m.name, m.offset, m.size, m.read() if leaving.random() < 0.7 else None) for m in reader]
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        expected = [
            (info.name, info.offset_data, info.size, archive.extractfile(info).read())
            for info in archive
            if split_key(info.name) is not None
        ]
    assert [place for *place, _ in found] == [place for *place, _ in expected]
    assert all(data in (None, bytes_) for (*_, data), (*_, bytes_) in zip(found, expected, strict=True))
    assert (reader.num_bytes, reader.checksum) == (len(whole), checksum(whole))
