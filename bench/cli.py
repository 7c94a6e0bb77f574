"""``dali-pipes bench``: the names of its commands. Each is a file in `bench.commands`, or a scenario."""

import click

from bench.catalog import SCENARIOS, scenario_class
from dali_pipes.commands.lazy import LazyGroup, with_verbosity

_COMMANDS = {
    "compare": "Tell whether a run is worse than an earlier one; exit 1 if it is.",
    "gpu": "Time decoding on a GPU, one setting changed at a time; or the same on the CPU.",
    "report": "Show records as tables and plots: Markdown, SVG, a document's tables.",
    "run": "Compare the outputs of loaders on the same shards, then time the loaders.",
    "sweep": "Time loaders as run does, over threads, ranks, latencies, sizes, ...",
}


class _BenchGroup(LazyGroup):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SCENARIOS:
            return super().get_command(ctx, cmd_name)
        from bench.commands.running import scenario_command
        from bench.tools.environment import check_extras

        check_extras()  # before the scenario's module imports them
        return with_verbosity(scenario_command(scenario_class(cmd_name)))


@click.group(
    cls=_BenchGroup,
    context_settings={"show_default": True},
    lazy={name: (f"bench.commands.{name}:{name}", line) for name, line in _COMMANDS.items()}
    | {name: ("", line) for name, line in SCENARIOS.items()},
)
def bench() -> None:
    """Time DALI against its peers, on the same shards, batches and clock."""
