"""The steps of a plan have a length; `integrations.test_faces` has that of loaders."""

import pytest

from dali_pipes.order.plan import LastBatchPolicyName
from tests.dali_pipes.order.test_plan import plan_of


@pytest.mark.parametrize("policy", ["DROP", "FILL", "PARTIAL"])
@pytest.mark.parametrize("start", [0, 4, 8, 23, 24])
def test_steps_of_a_plan_have_a_length(policy: LastBatchPolicyName, start: int) -> None:
    for rank in range(2):
        steps = plan_of([5, 9, 10], shuffle=True).steps(
            batch_size=2, rank=rank, world_size=2, last_batch_policy=policy, start=start
        )
        expected = len(steps)
        assert expected == sum(1 for _ in steps)
