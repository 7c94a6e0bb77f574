"""Small shards in the formats of tar that are in use."""

import io
import tarfile

from tests.builders import make_samples


def shards() -> list[bytes]:
    """Valid tars with samples of a photo, a class id and a mask: ustar, GNU and PAX, long and non-ASCII names."""
    return [_tar(tarfile.USTAR_FORMAT, ""), _tar(tarfile.GNU_FORMAT, "x" * 120), _tar(tarfile.PAX_FORMAT, "é" * 90)]


def _tar(kind: int, folder: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
        archive.addfile(_member(tarfile.DIRTYPE, folder or "folder"))
        for sample in make_samples([(9, 8), (8, 9)]):
            for component, data in sample.components.items():
                member = _member(tarfile.REGTYPE, f"{folder}/{sample.key}.{component}".strip("/"))
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def _member(kind: bytes, name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    return member
