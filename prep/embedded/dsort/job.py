"""Run a dSort job: read the shards that a spec names, write new ones to a bucket, and report progress as AIS does."""

import gzip
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

from dali_pipes.errors import DataError
from dali_pipes.formats.names import split_key
from dali_pipes.formats.tar_reader import BLOCK
from prep.embedded import wire
from prep.embedded.dsort.reshard import (
    FileHead,
    InputShard,
    OutputShard,
    StoredSample,
    arranged,
    plan,
    scan,
    tar_chunks,
)
from prep.embedded.dsort.spec import SortSpec, with_extension
from prep.embedded.storage import BucketExistsError, BucketMissingError, ObjectMissingError, Storage
from prep.shuffle.key_map import cut_by_map, parse_key_map
from prep.shuffle.order import parse_content

_NEVER = "0001-01-01T00:00:00Z"
_GZIP = 16 + zlib.MAX_WBITS  # makes zlib write gzip's format
_NO_STATS = {"total_ms": "0", "count": "0", "min_ms": "9223372036854775807", "max_ms": "0", "avg_ms": "0"}


class _AbortedError(Exception):
    """The job was asked to stop."""


@dataclass
class _Phase:
    started_ns: int = 0
    ended_ns: int = 0

    def json(self) -> dict[str, Any]:
        end_ns = self.ended_ns or time.time_ns()
        return {
            "started_time": _timestamp(self.started_ns),
            "end_time": _timestamp(self.ended_ns),
            "elapsed": end_ns - self.started_ns if self.started_ns else 0,
            "running": bool(self.started_ns and not self.ended_ns),
            "finished": bool(self.ended_ns),
        }


