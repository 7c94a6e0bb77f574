"""The group's table of commands is what there is, and costs nothing to show."""

import dataclasses
import subprocess
import sys

import click
import pytest

from bench.cli import SCENARIOS, scenario_class
from bench.cli import bench as bench_command


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_options_of_a_scenario_are_its_fields(name: str) -> None:
    """The default that ``--help`` shows is the one that the field has."""
    command = bench_command.get_command(click.Context(bench_command), name)
    assert command is not None
    of_fields = {one.name: one.default for one in dataclasses.fields(scenario_class(name))}
    context = click.Context(command)
    for option in command.params:
        typed = option.get_default(context)
        if option.name in of_fields and isinstance(typed, str | int | float):
            assert option.type_cast_value(context, typed) == of_fields[option.name]


@pytest.mark.fresh_interpreter
def test_help_imports_no_library() -> None:
    """The list of commands is there at once: neither torch nor DALI, nor a command's own module."""
    code = (
        "import sys; from bench.cli import bench; "
        "bench.main(['--help'], standalone_mode=False); "
        "print([m for m in ('torch', 'nvidia.dali', 'numpy', 'bench.commands') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "sweep" in done.stdout
    assert done.stderr.strip().endswith("[]")
