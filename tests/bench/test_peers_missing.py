"""Peers whose packages are not installed."""

import pytest

from bench.loaders import LoaderOptions, open_loader
from prep.errors import PipesError
from prep.urls import ShardSet


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("aistore", "alive_progress", "aistore-pytorch"),
        ("spdl", "spdl.pipeline", "spdl"),
        ("litdata", "litdata", "litdata"),
        ("mosaic", "streaming", "mosaic"),
    ],
)
def test_peer_without_its_package_says_what_to_install(
    name: str, package: str, extra: str, shards: ShardSet, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer is an extra of its own, and says which."""
    monkeypatch.setattr("bench.loaders._is_installed", lambda package: False)
    message = (
        rf"loader '{name}' needs the package '{package}', which is not installed; pip install 'dali-pipes\[{extra}\]'"
    )
    with pytest.raises(PipesError, match=message), open_loader(name, shards, options=options):
        pass
