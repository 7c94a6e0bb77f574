"""Credentials of AWS's profiles end while a job runs, and it goes on with new ones."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.errors import StoreError
from dali_pipes.store.cloud import profiles
from dali_pipes.store.cloud.profiles import ProfileCredentials
from dali_pipes.store.patience import Patience, use_patience
from dali_pipes.store.urls import open_store
from tests.loaders import open_windowed
from tests.servers.expiring import ExpiringBucket
from tests.servers.scripted import scripted

Start = Callable[..., ExpiringBucket]
NAMES = [f"{number}.bin" for number in range(12)]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a server of bucket ``pets`` over a directory, which the environment names without keys."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    servers: list[Any] = []

    def run(folder: Path, is_good: Callable[[str], bool]) -> ExpiringBucket:
        bucket = ExpiringBucket(folder, is_good)
        servers.append(scripted(bucket))
        monkeypatch.setenv("AWS_ENDPOINT_URL", servers[-1].__enter__().endpoint)
        return bucket

    yield run
    for server in servers:
        server.__exit__(None, None, None)


def use_file(folder: Path, key: str) -> None:
    text = (
        f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret-of-{key}\naws_session_token = t-{key}\n"
    )
    (folder / "new").write_text(text)
    (folder / "new").rename(folder / "credentials")


def use_program(folder: Path, *, lasts_s: float | None) -> None:
    """Credentials of a program, which has another key at each call, and may say when it ends."""
    program = folder / "give_keys.py"
    program.write_text(f"""
import datetime, json, pathlib, time
calls = pathlib.Path({str(folder / "calls")!r})
num = len(calls.read_text()) + 1 if calls.exists() else 1
calls.write_text("x" * num)
said = {{"Version": 1, "AccessKeyId": f"KEY{{num}}-{{time.time() + {lasts_s or 0}}}", "SecretAccessKey": "secret" * 4}}
said["SessionToken"] = "token" * 4
if {lasts_s}:
    said["Expiration"] = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds={lasts_s})).isoformat()
