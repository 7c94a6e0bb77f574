"""Whatever gives batches says before the first how many."""

from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.order.plan import LastBatchPolicyName
from tests.dali_pipes.order.test_plan import plan_of
from tests.dali_pipes.raw import raw


@pytest.mark.parametrize("policy", ["DROP", "FILL", "PARTIAL"])
@pytest.mark.parametrize("start", [0, 4, 8, 23, 24])
def test_steps_of_a_plan_have_a_length(policy: LastBatchPolicyName, start: int) -> None:
    for rank in range(2):
        steps = plan_of([5, 9, 10], shuffle=True).steps(
            batch_size=2, rank=rank, world_size=2, last_batch_policy=policy, start=start
        )
        expected = len(steps)
        assert expected == sum(1 for _ in steps)


@pytest.mark.parametrize("policy", ["DROP", "FILL", "PARTIAL"])
def test_faces_of_a_loader_have_a_length(small_shards: Path, tmp_path: Path, policy: str) -> None:
    with dp.loader(
        small_shards, raw, batch_size=5, last_batch_policy=policy, device="cpu", cache=dp.Cache(directory=tmp_path)
    ) as loader:
        faces = {"loader": loader, "as_dicts": loader.as_dicts(), "as_dataset": loader.as_dataset()}
        expected = {"DROP": 4}.get(policy, 5)
        for name, face in faces.items():
            assert len(face) == expected
            assert sum(1 for _ in face) == expected, name
        dicts = loader.as_dicts()
        assert sum(1 for _ in dicts) == expected
        assert list(dicts) == []
