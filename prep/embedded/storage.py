"""Keep objects in a folder: chunks in; one file an object, its metadata inside it, made visible by one rename.

::

    FOLDER/buckets/NAME/.bucket       the bucket's number and time of creation; locked while an object is replaced
                        .props        what can be chosen of a bucket; not there before something was
                        a%2Fb.obj     an object: its bytes, then its metadata, then a footer that finds them
                        0f..e1.long   the same for a name too long for a file name; the true one is in the metadata
           jobs/ID.json               what is known of a dSort job
           scratch/NODE/              files that a running node is writing; swept when its lock is free

Body and metadata are one file, so they cannot disagree, whenever a process is killed. All truth is on disk: any number
of nodes may serve one folder. Nothing is synced: an object is as durable as any file just written, and one that a power
cut left without its footer does not exist.
"""

import fcntl
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Self
from urllib.parse import quote, unquote

from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, new_checksum
from prep.embedded.reshard import InputShard

_FOOTER = struct.Struct("<I8s")  # bytes of metadata before it, mark
_MARK = b"dpobj\x01\r\n"
_MAX_FILE_NAME = 240  # of 255, which leaves room for the suffix
_BUCKET_FILE = ".bucket"
_PROPS_FILE = ".props"  # apart, because the other is locked: a file that is replaced takes its locks with it


class BucketMissingError(Exception):
    """There is no such bucket."""


class ObjectMissingError(Exception):
    """There is no such object."""


class BucketExistsError(Exception):
    """There is such a bucket already."""


class ChecksumMismatchError(Exception):
    """The bytes that came are not those whose checksum was given: its type, what was given, what was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketProps:
    """What can be chosen of a bucket."""

    checksum_type: str = DEFAULT_CHECKSUM_TYPE
    """One of ``CHECKSUM_TYPES``: of the objects stored from then on."""
    read_range: bool = False
    """Whether a ranged read is answered with the checksum of the range instead of the object's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectMeta:
    """What is stored with an object's bytes."""

    name: str
    num_bytes: int
    checksum: str
    """In hex, of the bytes; empty for type ``none``."""
    checksum_type: str = DEFAULT_CHECKSUM_TYPE
    """What the bucket's was when the object was stored. (Objects stored before there was a choice do not name it.)"""
    version: int
    """1, and one more each time the object is replaced."""
    atime_ns: int
    """When it was stored. (AIS moves it on at every read.)"""


