import pytest

from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.http import objects
from tests.dali_pipes.fetch.served import DATA


@pytest.fixture
def store(bucket: AisStore) -> AisStore:
    """A bucket of this test's own with ``a/x.tar``, 2.5 MB."""
    bucket.create()
    bucket.write("a/x.tar", DATA)
    return bucket


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 500_000)
