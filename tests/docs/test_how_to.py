"""The Python of the how-to pages runs as it stands, on shards like those that each page names; links lead somewhere."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dali_pipes as dp
from dali_pipes.metrics.figures import FIGURES
from tests.docs.pages import REPOSITORY, python_of, run_blocks, run_python
from tests.servers.clouds import Cloud
from tests.shards import Sample, mask_bytes, npy_bytes, photo_bytes, write_shards
from tests.turned_photos import exif_block, with_exif

DOCS = REPOSITORY / "docs"
# Its data is in a bucket, which has a test of its own.
IN_A_BUCKET = DOCS / "how-to" / "stores.md"
WITH_PYTHON = [page for page in sorted((DOCS / "how-to").glob("*.md")) if python_of(page) and page != IN_A_BUCKET]
CUT_OFF = 21


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    samples = [_sample(number) for number in range(64)]
    for number, sample in enumerate(samples):
        parts = sample.components
        if page.stem == "bad-data" and number == CUT_OFF:
            parts["jpg"] = parts["jpg"][: 3 * len(parts["jpg"]) // 4]
        elif page.stem == "own-graph":
            orientation = 1 + number % 8
            parts["jpg"] = with_exif(parts["jpg"], exif_block(orientation))
            if orientation > 4:  # the mask is that of the upright photo
                parts["png"] = mask_bytes(number, 72, 80 + number % 7)
        elif page.stem == "shapes":
            parts["jpg"] = photo_bytes(number, 60 + 37 * number % 90, 60 + 53 * number % 90)
        elif page.stem == "recipes":
            depth = io.BytesIO()
            Image.fromarray(np.full((72, 80), 300 + number, np.uint16)).save(depth, "PNG")
            parts |= {"boxes.json": json.dumps(_boxes(number)).encode(), "tokens.npy": _tokens(number)}
            parts |= {
                "depth.png": depth.getvalue(),
                "age.txt": b"%d" % number,
                "keypoints.json": b"[[9, 8], [30.5, 40]]",
            }
    write_shards(tmp_path / "shards", samples, per_shard=16)
    (tmp_path / "page.py").write_text(python_of(page))
    run_python("page.py", folder=tmp_path)
    if page.stem == "shapes":
        assert run_blocks(page, folder=tmp_path) == 1


def test_page_of_buckets_goes_from_photos_to_batches(
    tmp_path: Path, s3_server: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real S3 server, by the environment variables that the page names."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3_server.make_bucket("pets")
    for number in range(24):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo_bytes(number, 90, 80))
    assert run_blocks(IN_A_BUCKET, folder=tmp_path) == 1
    (tmp_path / "page.py").write_text(python_of(IN_A_BUCKET))
    run_python("page.py", folder=tmp_path)


def test_commands_of_look_run_and_write_pages(tmp_path: Path) -> None:
    """On shards of the names that the page uses; each page is one file of the sort that `tests/pages` opens."""
    write_shards(tmp_path / "shards", [_sample(number, "cls", "jpg", "png") for number in range(64)], per_shard=16)
    assert run_blocks(DOCS / "how-to" / "watch.md", folder=tmp_path) == 4
    assert (tmp_path / "data.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(list((tmp_path / "plots").glob("run-*.svg"))) == 6


def test_commands_of_prepare_go_from_photos_to_a_batch(tmp_path: Path) -> None:
    """On photos as a phone names them."""
    (tmp_path / "photos").mkdir()
    for number in range(12):
        (tmp_path / "photos" / f"IMG_20260{number:03d}.PORTRAIT.jpg").write_bytes(photo_bytes(number, 64, 48))
    assert run_blocks(DOCS / "how-to" / "prepare.md", folder=tmp_path) == 1


def test_commands_of_small_shards_run(tmp_path: Path) -> None:
    """On photos of several formats and sizes, those of phones among them."""
    heif = pytest.importorskip("pillow_heif")
    if shutil.which("jpegtran") is None:
        pytest.skip("no program jpegtran")
    heif.register_heif_opener()
    for name in ("photos/cat", "photos/dog", "phone"):
        (tmp_path / name).mkdir(parents=True)
    for number in range(16):
        side = 80 if number % 4 == 3 else 120
        photo = photo_bytes(number, side + 40, side, progressive=number % 2 == 0)
        (tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg").write_bytes(photo)
    photo = Image.open(io.BytesIO(photo_bytes(1, 160, 120)))
    for name in ("IMG_1.HEIC", "IMG_2.avif"):
        photo.save(tmp_path / "phone" / name)
    assert run_blocks(DOCS / "how-to" / "small-shards.md", folder=tmp_path) == 4
    assert len(list((tmp_path / "shards").glob(".dali-pipes/*-recoded.json"))) == 4


def test_photos_with_boxes_and_tokens_are_packed_as_recipes_says(tmp_path: Path) -> None:
    """Its commands make a data set that its graphs read."""
    (tmp_path / "photos").mkdir()
    rows = []
    for number in range(6):
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(photo_bytes(number, 80, 72))
        rows.append({"path": f"photos/{number}.jpg", "caption": f"photo {number}", "boxes": _boxes(number)})
    (tmp_path / "captions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert run_blocks(DOCS / "how-to" / "recipes.md", folder=tmp_path) == 1
    with dp.loader(
        tmp_path / "annotated" / "train-", dp.detection(crop=32, scale=None, flip=0), batch_size=6, device="cpu"
    ) as loader:
        found = sorted(len(target["boxes"]) for target in next(loader)[0]["target"])
    assert found == sorted(len(_boxes(number)["boxes"]) for number in range(6))


def test_watch_lists_the_figures_as_they_are() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (counter|gauge) \| (.*) \|$", (DOCS / "how-to" / "watch.md").read_text(), re.MULTILINE
    )
    assert rows == [(one.name, "counter" if one.is_counter else "gauge", one.help) for one in FIGURES]


def test_page_of_trainers_shows_lines_of_the_programs() -> None:
    """The programs are run by the trainers' tests; the page shows their lines about data, in order."""
    blocks = re.findall(r"^```py (\S+)\n(.*?)^```", (DOCS / "how-to" / "trainers.md").read_text(), re.M | re.S)
    programs = {path.name: path.read_text() for path in (REPOSITORY / "examples" / "trainers").glob("*.py")}
    assert {name for name, _ in blocks} == programs.keys()
    for name, shown in blocks:
        lines = iter(programs[name].splitlines())
        assert [line for line in shown.splitlines() if line not in lines] == []


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


def _boxes(number: int) -> dict[str, Any]:
    boxes = [[5 + number % 9, 8 * place, 60 + number % 9, 8 * place + 30] for place in range(number % 4)]
    return {"boxes": boxes, "labels": [1 + place for place in range(len(boxes))]}


def _tokens(number: int) -> bytes:
    return npy_bytes(np.arange(5 + number % 20))


def _sample(number: int, *names: str) -> Sample:
    """A sample with the named components, or with every component that a page uses."""
    components = {
        "jpg": photo_bytes(number, 80 + number % 7, 72),
        "png": mask_bytes(number, 80 + number % 7, 72),
        "cls": b"%d" % (number % 5),
        "emb.npy": npy_bytes(np.full(16, number, np.float32)),
        "labels.json": b"[%d, 9]" % (number % 5),
        "txt": f"photo {number}".encode(),
    }
    return Sample(f"s{number:05d}", {name: components[name] for name in names or components})
