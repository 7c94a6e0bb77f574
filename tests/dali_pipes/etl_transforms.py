"""What the ETLs of `test_through_etl` do to a sample: a module of its own, which their processes import."""

import os

from prep.etl.transforms import ShardTransform, pets


def small_pets(sample: dict[str, bytes]) -> dict[str, bytes]:
    """The tutorial's, of 24 pixels a side."""
    return pets(sample, crop=24)


def act(sample: dict[str, bytes]) -> dict[str, bytes]:
    """What the component ``act`` says; without one the sample, and of a shard of this project not a byte changes."""
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


class _Told(ShardTransform):
    def transform(self, data: bytes, path: str, etl_args: str = "") -> bytes:
        """Half of it, of a shard of that name."""
        made = super().transform(data, path, etl_args)
        return made[: len(made) // 2 + 7] if "half" in path else made


as_told = _Told(f"{__name__}:as_told", act)
