"""``prep shuffle``: options in, shards and one line out."""

import json
import re
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.shards import make_source, pack

_run = partial(run_prep, "shuffle")
_json = partial(json_of_prep, "shuffle")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three shards of ten samples and less, of three classes."""
    pack(make_source(25), store=LocalStore(tmp_path / "shards"), max_count=10)
    return tmp_path / "shards"


def test_an_output_that_is_named_as_an_input_is_told(directory: Path) -> None:
    match = r"matches no \.tar.*; every URL is an input here, and --output names the output"
    _run(f"{directory}/samples-", f"{directory}/mixed-", expect=StoreError, match=match)


def test_shuffle_by_split_is_the_same_in_all_epochs(directory: Path) -> None:
    """A sample of the one epoch's validation must not be in the next one's training."""
    arguments = ("--by", "split", "--splits", "train=0.8,val=0.2", "--shard-bytes", "1GiB")
    keys = []
    for epoch in range(2):
        found = _json(directory / "samples-", *arguments, "--epoch", str(epoch))
        assert found["shards"] == [f"e{epoch:06d}-shuffled-{split}-000000.tar" for split in ("train", "val")]
        assert [shard["num_samples"] for shard in found["planned"]] == [18, 7]
        with tarfile.open(directory / f"e{epoch:06d}-shuffled-val-000000.tar") as archive:
            keys.append({name.partition(".")[0] for name in archive.getnames()})
    assert keys[0] == keys[1] != set()


def test_shuffle_dry_run_prints_the_spec_and_the_shards(node: str, bucket: AisStore) -> None:
    pack(make_source(25), store=bucket, max_count=10)
    output = _run(f"{bucket.url}/samples-", "--dry-run", "--endpoint", node).stdout
    text, _, rest = output.partition("\n}\n")
    spec = json.loads(f"{text}}}")
    assert spec == {  # the fields that real clusters took
        "description": "dali-pipes prep shuffle",
        "input_bck": {"name": bucket.bucket, "provider": "ais"},
        "output_bck": {"name": bucket.bucket, "provider": "ais"},
        "input_format": {"template": "samples-{000000..000002}"},
        "input_extension": ".tar",
        "output_format": "shuffled-{000000..000018}",
        "output_extension": ".tar",
        "output_shard_size": spec["output_shard_size"],
        "algorithm": {"kind": "shuffle", "seed": "0"},  # a string: a number breaks the connection
    }
    lines = rest.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"shuffled-000000\.tar: \d+ samples, .* KiB", lines[0])
    assert lines[-1].startswith("would shuffle 3 shards into 3 shards, 25 samples, ")
    assert bucket.list("shuffled-") == []


def test_shuffle_dry_run_as_a_spec_does_the_same(node: str, bucket: AisStore, tmp_path: Path) -> None:
    """What --dry-run prints is a spec that --spec and `ais start dsort -f` take; settings of the cluster stay in it."""
    pack(make_source(25), store=bucket, max_count=10)
    found = _json(f"{bucket.url}/samples-", "--seed", "3", "--dry-run", "--endpoint", node)
    changed = found["spec"] | {
        "algorithm": {"kind": "content", "extension": ".cls", "content_key_type": "int", "decreasing": False},
        "max_mem_usage": "60%",
    }
    (tmp_path / "spec.json").write_text(json.dumps(changed))
    assert _json("--spec", tmp_path / "spec.json", "--dry-run", "--endpoint", node)["spec"] == changed
    for engine, prefix in (("dsort", "shuffled-"), ("exchange", "again-")):
        spec = found["spec"] | {"output_format": found["spec"]["output_format"].replace("shuffled-", prefix)}
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        done = _json("--spec", tmp_path / "spec.json", "--engine", engine, "--endpoint", node)
        assert done["engine"] == engine
        assert [(shard["num_samples"], shard["num_bytes"]) for shard in done["planned"]] == [
            (shard["num_samples"], shard["num_bytes"]) for shard in found["planned"]
        ]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"output_format": "out-{0..1}"}, ValueError, r"0\.\.1\}' names 2 output shards, 25 of 1 bytes are needed"),
        ({"input_format": {"template": "samples-{000000..000007}"}}, StoreError, "no shard .*; 8 were named"),
    ],
)
def test_shuffle_spec_that_cannot_be_done_is_refused_and_nothing_written(
    node: str, bucket: AisStore, tmp_path: Path, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    pack(make_source(25), store=bucket, max_count=10)
    spec = {
        "input_bck": {"name": bucket.bucket},
        "input_format": {"template": "samples-{000000..000002}"},
        "output_format": "out-{00..99}",
        "output_shard_size": "1B",
        "algorithm": {"kind": "alphanumeric"},
    } | change
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    before = bucket.list("")
    _run("--spec", tmp_path / "spec.json", "--endpoint", node, expect=error, match=match)
    assert bucket.list("") == before


def test_shuffle_spec_with_a_prefix_reads_what_it_names(tmp_path: Path, node: str, bucket: AisStore) -> None:
    """A cluster takes a prefix, reads nothing and reports success."""
    pack(make_source(25), store=bucket, max_count=10)
    bucket.write("map.json", b'{"o-{0..9}.tar": ["^folder/"]}')
    (tmp_path / "spec.yaml").write_text(
        f"{{input_bck: {{name: {bucket.bucket}}}, input_format: {{template: samples-}}, output_shard_size: 1GiB, "
        f"ekm_file: {bucket.url}/map.json}}"
    )
    assert _json("--spec", tmp_path / "spec.yaml", "--endpoint", node)["shards"] == ["o-0.tar"]


def test_key_map_that_lacks_samples_leaves_them_out_only_when_asked(directory: Path, caplog: Any) -> None:
    (directory / "map.json").write_text('{"x-{0..9}.tar": ["^folder/000", "none"]}')
    arguments = (directory / "samples-", "--ekm", directory / "map.json")
    _run(*arguments, expect=DataError, match="names no shard for 15 of 25 keys: 'folder/0010'")
    assert "left out 15 samples that the key map lacks" in _run(*arguments, "--drop-unmapped").stdout
    assert "no sample for 1 of its 1 keys: 'none'" in caplog.text
    _run(*arguments, "--drop-unmapped", "--dry-run", "--shard-bytes", "1")
    assert "4 shards are there already" in caplog.text
    _run(*arguments, "--drop-unmapped", "--shard-bytes", "1", expect=StoreError, match="or name others in key map")
