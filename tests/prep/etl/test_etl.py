"""A transform gives the same bytes on this machine, inline and offline; its errors name shard and key."""

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.cli import main
from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.etl import transforms
from prep.etl.run import Output, get_transformed, open_output, run_offline, start_etl, stop_etl, transform_shards
from prep.etl.transforms import ShardTransform, load_transform, pets
from tests.prep.etl import functions
from tests.prep.etl.conftest import FUNCTIONS, make_shard, words
from tests.shards import encode_mask, encode_photo, files_of, make_source, pack, read_tar, tar_bytes


@contextmanager
def running(store: AisStore, name: str, transform: str) -> Iterator[str]:
    start_etl(store, name, transform=f"{FUNCTIONS}:{transform}")
    yield name
    stop_etl(store, name)


def test_function_makes_new_components_and_a_tar_without_time_or_owner() -> None:
    made = ShardTransform("shout", functions.shout).transform(words(), "bucket/s.tar")
    assert dict(read_tar(made))["d/001.loud.txt"] == b"WORD 1!"
    assert list(dict(read_tar(made)))[:3] == ["d/000.loud.txt", "d/000.cls", "d/001.loud.txt"]
    assert len(made) % 10240 == 0
    with tarfile.open(fileobj=io.BytesIO(made)) as tar:
        assert {(member.mtime, member.uname, member.mode) for member in tar} == {(0, "", 0o644)}
    some = ShardTransform("drop_odd", functions.drop_odd).transform(words(), "s.tar")
    assert list(dict(read_tar(some))) == ["d/000.txt", "d/000.cls", "d/002.txt", "d/002.cls"], "{} leaves a sample out"
    with pytest.raises(ValueError, match=r"transform 'x' takes no arguments with a request, got 'crop=3'"):
        ShardTransform("x", functions.shout).transform(words(), "s.tar", "crop=3")


def test_identity_gives_the_bytes_that_pack_writes(tmp_path: Path) -> None:
    """A transform that changes no sample leaves all bytes of our shards unchanged."""
    pack(make_source(5), store=LocalStore(tmp_path), prefix="s-", max_count=10, max_bytes=1 << 20)
    packed = (tmp_path / "s-000000.tar").read_bytes()
    assert ShardTransform("same", functions.same).transform(packed, "s") == packed


