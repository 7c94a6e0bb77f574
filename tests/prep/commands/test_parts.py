"""``--part I/N``: processes that share only the store make together what one makes."""

import json
from pathlib import Path

import pytest

from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from tests.prep.commands.calls import call_prep, json_of_prep, run_prep
from tests.prep.versions.sets import class_folders
from tests.shards import files_of, make_source, pack


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Five shards."""
    pack(make_source(43), store=LocalStore(tmp_path / "shards"), max_count=10)
    return tmp_path / "shards"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.rpartition("/")[2]: data for path, data in files_of(directory).items()}


def refused(*words: str | Path) -> str:
    """The error of a command, in one line."""
    result = call_prep(*words)
    assert result.exit_code in (1, 2)
    text = result.output if result.exit_code == 2 else str(result.exception)
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("total", [2, 11])
def test_parts_of_a_pack_make_the_whole(tmp_path: Path, total: int) -> None:
    """Also with more parts than shards, in any order, and one of them twice."""
    photos = class_folders(tmp_path / "photos", {"cat": 8, "dog": 7, "owl": 7})
    command = ("pack", "imagefolder", photos, "--max-count", "3")
    run_prep(*command, f"{tmp_path}/whole/")
    whole = contents(tmp_path / "whole")
    assert len(whole) == 8 + 2
    found = [
        json_of_prep(*command, f"{tmp_path}/parts/", "--part", f"{number}/{total}")
        for number in [*range(total, 0, -1), total]
    ]
    assert [sum(part[count] for part in found[:-1]) for count in ("num_samples", "num_written")] == [22, 8]
    assert found[-1]["num_written"] == 0
    assert contents(tmp_path / "parts") == whole


def test_parts_of_an_index_are_merged_to_the_whole(directory: Path) -> None:
    run_prep("index", directory)
    whole = contents(directory)
    for command in ("index", "verify"):
        assert "nothing to do: part 7/8 of '" in run_prep(command, directory, "--part", "7/8").stdout
    assert "nothing to do" in run_prep("transform", directory, "out", "--function", "pets", "--part", "7/8").stdout
    assert contents(directory) == whole
    for path in directory.rglob("*.safetensors"):
        path.unlink()
    for number in (2, 1):
        line = run_prep("index", directory, "--part", f"{number}/2").stdout
        assert f"part {number}/2 of '{directory}/samples-'; when all parts are done, --merge makes" in line
        assert not (directory / ".dali-pipes/samples-manifest.safetensors").exists()
        if number == 2:
            said = refused("index", directory, "--merge")
            assert "3 of 5 shards have no shard index: " in said
            assert f"a part is not done, or was stopped: run it again, dali-pipes prep index '{directory}/" in said
    assert json_of_prep("index", directory, "--merge")["num_samples"] == 43
    assert contents(directory) == whole


def test_merge_refuses_an_index_of_another_shard(directory: Path) -> None:
    """A shard that was packed anew after its part was indexed."""
    for number in (1, 2):
        run_prep("index", directory, "--part", f"{number}/2")
    path = directory / "samples-000002.tar"
    path.write_bytes(path.read_bytes() + bytes(10240))
    assert "recorded" in refused("index", directory, "--merge")
    (directory / ".dali-pipes/samples-written.json").unlink()
    said = refused("index", directory, "--merge")
    assert "samples-000002.index.safetensors' is the index of other bytes than the shard has now" in said
    assert "index the shard again" in said


def test_merge_in_a_bucket_reads_no_shard(bucket: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(make_source(43), store=bucket, max_count=10)
    command = ("index", f"{bucket.url}/samples-", "--endpoint", bucket.endpoint)
    run_prep(*command)
    whole = bucket.read(".dali-pipes/samples-manifest.safetensors")
    bucket.delete(".dali-pipes/samples-manifest.safetensors")
    monkeypatch.setattr(AisStore, "open", None)
    run_prep(*command, "--merge")
    assert bucket.read(".dali-pipes/samples-manifest.safetensors") == whole


def test_parts_of_verify_read_all_shards_once(directory: Path) -> None:
    """Each finding is told once; what concerns the set, by the first part."""
    run_prep("index", directory)
    path = directory / "samples-000001.tar"
    path.write_bytes(path.read_bytes()[:-2048])
    (directory / "samples-000004.tar").unlink()
    verified = ("verify", directory, "--decoder", "pillow", "--workers", "1", "--json", "--part")
    found = [json.loads(call_prep(*verified, part).stdout) for part in ("1/2", "2/2")]
    assert [one["num_shards"] for one in found] == [2, 2]
    assert [any(one["kind"] == "gone" for one in part["findings"]) for part in found] == [True, False]
    assert [any(one["shard"] == path.name for one in part["findings"]) for part in found] == [False, True]


def test_parts_of_a_transform_make_the_whole(directory: Path, tmp_path: Path) -> None:
    command = ("transform", directory, "--function", "tests.prep.workers_tasks:unchanged", "--jobs", "1")
    run_prep(*command, f"{tmp_path}/whole/")
    for number in (3, 1, 2):
        run_prep(*command, f"{tmp_path}/parts/", "--part", f"{number}/3")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_parts_of_a_shuffle_make_the_whole(directory: Path) -> None:
    run_prep("index", directory / "samples-")
    command = ("shuffle", directory / "samples-", "--seed", "7", "--jobs", "1")
    run_prep(*command, "--output", "whole-")
    for number in (2, 1):
        assert json_of_prep(*command, "--output", "parts-", "--part", f"{number}/2")["engine"] == "exchange"
    made = contents(directory)
    made |= {name: data.replace(b"parts-", b"whole-") for name, data in made.items() if name.endswith("written.json")}
    whole = {name: data for name, data in made.items() if name.startswith("whole-")}
    assert {name.replace("parts-", "whole-"): data for name, data in made.items() if name.startswith("parts-")} == whole


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("index", "{}", "--part", "0/2"), "1 <= I <= N, got '0/2'; parts are counted from 1"),
        (("index", "{}", "--part", "2"), "a part must be I/N, such as 3/16, got '2'"),
        (("index", "{}", "--part", "1/2", "--merge"), "--merge follows when all parts are done"),
        (("add", "{}", "{}", "--part", "1/2"), "add has no --part: it makes one version of the data set"),
        (("pack", "tars", "{}", "{}/out/", "--part", "1/2", "--short-side", "8"), "part 1/2 would recode all photos"),
        (("shuffle", "{}", "--part", "1/2"), "parts of a shuffle plan by the shard indexes of the input"),
    ],
)
def test_parts_that_make_no_sense_are_refused(directory: Path, words: tuple[str, ...], said: str) -> None:
    before = contents(directory)
    assert said in refused(*(word.format(directory) for word in words))
    assert contents(directory) == before
