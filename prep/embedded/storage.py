"""Store objects in a folder: one file per object, with its metadata inside, made visible by one rename.

::

    FOLDER/buckets/NAME/.bucket       the bucket's time of creation; locked while an object is replaced
                        .props        the bucket's properties
                        a%2Fb.obj     an object: its bytes, then its metadata, then a footer with their length
                        0f..e1.long   the same for a name too long for a file name; the name is in the metadata
           scratch/NODE/              files that a running node is writing; removed when its lock is free

The folder of a bucket in a namespace is ``buckets/#NAMESPACE/NAME``.

Bytes and metadata are in one file, so they cannot disagree, even if a process is killed. All objects are on disk, so
several nodes may serve one folder; a job belongs to its node. Nothing is synced to disk: an object that a power failure
left without its footer does not exist.
"""

import fcntl
import json
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Self
from urllib.parse import quote, unquote

from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.embedded_node import BUCKETS, bucket_names, claim_folder

_FOOTER = struct.Struct("<I8s")  # bytes of metadata before it, mark
_MARK = b"dpobj\x01\r\n"
_MAX_FILE_NAME = 240  # of 255; the rest is for the suffix
_BUCKET_FILE = ".bucket"
_PROPS_FILE = ".props"  # a file of its own, because .bucket is locked, and replacing a file drops its locks


