"""All commands and the loader judge alike which component is the photo and which the mask."""

import json
from pathlib import Path

import pytest

import dali_pipes as dp
from bench.loaders.recipe import find_components
from dali_pipes.store.urls import resolve_shards
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.shards import Sample, encode_photo, mask_bytes, write_shards

KINDS = ("jpg", "jpg", "png", "jpg", "webp", "jpg", "png", "jpg", "webp")  # most are JPEGs
NUM = len(KINDS)


def photo(kind: str, number: int) -> bytes:
    return encode_photo(kind, seed=number, size=(60, 40))


@pytest.fixture(scope="module", params=["photos alone", "with masks"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Indexed shards of a folder of JPEG, PNG and WEBP files, and the mask's component."""
    mask = {"seg.png": mask_bytes(1, 60, 40)} if request.param == "with masks" else {}
    samples = [
        Sample(f"k{number}", {KINDS[number]: photo(KINDS[number], number), "cls": b"%d" % (number % 2), **mask})
        for number in range(NUM)
    ]
    return write_shards(tmp_path_factory.mktemp("mixed"), samples, per_shard=4), "".join(mask)


def test_loader_reads_each_sample(mixed: tuple[Path, str]) -> None:
    graph = dp.segmentation(crop=32) if mixed[1] else dp.classification_eval(resize=32, crop=32)
    with dp.loader(str(mixed[0]), graph, batch_size=NUM, device="cpu", seed=1) as loader:
        [batch] = loader.as_dicts()
    assert len(batch["image"]) == NUM
    assert sorted(batch["label"].flatten().tolist()) == [0] * 5 + [1] * 4


def test_verify_view_info_and_bench_take_the_same_components(mixed: tuple[Path, str], tmp_path: Path) -> None:
    """Verify accepts the shards with an index and without; the other commands find the same photos and mask."""
    shards, mask = mixed
    for path in shards.glob("*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for each in (shards, tmp_path):
        assert json_of_prep("verify", each, "--decoder", "pillow", "--workers", "1")["ok"]
    run_prep("view", shards, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "nothing bad was found" in page
    found = json.loads(page.partition('id="samples">')[2].partition("</script>")[0])["samples"]
    assert all(sample["photo"] and bool(sample["mask"]) == bool(mask) for sample in found)
    assert json_of_prep("view", shards, tmp_path / "sheet.png")["undecodable"] == []
    told = json_of_prep("info", shards)["photos"]
    masks = {mask: True} if mask else {}
    assert {name: one["is_mask"] for name, one in told.items()} == dict.fromkeys(KINDS, False) | masks
    photo, found_mask = find_components(resolve_shards(shards, endpoint=None), photo=None, mask=None)
    assert (set(photo.split(";")), found_mask or "") == (set(KINDS), mask)
