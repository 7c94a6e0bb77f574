"""The kinds of sources, which stand here because the command line reads them before it imports what reads sources."""

from typing import Literal

Kind = Literal["imagefolder", "photos", "pets", "coco", "yolo", "voc", "table", "hf", "tars"]
"""Called as the commands of ``prep pack``."""
