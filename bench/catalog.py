"""List the scenarios of ``dali-pipes bench``. Each is the class ``NameScenario`` in ``bench/scenarios/NAME.py``."""

import importlib
from typing import Any

SCENARIOS = {
    "feed": "Time loaders without decoding: what reading and the hand-over cost.",
    "fetch": "Fetch the same objects with our transport, the SDK and curl.",
    "open": "Open loaders of a simulated bucket of a million shards, and list it.",
    "resume": "Time the first batch after a resume, and at the start of an epoch.",
    "scale": "Time the steps before the first sample, for up to a million shards.",
    "tfrecord": "Write, read and decode the same samples as tars and as TFRecord files.",
    "windows": "Load through caches that hold all of a data set or a part, near and far from its server.",
}
"""Name -> line in the help of `dali-pipes bench`."""


def scenario_class(name: str) -> Any:
    """Import a `bench.engine.scenario.Scenario` class; its fields are the options of its command."""
    return getattr(importlib.import_module(f"bench.scenarios.{name}"), f"{name.title()}Scenario")
