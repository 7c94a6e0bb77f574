"""``msc://PROFILE/PATH``: a profile of the real Multi-Storage Client, and real servers behind it."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import dali_pipes as dp
from dali_pipes.data_set.named import name_shards
from dali_pipes.errors import StoreError
from dali_pipes.store.cloud.profiles import open_profile
from dali_pipes.store.urls import open_store, resolve_shards
from prep.commands.group import prep
from prep.index import index_shards
from tests.servers.clouds import AZURE_KEY, KINDS, S3_KEYS, Cloud, cloud_bucket

pytest.importorskip("multistorageclient", reason="profiles are read by the package multi-storage-client")

NO_STORAGE: dict[str, Any] = {"type": "s3", "options": {"base_path": "b"}}


@pytest.fixture
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket of a real server; only the profiles ``named`` and ``whole`` say how it is reached."""
    url = cloud_bucket(request.param, request)
    scheme, _, name = url.partition("://")
    cloud: Cloud = request.getfixturevalue({"s3": "s3_server", "az": "azure_server"}[scheme])
    for variable in cloud.environment:
        monkeypatch.delenv(variable)
    # MSC's own way to keep a secret out of its file.
    monkeypatch.setenv("MINE", S3_KEYS[1] if scheme == "s3" else cloud.environment["AZURE_STORAGE_CONNECTION_STRING"])
    keys = {"access_key": S3_KEYS[0], "secret_key": "${MINE}"} if scheme == "s3" else {"connection": "${MINE}"}
    options = {"endpoint_url": cloud.endpoint} | ({"region_name": "us-east-1"} if scheme == "s3" else {})
    credentials = {"type": "S3Credentials" if scheme == "s3" else "AzureCredentials", "options": keys}
    kind = "s3" if scheme == "s3" else "azure"
    profiles = {
        profile: {
            "storage_provider": {
                "type": kind,
                "options": options | {"base_path": base, "multipart_chunksize": 1 << 25},
            },
            "credentials_provider": credentials,
        }
        for profile, base in (("named", name), ("whole", ""))
    }
    _configure(profiles, tmp_path, monkeypatch)
    return name


def _configure(profiles: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = folder / "msc.json"
    path.write_text(json.dumps({"profiles": profiles}))
    monkeypatch.setenv("MSC_CONFIG", str(path))
    return path


@pytest.mark.parametrize("bucket", KINDS, indirect=True)
def test_loader_reads_a_profiles_bucket_as_the_directory(bucket: str, small_shards: Path, tmp_path: Path) -> None:
    """Written, listed, indexed and loaded by ``msc://``; the base path names the bucket, or the URL does."""
    for root in ("msc://named", f"msc://whole/{bucket}"):
        store, prefix = open_store(f"{root}/train/s-", endpoint=None)
        assert (store.url, prefix) == (root, "train/s-")
    for path in small_shards.glob("*.tar"):
        store.upload(f"train/{path.name}", path)
    url = f"msc://named/train/{_common(small_shards)}"
    index_shards(resolve_shards(url, endpoint=None))
    index_shards(resolve_shards(str(small_shards), endpoint=None))
    assert len(name_shards(url, endpoint=None).names) == len(list(small_shards.glob("*.tar")))

    def keys(shards: str) -> list[list[str]]:
        options: dict[str, Any] = {"batch_size": 5, "seed": 3, "device": "cpu", "outputs": dp.Outputs(keys=True)}
        with dp.loader(shards, dp.segmentation(crop=16), cache=dp.Cache(directory=tmp_path), **options) as loader:
            return [list(batch["key"]) for (batch,) in loader]

    assert keys(url) == keys(str(small_shards))


def _common(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.tar"))
    return names[0][: next(i for i, (a, b) in enumerate(zip(names[0], names[-1], strict=True)) if a != b)]


@pytest.mark.parametrize("bucket", KINDS, indirect=True)
def test_input_is_not_replaced_under_another_name_of_its_bucket(bucket: str, small_shards: Path) -> None:
    """Two URLs name one bucket. The input of a shuffle and of a transform stays."""
    store, _ = open_store("msc://named/x", endpoint=None)
    for path in small_shards.glob("*.tar"):
        store.upload(path.name, path)
    before = [(entry.name, entry.size) for entry in store.list("")]
    prefix = _common(small_shards).rstrip("0")
    for command in (
        ["shuffle", f"msc://named/{prefix}", "--output", f"msc://whole/{bucket}/{prefix}"],
        ["transform", f"msc://named/{prefix}", f"msc://whole/{bucket}", "--function", "pets"],
    ):
        done = CliRunner().invoke(prep, [*command, "--overwrite"])
        assert isinstance(done.exception, ValueError), done.output
        assert "input" in str(done.exception)
    assert [(entry.name, entry.size) for entry in store.list("")] == before


@pytest.mark.parametrize("bucket", KINDS, indirect=True)
def test_store_of_a_profile_travels_without_the_profile(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on another machine needs no configuration; no text shows the key."""
    store, _ = open_store("msc://named/x", endpoint=None)
    store.write("x", b"1")
    monkeypatch.setenv("MSC_CONFIG", "/nowhere")
    sent = pickle.loads(pickle.dumps(store))
    assert (sent.read("x"), sent.locate("x")) == (b"1", "msc://named/x")
    assert not {S3_KEYS[1], AZURE_KEY} & {*repr(store.__dict__).split("'")}


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (
            {"storage_provider": {"type": "ais", "options": {"base_path": ""}}},
            "'ais', .* ais://BUCKET/PREFIX, with AIS_ENDPOINT",
        ),
        ({"storage_provider": {"type": "file", "options": {"base_path": "/"}}}, "'file', .* by their path"),
        ({"storage_provider": {"type": "oci", "options": {"base_path": ""}}}, "'oci', .* expected one of s3"),
        ({"storage_provider": {"type": "s3", "options": {"base_path": "b/c"}}}, "set it to 'b', .* 'msc://p/c/x'"),
        (
            {"storage_provider": {"type": "s3", "options": {"base_path": "b", "verify": False}}},
            "option 'verify' is not read",
        ),
        (
            {"storage_provider": {"type": "s3", "options": {"base_path": "b", "endpoint_url": "minio:9000"}}},
            "endpoint_url must be an address such as http://",
        ),
        (
            {"storage_provider": NO_STORAGE, "credentials_provider": {"type": "my.Own"}},
            r"credentials 'my.Own', which are not read \(known: S3Credentials\)",
        ),
        ({"storage_provider": NO_STORAGE, "metadata_provider": {"type": "manifest"}}, "has 'metadata_provider'"),
    ],
)
def test_profile_that_cannot_be_followed_is_an_error(
    profile: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in a profile is left out in silence."""
    _configure({"p": profile}, tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=message):
        open_profile("msc://p/x")


def test_unknown_profile_names_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _configure({"p": {"storage_provider": NO_STORAGE}}, tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=f"'{path}' has no profile 'q' .found: p."):
        open_profile("msc://q/x")


def test_configuration_that_is_not_valid_is_an_error_without_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says where; what stands there may be a key."""
    _configure({"p": {"storage_provider": "s3cret"}}, tmp_path, monkeypatch)
    with pytest.raises(StoreError, match=r"not valid at '.*storage_provider.*' \(rule: type\)") as failed:
        open_profile("msc://p/x")
    assert "s3cret" not in str(failed.value)
