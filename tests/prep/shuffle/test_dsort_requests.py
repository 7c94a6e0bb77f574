"""Specs of dSort: what clusters take goes through as it is, what they would misread is refused by name."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.shard_names import Template, extension_of, template_of
from prep.shuffle.dsort import BucketName, DsortSpec, parse_size, parse_spec, read_spec
from prep.shuffle.order import Algorithm

SPEC: dict[str, Any] = {
    "input_bck": {"name": "pets"},
    "input_format": {"template": "samples-{000000..000003}"},
    "output_format": "shuffled-{000000..000019}",
    "output_shard_size": "4MB",
    "algorithm": {"kind": "shuffle", "seed": "7"},
}


def test_spec_has_the_fields_that_real_clusters_took() -> None:
    spec = DsortSpec(
        source=BucketName("pets", "aws"),
        target=BucketName("pets", "aws"),
        inputs=Template.parse("samples-{000000..000003}"),
        outputs=Template.parse("shuffled-{000000..000019}"),
        shard_bytes=4_000_000,
        algorithm=Algorithm(seed=7),
    )
    assert spec.json() == {
        "description": "dali-pipes prep shuffle",
        "input_bck": {"name": "pets", "provider": "aws"},
        "output_bck": {"name": "pets", "provider": "aws"},
        "input_format": {"template": "samples-{000000..000003}"},
        "input_extension": ".tar",
        "output_format": "shuffled-{000000..000019}",
        "output_extension": ".tar",
        "output_shard_size": "4000000B",
        "algorithm": {"kind": "shuffle", "seed": "7"},  # a string: a number breaks the connection
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "alphanumeric", "decreasing": True},
        {"kind": "content", "extension": ".cls", "content_key_type": "int", "decreasing": False},
        {"kind": "none"},
        {"kind": "shuffle", "seed": "0"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"input_format": {"objnames": ["b-1.tar", "b-3.tar"]}},
        {"output_bck": {"name": "other", "provider": "gcp"}, "input_extension": ".tgz", "output_extension": ".tar"},
        {"ekm_file": "http://x/map", "ekm_file_sep": "\t", "output_format": ""},
        {"max_mem_usage": "60%", "create_concurrency_max_limit": 2, "description": "mine"},
    ],
    ids=lambda change: "+".join(change),
)
def test_spec_that_was_read_is_sent_as_it_was(algorithm: dict[str, Any], change: dict[str, Any]) -> None:
    sent = parse_spec(SPEC | {"algorithm": algorithm} | change).json()
    for name, value in (SPEC | {"algorithm": algorithm} | change).items():
        if name in ("input_bck", "output_bck"):
            assert sent[name] == {"provider": "ais"} | value
        elif name == "output_shard_size":
            assert sent[name] == f"{4 << 20}B"
        else:
            assert sent[name] == value
    assert parse_spec(sent).json() == sent


def test_spec_whose_fields_are_empty_has_the_defaults() -> None:
    empty = {"kind": "", "extension": "", "content_key_type": ""}
    assert parse_spec(SPEC | {"algorithm": empty}) == parse_spec(SPEC | {"algorithm": {}})


YAML = """
input_bck: {name: pets}
input_format:
  template: "samples-{0..3}.tgz"
output_format: "out-{00..99}.tar"
output_shard_size: 4KB   # 4096
algorithm:
  kind: content
  extension: .cls
  content_key_type: int
  decreasing: true
