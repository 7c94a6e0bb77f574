"""What `prep verify` finds, one defect a test, in real tars read by the real decoders."""

import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from PIL import Image

import dali_pipes as dp
from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import PipesError, StoreError, printable
from dali_pipes.formats.names import index_name
from dali_pipes.formats.quarantine import read_exclusions
from dali_pipes.formats.sample_columns import SampleColumns
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.urls import resolve_shards
from prep.inspect.verify import VerifyReport, verify
from tests.hostile_photos import undecodable
from tests.loaders import keys_of, open_loader
from tests.prep.commands.calls import call_prep
from tests.prep.inspect.dying import die
from tests.shards import (
    Sample,
    copy_files,
    image_bytes,
    make_samples,
    mask_bytes,
    photo_bytes,
    tar_bytes,
    with_data,
    write_classes,
    write_shards,
    write_tar,
)
from tests.simulated import read_column_file
from tests.turned_photos import slope, turned_photo

REPOSITORY = Path(__file__).parents[3]
PHOTO = photo_bytes(1, 40, 33)


def samples_with(component: str, data: bytes | None, *, at: int = 2, num: int = 5) -> list[Sample]:
    """Good samples of 40 x 33 pixels, one of them with another component, or without it."""
    samples = make_samples([(40, 33)] * num)
    changed = {name: old for name, old in samples[at].components.items() if name != component}
    if data is not None:
        changed[component] = data
    samples[at] = Sample(samples[at].key, changed)
    return samples


def run(shards: Path, **options: object) -> VerifyReport:
    """By Pillow, in this process; DALI starts in one of its own, which takes seconds."""
    usual: dict[str, object] = {"workers": 1, "decoder": "pillow"}
    return verify(resolve_shards(shards, endpoint=None), **(usual | options))  # type: ignore[arg-type]


def found(report: VerifyReport) -> list[tuple[str, str, str, str]]:
    """Kind, key, component and text, without notes."""
    return [(f.kind, f.key, f.component, f.text) for f in report.findings if f.kind != "note"]


def call(shards: Path, *options: str | Path) -> Result:
    """Run the command in this process, with Pillow as the decoder."""
    return call_prep("verify", shards, "--decoder", "pillow", "--workers", "1", *options)


def test_whole_set_has_no_findings(small_shards: Path) -> None:
    """A set that is indexed and whole: everything was read, every photo and mask decoded, nothing said."""
    report = run(small_shards, decoder=None)
    assert (report.findings, report.decoder) == ([], "dali")
    assert (report.num_shards, report.num_samples, report.num_decoded) == (4, 23, 46)
    assert report.num_bytes == sum(path.stat().st_size for path in small_shards.glob("*.tar"))
    assert report.components == {"cls": 23, "image.jpg": 23, "trimap.png": 23}
    assert set(report.mask_values) == {1, 2, 3}
    part = run(small_shards / "s-00000[13].tar")  # shards are compared with their own rows of the manifest
    assert (part.findings, part.num_samples) == ([], 11)


def test_processes_find_the_same_in_a_bucket(bucket: AisStore, node: str, tmp_path: Path) -> None:
    """Each process opens the bucket for itself; the URL is a template with braces."""
    samples = samples_with("image.jpg", PHOTO[:-2], num=9)
    samples[5] = Sample("s00005", samples[5].components | {"cls": b"cat"})
    write_shards(tmp_path / "set", samples, per_shard=3, index=False)
    bucket.create()
    copy_files(tmp_path / "set", bucket)
    alone = run(tmp_path / "set")
    remote = verify(resolve_shards(f"{bucket.url}/s-00000{{0..2}}.tar", endpoint=node), workers=2, decoder="pillow")
    assert found(remote) == found(alone)
    assert (remote.num_samples, remote.num_decoded) == (alone.num_samples, alone.num_decoded) == (9, 17)
    assert remote.mask_values == alone.mask_values


