"""Walk the chunks of a PNG, and compare the checksums that decoders compare."""

import zlib
from collections.abc import Iterator

_SIGNATURE_BYTES = 8


def needed_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield kind and content of each chunk that decoders need, up to the end chunk or the end of the bytes.

    Chunks that a decoder may skip, such as text, have a small letter first. Of these only ``tRNS`` changes pixels; it
    is left out nevertheless, because decoders to RGB do not read it.

    Raises:
        ValueError: If the checksum of a needed chunk before the end chunk is wrong: DALI's decoder refuses such a PNG.
            Other checksums are not compared, as it does not, either.
    """
    view, at = memoryview(data), _SIGNATURE_BYTES
    while at + 12 <= len(view):
        stop = at + 8 + int.from_bytes(view[at : at + 4])
        if stop + 4 > len(view):
            return
        kind = bytes(view[at + 4 : at + 8])
        if kind == b"IEND":
            yield kind, view[at + 8 : stop]
            return
        if not kind[0] & 0x20:
            if zlib.crc32(view[at + 4 : stop]) != int.from_bytes(view[stop : stop + 4]):
                raise ValueError(f"the {kind.decode('latin-1')!r} at byte {at} has another checksum than it says")
            yield kind, view[at + 8 : stop]
        at = stop + 4


def damage(data: bytes | memoryview) -> str | None:
    """Say what is wrong with a PNG that has an end chunk, without inflating its pixels; ``None``: nothing is."""
    try:
        kinds = {kind for kind, _ in needed_chunks(data)}
    except ValueError as exc:
        return str(exc)
    return None if b"IDAT" in kinds else "it has no pixels"
