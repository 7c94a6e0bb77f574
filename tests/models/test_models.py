"""Run a few draws of each model; `make models` runs draws for MINUTES."""

import pytest

from tests.models.__main__ import MODELS, draw


@pytest.mark.parametrize("seed", [1, 21, 61, 121])
@pytest.mark.parametrize("name", MODELS)
def test_draws(name: str, seed: int) -> None:
    """The project does what an independent model of its documents says. The seeds have every policy and shuffle."""
    draw(name, seed)
