"""``dali-pipes bench``: the names of its commands.

Each is a file in `bench.commands`, or a scenario: the class ``NameScenario`` in ``bench/scenarios/NAME.py``.
"""

import importlib
from typing import Any

import click

from dali_pipes.commands.options import LazyGroup, with_verbosity

SCENARIOS = {
    "feed": "Time loaders without decoding: what reading and the hand-over cost.",
    "fetch": "Fetch the same objects with our transport, the SDK and curl.",
    "open": "Open loaders of a simulated bucket of a million shards, and list it.",
    "resume": "Time the first batch after a resume, and at the start of an epoch.",
    "windows": "Load through caches that hold all of a data set or a part, near and far from its server.",
}


def scenario_class(name: str) -> Any:
    """Import a `bench.engine.scenario.Scenario` class; its fields are the options of its command."""
    return getattr(importlib.import_module(f"bench.scenarios.{name}"), f"{name.title()}Scenario")


_COMMANDS = {
    "compare": "Tell whether a run is worse than an earlier one; exit 1 if it is.",
    "gpu": "Time decoding on a GPU, one setting changed at a time; or the same on the CPU.",
    "report": "Show records as tables and plots: Markdown, SVG, a document's tables.",
    "run": "Compare the outputs of loaders on the same shards, then time the loaders.",
    "sweep": "Time loaders as run does, over threads, ranks, latencies, sizes, ...",
}
_FILES = {"sweep": "run", "compare": "report"}


class _BenchGroup(LazyGroup):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from bench.tools.environment import check_extras

        if cmd_name in self._lazy and cmd_name not in ("compare", "report"):
            check_extras()  # before modules that need them are imported
        if cmd_name not in SCENARIOS:
            return super().get_command(ctx, cmd_name)
        from bench.engine.options import scenario_command

        return with_verbosity(scenario_command(scenario_class(cmd_name)))


@click.group(
    cls=_BenchGroup,
    context_settings={"show_default": True},
    lazy={name: (f"bench.commands.{_FILES.get(name, name)}:{name}", line) for name, line in _COMMANDS.items()}
    | {name: ("", line) for name, line in SCENARIOS.items()},
)
def bench() -> None:
    """Time DALI against its peers, on the same shards, batches and clock."""
