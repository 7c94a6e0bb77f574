"""Test the node's shuffle: the order by keys and seed, cuts by size, and tars of every dialect as input."""

import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dali_pipes.errors import DataError
from dali_pipes.formats.names import split_key
from prep.embedded.dsort.reshard import InputShard, OutputShard, plan, scan, tar_chunks
from prep.shuffle.order import Algorithm, arrange, cut, cut_mapped, parse_content, shuffled
from tests.prep.embedded.tars import make_tar, read_tar

NAMES = [f"out-{index:03}.tar" for index in range(1000)]


def write(folder: Path, name: str, data: bytes) -> InputShard:
    path = folder / name
    path.write_bytes(data)
    return InputShard.of(name, path, path.stat())


def reshard(
    shards: Sequence[InputShard], *, folder: Path, names: Iterable[str], output_shard_size: int, seed: int
) -> list[tuple[OutputShard, Path]]:
    """Take the three steps of the embedded node."""
    samples = [sample for shard in shards for sample in scan(shard)]
    outputs = plan(samples, names=names, output_shard_size=output_shard_size, algorithm=Algorithm(seed=seed))
    folder.mkdir(exist_ok=True)
    for output in outputs:
        (folder / output.name).write_bytes(b"".join(tar_chunks(output.samples)))
    return [(output, folder / output.name) for output in outputs]


def members_of(folder: Path) -> list[tuple[str, bytes]]:
    return [member for path in sorted(folder.glob("out-*.tar")) for member in read_tar(path.read_bytes())]


# Order


def test_shuffled_is_the_same_everywhere_and_for_ever() -> None:
    """The order must be the same on every machine and Python version: another order would be another data set."""
    assert shuffled([f"{index:02}" for index in range(8)], seed=0) == [6, 3, 7, 2, 1, 4, 0, 5]
    code = "from prep.shuffle.order import shuffled; print(shuffled([f'{i:02}' for i in range(8)], seed=0))"
    root = str(Path(__file__).parents[4])
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, env={"PYTHONHASHSEED": "5"}
    )
    assert other.stdout.strip() == "[6, 3, 7, 2, 1, 4, 0, 5]"


@given(st.lists(st.text(max_size=5), max_size=50), st.integers(-3, 1 << 70))
def test_shuffled_is_a_permutation(keys: list[str], seed: int) -> None:
    """Each position comes once, also if keys repeat; a second call gives the same order."""
    order = shuffled(keys, seed=seed)
    assert sorted(order) == list(range(len(keys)))
    assert shuffled(keys, seed=seed) == order


def test_shuffled_depends_on_seed_and_keys() -> None:
    """Another seed gives another order; positions are spread evenly."""
    keys = [str(index) for index in range(200)]
    assert shuffled(keys, seed=1) != shuffled(keys, seed=2)
    means = [sum(shuffled(keys, seed=seed)[:20]) / 20 for seed in range(50)]
    assert 90 < sum(means) / 50 < 109


# Cuts


@pytest.mark.parametrize(
    ("sizes", "target", "expected"),
    [
        ([], 10, []),  # nothing gives no shard
        ([1], 10, [1]),
        ([5, 5, 5], 10, [2, 1]),  # the item that reaches the target still belongs to the shard
        ([20, 1, 20], 10, [1, 2]),  # one too large is a shard of its own
        ([0, 0, 0], 10, [3]),
        ([10, 10], 10, [1, 1]),  # no empty shard at the end
    ],
)
def test_cut(sizes: list[int], target: int, expected: list[int]) -> None:
    """A shard ends with the item that brings it to the target."""
    assert cut(sizes, target=target) == expected


@given(st.lists(st.integers(0, 100)), st.integers(1, 300))
def test_cut_takes_all(sizes: list[int], target: int) -> None:
    """Every item is in one shard. All shards but the last reach the target, and only with their last item."""
    counts = cut(sizes, target=target)
    assert sum(counts) == len(sizes)
    start = 0
    for count in counts:
        shard = sizes[start : start + count]
        start += count
        assert sum(shard[:-1]) < target
        assert sum(shard) >= target or start == len(sizes)