"""


def test_spec_in_yaml_and_in_json(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(YAML)
    spec = read_spec(tmp_path / "spec.yaml")
    assert str(spec.inputs) == "samples-{0..3}"
    assert (spec.input_extension, spec.output_extension, spec.shard_bytes) == (".tgz", ".tar", 4096)
    assert spec.algorithm == Algorithm(kind="content", component="cls", key_type="int", decreasing=True)
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    assert read_spec(tmp_path / "spec.json").json()["algorithm"] == SPEC["algorithm"]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", DataError, r"spec '.*spec\.json' is not JSON: Expecting"),
        ("[1]", DataError, "expected fields such as input_bck, got list"),
        (None, StoreError, "cannot read spec '.*': No such file"),
    ],
)
def test_spec_file_that_is_none(text: str | None, error: type[Exception], message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "spec.json").write_text(text)
    with pytest.raises(error, match=message):
        read_spec(tmp_path / "spec.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_shards_size": "1KB"}, "unknown field `output_shards_size`"),
        ({"algorithm": {"type": "shuffle"}}, r"unknown field `type` - at `\$\.algorithm`"),
        ({"input_bck": {"nam": "x"}}, r"unknown field `nam` - at `\$\.input_bck`"),
        ({"input_bck": None}, r"input_bck\.name is missing"),
        ({"input_bck": "ais://pets"}, r"Expected `object`, got `str` - at `\$\.input_bck`"),
        ({"input_bck": {"name": "x", "provider": "hdfs"}}, r"input_bck\.provider must be one of ais, aws, .*'hdfs'"),
        ({"input_bck": {"name": "x", "namespace": "#n"}}, "namespaces are not supported"),
        ({"input_format": {}}, "input_format must have either template or objnames"),
        ({"input_format": {"template": "a-{0..1}", "objnames": ["b"]}}, "must have either template or objnames"),
        ({"input_format": {"objnames": "a"}}, r"Expected `array`, got `str` - at `\$\.input_format\.objnames`"),
        ({"input_format": {"template": "in-{0.."}}, "has braces without a pair; dSort would read nothing"),
        ({"input_format": {"template": "in-{3..1}"}}, r"input_format\.template: .*\{3\.\.1\} does not ascend"),
        ({"output_format": "out-{0.."}, r"output_format 'out-\{0\.\.' has braces without a pair"),
        ({"output_format": "out-"}, "output_format must hold a range of numbers, such as .*, got 'out-'"),
        ({"output_format": None}, "output_format must hold a range of numbers"),
        ({"output_format": "o-{0..9}.tgz", "output_extension": ".tar"}, r"ends in \.tgz, but the extension field says"),
        ({"output_extension": ".zip"}, r"output_extension must be one of \.tar, \.tgz, \.tar\.gz, got '\.zip'"),
        ({"output_shard_size": "-1"}, "output_shard_size: a size is a number that is not negative.*got '-1'"),
        ({"output_shard_size": "big"}, "output_shard_size: a size is a number"),
        ({"ekm_file": "http://x/m", "output_shard_size": None}, "output_shard_size is missing: with an ekm_file"),
        ({"algorithm": {"kind": "sideways"}}, "algorithm must be one of shuffle, .*, got 'sideways'"),
        ({"algorithm": {"kind": "md5"}}, "algorithm must be one of shuffle, .*, got 'md5'"),
        ({"algorithm": {"kind": "shuffle"}}, r"algorithm\.seed is missing"),
        ({"algorithm": {"kind": "shuffle", "seed": "x"}}, r"algorithm\.seed must be a whole number.*'x'"),
        ({"algorithm": {"kind": "shuffle", "seed": -1}}, r"algorithm\.seed must be a whole number.*-1"),
        ({"algorithm": {"kind": "content"}}, "algorithm 'content' needs the component"),
        ({"algorithm": {"kind": "none", "extension": ".cls"}}, "algorithm 'none' does not take a component, got 'cls'"),
        ({"algorithm": {"kind": "shuffle", "seed": 1, "decreasing": True}}, "'shuffle' has no decreasing order"),
        ({"algorithm": {"kind": "shuffle", "seed": 2**63}}, r"seed must be in \[0, 2\*\*63\), got"),
        (
            {"algorithm": {"kind": "content", "extension": "cls", "content_key_type": "date"}},
            "key type must be one of int, float, string",
        ),
        ({"dry_run": "false"}, r"Expected `bool`, got `str` - at `\$\.dry_run`"),
        ({"algorithm": {"decreasing": "yes"}}, r"Expected `bool`, got `str` - at `\$\.algorithm\.decreasing`"),
    ],
)
def test_spec_that_a_cluster_would_refuse_or_misread(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(SPEC | change))
    with pytest.raises(DataError, match=rf"^spec '.*spec\.json': .*{message}"):
        read_spec(tmp_path / "spec.json")


@pytest.mark.parametrize(
    ("names", "template"),
    [
        (["a-000000", "a-000001"], "a-{000000..000001}"),
        (["a-7"], "a-{7..7}"),  # one shard is a range, too
        (["x/a-08", "x/a-09", "x/a-10"], "x/a-{08..10}"),
        (["a-9", "a-10"], "a-{9..10}"),
        (["v2-shard3", "v2-shard4"], "v2-shard{3..4}"),  # the last number counts
        (["a-0", "a-2"], None),  # a gap
        (["a-1", "a-0"], None),
        (["a-0", "b-1"], None),
        (["a-00", "a-1"], None),
        (["cat"], None),
        (["a{1..2}-0"], None),  # braces in a name are no range
    ],
)
def test_template_of_names_that_count_up(names: list[str], template: str | None) -> None:
    found = template_of(names)
    assert (None if found is None else str(found)) == template
    if found is not None:
        assert list(found.names()) == names
        assert all(found.holds(name) for name in names)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a-03", True),
        ("a-12", False),
        ("a-3", False),
        ("a-003", False),
        ("b-03", False),
        ("a-x", False),
        ("a-04", False),
    ],
)
def test_template_holds_its_names_only(name: str, expected: bool) -> None:
    assert Template.parse("a-{03..11..2}").holds(name) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a-{0..2}", ["a-0", "a-1", "a-2"]),
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{0..4..2}", ["0", "2", "4"]),
        ("{0..1}/{00..01}", ["0/00", "0/01", "1/00", "1/01"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{8..010}", ["8", "9", "10"]),  # the shorter number gives the width
        ("plain", []),  # no range, no name
        ("a-{0..", []),
    ],
)
def test_template_names(text: str, expected: list[str]) -> None:
    """Templates expand as in AIS."""
    template = Template.parse(text)
    assert list(template.names()) == expected
    assert len(template) == len(expected)
    assert list(Template.parse(str(template)).names()) == expected


def test_template_makes_one_name_at_a_time() -> None:
    """A class has a million names, of which a few are used: 40 MB for each class, were they all made."""
    tracemalloc.start()
    try:
        found = [next(Template.parse(f"class{row}-{{000000..999999}}-{{8..9}}").names()) for row in range(3)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == ["class0-000000-8", "class1-000000-8", "class2-000000-8"]
    assert list(Template.parse("{0..1}-{8..10..2}").names()) == ["0-8", "0-10", "1-8", "1-10"]
    assert peak < 1 << 20


@pytest.mark.parametrize(("text", "num_bytes"), [("4KB", 4096), ("4KiB", 4096), ("12", 12), ("1.5 MiB", 3 << 19)])
def test_parse_size_is_binary_as_in_ais(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("name", "extension"), [("a.tar", ".tar"), ("a.tgz", ".tgz"), ("a.tar.gz", ".tar.gz"), ("a.gz", ""), ("tar", "")]
)
def test_extension_of_a_shard(name: str, extension: str) -> None:
    assert extension_of(name) == extension
