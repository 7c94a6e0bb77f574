"""External key maps: both of AIS's forms, keys and expressions apart, and maps made by rule."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.errors import DataError
from dali_pipes.store.shard_names import Template
from prep.shuffle.key_map import Grouping, KeyMap, group_by, parse_key_map, regexes_of
from prep.shuffle.order import key_of

NAMES = ["a/1.cls", "a/10.jpg", "b/1.jpg", "img (1).jpg"]


def test_key_map_in_json_and_in_lines_says_the_same() -> None:
    in_json = parse_key_map(b'{"x-{0..9}.tar": ["a/1", "b/1"], "y-{0..9}": ["a/10"]}', where="map")
    in_lines = parse_key_map(b"a/1\tx-{0..9}.tar\n\nb/1\tx-{0..9}.tar\na/10\ty-{0..9}\n", where="map")
    assert [str(template) for template in in_json.outputs] == ["x-{0..9}", "y-{0..9}"]
    assert in_json.assign(NAMES) == in_lines.assign(NAMES) == [0, 1, 0, -1]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("a/1", [0, -1, -1, -1]),  # a key; AIS would take a/10 as well
        ("a/1.cls", [0, -1, -1, -1]),  # the name of a first member
        ("a/", [-1, -1, -1, -1]),  # no expression: no character says so
        ("^a/", [0, 0, -1, -1]),
        ("1.*jpg$", [-1, 0, 0, 0]),  # anywhere in the name, as in AIS
        (r"img \(1\)", [-1, -1, -1, 0]),
    ],
)
def test_key_map_entry_is_a_key_or_an_expression(entry: str, expected: list[int]) -> None:
    found = parse_key_map(json.dumps({"x-{0..9}": [entry]}).encode(), where="map")
    assert found.assign(NAMES) == expected


def test_key_map_that_sends_a_key_to_two_shards_is_refused() -> None:
    found = parse_key_map(b'{"x-{0..9}": ["^a"], "y-{0..9}": ["1"], "z-{0..9}": ["[0-9]"]}', where="map")
    with pytest.raises(DataError, match=r"map: key 'a/1' is mapped to 'x-\{0\.\.9\}' and to 'z-\{0\.\.9\}'"):
        found.assign(NAMES)
    # A key stands over expressions.
    found = parse_key_map(b'{"x-{0..9}": ["^a"], "y-{0..9}": ["a/1"]}', where="map")
    assert found.assign(NAMES[:2]) == [1, 0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "maps no key"),
        (b'{"x-{0..9}": [1]}', "expected "),
        (b'{"x": ["a"', "starts like JSON but is not valid JSON"),
        (b"\xff", r"a key map is JSON or lines in UTF-8 \(invalid start byte at byte 0\)"),
        (b"a\tx-{0..9}\nb\n", r"line 2: expected KEY'\\t'TEMPLATE, got 'b'"),
        (b'{"x": ["a"]}', "template 'x' must hold a range of numbers"),
        (b'{"x-{0..9}.tgz": ["a"]}', r"template 'x-\{0\.\.9\}\.tgz' ends in \.tgz, shards end in \.tar"),
        (b'{"x-{0..9}": ["a("]}', r"'a\(' is not a regular expression"),
    ],
)
def test_key_map_that_is_none_says_why(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^map.*{message}"):
        parse_key_map(data, where="map")


KEYS = st.text(st.sampled_from("ab1./-+()[]|\\^$ \u00e4"), min_size=1, max_size=8).filter(
    lambda key: key_of(f"{key}.x") == key and not key.endswith("/")
)


@settings(max_examples=50)
@given(st.lists(KEYS, unique=True, min_size=1, max_size=30), st.data())
def test_expressions_for_a_cluster_match_their_keys_only(keys: list[str], data: st.DataObject) -> None:
    """As a cluster matches them, one by one; and read back here, where they are keys again."""
    chosen = data.draw(st.sets(st.sampled_from(keys)))
    patterns = [re.compile(pattern) for pattern in regexes_of(sorted(chosen))]
    names = [f"{key}.jpg" for key in keys]
    assert {key for key, name in zip(keys, names, strict=True) if any(p.search(name) for p in patterns)} == chosen
    if chosen:
        found = parse_key_map(json.dumps({"x-{0..9}": regexes_of(sorted(chosen))}).encode(), where="map")
        assert found.patterns == ()
        assert set(found.keys) == chosen


def test_expressions_hold_many_keys_each() -> None:
    """A cluster tries each on each sample: a hundred thousand keys are a hundred expressions."""
    assert len(regexes_of([f"folder/{number:06d}" for number in range(100_000)])) == 100


@given(st.lists(st.integers(0, 4), min_size=1, max_size=200), st.integers(1, 9), st.integers(0, 3))
def test_balanced_deals_each_class_evenly(labels: list[int], num_shards: int, seed: int) -> None:
    names = [f"{number}.jpg" for number in range(len(labels))]
    found = group_by(
        names, grouping=Grouping(by="balanced"), prefix="x-", labels=labels, num_shards=num_shards, seed=seed
    )
    rows = found.assign(names)
    for label in set(labels):
        counts = [
            sum(r == row and lab == label for r, lab in zip(rows, labels, strict=True)) for row in range(num_shards)
        ]
        assert max(counts) - min(counts) <= 1
    totals = [rows.count(row) for row in range(num_shards)]
    assert max(totals) - min(totals) <= 1


def test_by_class_names_shards_by_id() -> None:
    names = ["a.jpg", "b.jpg", "c.jpg"]
    found = group_by(names, grouping=Grouping(by="class"), prefix="x-", labels=[3, 12, 3])
    assert [str(template) for template in found.outputs] == ["x-class03-{000000..999999}", "x-class12-{000000..999999}"]
    assert found.assign(names) == [0, 1, 0]


def test_split_stays_when_samples_are_added_or_removed() -> None:
    """And its numbers of samples are near the shares."""
    shares = {"train": 0.7, "val": 0.2, "test": 0.1}
    grouping = Grouping(by="split", shares=shares, seed=3)

    def split(names: list[str]) -> dict[str, int]:
        found = group_by(names, grouping=grouping, prefix="x-")
        return dict(zip(names, found.assign(names), strict=True))

    few = split([f"a/{number}.jpg" for number in range(0, 3000, 2)])
    many = split([f"a/{number}.jpg" for number in range(3000)])
    assert {name: many[name] for name in few} == few
    for row, share in enumerate((0.1, 0.7, 0.2)):  # test, train, val
        # Five standard deviations of a binomial distribution.
        assert abs(sum(one == row for one in many.values()) - 3000 * share) < 5 * (3000 * share * (1 - share)) ** 0.5


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 50)), max_size=60), st.integers(1, 100))
def test_cut_takes_each_sample_once_in_order(samples: list[tuple[int, int]], target: int) -> None:
    """Each shard but a group's last is over the target, and only with its last sample."""
    groups, sizes = [group for group, _ in samples], [size for _, size in samples]
    key_map = KeyMap(tuple(Template.parse(f"{row}-{{00..99}}") for row in range(4)), {}, (), "map")
    found = key_map.cut(groups, sizes, target=target)
    for group in range(4):
        runs = [positions for of, _, positions in found if of == group]
        assert [name for of, name, _ in found if of == group] == [f"{group}-{n:02d}" for n in range(len(runs))]
        assert [position for run in runs for position in run] == [at for at, of in enumerate(groups) if of == group]
        filled = [[sizes[position] for position in run] for run in runs]
        assert all(sum(run) > target for run in filled[:-1])
        assert all(sum(run[:-1]) <= target for run in filled)
