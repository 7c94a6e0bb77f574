"""The prefix of a data set lists its shards alone, whichever command wrote them: other readers list it, too."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from tests.prep.commands.calls import run_prep
from tests.prep.versions.sets import class_folders

SAME = "tests.prep.etl.functions:same"


BUCKET = f"b{os.getpid()}"
"""The temporary folder of a shuffle follows from its output's URL: another run of these tests has another one."""


@dataclass(frozen=True)
class Place:
    """A folder for data sets, in a bucket or a directory; ``x-`` has 7 photos in three shards, indexed."""

    url: str
    endpoint: str | None

    def run(self, *words: str | Path, **expected: Any) -> None:
        run_prep(*words, *(["--endpoint", self.endpoint] if self.endpoint else []), **expected)

    def beginning(self, name: str) -> str:
        """What a command takes that wants names in the bucket or directory."""
        return name if self.endpoint is None else f"set/{name}"

    def check(self, url: str, num_samples: int | None = None, *, etl: str | None = None) -> None:
        """Only tars lie at the prefix; with a number, the data set opens, and has so many samples."""
        if self.endpoint is None:
            folder, start = Path(url).parent, Path(url).name
            listed = [path.name for path in folder.iterdir() if path.name.startswith(start)]
            assert {path.name for path in folder.iterdir() if path.suffix != ".tar"} == {".dali-pipes"}
        else:
            bucket = AisStore(self.endpoint, BUCKET).client.bucket(BUCKET)
            listed = [entry.name for entry in bucket.list_all_objects(prefix=url.removeprefix(f"ais://{BUCKET}/"))]
        assert {name.rpartition(".")[2] for name in listed} == {"tar"}
        if num_samples is not None:
            assert len(dp.loader(
                dp.Shards(url, etl=etl), dp.classification_eval(resize=16, crop=16), batch_size=1, device="cpu",
                endpoint=self.endpoint,
            )) == num_samples  # fmt: skip


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    photos = class_folders(tmp_path / "photos", {"cat": 4, "dog": 3})

    def filled(made: Place) -> Place:
        made.run("pack", "imagefolder", photos, f"{made.url}/x-", "--max-count", "3", "--short-side", "24")
        made.check(f"{made.url}/x-")
        made.run("index", f"{made.url}/x-")
        return made

    if request.param == "directory":
        yield filled(Place(f"{tmp_path}/set", None))
        return
    with embedded_node.start(tmp_path / "node", allow_etl=True) as node:
        yield filled(Place(f"ais://{BUCKET}/set", node.endpoint))


def test_pack_index_shuffle_transform(place: Place) -> None:
    place.check(f"{place.url}/x-", 7)
    for engine in ["exchange"] if place.endpoint is None else ["exchange", "dsort"]:
        place.run("shuffle", f"{place.url}/x-", "--output", place.beginning(f"{engine}-"), "--engine", engine)
        place.check(f"{place.url}/{engine}-")
        place.run("index", f"{place.url}/{engine}-")
        place.check(f"{place.url}/{engine}-", 7)
    place.run("transform", f"{place.url}/x-", f"{place.url}-t/", "--function", SAME, "--jobs", "1")
    made = f"{place.url}-t/{place.beginning('x-')}"
    place.check(made)
    place.run("index", made)
    place.check(made, 7)


def test_versions(place: Place, tmp_path: Path) -> None:
    more = class_folders(tmp_path / "more", {"cat": 2}, first=50)
    url = f"{place.url}/x-"
    for command, num_samples in (
        (["add", more, url], 9),
        (["remove", url, "--key", "cat/000"], 8),
        (["compact", url], 8),
        (["compact", url, "--drop-old"], 8),
    ):
        place.run(*command)
        place.check(url, num_samples)
    place.run("verify", url, "--decoder", "pillow", "--workers", "1")


def test_parts_of_an_index(place: Place) -> None:
    """The parts of an ETL are its own: those of the stored shards, which are there, do not count."""
    url = f"{place.url}/x-"
    for etl in [[]] if place.endpoint is None else [[], ["--etl", "same-etl"]]:
        if etl:
            place.run("etl", "start", "same-etl", "--function", SAME)
            place.run("index", url, "--merge", *etl, expect=StoreError, match="3 of 3 shards have no shard index")
        for step in (["--part", "2/2"], ["--part", "1/2"], ["--merge"]):
            place.run("index", url, *step, *etl)
            place.check(url, 7)
        place.check(url, 7, etl=etl[1] if etl else None)


def test_files_beside_the_shards_are_not_read(place: Place) -> None:
    """Where they lay before the first release."""
    if place.endpoint is None:
        for path in (Path(place.url) / ".dali-pipes").iterdir():
            path.rename(Path(place.url) / path.name)
    else:
        bucket = AisStore(place.endpoint, BUCKET)
        for entry in bucket.list(".dali-pipes/"):
            bucket.write(entry.name.removeprefix(".dali-pipes/"), bucket.read(entry.name))
            bucket.delete(entry.name)
    told = "has no manifest, so it has no versions; index it first: dali-pipes prep index"
    place.run("remove", f"{place.url}/x-", "--key", "cat/000", expect=DataError, match=told)
