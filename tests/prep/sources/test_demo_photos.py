from collections import Counter

import pytest

from prep.sources.demo_photos import NUM_PHOTOS, PHOTOGRAPHS, demo_photos

pytest.importorskip("skimage")


def test_demo_photos_have_a_class_for_each_photograph() -> None:
    demo = demo_photos()
    assert len({record.key for record in demo.records}) == NUM_PHOTOS
    assert list(demo.classes.values()) == list(PHOTOGRAPHS)
    counts = Counter(record.label for record in demo.records)
    assert set(counts) == set(demo.classes) == set(range(1, len(PHOTOGRAPHS) + 1))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_demo_photos_of_one_seed_have_the_same_bytes() -> None:
    first, again, other = (demo_photos(count=24, seed=seed).records for seed in (5, 5, 6))
    assert first == again != other