def test_pieces_come_sample_by_sample() -> None:
    """A shard is not read into memory: for the first sample's pieces, at most one read's bytes are taken."""
    big = make_shard({f"{n:03d}": {"txt": bytes(1 << 20)} for n in range(8)})
    stream = io.BytesIO(big)
    next(ShardTransform("same", functions.same).pieces(stream, shard="s"))
    assert stream.tell() <= 3 << 20


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("forget", r"shard 's.tar', key 'd/000': transform 'x' returned NoneType, expected a dict"),
        ("as_text", r"transform 'x' made component 'txt' of str, expected bytes"),
        ("misname", r"transform 'x' named a component 'a/b', expected an extension in lower case, such as 'jpg'"),
        ("fail", r"shard 's.tar', key 'd/000': transform 'x' failed: KeyError: 'gone'"),
    ],
)
def test_what_a_function_returns_is_checked(transform: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ShardTransform("x", getattr(functions, transform)).transform(words(), "ais%2Fb/s.tar")


def test_broken_shards_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    unchanged = ShardTransform("same", functions.same)
    with pytest.raises(DataError, match=r"shard 's.tar' is cut off"):
        unchanged.transform(words()[:2048], "s.tar")
    twice = words() + words()  # the reader stops at the first end
    assert unchanged.transform(twice, "s.tar") == unchanged.transform(words(), "s.tar")
    apart = tar_bytes(dict.fromkeys(("a.txt", "b.txt", "a.cls"), b""))
    with pytest.raises(DataError, match=r"shard 's.tar', key 'a': its members do not stand together"):
        unchanged.transform(apart, "s.tar")
    double = tar_bytes({"a.txt": b"", "a.TXT": b""})
    with pytest.raises(DataError, match=r"key 'a': component 'txt' comes twice"):
        unchanged.transform(double, "s.tar")
    monkeypatch.setattr(transforms, "MAX_SAMPLE_BYTES", 3)
    with pytest.raises(DataError, match=r"key 'a': a sample of 4 bytes or more, a transform takes at most 3"):
        unchanged.transform(tar_bytes({"a.txt": b"12", "a.cls": b"34"}), "s.tar")


@pytest.mark.parametrize(("size", "mode"), [((500, 375), "RGB"), ((347, 500), "L"), ((201, 120), "RGB")])
def test_pets_is_torchvisions_transform(size: tuple[int, int], mode: str) -> None:
    """Crop, padding and normalisation match the tutorial; pixels differ at most in float32's last bits."""
    from bench.loaders.protocol import LoaderOptions
    from bench.loaders.transforms import SampleDecoder

    photo, mask = encode_photo(size=size, mode=mode), encode_mask(size=size)
    shard = make_shard({"a": {"image.jpg": photo, "cls": b"3", "trimap.png": mask}})
    made = dict(read_tar(ShardTransform("pets", pets).transform(shard, "s.tar")))
    assert list(made) == ["a.image.npy", "a.cls", "a.trimap.npy"]
    assert made["a.cls"] == b"3"
    image, trimap = (np.load(io.BytesIO(made[name])) for name in ("a.image.npy", "a.trimap.npy"))
    assert (image.shape, image.dtype, trimap.shape, trimap.dtype) == ((3, 350, 350), "float32", (1, 350, 350), "uint8")
    sample = {"__key__": "a", "image.jpg": photo, "cls": b"3", "trimap.png": mask}
    wanted = SampleDecoder(LoaderOptions(crop=350))(sample)
    np.testing.assert_allclose(image, wanted["image"].numpy(), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(trimap, wanted["mask"].numpy())


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"image.jpg": b""}, "key 'a': transform 'pets' failed: no component 'trimap.png' .found: image.jpg."),
        ({"image.jpg": b"no photo", "trimap.png": b""}, "'image.jpg' cannot be decoded: cannot identify image file"),
    ],
)
def test_pets_tells_what_is_wrong(sample: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ShardTransform("pets", pets).transform(make_shard({"a": sample}), "s.tar")


def test_transforms_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pets, functions, and modules in the current directory are found."""
    (tmp_path / "lying_here.py").write_text("def same(sample):\n    return sample\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_transform("pets").function is pets
    assert load_transform(f"{FUNCTIONS}:shout").name == f"{FUNCTIONS}:shout"
    assert load_transform("lying_here:same").function({"a": b""}) == {"a": b""}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dogs", r"a transform is 'pets' or MODULE:FUNCTION, such as my_module:crop, got 'dogs'"),
        ("no_such_module:f", r"transform 'no_such_module:f': no module 'no_such_module' in '.*' or on Python's path"),
        ("json:no_such", r"transform 'json:no_such': module 'json' has no 'no_such'"),
        (f"{FUNCTIONS}:os", r"is module, expected a function of a sample"),
        ("breaks_here:f", "transform 'breaks_here:f': importing it failed: ZeroDivisionError"),
    ],
)
def test_names_of_no_transform_are_refused(
    spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_here.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match=message):
        load_transform(spec)


def test_transform_here_writes_all_shards_and_the_class_table(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = resolve_shards(f"{shards}/samples-", endpoint=None)
    report = transform_shards(found, open_output(out, endpoint=None), transform=f"{FUNCTIONS}:shout", jobs=2)
    assert report.shards == ("samples-000000.tar", "samples-000001.tar")
    assert report.num_bytes == sum((out / name).stat().st_size for name in report.shards)
    wanted = load_transform(f"{FUNCTIONS}:shout").transform(words(3, 2), "s")
    assert (out / "samples-000001.tar").read_bytes() == wanted
    assert (out / ".dali-pipes/samples-classes.json").read_text() == '{"0": "zero"}'
    described = [".dali-pipes/samples-classes.json", ".dali-pipes/samples-written.json"]
    assert list(files_of(out)) == [*described, *report.shards]


def test_transform_here_refuses_what_is_there(shards: Path, tmp_path: Path) -> None:
    """Outputs are replaced only on request; then the files that describe the old shards are deleted."""
    found = resolve_shards(f"{shards}/samples-", endpoint=None)
    output = Output(store=LocalStore(tmp_path / "out"), prefix="small-")
    transform_shards(found, output, transform=f"{FUNCTIONS}:shout", jobs=1)
    (tmp_path / "out" / ".dali-pipes/small-samples-manifest.safetensors").write_bytes(b"")
    with pytest.raises(StoreError, match=r"has 'small-samples-000000.tar', .* already; pass --overwrite to replace"):
        transform_shards(found, output, transform=f"{FUNCTIONS}:drop_odd", jobs=1)
    transform_shards(found, output, transform=f"{FUNCTIONS}:drop_odd", jobs=1, overwrite=True)
    assert not (tmp_path / "out" / ".dali-pipes/small-samples-manifest.safetensors").exists()
    assert "d/000.txt" in dict(read_tar((tmp_path / "out" / "small-samples-000000.tar").read_bytes()))


def test_transform_here_that_fails_leaves_no_part(shards: Path, tmp_path: Path) -> None:
    found = resolve_shards(f"{shards}/samples-", endpoint=None)
    with pytest.raises(DataError, match=r"shard 'samples-000000.tar', key 'd/000': transform .* returned None"):
        transform_shards(found, open_output(tmp_path / "out", endpoint=None), transform=f"{FUNCTIONS}:forget", jobs=1)
    assert list(files_of(tmp_path / "out")) == [".dali-pipes/samples-written.json"]


def test_three_ways_give_the_same_bytes(source: AisStore) -> None:
    """A transform gives the same bytes in this process, inline and offline; only shards are transformed."""
    found = resolve_shards(f"{source.url}/samples-", endpoint=source.endpoint)
    target = AisStore(source.endpoint, f"{source.bucket}-out")
    with running(source, "shout-etl", "shout") as etl:
        inline = io.BytesIO()
        num_bytes = get_transformed(source, "samples-000000.tar", inline, etl=etl)
        report = run_offline(found, Output(store=target, prefix="new/"), etl=etl)
    wanted = [ShardTransform("shout", functions.shout).transform(source.read(name), name) for name in found.names]
    assert inline.getvalue() == wanted[0]
    assert num_bytes == len(wanted[0])
    assert report.shards == ("new/samples-000000.tar", "new/samples-000001.tar")
    assert [target.read(name) for name in report.shards] == wanted
    assert report.num_bytes == sum(map(len, wanted))
    described = [".dali-pipes/new/samples-classes.json", ".dali-pipes/new/samples-written.json"]
    assert [entry.name for entry in target.list("")] == [*described, *report.shards]


def test_transform_that_fails_in_an_etl_names_shard_and_key(source: AisStore) -> None:
    found = resolve_shards(f"{source.url}/samples-", endpoint=source.endpoint)
    target = AisStore(source.endpoint, f"{source.bucket}-out")
    told = rf"shard 'samples-000000.tar', key 'd/000': transform '{FUNCTIONS}:forget' returned NoneType"
    with running(source, "forget-etl", "forget") as etl:
        with pytest.raises(StoreError, match=f"ETL 'forget-etl' failed: {told}"):
            get_transformed(source, "samples-000000.tar", io.BytesIO(), etl=etl)
        with pytest.raises(StoreError, match=f"left 2 of 2 shards untransformed, .*{told}"):
            run_offline(found, Output(store=target, prefix=""), etl=etl)
    assert [entry.name for entry in target.list("")] == [".dali-pipes/samples-written.json"]


def test_what_an_etl_cannot_do_is_refused_with_the_way_out(source: AisStore) -> None:
    """The errors come before anything is written, and say how to go on."""
    found = resolve_shards(f"{source.url}/samples-", endpoint=source.endpoint)
    output = Output(store=AisStore(source.endpoint, f"{source.bucket}-out"), prefix="")
    with pytest.raises(StoreError, match=r"no ETL 'not-there' at .*does not exist.*; start it: dali-pipes prep etl st"):
        run_offline(found, output, etl="not-there")
    assert not output.store.exists()
    with pytest.raises(StoreError, match=r"ETL\[never-starts\] did not start: a transform is 'pets' or"):
        start_etl(source, "never-starts", transform="dogs")
    with pytest.raises(ValueError, match="ETL name 'x' is too short"):
        start_etl(source, "x", transform="pets")
    with running(source, "drop-etl", "drop_odd") as etl:
        with pytest.raises(StoreError, match=r"409 ETL\[drop-etl\] already exists"):
            start_etl(source, etl, transform="pets")
        with pytest.raises(StoreError, match=r"no object '.*/samples-9.tar'|samples-9.tar does not exist"):
            get_transformed(source, "samples-9.tar", io.BytesIO(), etl=etl)
        with pytest.raises(ValueError, match=r"samples-000000.tar' is an input"):
            run_offline(found, Output(store=source, prefix=""), etl=etl)
        with pytest.raises(ValueError, match="is a directory, a cluster's ETL goes from bucket to bucket"):
            run_offline(found, Output(store=LocalStore(Path("out")), prefix=""), etl=etl)
        output.store.create()
        output.store.write("samples-000001.tar", b"stale")
        with pytest.raises(StoreError, match="already; pass --overwrite to replace"):
            run_offline(found, output, etl=etl)
        run_offline(found, output, etl=etl, overwrite=True)
    assert list(dict(read_tar(output.store.read("samples-000001.tar")))) == ["d/004.txt", "d/004.cls"]


def test_commands_on_a_laptop(tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an endpoint an embedded node runs the transform; the environment stays as it was."""
    node = ["--embedded-dir", str(tmp_path / "node")]
    function = ["--function", f"{FUNCTIONS}:shout"]
    before = dict(os.environ)
    words_in = ["prep", "transform", f"{shards}/samples-", "ais://words", "--function", f"{FUNCTIONS}:same"]
    assert main([*words_in, "--jobs", "1", *node]) == 0
    assert "transformed 2 shards by" in capsys.readouterr().out
    one = tmp_path / "one.tar"
    assert main(["prep", "etl", "get", "ais://words/samples-000000.tar", str(one), *function, *node]) == 0
    assert "read ais://words/samples-000000.tar through ETL" in capsys.readouterr().out
    assert main(["prep", "etl", "run", "ais://words/samples-", "ais://run", *function, *node, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["shards"] == ["samples-000000.tar", "samples-000001.tar"]
    with embedded_node.start(tmp_path / "node") as there:
        offline = [AisStore(there.endpoint, "run").read(name) for name in report["shards"]]
    shout = ShardTransform("shout", functions.shout)
    assert offline == [shout.transform((shards / name).read_bytes(), name) for name in report["shards"]]
    assert offline[0] == one.read_bytes()
    assert report["num_bytes"] == sum(map(len, offline))
    assert dict(os.environ) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "node", "one.tar"]


def test_etl_that_stays(etl_node: str, source: AisStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--endpoint", etl_node]
    assert main(["prep", "etl", "start", "stays-on", "--function", f"{FUNCTIONS}:shout", *at]) == 0
    assert f"ETL 'stays-on' runs {FUNCTIONS}:shout at {etl_node}" in capsys.readouterr().out
    one = str(tmp_path / "one.tar")
    assert main(["prep", "etl", "get", f"{source.url}/samples-000000.tar", one, "--etl", "stays-on", *at]) == 0
    assert main(["prep", "etl", "stop", "stays-on", *at]) == 0
    capsys.readouterr()
    Path(one).unlink()
    assert main(["prep", "etl", "get", f"{source.url}/samples-000000.tar", one, "--etl", "stays-on", *at]) == 1
    assert "no ETL 'stays-on'" in capsys.readouterr().err
    assert list(tmp_path.glob("*.tar")) == list(tmp_path.glob(".partial*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("transform a-{0..1}.tar out --function dogs", "a transform is 'pets' or MODULE:FUNCTION"),
        ("etl get in/s.tar o.tar --function pets", "'in/s.tar' is not a bucket, an ETL reads from one"),
        ("etl get ais://b/s.tar o.tar --etl some-name", "--etl NAME needs --endpoint"),
        ("etl run ais://b/s- out --function pets", "'out' is not a bucket, a cluster's ETL goes"),
    ],
)
def test_misuse_is_told(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prep", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
