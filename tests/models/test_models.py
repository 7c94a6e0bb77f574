"""Run one draw of each model; `make models` runs draws for MINUTES."""

import pytest

from tests.models.__main__ import MODELS, draw


@pytest.mark.parametrize("name", MODELS)
def test_one_draw(name: str) -> None:
    """The project does what an independent model of its documents says."""
    draw(name, 1)
