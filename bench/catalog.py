"""List the scenarios of ``dali-pipes bench``. Each is the class ``NameScenario`` in ``bench/scenarios/NAME.py``."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.engine.scenario import Scenario

SCENARIOS = {
    "fetch": "Our transport, the SDK and curl, on the same objects.",
    "pack": "`prep pack` against tar and curl, on the same files.",
    "resume": "The first batch after a resume against that of an epoch's start.",
    "scale": "What comes before the first sample, for up to a million shards.",
    "shuffle": "How far from uniform the orders of windows and buffers are.",
    "tfrecord": "The same samples as tars and as TFRecord files.",
    "windows": "Caches that hold all of a data set or a part, near and far from its server.",
}
"""Name -> line in the help of `dali-pipes bench`."""


def scenario_class(name: str) -> "type[Scenario[Any, Any, Any]]":
    """Import a scenario; its fields are the options of its command."""
    found: type[Scenario[Any, Any, Any]]
    found = getattr(importlib.import_module(f"bench.scenarios.{name}"), f"{name.title()}Scenario")
    return found
