"""The examples, imported as they import each other: from their own folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lazy import Lazy
from tests.shards import make_samples, write_shards

torch = Lazy("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_SAMPLES = 53

sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def photo_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """53 small photos with masks in six shards, sizes on both sides of a crop of 64."""
    samples = make_samples([(48 + 7 * (i % 6), 50 + 9 * (i % 5)) for i in range(NUM_SAMPLES)])
    return write_shards(tmp_path_factory.mktemp("photos"), samples, per_shard=10)


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """What a training sets for its whole process, set back."""
    num_threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(is_deterministic)
