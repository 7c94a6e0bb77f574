"""A data set whose class names, keys, captions, components and causes want to be run as scripts."""

import json
from pathlib import Path

from PIL import Image

from tests.shards import Sample, mask_bytes, photo_bytes, write_classes, write_shards

SCRIPT = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
KEY = "a<script>alert(1)&\"'-"
NUM = 24
CUT_OFF, NO_PHOTO, OTHER_MASK, NO_MASK, TURNED = 5, 6, 4, 7, 8


def write_hostile(directory: Path) -> Path:
    """24 samples in three shards, classes 0 to 2, of which 1 and 2 have names; some are bad."""
    write_classes(directory, {"1": f"cat {SCRIPT}", "2": "dog", "0": "cow"})
    samples = []
    for number in range(NUM):
        components = {
            "jpg": photo_bytes(number, 200 + number, 150),
            "mask.png": mask_bytes(number, 200 + number, 150),
            "cls": b"%d" % (number % 3),
            "txt": f"caption {number} {SCRIPT}".encode(),
        }
        if number % 2:
            components["boxes.json"] = json.dumps([[20, 30, 120, 105], [0, 0, 9999, 10]]).encode()
        samples.append(Sample(f"{KEY}{number:02d}", components))
    exif = Image.Exif()
    exif[274] = 6
    changes = {
        CUT_OFF: {"jpg": samples[CUT_OFF].components["jpg"][:-300]},
        NO_PHOTO: {"jpg": b"\0" * 100},
        OTHER_MASK: {"mask.png": mask_bytes(1, 10, 90)},
        TURNED: {"jpg": photo_bytes(8, 200, 150, exif=exif), "mask.png": mask_bytes(8, 150, 200)},
    }
    for number, components in changes.items():
        samples[number].components.update(components)
    del samples[NO_MASK].components["mask.png"]
    return write_shards(directory, samples, per_shard=10)
