"""Numbers without an end, nesting without an end and halves of characters are errors of ours that name the place."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.cli import main
from dali_pipes.data_set.indexing import parse_label, read_class_table
from dali_pipes.errors import DataError
from dali_pipes.order.selection import Selection
from dali_pipes.order.state import LoaderState, StateError
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import expand_braces
from dali_pipes.tuning import Tuning
from prep.shuffle.key_map import parse_key_map
from prep.shuffle.request import read_spec
from tests.fuzz.targets.texts import state
from tests.shards import Sample, make_samples, photo_bytes, write_shards, write_tar

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"7" * 5000, r"holds '7{20,60}\.\.\. \(1001 characters\)', expected an integer"),
        (b" " * 5000 + b"7", "expected an integer"),
        (str(2**70).encode(), f"holds '{2**70}', expected an integer that fits 64 bits"),
        (str(-(2**63) - 1).encode(), "expected an integer that fits 64 bits"),
        (b"\xff\x1b[2J", r"holds '\\xff\\x1b\[2J', expected an integer"),
        ("٣".encode(), "holds '٣', expected an integer"),  # a digit, but not of ASCII
    ],
)
def test_labels_beyond_any_integer(data: bytes, expected: str) -> None:
    with pytest.raises(DataError, match=rf"shard 's\.tar', key 'a': component 'cls' {expected}|{expected}"):
        parse_label(data, shard="s.tar", key="a")


def test_shard_of_such_a_label_is_refused_by_commands(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", [Sample("a", {"cls": b"7" * 5000, "jpg": photo_bytes(0, 9, 8)})])
    assert main(["prep", "index", str(tmp_path)]) == 1
    assert main(["prep", "verify", "--workers", "1", str(tmp_path)]) == 1


def test_labels_of_64_bits_are_taken() -> None:
    for label in (2**63 - 1, -(2**63)):
        assert parse_label(f" {label}\n".encode(), shard="s.tar", key="a") == label


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (DEEP, "nested too deeply"),
        (b'{"1": "a", "01": "b"}', "each once, found '01': 'b'"),
        (json.dumps({"9" * 19: "a"}).encode(), "ids of 64 bits, .* found '9999999999999999999'"),
        (json.dumps({"9" * 5000: "a"}).encode(), r"found '9+\.\.\. \(5000 characters\)'"),
        (b'{"1_0": "a"}', "found '1_0'"),
        ('{"٣": "a"}'.encode(), "found '٣'"),
        (b'{"1": "\\ud800"}', r"found '1': '\\ud800'"),
        (b"[1]", "found a list"),
        (b"\xff", "can't decode byte 0xff"),
    ],
)
def test_class_tables(table: bytes, expected: str, tmp_path: Path) -> None:
    """What is taken here goes into a manifest, and into arrays of int64."""
    (tmp_path / "s-classes.json").write_bytes(table)
    with pytest.raises(DataError, match=expected):
        read_class_table(LocalStore(tmp_path), "s-")


def test_nesting_without_an_end(tmp_path: Path) -> None:
    """In each file of JSON or YAML that a person may name."""
    path = tmp_path / "x.json"
    path.write_bytes(DEEP)
    with pytest.raises(DataError, match=r"tuning file '.*x.json' .*its brackets are nested too deeply"):
        Tuning.read(path)
    with pytest.raises(DataError, match=r"spec '.*x.json' is not JSON: its brackets are nested too deeply"):
        read_spec(path)
    path.with_suffix(".yaml").write_bytes(DEEP)
    with pytest.raises(DataError, match=r"spec '.*x.yaml' is not YAML"):
        read_spec(path.with_suffix(".yaml"))
    with pytest.raises(DataError, match="map: starts like JSON but is not valid JSON: its brackets are nested"):
        parse_key_map(b'{"a":' + DEEP, where="map")


@pytest.mark.parametrize("text", ["{a," * 5000, "{a," * 500 + "b" + "}" * 500, "{" * 100_000])
def test_braces_without_an_end(text: str) -> None:
    """A bad argument, not the end of Python's stack."""
    with pytest.raises(ValueError, match=r"braces are nested deeper than 20; simplify the pattern") as caught:
        expand_braces(text)
    assert len(str(caught.value)) < 1000


def test_numbers_beyond_any_array() -> None:
    """Bad arguments, before an array is made of them."""
    labels = np.zeros(3, np.int64)
    with pytest.raises(TypeError, match=f"oversample must name classes by integers, .*, got {2**70}"):
        Selection(3, labels=labels, oversample={2**70: 2})
    with pytest.raises(ValueError, match=r"oversample\[0\] must be a finite number"):
        Selection(3, labels=labels, oversample={0: 10**400})


def test_json_components_that_nest_without_an_end_are_bad_samples(tmp_path: Path) -> None:
    """The loader names shard and key."""
    samples = [Sample(s.key, s.components | {"json": DEEP}) for s in make_samples([(9, 8)] * 2)]
    shards = write_shards(tmp_path / "in", samples, per_shard=2)

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"x": components.json("json", to=len, dtype=np.int64, ndim=0)}

    with pytest.raises(dp.DecodeError, match=r"shard 's-000000.tar', key 's0000[01]': .*nested too deeply"):
        list(dp.loader(shards, graph, batch_size=2, cache=dp.Cache(directory=tmp_path)))


@pytest.mark.parametrize("value", ["missing", 10**400, -1, "x" * 10_000, [[]], {}, None])
def test_states(value: object) -> None:
    """Every entry of a state may be anything: it is taken, or refused by a `StateError`."""
    for name in json.loads(state()):
        values = json.loads(state()) | {name: value}
        if value == "missing":
            del values[name]
        with contextlib.suppress(StateError):
            assert LoaderState.from_dict(values).to_dict().keys() == values.keys()