class Storage:
    """One node's hold on a folder. Every method may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if need be, and sweep what dead nodes left half written."""
        self.folder = folder
        self._buckets, self._jobs, scratches = folder / "buckets", folder / "jobs", folder / "scratch"
        for part in (self._buckets, self._jobs, scratches):
            part.mkdir(parents=True, exist_ok=True)
        self.node = os.urandom(6).hex()
        self._scratch = scratches / self.node
        with _locked(folder / ".lock", os.O_CREAT):
            for old in scratches.iterdir():
                if not self.is_alive(old.name):
                    shutil.rmtree(old, ignore_errors=True)
            self._scratch.mkdir()
            self._lock = os.open(self._scratch / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Leave nothing half written behind."""
        if self._lock >= 0:
            shutil.rmtree(self._scratch, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def is_alive(self, node: str) -> bool:
        """Whether the node of that number still runs."""
        try:
            lock = os.open(self.folder / "scratch" / node / ".lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    # Buckets

    def create_bucket(self, bucket: str, props: BucketProps = BucketProps()) -> None:
        """Make it, whole at once.

        Raises:
            BucketExistsError: It is there already.
        """
        made = self._scratch_path()
        made.mkdir()
        created_ns = time.time_ns()
        (made / _BUCKET_FILE).write_text(json.dumps({"id": created_ns, "created_ns": created_ns}))
        (made / _PROPS_FILE).write_text(json.dumps(asdict(props)))
        try:
            made.rename(self._buckets / bucket)  # fails on a folder that is not empty, and a bucket never is
        except OSError as exc:
            shutil.rmtree(made, ignore_errors=True)
            if (self._buckets / bucket).is_dir():
                raise BucketExistsError(bucket) from exc
            raise

    def destroy_bucket(self, bucket: str) -> None:
        """Take it away with all it holds, at once; the files go afterwards."""
        dropped = self._scratch_path()
        try:
            (self._buckets / bucket).rename(dropped)
        except FileNotFoundError as exc:
            raise BucketMissingError(bucket) from exc
        shutil.rmtree(dropped, ignore_errors=True)

    def list_buckets(self) -> list[str]:
        """Their names, in order."""
        return sorted(path.name for path in self._buckets.iterdir() if path.is_dir())

    def bucket_info(self, bucket: str) -> tuple[int, int]:
        """Its number and its time of creation in nanoseconds."""
        try:
            info = json.loads((self._buckets / bucket / _BUCKET_FILE).read_bytes())
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise BucketMissingError(bucket) from exc
        return int(info["id"]), int(info["created_ns"])

    def bucket_props(self, bucket: str) -> BucketProps:
        """What was chosen of it; raises ``BucketMissingError``."""
        try:
            return BucketProps(**json.loads((self._buckets / bucket / _PROPS_FILE).read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            self.bucket_info(bucket)
            return BucketProps()  # a bucket from before there was a choice

    def set_bucket_props(self, bucket: str, props: BucketProps) -> None:
        """Choose anew; what is stored already stays as it is. Raises ``BucketMissingError``."""
        temporary = self._scratch_path()
        temporary.write_text(json.dumps(asdict(props)))
        try:
            temporary.rename(self._buckets / bucket / _PROPS_FILE)
        except (FileNotFoundError, NotADirectoryError) as exc:
            temporary.unlink()
            raise BucketMissingError(bucket) from exc

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
        """Store an object; nothing of it is seen before all of it is there.

        Args:
            bucket: Where.
            name: Its name.
            chunks: Its bytes. An exception from here leaves things as they were.
            checksum: If given, what the bytes' checksum must be. What is stored is the bucket's own.
            checksum_type: Of ``checksum``.

        Raises:
            BucketMissingError: No such bucket, or none any more when the bytes were there.
            ChecksumMismatchError: With the type and the two checksums.
            OSError: No room, or the file system refused.
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
                    raise ChecksumMismatchError(checksum_type, checksum, found)
                try:
                    with _locked(self._buckets / bucket / _BUCKET_FILE):
                        version = self._version(bucket, name) + 1
                        meta = ObjectMeta(
                            name=name,
                            num_bytes=num_bytes,
                            checksum=digest.hexdigest(),
                            checksum_type=own_type,
                            version=version,
                            atime_ns=time.time_ns(),
                        )
                        text = json.dumps(asdict(meta)).encode()
                        file.write(text + _FOOTER.pack(len(text), _MARK))
                        file.close()  # the last bytes must be accepted before the rename
                        temporary.rename(self._path(bucket, name))
                except FileNotFoundError as exc:
                    raise BucketMissingError(bucket) from exc
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return meta

    def open(self, bucket: str, name: str) -> tuple[BinaryIO, ObjectMeta]:
        """The object's file, whose first ``num_bytes`` are the object, and its metadata. It stays readable if replaced.

        Raises:
            ObjectMissingError: No such object.
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

    def head(self, bucket: str, name: str) -> ObjectMeta:
        """The object's metadata."""
        file, meta = self.open(bucket, name)
        file.close()
        return meta

    def shard(self, bucket: str, name: str) -> InputShard:
        """The object as a tar to be read; raises ``ObjectMissingError``."""
        return InputShard(name=name, path=self._path(bucket, name), num_bytes=self.head(bucket, name).num_bytes)

    def delete(self, bucket: str, name: str) -> None:
        """Take it away; raises ``ObjectMissingError``."""
        try:
            self._path(bucket, name).unlink()
        except FileNotFoundError as exc:
            raise ObjectMissingError(bucket, name) from exc

    def list_names(self, bucket: str, *, prefix: str = "", after: str = "") -> list[str]:
        """Names of the objects that begin with ``prefix`` and come after ``after``, in order of code points."""
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
        """Metadata of the objects that are still there."""
        for name in names:
            try:
                yield self.head(bucket, name)
            except ObjectMissingError:
                continue

    def disk_bytes(self) -> int:
        """Size of the file system."""
        return shutil.disk_usage(self.folder).total

    # Jobs

    def write_job(self, job: str, status: dict[str, Any]) -> None:
        """Replace what is known of a job."""
        temporary = self._scratch_path()
        temporary.write_text(json.dumps(status))
        temporary.rename(self._jobs / f"{job}.json")

    def read_job(self, job: str) -> dict[str, Any] | None:
        """What is known of a job; None for one that never was."""
        if not re.fullmatch(r"[A-Za-z0-9_-]+", job):
            return None
        try:
            status: dict[str, Any] = json.loads((self._jobs / f"{job}.json").read_bytes())
        except FileNotFoundError:
            return None
        return status

    def abort_job(self, job: str) -> None:
        """Ask whichever node runs it to stop."""
        (self._jobs / f"{job}.abort").touch()

    def is_job_aborted(self, job: str) -> bool:
        """Whether it was asked to stop."""
        return (self._jobs / f"{job}.abort").exists()

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
            try:
                descriptor = os.open(entry.path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                meta = _read_meta(descriptor)
            finally:
                os.close(descriptor)
            return None if meta is None else meta.name
        return None

    def _version(self, bucket: str, name: str) -> int:
        try:
            return self.head(bucket, name).version
        except ObjectMissingError:
            return 0


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


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