print(json.dumps(said))
""")
    (folder / "config").write_text(f"[default]\ncredential_process = {shlex.join([sys.executable, str(program)])}\n")


@pytest.mark.parametrize("lasts_s", [3600.0, None], ids=["says an end", "says no end"])
def test_keys_that_end_early_are_asked_for_again(start: Start, tmp_path: Path, lasts_s: float | None) -> None:
    """A server takes each key for five requests; every read, listing, size and write is done with a later one."""
    (tmp_path / "data").mkdir()
    for name in NAMES:
        (tmp_path / "data" / name).write_bytes(name.encode())
    use_program(tmp_path, lasts_s=lasts_s)
    uses: dict[str, int] = {}

    def is_good(key: str) -> bool:
        uses[key] = uses.get(key, 0) + 1
        return uses[key] <= 5

    bucket = start(tmp_path / "data", is_good)
    store, _ = open_store("s3://pets", endpoint=None)
    assert [store.read(name) for name in NAMES] == [name.encode() for name in NAMES]
    for _ in range(5):
        assert len(store.list("")) == len(NAMES)
        assert store.size("1.bin") == 5
    assert bucket.num_refused
    assert len(uses) > 4


def test_file_that_is_written_anew_is_waited_for(start: Start, tmp_path: Path) -> None:
    """A loader whose keys have ended waits, and goes on when the file has new ones."""
    use_file(tmp_path, "OLD-KEY")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"bytes")
    good = {"OLD-KEY"}
    bucket = start(tmp_path / "data", good.__contains__)

    def rewrite() -> None:
        if bucket.num_refused == 4:
            use_file(tmp_path, "NEW-KEY")
            good.add("NEW-KEY")

    with use_patience(Patience(patience_s=120.0, on_retry=rewrite)):
        store, _ = open_store("s3://pets", endpoint=None)
    assert store.read("a") == b"bytes"
    good.clear()
    assert store.read("a") == b"bytes"
    assert bucket.used[-1] == "NEW-KEY"


def test_a_refusal_that_may_have_other_reasons_is_final_with_new_keys(start: Start, tmp_path: Path) -> None:
    """The answer to a HEAD says no reason: keys that have ended, or a name that the server does not take."""
    use_file(tmp_path, "KEY")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"bytes")
    good = {"KEY"}
    bucket = start(tmp_path / "data", good.__contains__)
    store, _ = open_store("s3://pets", endpoint=None)
    assert store.read("a") == b"bytes"
    good.clear()
    with pytest.raises(StoreError, match=r"400 Bad Request.*credentials are looked for in this order"):
        store.size("a")
    assert bucket.num_refused == 2


def test_profile_without_keys_is_an_error(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "config").write_text("[default]\nregion = here\n")
    start(tmp_path, lambda key: True)
    with pytest.raises(StoreError, match="no credentials in AWS's profiles: they have none; check AWS_PROFILE"):
        open_store("s3://pets", endpoint=None)[0].list("")


def test_keys_that_were_never_taken_are_an_error_at_once(start: Start, tmp_path: Path) -> None:
    use_file(tmp_path, "OLD-KEY")
    bucket = start(tmp_path, lambda key: False)
    with use_patience(Patience(patience_s=120.0)):
        store, _ = open_store("s3://pets", endpoint=None)
    for ask in (lambda: store.read("a"), lambda: store.list("")):
        with pytest.raises(StoreError, match=r"ExpiredToken: The provided token has expired\.; credentials are looked"):
            ask()
    assert bucket.num_refused <= 4


def test_end_of_credentials_rules_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After half of the time that is left, and no signature is used for longer than they last."""
    clock = SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr(profiles, "time", clock)
    given: list[float] = []

    def frozen() -> Any:
        given.append(now)
        return SimpleNamespace(access_key="key", secret_key="secret-key", token=None)

    now = 1000.0
    ends = datetime.fromtimestamp(4600.0, UTC)
    source = SimpleNamespace(get_frozen_credentials=frozen, _expiry_time=ends)
    session = SimpleNamespace(region_name="eu-west-1", get_credentials=lambda: source)
    credentials = ProfileCredentials(lambda: session)
    for now in (1000.0, 2700.0, 2900.0, 3000.0, 3800.0):
        credentials()
        assert credentials.left_s == 4600.0 - now
    assert given == [1000.0, 2900.0, 3800.0]
    assert credentials.config == {"region": "eu-west-1"}
    credentials.renew()
    credentials()
    credentials.renew()  # within a second: many threads are refused at the same time
    credentials()
    assert given == [1000.0, 2900.0, 3800.0, 3800.0]


@pytest.mark.nightly
def test_loader_runs_over_keys_that_end(start: Start, small_shards: Path, tmp_path: Path) -> None:
    """Keys end after KEYS_S seconds, as they say; a cache of half the data set reads shards again for RUN_S seconds."""
    use_program(tmp_path, lasts_s=float(os.environ.get("KEYS_S", "3")))
    bucket = start(small_shards, lambda key: time.time() < float(key.partition("-")[2]))
    num_bytes = sum(path.stat().st_size for path in small_shards.glob("*.tar"))
    until = time.monotonic() + float(os.environ.get("RUN_S", "30"))
    outputs = dp.Outputs(keys=True)
    (cache := tmp_path / "cache").mkdir()
    with open_windowed(
        "s3://pets/",
        dp.segmentation(crop=16),
        window_bytes=num_bytes // 8,
        batch_size=4,
        outputs=outputs,
        directory=cache,
        max_bytes=num_bytes,
    ) as loader:
        while time.monotonic() < until:
            keys = [key for (batch,) in loader for key in batch["key"][: loader.num_valid]]
            assert len(set(keys)) == len(keys) == loader.num_samples
            loader.reset()
        print(f"{loader.epoch} epochs, {len(set(bucket.used))} keys, {len(bucket.used)} requests")
    assert len(set(bucket.used)) > 3
