"""Read a tar and note its oddities: parts that other readers misread, links, and files that belong to no sample."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from dali_pipes.errors import printable
from dali_pipes.formats.names import split_key
from dali_pipes.formats.tar_reader import BLOCK, LINKS, REGULAR, ArchiveReader, Header, Member
from prep.inspect.findings import ShardFinding, note

# Names that a note gives as examples.
_SHOWN = 3


class NotingReader(ArchiveReader):
    """Reads an archive. Afterwards `links` and `notes` list its oddities."""

    def __init__(self, stream: BinaryIO, *, shard: str, size: int | None) -> None:
        super().__init__(stream, shard=shard, size=size)
        self._name = shard
        self._stop = -1
        """Byte at which the first end-of-archive block begins; -1 until it was read."""
        self._num_zeros = 0
        """Bytes from there on; used only if all of them are zero."""
        self._trailing = False
        self._long: Counter[str] = Counter()
        self.links: list[ShardFinding] = []
        """Findings for members of samples that are links, which no reader of shards follows."""
        self._outside: list[str] = []
        self._num_members = self._num_outside = self._num_spaces = 0

    def notes(self) -> list[ShardFinding]:
        """The notes; call it when the whole archive was read."""
        texts = [
            f"{number} member{'' if number == 1 else 's'} with {kind}" for kind, number in sorted(self._long.items())
        ]
        if self._stop >= 0 and not self._num_members:
            texts.append("holds no sample; DALI without an index reads it as one sample with empty components")
        if self._num_outside:
            shown = ", ".join(f"'{name}'" for name in self._outside)
            more = f" and {self._num_outside - len(self._outside)} more" if self._num_outside > _SHOWN else ""
            texts.append(f"{self._num_outside} files belong to no sample: {shown}{more}")
        if self._num_spaces:
            texts.append(f"{self._num_spaces} names with white space, which DALI's own index format cannot hold")
        if self._trailing:
            texts.append(f"bytes after the end of the archive, at byte {self._stop}: readers of tars ignore them")
        elif self._stop >= 0 and self._num_zeros < 2 * BLOCK:
            texts.append("one end-of-archive block, expected two")
        return [note(text, shard=self._name) for text in texts]

    def _next_header(self) -> Header | None:
        start = self._position
        header = super()._next_header()
        if header is None:
            self._stop = start
            self._look_behind(bytes(BLOCK) + self._piece[self._piece_start :])
        elif header.kind == ord("L"):
            self._long["GNU's long name, for which wds2idx writes a wrong position"] += 1
        return header

    def _skip_special(self, name: str, kind: int) -> None:
        if kind in LINKS and (names := split_key(name)) is not None:
            text = "is a link, which no reader of shards follows; pack it anew (tar: --hard-dereference or -h)"
            self.links.append(ShardFinding("link", self._name, names[0], names[1].lower(), text))

    def _pax_records(self, header: Header) -> dict[bytes, bytes]:
        records = super()._pax_records(header)
        if records.get(b"path"):
            self._long["a PAX long name, which DALI without an index reads as another sample"] += 1
        return records

    def _member(self, name: str, size: int, kind: int, said: Mapping[bytes, bytes]) -> Iterator[Member]:
        belongs = False
        for member in super()._member(name, size, kind, said):
            belongs = True
            self._num_members += 1
            self._num_spaces += any(character.isspace() for character in name)
            yield member
        if not belongs and kind in REGULAR:
            self._num_outside += 1
            if len(self._outside) < _SHOWN:
                self._outside.append(printable(name))

    def _read_piece(self) -> bool:
        is_more = super()._read_piece()
        if self._stop >= 0:
            self._look_behind(self._piece)
        return is_more

    def _look_behind(self, piece: bytes) -> None:
        """Examine bytes after the end of the archive."""
        self._trailing = self._trailing or any(piece)
        self._num_zeros += len(piece)
