"""What the ETLs of `test_through_etl` do to a sample: a module of its own, which their processes import."""

import os
from collections.abc import Mapping

from prep.etl.transforms import PetsTransform, ShardTransform


class SmallPets(PetsTransform):
    """The tutorial's, of 24 pixels a side."""

    def __init__(self) -> None:
        super().__init__(crop=24)


class AsTold(ShardTransform):
    """What the component ``act`` says; without one the sample, and of a shard of this project not a byte changes."""

    def transform_sample(self, sample: dict[str, bytes]) -> Mapping[str, bytes]:
        kept = {component: data for component, data in sample.items() if component != "act"}
        match sample.get("act"):
            case b"relabel":  # of the same size
                return kept | {"cls": b"9"}
            case b"cut off":  # nobody knows before it is decoded
                return kept | {"image.jpg": sample["image.jpg"][:-40]}
            case b"unsteady":  # other bytes each time, as many
                return kept | {"txt": os.urandom(8)}
            case b"ragged":  # and another number: by tens of kilobytes, since a tar is filled up
                return kept | {"txt": bytes(int.from_bytes(os.urandom(2)))}
            case b"fail":
                raise ValueError("a sample that it does not know")
        return kept

    def transform(self, data: bytes, path: str, etl_args: str = "") -> bytes:
        """Half of it, of a shard of that name."""
        made = super().transform(data, path, etl_args)
        return made[: len(made) // 2 + 7] if "half" in path else made
