"""What is known of loaders before one is opened: what is missing, what a group stands for, what is made for them."""

import sys
from pathlib import Path

import pytest

from bench.loaders.protocol import LoaderOptions, num_rows
from bench.loaders.registry import (
    GROUPS,
    LOADERS,
    LoaderEntry,
    LoaderSpec,
    available_loaders,
    open_loader,
    prepare_loader,
    select_loaders,
)
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet

HERE = ("dali", "memory", "webloader", "webloader-tutorial", "dali-s3", "dali-external", "synthetic")
"""What the extra ``bench`` is enough for."""


def test_registry_loaders_of_the_bench_extra_are_all_here(bucket: ShardSet) -> None:
    reasons = available_loaders(bucket)
    assert [name for name in HERE if reasons[name] is not None] == []


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("aistore", "alive_progress", "aistore-pytorch"),
        ("spdl", "spdl.pipeline", "spdl"),
        ("s3torchconnector", "s3torchconnector", "s3torchconnector"),
        ("energon", "megatron.energon", "energon"),
        ("litdata", "litdata", "litdata"),
        ("mosaic", "streaming", "mosaic"),
    ],
)
def test_registry_missing_package_is_named_with_its_extra(
    name: str, package: str, extra: str, shards: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not it is installed here, and before the loader's module is imported."""
    # Python's own way to say that there is no such package.
    monkeypatch.setitem(sys.modules, package.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, package, None)
    pattern = f"loader '{name}' needs the package '{package}', which is not .*; pip install 'dali-pipes.{extra}.'"
    with pytest.raises(PipesError, match=pattern), open_loader(name, shards, options=options):
        pass
    with pytest.raises(PipesError, match=pattern):
        select_loaders([name])


def test_registry_package_that_is_nowhere_is_missing(monkeypatch: pytest.MonkeyPatch, shards: ShardSet) -> None:
    """Named alone that is an error; in a group a line, and the others come."""
    entry = LoaderEntry(module="bench.loaders.none", extra="peers", requires=("no_such_package.of_that_name",))
    monkeypatch.setitem(LOADERS, "absent", entry)
    missing = (
        "loader 'absent' needs the package 'no_such_package.of_that_name', which is not installed; "
        "pip install 'dali-pipes[peers]'"
    )
    assert available_loaders()["absent"] == missing
    with pytest.raises(PipesError, match="needs the package 'no_such_package"):
        select_loaders(["dali", "absent"])
    specs, skipped = select_loaders(["all"], shards=shards)
    assert f"skipped: {missing}" in skipped
    assert "skipped: loader 'dali-s3' reads shards in a bucket of AIStore or in a bucket of S3, got" in "\n".join(
        skipped
    )
    assert {"absent", "dali-s3"}.isdisjoint(spec.name for spec in specs)


@pytest.mark.parametrize(
    ("group", "within", "without"),
    [
        ("all", {"dali", "synthetic", "webloader:pil"}, set[str]()),
        ("peers", {"dali-s3", "webloader:pil"}, {"dali", "memory", "synthetic"}),
        ("dali-decode", {"dali", "memory", "dali-s3", "dali-external"}, {"synthetic", "webloader:pil"}),
        ("python-decode", {"webloader:turbo"}, {"dali", "synthetic"}),
    ],
)
def test_select_loaders_groups(bucket: ShardSet, group: str, within: set[str], without: set[str]) -> None:
    chosen = {str(spec) for spec in select_loaders([group], shards=bucket)[0]}
    assert within <= chosen
    assert without.isdisjoint(chosen)
    assert group in GROUPS


@pytest.mark.parametrize("texts", [("webloader", "webloader:pil"), ("dali", "dali")])
def test_select_loaders_one_loader_twice_is_refused(texts: tuple[str, str]) -> None:
    """One thing would be timed twice, and have two rows of one label."""
    with pytest.raises(ValueError, match=f"^loaders must not repeat, got '{LoaderSpec.parse(texts[0])}' twice$"):
        select_loaders(texts)


def test_select_loaders_group_leaves_out_what_was_named_without_its_decoder(bucket: ShardSet) -> None:
    """webloader is webloader:pil; the group brings the other one."""
    chosen = [str(spec) for spec in select_loaders(["webloader", "python-decode"], shards=bucket)[0]]
    assert [text for text in chosen if text.startswith("webloader")] == [
        "webloader:pil",
        "webloader:turbo",
        "webloader-tutorial:pil",
    ]


def test_open_loader_reads_what_was_prepared(
    shards: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And leaves it there: a conversion is paid once, not for each opening."""
    entry = LoaderEntry(module="tests.bench.loaders.copied_shards", prepares="prepare", source=("converted",))
    monkeypatch.setitem(LOADERS, "copied", entry)
    prepared = prepare_loader("copied", shards, directory=tmp_path)
    assert prepared is not None
    assert prepared.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(shards.names)
    (tmp_path / shards.names[0]).unlink()
    for _ in range(2):
        with open_loader("copied", shards, options=options, prepared=prepared) as loader:
            assert sum(num_rows(batch) for batch in loader.epoch()) == 14
    assert (tmp_path / shards.names[1]).exists()