@dataclass
class SortJob:
    """Runs a spec in a thread of its own, and writes its status to the storage at every step."""

    spec: SortSpec
    storage: Storage
    node: str
    """The target's name in statuses."""
    endpoint: str = ""
    """Address of the node; key maps are read from there only."""
    job: str = field(default_factory=lambda: f"srt-{os.urandom(5).hex()}")
    num_extracted: int = 0
    extracted_bytes: int = 0
    num_files: int = 0
    num_planned: int = 0
    num_created: int = 0
    error: str = ""
    _extraction: _Phase = field(default_factory=_Phase)
    _sorting: _Phase = field(default_factory=_Phase)
    _creation: _Phase = field(default_factory=_Phase)

    def start(self) -> str:
        """Start the thread and return the job's id."""
        self.storage.bucket_info(self.spec.source)
        if self.spec.target not in self.storage.list_buckets():
            with suppress(BucketExistsError):
                self.storage.create_bucket(self.spec.target)  # as AIS does
        self._save()
        threading.Thread(target=self._run, name=self.job, daemon=True).start()
        return self.job

    def _run(self) -> None:
        try:
            scratch = self.storage.folder / "scratch" / self.storage.node
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                with self._phase(self._extraction):
                    samples = self._extract(Path(folder))
                with self._phase(self._sorting):
                    outputs = self._plan(samples)
                with self._phase(self._creation):
                    for output in outputs:
                        self.storage.write(self.spec.target, output.name, self._chunks(output))
                        self.num_created += 1
                        self._save()
        except _AbortedError:
            self.error = f"t[{self.node}]: [dsort] {self.job} aborted"
        except BucketMissingError as exc:
            self.error = f'bucket "ais://{exc.args[0]}" does not exist'
        except (DataError, OSError, wire.RefusalError) as exc:
            self.error = str(exc)
        except Exception as exc:
            # A bug. The client that waits for the job must hear of it, too.
            self.error = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            self._save()

    @contextmanager
    def _phase(self, phase: _Phase) -> Iterator[None]:
        phase.started_ns = time.time_ns()
        self._save()
        yield
        phase.ended_ns = time.time_ns()

    def _extract(self, folder: Path) -> list[StoredSample]:
        samples: list[StoredSample] = []
        for name in self.spec.input_names():
            self._check_aborted()
            try:
                shard = self.storage.shard(self.spec.source, name)
            except ObjectMissingError:
                continue  # as AIS does by default
            if self.spec.input_extension != ".tar":
                shard = self._decompress(name, folder / str(self.num_extracted))
            found = scan(shard)
            samples += found
            self.num_extracted += 1
            self.extracted_bytes += sum(sample.num_bytes for sample in found)
            self.num_files += sum(len(sample.files) for sample in found)
            self._save()
        return samples

    def _decompress(self, name: str, path: Path) -> InputShard:
        file, meta = self.storage.open(self.spec.source, name)
        try:
            packed_file = cast("BinaryIO", FileHead(file, meta.num_bytes))
            with file, path.open("wb") as plain, gzip.GzipFile(mode="rb", fileobj=packed_file) as packed:
                shutil.copyfileobj(packed, plain, 1 << 20)
        except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
            raise DataError(f"shard '{name}' is not a complete gzip file: {exc}") from exc
        return InputShard.of(name, path, path.stat())

    def _plan(self, samples: list[StoredSample]) -> list[OutputShard]:
        algorithm, extension = self.spec.algorithm, self.spec.output_extension
        contents = None
        if algorithm.kind == "content":
            contents = [self._content(sample) for sample in samples if sample.has_key]
        if self.spec.outputs is None:
            outputs = self._plan_mapped(arranged(samples, algorithm=algorithm, contents=contents))
        else:
            names = (with_extension(name, extension) for name in self.spec.outputs.names())
            size = self.spec.output_shard_size or max(1, -(-self.extracted_bytes // len(self.spec.outputs)))
            outputs = plan(samples, names=names, output_shard_size=size, algorithm=algorithm, contents=contents)
        if self.spec.source == self.spec.target:
            inputs = {sample.shard.name for sample in samples}
            for output in outputs:
                if output.name in inputs:
                    raise DataError(f"output shard '{output.name}' is an input too; choose another output_format")
        self.num_planned = len(outputs)
        return outputs

    def _content(self, sample: StoredSample) -> int | float | bytes:
        """Return the value that a sample is sorted by."""
        data = None
        for file in sample.files:
            parts = split_key(file.name)
            if parts is not None and parts[1].lower() == self.spec.algorithm.component.lower():
                with sample.shard.open() as source:
                    data = b"".join(file.read(source, sample.shard))
        where = f"shard '{sample.shard.name}', key '{sample.key}'"
        return parse_content(data, algorithm=self.spec.algorithm, where=where)

    def _plan_mapped(self, samples: Sequence[StoredSample]) -> list[OutputShard]:
        extension = self.spec.output_extension
        key_map = parse_key_map(
            self._read_key_map(),
            where=f"key map '{self.spec.key_map}'",
            separator=self.spec.key_map_separator,
            extension=extension,
        )
        for template in key_map.outputs:
            for name in template.ends():
                wire.check_object_name(with_extension(name, extension))
        groups = key_map.assign([sample.files[0].name for sample in samples])
        if -1 in groups:
            name = samples[groups.index(-1)].files[0].name
            raise DataError(f'error on lookup record "{name}" in external key map: no match found')
        sizes = [sample.num_bytes + BLOCK * len(sample.files) for sample in samples]
        return [
            OutputShard(with_extension(stem, extension), [samples[at] for at in positions])
            for _, stem, positions in cut_by_map(key_map, groups, sizes, target=self.spec.output_shard_size)
        ]

    def _read_key_map(self) -> bytes:
        url = self.spec.key_map
        path = urlsplit(url).path.split("/", 4)
        if not self.endpoint or not url.startswith(f"{self.endpoint}/v1/objects/") or len(path) < 5:
            raise DataError(f'the embedded node reads an ekm file from its own buckets only, not from "{url}"')
        try:
            return self.storage.read(path[3], unquote(path[4]))
        except ObjectMissingError as exc:
            raise DataError(f'unexpected status code (404) when requesting ekm file from "{url}"') from exc

    def _chunks(self, output: OutputShard) -> Iterator[bytes]:
        packer = None if self.spec.output_extension == ".tar" else zlib.compressobj(wbits=_GZIP)
        for chunk in tar_chunks(output.samples):
            self._check_aborted()
            yield chunk if packer is None else packer.compress(chunk)
        if packer is not None:
            yield packer.flush()

    def _check_aborted(self) -> None:
        if self.storage.is_job_aborted(self.job):
            raise _AbortedError

    def _save(self) -> None:
        self.storage.write_job(self.job, {"runner": self.storage.node, "targets": {self.node: self._json()}})

    def _json(self) -> dict[str, Any]:
        failed = bool(self.error)
        done = failed or bool(self._creation.ended_ns)
        phases = (self._extraction, self._sorting, self._creation)
        extraction, sorting, creation = (phase.json() for phase in phases)
        metrics = {
            "local_extraction": extraction
            | {
                "total_count": str(len(self.spec.inputs)),
                "extracted_count": str(self.num_extracted),
                "extracted_size": str(self.extracted_bytes),
                "extracted_record_count": str(self.num_files),
                "extracted_to_disk_count": "0",
                "extracted_to_disk_size": "0",
            },
            "meta_sorting": sorting | {"sent_stats": _NO_STATS, "recv_stats": _NO_STATS},
            "shard_creation": creation
            | {
                "to_create": str(self.num_planned),
                "created_count": str(self.num_created),
                "moved_shard_count": "0",
            },
            "description": self.spec.description,
            **({"errors": [self.error]} if failed else {}),
            "aborted": failed,
            "archived": done,
        }
        names = ("started_meta_sorting", "started_shard_creation", "finished_shard_creation")
        return {
            "id": self.job,
            "src-bck": wire.bucket_json(self.spec.source),
            "dst-bck": wire.bucket_json(self.spec.target),
            "started_time": extraction["started_time"],
            "finish_time": creation["end_time"],
            **{name: phase.json()["elapsed"] for name, phase in zip(names, phases, strict=True) if phase.started_ns},
            "loc-objs": str(self.num_extracted),
            "loc-bytes": str(self.extracted_bytes),
            "Metrics": metrics,
            "aborted": failed,
            "archived": done,
        }


def read_status(storage: Storage, job: str) -> dict[str, Any] | None:
    """Return a job's status by target, as ``GET /v1/sort?uuid=`` answers, or ``None`` for an unknown job.

    A job whose node ended before the job is reported as aborted.
    """
    known = storage.read_job(job)
    if known is None:
        return None
    targets: dict[str, Any] = known["targets"]
    for target, status in targets.items():
        if not status["archived"] and not storage.is_alive(known["runner"]):
            for part in (status, status["Metrics"]):
                part |= {"aborted": True, "archived": True}
            status["Metrics"]["errors"] = [f"t[{target}]: the node that ran [dsort] {job} has gone"]
    return targets


def _timestamp(time_ns: int) -> str:
    if not time_ns:
        return _NEVER
    return f"{datetime.fromtimestamp(time_ns // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.{time_ns % 10**9:09}Z"