class RefusalError(Exception):
    """Makes the node answer with an error. ``tcode`` is AIS's name of the error's kind; empty if AIS sends none."""

    def __init__(self, status: int, message: str, tcode: str = "", headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status, self.message, self.tcode, self.headers = status, message, tcode, headers


class BucketMissingError(RefusalError):
    """The bucket does not exist. By these words the SDK distinguishes it from a missing object."""

    def __init__(self, bucket: str) -> None:
        super().__init__(404, f'bucket "ais://{bucket}" does not exist', "ErrBckNotFound")
        self.bucket = bucket


class ObjectMissingError(RefusalError):
    """The object does not exist."""

    def __init__(self, bucket: str, name: str) -> None:
        super().__init__(404, f"ais://{bucket}/{name} does not exist", "ErrNotFound")


class BucketExistsError(RefusalError):
    """A new bucket's name is taken."""

    def __init__(self, bucket: str) -> None:
        super().__init__(409, f'bucket "ais://{bucket}" already exists', "ErrBucketAlreadyExists")


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketProps:
    """The properties of a bucket that a client can set."""

    checksum_type: str = DEFAULT_CHECKSUM_TYPE
    """One of ``CHECKSUM_TYPES``; the checksum of objects that are stored from then on."""
    read_range: bool = False
    """Whether a ranged read is answered with the checksum of the range instead of the object's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectMeta:
    name: str
    num_bytes: int
    checksum: str
    """In hexadecimal; empty for type ``none``."""
    checksum_type: str
    """The bucket's type when the object was stored."""
    version: int
    """1 for a new object, and one more each time it is replaced."""
    atime_ns: int
    """When it was stored. (AIS updates it at every read.)"""


class Storage:
    """A node's access to a folder, which is created if needed, for its owner alone; thread-safe.

    Removes the files that dead nodes left half written. Methods raise `RefusalError`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        claim_folder(folder)
        self._buckets, scratches = folder / BUCKETS, folder / "scratch"
        for part in (self._buckets, scratches):
            part.mkdir(parents=True, exist_ok=True)
        self._scratch = scratches / os.urandom(6).hex()
        with _locked(folder / ".lock", os.O_CREAT):
            for old in scratches.iterdir():
                if not _is_locked(old / ".lock"):
                    shutil.rmtree(old, ignore_errors=True)
            self._scratch.mkdir()
            self._lock = os.open(self._scratch / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Can be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self._scratch, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Buckets

    def create_bucket(self, bucket: str, props: BucketProps = BucketProps()) -> None:
        made = self._scratch_path()
        made.mkdir()
        (made / _BUCKET_FILE).write_text(json.dumps({"created_ns": time.time_ns()}))
        (made / _PROPS_FILE).write_text(json.dumps(asdict(props)))
        (self._buckets / bucket).parent.mkdir(exist_ok=True)  # of its namespace
        try:
            made.rename(self._buckets / bucket)  # fails on a folder that is not empty, and a bucket never is
        except OSError as exc:
            shutil.rmtree(made, ignore_errors=True)
            if (self._buckets / bucket).is_dir():
                raise BucketExistsError(bucket) from exc
            raise

    def destroy_bucket(self, bucket: str) -> None:
        """Remove a bucket and its objects in one step; its files are deleted afterwards."""
        dropped = self._scratch_path()
        try:
            (self._buckets / bucket).rename(dropped)
        except FileNotFoundError as exc:
            raise BucketMissingError(bucket) from exc
        shutil.rmtree(dropped, ignore_errors=True)

    def list_buckets(self) -> list[str]:
        return bucket_names(self.folder)

    def created_ns(self, bucket: str) -> int:
        """Return a bucket's time of creation, which is also its number."""
        return int(self._read_json(bucket, _BUCKET_FILE)["created_ns"])

    def bucket_props(self, bucket: str) -> BucketProps:
        return BucketProps(**self._read_json(bucket, _PROPS_FILE))

    def _read_json(self, bucket: str, file: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._buckets / bucket / file).read_bytes())
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise BucketMissingError(bucket) from exc
        return found

    def set_bucket_props(self, bucket: str, props: BucketProps) -> None:
        temporary = self._scratch_path()
        try:
            temporary.write_text(json.dumps(asdict(props)))
            temporary.rename(self._buckets / bucket / _PROPS_FILE)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise BucketMissingError(bucket) from exc
        finally:
            temporary.unlink(missing_ok=True)

    # Objects

    def write(
        self,
        bucket: str,
        name: str,
        chunks: Iterable[bytes | memoryview],
        *,
        checksum: str = "",
        checksum_type: str = DEFAULT_CHECKSUM_TYPE,
    ) -> ObjectMeta:
        """Store an object, which becomes visible when it is complete. If ``chunks`` raises, nothing changes.

        The bytes must have the ``checksum``, if one is given; the stored checksum has the bucket's own type.
        """
        own_type = self.bucket_props(bucket).checksum_type
        temporary = self._scratch_path()
        digest = new_checksum(own_type)
        given = new_checksum(checksum_type) if checksum and checksum_type != own_type else None
        num_bytes = 0
        try:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                    digest.update(chunk)
                    if given is not None:
                        given.update(chunk)
                    num_bytes += len(chunk)
                found = (given or digest).hexdigest()
                if checksum and checksum != found:
                    text = f"{checksum_type}({checksum} != {found}) (context: ais://{bucket}/{name})"
                    raise RefusalError(500, f"BAD DATA CHECKSUM: {text}", "ErrBadCksum")
                with _locked(self._buckets / bucket / _BUCKET_FILE):
                    try:
                        version = self.head(bucket, name).version + 1
                    except ObjectMissingError:
                        version = 1
                    meta = ObjectMeta(
                        name=name,
                        num_bytes=num_bytes,
                        checksum=digest.hexdigest(),
                        checksum_type=own_type,
                        version=version,
                        atime_ns=time.time_ns(),
                    )
                    text = json.dumps(asdict(meta))
                    file.write(text.encode() + _FOOTER.pack(len(text), _MARK))
                    file.close()  # the last bytes must be written before the rename
                    temporary.rename(self._path(bucket, name))
        except BaseException as exc:
            temporary.unlink(missing_ok=True)
            if isinstance(exc, FileNotFoundError):
                raise BucketMissingError(bucket) from exc
            raise
        return meta

    def open(self, bucket: str, name: str) -> tuple[BinaryIO, ObjectMeta]:
        """Open an object's file, which begins with its bytes, and return the file and the metadata.

        The file stays readable if the object is replaced or deleted.
        """
        try:
            file = self._path(bucket, name).open("rb", buffering=0)
        except FileNotFoundError as exc:
            raise ObjectMissingError(bucket, name) from exc
        meta = _read_meta(file.fileno())
        if meta is None or meta.name != name:
            file.close()
            raise ObjectMissingError(bucket, name)
        return file, meta

    def read(self, bucket: str, name: str) -> bytes:
        file, meta = self.open(bucket, name)
        with file:
            return file.read()[: meta.num_bytes]

    def head(self, bucket: str, name: str) -> ObjectMeta:
        file, meta = self.open(bucket, name)
        file.close()
        return meta

    def delete(self, bucket: str, name: str) -> None:
        try:
            self._path(bucket, name).unlink()
        except FileNotFoundError as exc:
            raise ObjectMissingError(bucket, name) from exc

    def list_names(self, bucket: str, *, prefix: str = "", after: str = "") -> list[str]:
        """Return the names that begin with ``prefix`` and sort after ``after``, sorted by code points."""
        names = []
        try:
            with os.scandir(self._buckets / bucket) as entries:
                for entry in entries:
                    name = self._name(entry)
                    if name is not None and name.startswith(prefix) and name > after:
                        names.append(name)
        except FileNotFoundError as exc:
            raise BucketMissingError(bucket) from exc
        return sorted(names)

    def heads(self, bucket: str, names: Iterable[str]) -> Iterator[ObjectMeta]:
        """Yield the metadata of these objects; leave out those that were deleted meanwhile."""
        for name in names:
            with suppress(ObjectMissingError):
                yield self.head(bucket, name)

    def _scratch_path(self) -> Path:
        return self._scratch / os.urandom(8).hex()

    def _path(self, bucket: str, name: str) -> Path:
        short = quote(name, safe="")
        if len(short) <= _MAX_FILE_NAME:
            return self._buckets / bucket / f"{short}.obj"
        return self._buckets / bucket / f"{blake2b(name.encode(), digest_size=24).hexdigest()}.long"

    def _name(self, entry: os.DirEntry[str]) -> str | None:
        if entry.name.endswith(".obj"):
            return unquote(entry.name.removesuffix(".obj"))
        if entry.name.endswith(".long"):
            with suppress(FileNotFoundError), Path(entry.path).open("rb", buffering=0) as file:
                meta = _read_meta(file.fileno())
                return None if meta is None else meta.name
        return None


def _read_meta(descriptor: int) -> ObjectMeta | None:
    file_bytes = os.fstat(descriptor).st_size
    start = file_bytes - _FOOTER.size
    if start < 0:
        return None
    text_bytes, mark = _FOOTER.unpack(os.pread(descriptor, _FOOTER.size, start))
    if mark != _MARK or text_bytes > start:
        return None
    meta = ObjectMeta(**json.loads(os.pread(descriptor, text_bytes, start - text_bytes)))
    return meta if meta.num_bytes == start - text_bytes else None


def _is_locked(path: Path) -> bool:
    """Whether a running process holds the lock of this file."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