GIF = b"GIF89a" + bytes(20)
UNKNOWN = "holds no photo of a known format, expected JPEG, PNG, WEBP, BMP or PNM (starts with 68 65 6c 6c)"
PALETTE = Image.fromarray(np.ones((33, 40), np.uint8)).convert("P")
NO_MASK = "expected an 8-bit gray PNG: its class ids would be lost"
TURNED = turned_photo(slope(33, 40), 6)
BAD = [
    ("image.jpg", b"", "photo", "is empty"),
    ("image.jpg", GIF, "photo", "holds a GIF, expected JPEG, PNG, WEBP, BMP or PNM"),
    ("image.jpg", b"hello", "photo", UNKNOWN),
    ("image.jpg", PHOTO[:12], "photo", "holds a JPEG whose header cannot be read"),
    ("image.jpg", PHOTO[:-2], "photo", "is cut off: it has no end-of-image marker"),
    ("trimap.png", mask_bytes(1, 40, 33)[:-12], "photo", "is cut off: it has no whole IEND chunk"),
    ("image.jpg", photo_bytes(1, 200, 33), "mask size", "has 33 x 40 pixels, 'image.jpg' 33 x 200"),
    ("image.jpg", TURNED, "mask size", "has 33 x 40 pixels, 'image.jpg' 40 x 33, both turned upright"),
    ("trimap.png", mask_bytes(1, 33, 40), "mask size", "has 40 x 33 pixels, 'image.jpg' 33 x 40"),
    ("trimap.png", image_bytes(np.full((33, 40), 7, np.uint8)), "mask values", "holds 7, expected 1, 2, 3"),
    ("trimap.png", image_bytes(PALETTE), "mask", f"is a PNG of 8 bits and colour type 3, {NO_MASK}"),
    ("trimap.png", image_bytes(np.ones((33, 40), np.uint16)), "mask", "is a PNG of 16 bits and colour type 0, "),
    ("trimap.png", PHOTO, "mask", f"is a JPEG, {NO_MASK}"),
    ("cls", b"cat", "label", "holds 'cat', expected an integer"),
    ("cls", b"", "label", "holds '', expected an integer"),
    ("cls", b"99", "label", "class id 99 is not in the class table"),
    ("trimap.png", None, "missing", "is missing (found: cls, image.jpg)"),
    ("cls", None, "missing", "is missing (found: image.jpg, trimap.png)"),
]


@pytest.mark.parametrize(("component", "data", "kind", "text"), BAD, ids=[f"{row[0]} {row[3]:.24}" for row in BAD])
def test_bad_sample_is_named_with_its_component(
    tmp_path: Path, component: str, data: bytes | None, kind: str, text: str
) -> None:
    """One finding for one defect, and the sample is in the quarantine."""
    write_shards(tmp_path, samples_with(component, data), per_shard=3, index=False)
    write_classes(tmp_path, {str(label): f"c{label}" for label in range(1, 6)})
    report = run(tmp_path, mask_values=[1, 2, 3], quarantine=tmp_path / "bad.tsv")
    named = "trimap.png" if kind == "mask size" else component
    assert [finding[:3] for finding in found(report)] == [(kind, "s00002", named)]
    assert found(report)[0][3].startswith(text)
    assert report.num_bad_samples == 1
    (entry,) = read_exclusions(tmp_path / "bad.tsv")
    assert (entry.shard, entry.key) == ("s-000000.tar", "s00002")


def test_photo_above_max_pixels_is_not_decoded(tmp_path: Path) -> None:
    """A decompression bomb is told by its header: 40,000 x 40,000 pixels would be 5 GB."""
    bomb = bytearray(image_bytes(np.zeros((2, 2), np.uint8)))
    bomb[16:24] = (40_000).to_bytes(4) * 2
    write_shards(tmp_path, samples_with("image.jpg", bytes(bomb)), per_shard=5, index=False)
    text = "holds a photo of {} pixels, expected at most max_pixels={}"
    assert found(run(tmp_path)) == [("photo", "s00002", "image.jpg", text.format("40000 x 40000", 89478485))]
    assert found(run(tmp_path, max_pixels=1000))[0][3] == text.format("33 x 40", 1000)


