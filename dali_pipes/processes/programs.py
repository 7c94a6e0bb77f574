"""Start a program of this project in a process of its own, whatever modules the user has."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
"""The folder that holds our packages, installed or not."""

# Our packages are imported from their folder first: a user's prep.py cannot take their place. Then the folder goes to
# the end of the path. So all other modules, a user's transform for instance, are found in the same order as in the
# parent.
_START = """
import runpy, sys
root, module = sys.argv[1:3]
sys.path.insert(0, root)
import dali_pipes, prep
sys.path.remove(root)
sys.path.append(root)
sys.argv[:3] = [module]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def own_program(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours, such as ``prep.embedded``; the environment is the caller's."""
    # -P: the working directory is not on the path.
    return [sys.executable, "-P", "-c", _START, str(_ROOT), module, *arguments]
