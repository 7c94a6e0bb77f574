"""In a notebook an error ends in its text, after the user's own lines; elsewhere the traceback has all lines."""

import json
import subprocess
import sys

import pytest

from tests.conftest import make_samples, write_shards
from tests.hostile_photos import undecodable

CELLS = {
    "argument": "loader = dp.loader(SHARDS, graph, batch_size='4', device='cpu')",
    "option": "dp.Cache(max_bytes='1')",
    "shard": "loader = dp.loader(SHARDS + '/s-000009.tar', graph, batch_size=4, device='cpu')",
    "graph": "def mine(components, random):\n    return components.nothing\ndp.loader(SHARDS, mine, batch_size=4)",
    "sample": "loader = dp.loader(SHARDS, graph, batch_size=4, device='cpu', shuffle=False)\nfor it in loader:\n    1",
    "late": "len(dp.loader(SHARDS, lambda components, random: {}, batch_size=4, device='cpu', rank='late'))",
    "closed": "loader.close()\nnext(loader)",
    "others": "import json\njson.loads('{')",
}
# Cell -> the most lines, and the start of the last one.
SHOWN = {
    "argument": (7, "TypeError: batch_size must be an integer, got '4'"),
    "option": (7, "TypeError: max_bytes must be an integer, got '1'"),
    "shard": (7, "StoreError: no shard '"),
    "graph": (13, "AttributeError: 'Components' object has no attribute 'nothing'"),
    "sample": (9, "DecodeError: shard 's-000003.tar', key 's00020': component 'image.jpg'"),
    "late": (7, "ValueError: graph must return a dict of outputs by name, got dict"),
    "closed": (8, "ValueError: this loader is closed; make another"),
}
NOTEBOOK = """
import contextlib, io, json, sys, traceback
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors='nocolor')
shell.run_cell('import dali_pipes as dp; graph = dp.segmentation(crop=16)')
shell.user_ns['SHARDS'] = sys.argv[1]
told = {}
for name, cell in json.loads(sys.argv[2]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        shell.run_cell(cell)
    told[name] = out.getvalue().strip(), ''.join(traceback.format_exception(sys.last_value))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What a real IPython shows of each cell, and the traceback as Python prints it."""
    pytest.importorskip("IPython")
    samples = make_samples([(40, 33)] * 23)
    samples[20].components["image.jpg"] = undecodable(samples[20].components["image.jpg"])
    shards = write_shards(tmp_path_factory.mktemp("notebook"), samples, per_shard=6)
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(shards), json.dumps(CELLS)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("cell", SHOWN)
def test_notebook_shows_the_users_lines_and_the_text(told: dict[str, tuple[str, str]], cell: str) -> None:
    most, text = SHOWN[cell]
    shown, whole = told[cell]
    lines = shown.splitlines()
    assert lines[-1].startswith(text)
    assert len(lines) <= most
    assert "dali_pipes/" not in shown
    assert any(line.startswith("---->") for line in lines)
    assert whole.count("dali_pipes/") > 1  # Python's own traceback keeps all frames


def test_errors_of_others_are_shown_as_ever(told: dict[str, tuple[str, str]]) -> None:
    assert "json/decoder.py" in told["others"][0]
