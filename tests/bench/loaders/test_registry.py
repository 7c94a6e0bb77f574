"""What is known of loaders before one is opened: what is missing, what a group stands for, what is made for them."""

import sys

import pytest

from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import GROUPS, LOADERS, LoaderEntry, open_loader, select_loaders
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet


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


def test_select_loaders_group_leaves_out_what_cannot_be_used(monkeypatch: pytest.MonkeyPatch, shards: ShardSet) -> None:
    """A line names each skipped loader. The other loaders are selected."""
    entry = LoaderEntry(module="bench.loaders.none", extra="peers", requires=("no_such_package.of_that_name",))
    monkeypatch.setitem(LOADERS, "absent", entry)
    specs, skipped = select_loaders(["all"], shards=shards)
    assert {"absent", "dali-s3"}.isdisjoint(spec.name for spec in specs)
    told = "\n".join(skipped)
    assert "skipped: loader 'absent' needs the package 'no_such_package.of_that_name', which is not installed" in told
    assert "skipped: loader 'dali-s3' reads shards in a bucket of AIStore or in a bucket of S3, got" in told


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
