import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from dali_pipes.errors import PipesError
from prep.sources.demo_photos import MAX_SIDE, MIN_SIDE, NUM_PHOTOS, PHOTOGRAPHS, demo_photos
from prep.sources.record import Source

pytest.importorskip("skimage")


@pytest.fixture(scope="module")
def demo() -> Source:
    return demo_photos()


def _open(source: Source, component: str) -> list[Image.Image]:
    return [Image.open(io.BytesIO(record.components[component])) for record in source.records]  # type: ignore[arg-type]


def test_demo_photos_have_a_class_for_each_photograph(demo: Source) -> None:
    assert len({record.key for record in demo.records}) == NUM_PHOTOS
    assert list(demo.classes.values()) == list(PHOTOGRAPHS)
    counts = Counter(record.label for record in demo.records)
    assert set(counts) == set(demo.classes) == set(range(1, len(PHOTOGRAPHS) + 1))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_demo_photos_are_as_varied_as_real_ones_and_masks_have_their_sizes(demo: Source) -> None:
    """A crop is larger than a photo in no, one or both dimensions; masks have the values 1, 2, 3."""
    photos, values = _open(demo, "image.jpg"), Counter[int]()
    sides = [side for photo in photos for side in photo.size]
    assert MIN_SIDE <= min(sides) < 200 < 900 < max(sides) <= MAX_SIDE
    small = Counter(sum(side < 350 for side in photo.size) for photo in photos)
    assert all(small[count] > 10 for count in (0, 1, 2))
    assert {(photo.format, photo.mode) for photo in photos} == {("JPEG", "RGB"), ("JPEG", "L")}
    for photo, mask in zip(photos, _open(demo, "trimap.png"), strict=True):
        assert (mask.format, mask.mode, mask.size) == ("PNG", "L", photo.size)
        values.update(np.unique(np.asarray(mask)).tolist())
    assert set(values) == {1, 2, 3}
    assert min(values.values()) > 0.9 * NUM_PHOTOS  # each value nearly everywhere


def test_demo_photos_of_one_seed_have_the_same_bytes() -> None:
    first, again, other = (demo_photos(count=24, seed=seed).records for seed in (5, 5, 6))
    assert first == again != other


def test_demo_photos_without_scikit_image_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prep.sources.demo_photos.PHOTOGRAPHS", {"nope": "nope.png"})
    with pytest.raises(PipesError, match=r"'nope\.png' of scikit-image, which is not there .*pip install 'dali-pipes"):
        demo_photos()
