"""The Python of the how-to pages runs as it stands, on shards like those that each page names; links lead somewhere."""

import io
import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Sample, mask_bytes, photo_bytes, write_shards
from tests.docs.pages import REPOSITORY, python_of, run_python

DOCS = REPOSITORY / "docs"
WITH_PYTHON = [page for page in sorted((DOCS / "how-to").glob("*.md")) if python_of(page)]
CUT_OFF = 21


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    samples = [_sample(number) for number in range(64)]
    if page.stem == "bad-data":
        photo = samples[CUT_OFF].components["jpg"]
        samples[CUT_OFF].components["jpg"] = photo[: 3 * len(photo) // 4]
    write_shards(tmp_path / "shards", samples, per_shard=16)
    (tmp_path / "page.py").write_text(python_of(page))
    run_python("page.py", folder=tmp_path)


def test_links_of_all_pages_lead_somewhere() -> None:
    pages = [*DOCS.rglob("*.md"), *(REPOSITORY / "deploy").rglob("*.md"), *REPOSITORY.glob("*.md")]
    assert len(pages) > 10
    dead = [
        f"{page.relative_to(REPOSITORY)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not dead


def _sample(number: int) -> Sample:
    stream = io.BytesIO()
    np.save(stream, np.full(16, number, np.float32))
    return Sample(
        f"s{number:05d}",
        {
            "jpg": photo_bytes(number, 80 + number % 7, 72),
            "png": mask_bytes(number, 80 + number % 7, 72),
            "cls": b"%d" % (number % 5),
            "emb.npy": stream.getvalue(),
            "labels.json": b"[%d, 9]" % (number % 5),
            "txt": f"photo {number}".encode(),
        },
    )
