"""The kinds of sources. A module of its own: the command line reads it before it imports what reads sources."""

from typing import Literal

Kind = Literal["imagefolder", "photos", "pets", "table", "hf", "tars"]
"""Called as the commands of ``prep pack``."""
