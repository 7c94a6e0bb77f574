"""Specs of dSort: what clusters take goes through as it is, what they would misread is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import DataError
from dali_pipes.store.shard_names import Template, template_of
from prep.shuffle.order import Algorithm
from prep.shuffle.request import parse_size, parse_spec, read_spec

SPEC: dict[str, Any] = {
    "input_bck": {"name": "pets"},
    "input_format": {"template": "samples-{000000..000003}"},
    "output_format": "shuffled-{000000..000019}",
    "output_shard_size": "4MB",
    "algorithm": {"kind": "shuffle", "seed": "7"},
}


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
    assert (spec.input_extension, spec.options["extension"], spec.options["shard_bytes"]) == (".tgz", ".tar", 4096)
    algorithm = Algorithm(kind="content", component="cls", key_type="int", decreasing=True)
    assert spec.options["algorithm"] == algorithm
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    assert read_spec(tmp_path / "spec.json").options["algorithm"] == Algorithm(seed=7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_shards_size": "1KB"}, "unknown field `output_shards_size`"),
        ({"algorithm": {"type": "shuffle"}}, r"unknown field `type` - at `\$\.algorithm`"),
        ({"input_bck": {"name": "x", "provider": "hdfs"}}, r"input_bck\.provider must be one of ais, aws, .*'hdfs'"),
        ({"input_format": {}}, "input_format must have either template or objnames"),
        ({"input_format": {"template": "in-{0.."}}, "has braces without a pair; dSort would read nothing"),
        ({"input_format": {"template": "in-{3..1}"}}, r"input_format\.template: .*\{3\.\.1\} does not ascend"),
        ({"output_format": "out-{0.."}, r"output_format 'out-\{0\.\.' has braces without a pair"),
        ({"output_format": "o-{0..9}.tgz", "output_extension": ".tar"}, r"ends in \.tgz, but the extension field says"),
        ({"output_extension": ".zip"}, r"output_extension must be one of \.tar, \.tgz, \.tar\.gz, got '\.zip'"),
        ({"output_shard_size": "-1"}, "output_shard_size: a size is a number that is not negative.*got '-1'"),
        ({"ekm_file": "http://x/m", "output_shard_size": None}, "output_shard_size is missing: with an ekm_file"),
        ({"algorithm": {"kind": "shuffle"}}, r"algorithm\.seed is missing"),
        ({"algorithm": {"kind": "shuffle", "seed": "x"}}, r"algorithm\.seed must be a whole number.*'x'"),
        ({"algorithm": {"kind": "none", "extension": ".cls"}}, "algorithm 'none' does not take a component, got 'cls'"),
        ({"algorithm": {"kind": "shuffle", "seed": 1, "decreasing": True}}, "'shuffle' has no decreasing order"),
        ({"algorithm": {"kind": "shuffle", "seed": 2**63}}, r"seed must be in \[0, 2\*\*63\), got"),
    ],
)
def test_spec_that_a_cluster_would_refuse_or_misread(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(SPEC | change))
    with pytest.raises(DataError, match=rf"^spec '.*spec\.json': .*{message}"):
        read_spec(tmp_path / "spec.json")


@pytest.mark.parametrize(
    ("names", "template"),
    [
        ("a-000000 a-000001", "a-{000000..000001}"),
        ("a-7", "a-{7..7}"),  # one shard is a range, too
        ("a-9 a-10", "a-{9..10}"),
        ("a-0 a-2", None),  # a gap
        ("cat", None),
        ("a{1..2}-0", None),  # braces in a name are no range
    ],
)
def test_template_of_names_that_count_up(names: str, template: str | None) -> None:
    found = template_of(names.split())
    assert (None if found is None else str(found)) == template
    if found is not None:
        assert list(found.names()) == names.split()
        assert all(found.holds(name) for name in names.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a-{08..11}.tar", "a-08.tar a-09.tar a-10.tar a-11.tar"),
        ("{0..1}/{00..01}", "0/00 0/01 1/00 1/01"),
        ("{8..010}", "8 9 10"),  # the shorter number gives the width
        ("plain", ""),  # without a range there are no names
    ],
)
def test_template_names(text: str, expected: str) -> None:
    """Templates expand as in AIS."""
    template = Template.parse(text)
    assert list(template.names()) == expected.split()
    assert len(template) == len(expected.split())
    assert not any(map(template.holds, ("b", "a-x.tar")))
    assert list(Template.parse(str(template)).names()) == expected.split()


@pytest.mark.parametrize(("text", "num_bytes"), [("4KB", 4096), ("4KiB", 4096), ("12", 12), ("1.5 MiB", 3 << 19)])
def test_parse_size_is_binary_as_in_ais(text: str, num_bytes: int) -> None:
    assert parse_size(text, what="size") == num_bytes
