"""The group's table of commands is what there is, and costs nothing to show."""

import subprocess
import sys

import pytest


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
