"""The notebooks run from the top in an empty folder, and are stored without outputs."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

REPOSITORY = Path(__file__).parents[2]
NOTEBOOK = REPOSITORY / "examples" / "notebooks" / "first-batch.ipynb"


def test_notebook_goes_from_photos_to_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of this Python; nothing but its folder is written."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    folder = tmp_path / "work"
    folder.mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * 10
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()

    def result(number: int) -> str:
        outputs = cells[number - 1].outputs
        return "".join(each.get("text", "") + each.get("data", {}).get("text/plain", "") for each in outputs)

    assert "wrote 4 shards, 60 samples" in result(4)
    assert "indexed 4 shards, 60 samples" in result(5)
    assert result(6) == "(60, 5)"
    assert "'image': ((12, 3, 160, 160), torch.float32, " in result(7)
    assert any("image/png" in output.get("data", {}) for output in cells[7].outputs)
    assert result(9) == "{'astronaut': 20, 'cat': 20, 'rocket': 20}"
    assert result(10) == "(True, False)"
    assert [path.name for path in folder.iterdir()] == ["first-batch"]