# Whole


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, (1 << 63) - 1), target=st.integers(1, 4000))
def test_reshard_gives_every_member_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int, target: int
) -> None:
    """All names and bytes come out; a sample's members stay together, in order."""
    folder = tmp_path_factory.mktemp("reshard")
    stems = st.text(st.sampled_from("ab./\u00e4-\U0001f600"), min_size=1, max_size=130).filter(
        lambda text: not text.startswith("/") and not text.endswith("/") and "//" not in text
    )
    names = data.draw(st.lists(stems.map(lambda stem: f"{stem}.{len(stem)}"), unique=True, max_size=12))
    samples: dict[str, list[str]] = {}
    for name in names:
        samples.setdefault((split_key(name) or (name,))[0], []).append(name)
    shards: list[dict[str, bytes]] = [{}, {}, {}]
    for place, group in enumerate(samples.values()):
        for name in group:
            shards[place % 3][name] = data.draw(st.binary(max_size=1500))
    inputs = [
        write(folder, f"in-{at}.tar", make_tar(shard, tar_format=tar_format))
        for at, (shard, tar_format) in enumerate(
            zip(shards, (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT), strict=True)
        )
    ]
    reshard(inputs, folder=folder, names=NAMES, output_shard_size=target, seed=seed)
    found = members_of(folder)
    assert Counter(found) == Counter(member for shard in shards for member in shard.items())
    order = [name for name, _ in found]
    for group in samples.values():
        if split_key(group[0]) is not None:
            start = order.index(group[0])
            assert order[start : start + len(group)] == group


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_scan_reads_every_dialect(tmp_path: Path, tar_format: int) -> None:
    """Long names are read where the dialect has them; offsets point to the bytes."""
    long_name = "d/" * 60 + "long.jpg" if tar_format == tarfile.USTAR_FORMAT else "n" * 300 + ".jpg"
    shard = write(tmp_path, "s.tar", make_tar({"a.jpg": b"A" * 700, long_name: b"B"}, tar_format=tar_format))
    samples = scan(shard)
    assert [member.name for sample in samples for member in sample.files] == ["a.jpg", long_name]
    raw = shard.path.read_bytes()
    for sample, expected in zip(samples, (b"A" * 700, b"B"), strict=True):
        member = sample.files[0]
        assert raw[member.offset : member.offset + member.num_bytes] == expected
        assert member.offset % 512 == 0


def test_reshard_output_is_plain_ustar(tmp_path: Path) -> None:
    """Headers have 512 bytes if names allow it, and two zero blocks end the tar: the size is that of dSort's output."""
    members = {
        f"s{index}.{part}": bytes(size) for index in range(5) for part, size in (("cls", 1), ("jpg", 700), ("png", 300))
    }
    shard = write(tmp_path, "in.tar", make_tar(members))
    [(output, path)] = reshard([shard], folder=tmp_path, names=NAMES, output_shard_size=1 << 20, seed=0)
    assert (output.name, path.stat().st_size) == ("out-000.tar", 18944)
    with tarfile.open(path) as tar:
        assert all(info.offset_data - info.offset == 512 and info.pax_headers == {} for info in tar)


def test_reshard_keeps_mode_and_time(tmp_path: Path) -> None:
    """The owner is dropped: it is the user who packed."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.jpg")
        info.mode, info.mtime, info.uname, info.uid = 0o600, 1234.75, "me", 1000
        tar.addfile(info)
    shard = write(tmp_path, "in.tar", out.getvalue())
    [(_, path)] = reshard([shard], folder=tmp_path, names=NAMES, output_shard_size=1, seed=0)
    with tarfile.open(path) as tar:
        [info] = tar
    assert (info.mode, info.mtime, info.uname, info.uid) == (0o600, 1234, "", 0)


def test_reshard_same_seed_same_bytes(tmp_path: Path) -> None:
    """Two runs give equal bytes; with another seed the shards hold other samples."""
    shard = write(tmp_path, "in.tar", make_tar({f"{index:03}.jpg": bytes([index]) * 100 for index in range(40)}))
    runs: list[list[bytes]] = []
    for seed in (3, 3, 4):
        folder = tmp_path / f"run{len(runs)}"
        reshard([shard], folder=folder, names=NAMES, output_shard_size=1000, seed=seed)
        runs.append([path.read_bytes() for path in sorted(folder.iterdir())])
    assert len(runs[0]) == 4
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_members_without_a_key_are_kept_and_folders_left_out(tmp_path: Path) -> None:
    """``README`` in two shards, ``._a.jpg``, and ``a`` beside ``a.jpg`` all come out; a directory does not."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        folder = tarfile.TarInfo("dir")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in ("a", "a.jpg", "._a.jpg", "README"):
            tar.addfile(tarfile.TarInfo(name))
    shards = [write(tmp_path, "in-0.tar", out.getvalue()), write(tmp_path, "in-1.tar", make_tar({"README": b"2"}))]
    reshard(shards, folder=tmp_path, names=NAMES, output_shard_size=1 << 20, seed=0)
    assert sorted(members_of(tmp_path)) == [
        ("._a.jpg", b""), ("README", b""), ("README", b"2"), ("a", b""), ("a.jpg", b"")
    ]  # fmt: skip


