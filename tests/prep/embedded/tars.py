"""Small tars for tests."""

import io
import tarfile

__all__ = ["make_tar", "read_tar"]


def make_tar(members: dict[str, bytes], *, tar_format: int = tarfile.USTAR_FORMAT) -> bytes:
    """Make a tar of these members, in this order."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read_tar(data: bytes) -> list[tuple[str, bytes]]:
    """Return names and bytes of a tar's members, in order."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