def test_dali_decodes_in_a_process_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--decoder dali` names the bad photo, and what the libraries write is not on the terminal."""
    pytest.importorskip("nvidia.dali")
    write_shards(tmp_path, samples_with("trimap.png", undecodable(mask_bytes(1, 40, 33))), per_shard=5, index=False)
    report = run(tmp_path, decoder="dali", workers=1)
    assert [finding[:3] for finding in found(report)] == [("photo", "s00002", "trimap.png")]
    assert re.search("cannot be decoded: DALI.*; Pillow: broken data stream", found(report)[0][3])
    assert report.num_decoded == 9
    assert capfd.readouterr().err == ""


def test_same_key_in_two_shards_is_a_duplicate(tmp_path: Path) -> None:
    """Named in the later shard, which is the one that is left out."""
    samples = make_samples([(40, 33)] * 4)
    write_tar(tmp_path / "s-0.tar", samples[:2])
    write_tar(tmp_path / "s-1.tar", [samples[2], samples[1]])
    report = run(tmp_path, quarantine=tmp_path / "bad.tsv")
    assert found(report) == [("duplicate", "s00001", "", "is in shard 's-0.tar' too")]
    assert [(entry.shard, entry.key) for entry in read_exclusions(tmp_path / "bad.tsv")] == [("s-1.tar", "s00001")]


def write_members(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    path.write_bytes(tar_bytes(members))
    return path


def apart(name: str) -> str:
    return f"member '{name}' comes after other samples; members of one sample must stand together"


def test_members_that_no_reader_takes_for_one_sample(tmp_path: Path) -> None:
    for names, expected in (
        ("a.jpg b.jpg a.txt", ("split", "a", "", apart("a.txt"))),
        ("a.jpg b.jpg a.jpg", ("split", "a", "", apart("a.jpg"))),
        ("a.jpg a.JPG b.jpg", ("twice", "a", "jpg", "occurs twice (member 'a.JPG')")),
    ):
        write_members(tmp_path / "s.tar", [(name, PHOTO) for name in names.split()])
        assert [finding for finding in found(run(tmp_path)) if finding[0] != "missing"] == [expected]


BLOCKS = 512 + 512 * -(-len(PHOTO) // 512)  # header and data of one photo


STOPS = {
    2 * BLOCKS - 200: "is cut off: member 'b.jpg' claims bytes",  # within a member
    BLOCKS: "is cut off: ",  # between two members
    300: "is not a readable tar: its header is cut off, 300 bytes read",
    0: "is not a readable tar: empty file, 0 bytes read",
    None: "is not a readable tar: no header at byte 0; pack it anew",  # no tar
}


def test_tar_that_cannot_be_read(tmp_path: Path) -> None:
    """At every place, and what came before is verified still."""
    path = tmp_path / "s.tar"
    for stop, text in STOPS.items():
        write_members(path, [("a.jpg", PHOTO), ("b.jpg", PHOTO)])
        path.write_bytes(b"\x07" * 2048 if stop is None else path.read_bytes()[:stop])
        report = run(tmp_path)
        assert [(kind, key) for kind, key, _, _ in found(report)] == [("archive", "")]
        assert found(report)[0][3].startswith(text)
        assert f"shard 's.tar': {text}" in "\n".join(map(str, report.findings))


@pytest.mark.parametrize(
    ("name", "kind", "format"),
    [("b.jpg", tarfile.LNKTYPE, tarfile.PAX_FORMAT), ("f/" + "y" * 120 + ".jpg", tarfile.SYMTYPE, tarfile.GNU_FORMAT)],
)
def test_link_is_found_where_readers_pass_it_over(tmp_path: Path, name: str, kind: bytes, format: int) -> None:
    """Tar stores a photo's second name as a link: readers miss the second sample without an error."""
    links = tar_bytes({name: b"", "README": b""}, format=format, type=kind, linkname="a.jpg")  # README: in no sample
    (tmp_path / "s.tar").write_bytes(tar_bytes({"a.jpg": PHOTO})[:BLOCKS] + links)
    text = "is a link, which no reader of shards follows; pack it anew (tar: --hard-dereference or -h)"
    report = run(tmp_path)
    assert found(report) == [("link", name.removesuffix(".jpg"), "jpg", text)]
    assert (report.num_samples, report.num_problems, report.num_bad_samples) == (1, 1, 0)


def test_files_of_no_sample_are_a_note(tmp_path: Path) -> None:
    """Told, and exit code 0."""
    write_members(tmp_path / "s-0.tar", [("README", b"r"), ("f/.hidden.x", b"h"), ("a b.jpg", PHOTO), ("dot.", b"d")])
    write_members(tmp_path / "s-1.tar", [("README", b"r")])
    report = run(tmp_path)
    assert found(report) == []
    assert [(f.shard, f.text) for f in report.findings if f.shard] == [
        ("s-0.tar", "3 files belong to no sample: 'README', 'f/.hidden.x', 'dot.'"),
        ("s-1.tar", "1 files belong to no sample: 'README'"),
        ("s-1.tar", "holds no sample"),
    ]
    assert call(tmp_path).exit_code == 0


def test_names_that_are_no_keys(tmp_path: Path) -> None:
    """The index refuses them; the report says which, and can be printed."""
    for name, text in (("a\nb.jpg", "holds a control character"), ("a\udcff.jpg", "is not UTF-8")):
        write_members(tmp_path / "s.tar", [(name, PHOTO[:-2]), ("b.jpg", PHOTO)])
        report = run(tmp_path, quarantine=tmp_path / "q.tsv")
        assert [kind for kind, *_ in found(report)] == ["name", "photo"]
        assert text in found(report)[0][3]
        assert call(tmp_path, "--json").stdout.isascii()
        shown = call(tmp_path)
        assert shown.exit_code == 1
        assert f"key '{printable(name[:2])}" in shown.stdout


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """Two indexed shards of two samples."""
    return write_shards(tmp_path / "set", make_samples([(40, 33)] * 4), per_shard=2)


def test_shards_that_were_changed_since(indexed: Path) -> None:
    """Another photo of the same size, told by checksums; and other samples: each file that describes them says so."""
    path = indexed / "s-000000.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"\xff\xda") + 40] ^= 0x01
    path.write_bytes(data)
    write_tar(indexed / "s-000001.tar", make_samples([(40, 33)] * 2, first=10))
    first, second = (
        {one.kind: one.text for one in run(indexed).findings if one.shard == f"s-00000{row}.tar"} for row in range(2)
    )
    assert set(first) == {"manifest", "index"}
    assert first["manifest"].startswith(f"has {len(data)} bytes, xxhash2 ")
    assert "than the shard holds: other bytes in component 'image.jpg' of 's00000'; " in first["index"]
    assert all(text.endswith("index the shards anew: dali-pipes prep index URL --anew") for text in first.values())
    assert set(second) == {"manifest", "index", "columns"}
    assert second["index"].startswith(f"its index '{index_name('s-000001.tar')}' says something else than the shard")
    assert second["columns"].startswith("the column file has other keys than the shard")


@pytest.mark.parametrize(
    ("name", "data", "kind", "text"),
    [
        (".dali-pipes/s-manifest.safetensors", b"no manifest", "manifest", "expected a dali-pipes manifest"),
        (".dali-pipes/s-columns.safetensors", b"no columns", "columns", "s-columns.safetensors"),
        (".dali-pipes/s-classes.json", b"[]", "manifest", "class table"),
        (".dali-pipes/s-000001.index.safetensors", b"no index", "index", "is not the one that the manifest lists"),
        (".dali-pipes/s-000001.index.safetensors", None, "index", "does not exist; index the shards anew"),
    ],
)
def test_file_beside_the_shards_that_is_damaged_or_gone(
    indexed: Path, name: str, data: bytes | None, kind: str, text: str
) -> None:
    """Verify reports one finding, and still verifies the shards."""
    (indexed / name).unlink(missing_ok=True)
    if data is not None:
        (indexed / name).write_bytes(data)
    report = run(indexed)
    assert [(finding.kind, text in finding.text) for finding in report.findings] == [(kind, True)]
    assert report.num_decoded == 8


def test_column_file_with_other_labels(indexed: Path) -> None:
    """The column file is intact, but differs from the shards: loaders would give its wrong labels."""
    manifest = find_manifest(resolve_shards(indexed, endpoint=None))
    assert manifest is not None
    path = indexed / ".dali-pipes/s-columns.safetensors"
    columns = read_column_file(path.read_bytes(), manifest=manifest)
    changed = SampleColumns(keys=columns.keys, labels=np.array([1, 2, 3, 5]), has=columns.has)
    path.write_bytes(changed.to_bytes(manifest=manifest.shards_digest))
    ((kind, _, _, text),) = found(run(indexed))
    assert (kind, text.partition(";")[0]) == ("columns", "the column file has other labels than the shard")


def test_masks_are_what_the_caller_says(tmp_path: Path) -> None:
    """A depth map beside a photo has the name of a mask; --no-masks and --mask correct that."""
    depth = image_bytes(np.ones((33, 40), np.uint16))
    write_shards(tmp_path, samples_with("trimap.png", depth), per_shard=5, index=False)
    for options, components in (
        ((), {"trimap.png"}),
        (("--no-masks",), set()),
        (("--mask", "image.jpg"), {"image.jpg"}),
    ):
        answer = json.loads(call(tmp_path, *options, "--json").stdout)
        assert {one["component"] for one in answer["findings"] if one["kind"] == "mask"} == components


def test_quarantine_is_what_a_loader_takes(tmp_path: Path) -> None:
    """The way from `prep verify` to a run: what cannot be decoded is left out, the rest comes once."""
    samples = samples_with("image.jpg", PHOTO[:-2], num=9)
    write_shards(tmp_path / "set", samples, per_shard=4)
    quarantine = tmp_path / "bad.tsv"
    result = call(tmp_path / "set", "--quarantine", quarantine)
    assert result.exit_code == 1
    assert f"1 bad sample in '{quarantine}': pass select=dali_pipes.Select(exclude='{quarantine}')" in result.stdout
    options = {"select": dp.Select(exclude=quarantine), "cache": dp.Cache(directory=tmp_path)}
    with open_loader(tmp_path / "set", **options) as loader:
        assert sorted(keys_of(loader)) == [sample.key for sample in samples if sample.key != "s00002"]


def test_quarantine_is_added_to_and_made_for_no_samples(small_shards: Path, tmp_path: Path) -> None:
    """Run again, nothing comes twice; of a whole set it is a list of nothing, which can be passed too."""
    quarantine = tmp_path / "bad.tsv"
    run(small_shards, quarantine=quarantine)
    assert read_exclusions(quarantine) == []
    for _ in range(2):
        report = run(small_shards, quarantine=quarantine, mask_values=[1, 2])
    assert len(read_exclusions(quarantine)) == report.num_bad_samples > 15
    assert quarantine.read_text().count("# dali-pipes quarantine") == 1


def test_findings_past_the_most_are_counted_and_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that is all bad: memory is bounded, the list of what to leave out is not."""
    monkeypatch.setattr("prep.inspect.verify.MAX_FINDINGS", 2)
    write_shards(tmp_path, [Sample(f"a{i}", {"jpg": b"x"}) for i in range(6)], per_shard=3, index=False)
    report = run(tmp_path, quarantine=tmp_path / "bad.tsv")
    assert (len(report.findings), report.counts["photo"], report.num_bad_samples) == (2, 6, 6)
    assert len(read_exclusions(tmp_path / "bad.tsv")) == 6


def test_shards_and_decoders_that_are_not_there_are_named(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"no shard '.*s-000009.tar'; 1 were named"):
        run(small_shards / "s-000009.tar")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PipesError, match="decoder 'dali' needs DALI; install nvidia-dali-cuda120, or pass --decoder"):
        run(small_shards, decoder="dali")


def test_few_bad_samples_are_allowed_when_asked(tmp_path: Path) -> None:
    """A damaged file does not count as a bad sample."""
    samples = with_data(make_samples([(40, 33)] * 6), {1: b"", 4: PHOTO[:-2]})
    write_shards(tmp_path, samples, per_shard=3)
    assert call(tmp_path, "--max-bad", "1").exit_code == 1
    result = call(tmp_path, "--max-bad", "34%")
    assert result.exit_code == 0
    assert "          1 x is empty\n" in result.stdout
    assert "          1 x is cut off: it has no end-of-image marker\n" in result.stdout
    reasons = json.loads(call(tmp_path, "--json").stdout)["reasons"]
    assert reasons == {"photo": {"is empty": 1, "is cut off: it has no end-of-image marker": 1}}
    (tmp_path / index_name("s-000000.tar")).write_bytes(b"")
    assert call(tmp_path, "--max-bad", "100%").exit_code == 1


def test_process_that_dies_is_reported_with_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that brings its process down, or no memory left: not a hang, and the shard is named."""
    write_shards(tmp_path, make_samples([(40, 33)] * 4), per_shard=2, index=False)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr("prep.inspect.verify._verify", die)
    with pytest.raises(
        PipesError, match=r"ended while it worked on shard 's-00000[01]\.tar', .*with --workers 1 on this shard"
    ):
        run(tmp_path, workers=2)