# Refusals


def test_scan_of_a_cut_shard_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    """A tar that is cut off is refused, also between members and in padding, where tar readers see no error."""
    whole = make_tar({"a.jpg": b"A" * 700, "b.jpg": b"B" * 10})
    end = 512 + 1024 + 512 + 512  # of the last member
    for num_bytes in [*range(0, end + 512, 100), 512, 1536, end, end + 511]:
        shard = write(tmp_path, "cut.tar", whole[:num_bytes])
        with pytest.raises(DataError, match=r"shard 'cut\.tar'"):
            scan(shard)
    assert len(scan(write(tmp_path, "whole.tar", whole[: end + 512]))) == 2


def test_scan_of_a_damaged_header_is_refused(tmp_path: Path) -> None:
    """`tarfile` would take it for the end of the archive, and lose the rest without an error."""
    data = bytearray(make_tar({"a.jpg": b"A", "b.jpg": b"B", "c.jpg": b"C"}))
    data[1024 + 150] ^= 1  # the second header's checksum
    with pytest.raises(DataError, match=r"shard 'bad\.tar' is not a readable tar: no header at byte 1024"):
        scan(write(tmp_path, "bad.tar", bytes(data)))


def test_scan_of_no_tar_is_refused(tmp_path: Path) -> None:
    """Text and a compressed tar are refused."""
    for data in (b"not a tar" * 200, b"\x1f\x8b" + bytes(2000)):
        with pytest.raises(DataError, match=r"shard 'x\.tar'"):
            scan(write(tmp_path, "x.tar", data))


def test_scan_stops_at_the_length_given(tmp_path: Path) -> None:
    """Any bytes may follow the tar in the file."""
    whole = make_tar({"a.jpg": b"A"})
    path = write(tmp_path, "s.tar", whole + make_tar({"b.jpg": b"B"}) + b"more").path
    assert [sample.key for sample in scan(InputShard.of("s", path, path.stat(), num_bytes=len(whole)))] == ["a"]
    with pytest.raises(DataError, match="is cut off"):
        scan(InputShard.of("s", path, path.stat(), num_bytes=1024))


def test_scan_refuses_links_and_twins(tmp_path: Path) -> None:
    """A link has no bytes to copy; a name that occurs twice is ambiguous."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        link = tarfile.TarInfo("a.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "b.jpg"
        tar.addfile(link)
    with pytest.raises(DataError, match=r"member 'a\.jpg' is not a regular file"):
        scan(write(tmp_path, "link.tar", out.getvalue()))
    twins = make_tar({"a.jpg": b"1"})[:1024] + make_tar({"a.jpg": b"2"})
    with pytest.raises(DataError, match=r"member 'a\.jpg' occurs twice"):
        scan(write(tmp_path, "twins.tar", twins))


def test_plan_refuses_a_key_of_two_shards(tmp_path: Path) -> None:
    """An output would mix the members of both."""
    samples = [sample for at in range(2) for sample in scan(write(tmp_path, f"in-{at}.tar", make_tar({"a.jpg": b""})))]
    with pytest.raises(DataError, match=r"shard 'in-1\.tar', key 'a': is in shard 'in-0\.tar' too"):
        plan(samples, names=NAMES, output_shard_size=1, algorithm=Algorithm())


def test_plan_refuses_too_few_names_and_sizes_below_one(tmp_path: Path) -> None:
    """The job fails before anything is written, with dSort's words."""
    shard = write(tmp_path, "in.tar", make_tar({f"{index}.jpg": b"x" for index in range(4)}))
    with pytest.raises(DataError, match=r"exceeds expected number of shards \(3\)"):
        reshard([shard], folder=tmp_path / "out", names=NAMES[:3], output_shard_size=1, seed=0)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="output_shard_size must be positive, got 0"):
        plan([], names=NAMES, output_shard_size=0, algorithm=Algorithm())


def test_reshard_notices_an_input_replaced_meanwhile(tmp_path: Path) -> None:
    """Offsets of the old file are wrong for the new one."""
    shard = write(tmp_path, "in.tar", make_tar({f"{index}.jpg": b"x" * 9 for index in range(4)}))
    samples = scan(shard)
    shard.path.unlink()
    write(tmp_path, "in.tar", make_tar({"other.jpg": b"y" * 9}))
    for read in (lambda: list(tar_chunks(samples)), lambda: scan(shard)):
        with pytest.raises(DataError, match=r"shard 'in\.tar': changed while it was being read"):
            read()


def test_reshard_of_many_inputs(tmp_path: Path) -> None:
    """All samples of seventy shards come out."""
    shards = [write(tmp_path, f"in-{at:02}.tar", make_tar({f"{at}.jpg": str(at).encode()})) for at in range(70)]
    reshard(shards, folder=tmp_path, names=NAMES, output_shard_size=40, seed=1)
    assert sorted(members_of(tmp_path)) == sorted((f"{at}.jpg", str(at).encode()) for at in range(70))


# Orders


NAMES_IN = ["b/2.jpg", "a/10.jpg", "a/1.jpg", "a/1-x.jpg", "\u00e4.jpg", "Z.jpg"]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Algorithm(kind="none"), [0, 1, 2, 3, 4, 5]),
        # Bytes are compared, and the whole name: '-' before '.', upper case first, what is not ASCII last.
        (Algorithm(kind="alphanumeric"), [5, 3, 2, 1, 0, 4]),
        (Algorithm(kind="alphanumeric", decreasing=True), [4, 0, 1, 2, 3, 5]),
    ],
)
def test_arrange_by_name(algorithm: Algorithm, expected: list[int]) -> None:
    assert arrange(NAMES_IN, algorithm=algorithm) == expected


@pytest.mark.parametrize(
    ("key_type", "decreasing", "expected"),
    [
        ("int", False, [3, 1, 4, 0, 2]),  # -1 2 2 10 30: ties as they stood
        ("int", True, [2, 0, 1, 4, 3]),  # also when the order is turned
        ("float", False, [3, 1, 4, 0, 2]),
        ("string", False, [3, 0, 1, 4, 2]),  # b"-1" b"10" b"2" b"2" b"30"
    ],
)
def test_arrange_by_content(key_type: str, decreasing: bool, expected: list[int]) -> None:
    algorithm = Algorithm(kind="content", component=".cls", key_type=key_type, decreasing=decreasing)
    contents = [parse_content(data, algorithm=algorithm, where="") for data in (b"10", b"2", b"30", b"-1", b"2")]
    assert arrange([""] * 5, algorithm=algorithm, contents=contents) == expected


@pytest.mark.parametrize(
    ("data", "key_type", "found"),
    [
        (b" 7\n", "int", 7),
        (b"-0", "int", 0),
        (b"-" + b"0" * 5000 + b"7", "int", -7),
        (b" 1e3\n", "float", 1000.0),
        (b"inf", "float", float("inf")),
        (b" 7", "string", b" 7"),
    ],
)
def test_parse_content_allows_white_space_around_numbers(data: bytes, key_type: str, found: object) -> None:
    assert parse_content(data, algorithm=Algorithm(kind="content", component="c", key_type=key_type), where="") == found


@pytest.mark.parametrize(
    ("data", "key_type"),
    [
        (b"7.0", "int"),
        (b"", "int"),
        (b"9" * 30, "int"),
        (b"9" * 5000, "int"),  # of which Python makes no number
        (b"x", "float"),
        (b"nan", "float"),
    ],
)
def test_parse_content_that_is_no_number_says_where(data: bytes, key_type: str) -> None:
    algorithm = Algorithm(kind="content", component="c", key_type=key_type)
    with pytest.raises(DataError, match=f"^here: component 'c' holds '.*', expected {key_type} to sort by"):
        parse_content(data, algorithm=algorithm, where="here")


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 50)), max_size=60),
    st.integers(1, 100),
)
def test_cut_mapped_takes_each_once_in_order(samples: list[tuple[int, int]], target: int) -> None:
    """Each shard but a group's last is over the target, and only with its last sample."""
    groups, sizes = [group for group, _ in samples], [size for _, size in samples]
    found = cut_mapped(groups, sizes, limits=[99] * 4, labels=["x"] * 4, target=target)
    for group in range(4):
        runs = [positions for of, positions in found if of == group]
        assert [position for run in runs for position in run] == [at for at, of in enumerate(groups) if of == group]
        filled = [[sizes[position] for position in run] for run in runs]
        assert all(sum(run) > target for run in filled[:-1])
        assert all(sum(run[:-1]) <= target for run in filled)


def test_plan_puts_files_of_no_sample_last(tmp_path: Path) -> None:
    """Files without a key do not change the order of the samples."""
    members = {f"{index}.jpg": b"x" for index in range(8)}
    orders = []
    extras: list[dict[str, bytes]] = [{}, {"README": b"r"}]
    for extra in extras:
        shard = write(tmp_path, f"in-{len(extra)}.tar", make_tar(extra | members))
        [output] = plan(scan(shard), names=NAMES, output_shard_size=1 << 20, algorithm=Algorithm(seed=5))
        orders.append([sample.key for sample in output.samples])
    assert orders[1] == [*orders[0], "README"]
