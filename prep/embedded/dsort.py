"""Run dSort jobs on the embedded node, as exchanges (`prep.shuffle.exchange`) through the node's own API.

So a job writes the shards that `prep shuffle --engine exchange` writes for the same request, and leaves out files that
belong to no sample. The node answers 400 where AIS 4.9 closes the connection: for an unknown algorithm, a bad size or a
bad output template.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from dali_pipes.errors import DataError, PipesError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_names import Template
from dali_pipes.store.shard_set import ShardSet
from prep.embedded import wire
from prep.embedded.storage import BucketExistsError, ObjectMissingError, Storage
from prep.shuffle.contents import Contents, read_input
from prep.shuffle.dsort import DsortSpec, parse_spec
from prep.shuffle.exchange import Exchange
from prep.shuffle.key_map import KeyMap, parse_key_map
from prep.shuffle.plan import ShufflePlan, make_plan
from prep.shuffle.request import Request
from prep.workers import Workers

_NEVER = "0001-01-01T00:00:00Z"
_NO_STATS = {"total_ms": "0", "count": "0", "min_ms": "9223372036854775807", "max_ms": "0", "avg_ms": "0"}
_PHASES = ("local_extraction", "meta_sorting", "shard_creation")


class _AbortedError(Exception):
    """The job was asked to stop."""


def parse_job_spec(message: Mapping[str, Any]) -> DsortSpec:
    """Check a client's request; raises `RefusalError`."""
    fields = dict(message)
    algorithm = fields.get("algorithm")
    if isinstance(algorithm, dict):
        if algorithm.get("kind") == "md5":
            raise wire.unsupported("dSort by md5")
        if algorithm.get("kind") == "shuffle" and not algorithm.get("seed"):
            fields["algorithm"] = algorithm | {"seed": str(time.time_ns())}
    inputs = fields.get("input_format")
    inputs = inputs if isinstance(inputs, dict) else {}
    try:
        if isinstance(template := inputs.get("template"), str) and not len(Template.parse(template)):
            # A cluster takes a template without a range, or with half of one, and reads nothing.
            fields["input_format"] = inputs | {"template": template.replace("{", "")}
        spec = parse_spec(fields)
    except ValueError as exc:
        raise wire.RefusalError(400, f"[dsort] parse-spec: {exc}") from exc
    for bucket in (spec.source, spec.target):
        if bucket.provider != "ais":
            raise wire.unsupported(f"dSort of {bucket.provider}:// buckets")
        wire.check_bucket_name(bucket.name)
    if spec.dry_run:
        raise wire.unsupported("dSort with dry_run")
    for name in spec.outputs.ends() if spec.outputs is not None else ():
        wire.check_object_name(f"{name}{spec.output_extension}")
    return spec


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

    spec: DsortSpec
    storage: Storage
    node: str
    """The target's name in statuses."""
    endpoint: str
    """Address of the node; key maps are read from there only."""
    job: str = field(default_factory=lambda: f"srt-{os.urandom(5).hex()}")
    num_extracted: int = 0
    extracted_bytes: int = 0
    num_files: int = 0
    num_planned: int = 0
    num_created: int = 0
    error: str = ""
    _phases: dict[str, _Phase] = field(default_factory=lambda: {name: _Phase() for name in _PHASES})

    def start(self) -> str:
        """Start the thread and return the job's id."""
        self.storage.bucket_info(self.spec.source.name)
        with suppress(BucketExistsError):
            self.storage.create_bucket(self.spec.target.name)  # as AIS does
        self._save()
        threading.Thread(target=self._run, name=self.job, daemon=True).start()
        return self.job

    def _run(self) -> None:
        try:
            self._sort()
        except _AbortedError:
            self.error = f"t[{self.node}]: [dsort] {self.job} aborted"
        except (PipesError, ValueError, OSError) as exc:
            self.error = str(exc)
        except Exception as exc:
            # A bug. The client that waits for the job must hear of it, too.
            self.error = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            self._save()

    def _sort(self) -> None:
        with self._phase("local_extraction"):
            contents, request = self._extract()
        with self._phase("meta_sorting"):
            plan = self._plan(request, contents) if request is not None and contents is not None else None
        with self._phase("shard_creation"), Workers(1) as workers:
            if plan is None:
                return
            with Exchange(plan, workers) as exchange:
                for output in plan.outputs:
                    self._check_aborted()
                    exchange.write([output])
                    self.num_created += 1
                    self._save()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._check_aborted()
        phase = self._phases[name]
        phase.started_ns = time.time_ns()
        self._save()
        yield
        phase.ended_ns = time.time_ns()

    def _extract(self) -> tuple[Contents | None, Request | None]:
        """The contents of the input shards that exist, as AIS does by default, and the request to shuffle them."""
        spec = self.spec
        source, target = (AisStore(self.endpoint, bucket.name) for bucket in (spec.source, spec.target))
        inputs = spec.inputs
        names = (f"{stem}{spec.input_extension}" for stem in inputs.names()) if isinstance(inputs, Template) else inputs
        existing = frozenset(self.storage.list_names(spec.source.name))
        shards = ShardSet(store=source, names=tuple(name for name in names if name in existing))
        if not shards.names:
            return None, None
        request = Request(
            shards,
            target=None if spec.target == spec.source else target,
            outputs=spec.outputs,
            algorithm=spec.algorithm,
            shard_bytes=spec.shard_bytes,
            mapped=self._key_map() if spec.ekm_file else None,
            extension=spec.output_extension,
            engine="exchange",
        )
        with Workers(1) as workers:
            contents = read_input(request, shards.entries(), workers)
        self.num_extracted = len(shards.names)
        self.extracted_bytes, self.num_files = int(contents.num_bytes.sum()), int(contents.num_members.sum())
        return contents, request

    def _plan(self, request: Request, contents: Contents) -> ShufflePlan:
        try:
            plan = make_plan(request, contents)
        except ValueError as exc:
            num_names = len(self.spec.outputs) if self.spec.outputs is not None else 0  # AIS's words:
            raise DataError(f"number of shards to be created exceeds expected number of shards ({num_names})") from exc
        is_one_bucket = self.spec.source == self.spec.target
        if replaced := set(plan.names).intersection(request.shards.names if is_one_bucket else ()):
            raise DataError(f"output shard '{min(replaced)}' is an input too; choose another output_format")
        self.num_planned = len(plan.outputs)
        return plan

    def _key_map(self) -> KeyMap:
        url = self.spec.ekm_file
        path = urlsplit(url).path.split("/", 4)
        if not url.startswith(f"{self.endpoint}/v1/objects/") or len(path) < 5:
            raise DataError(f'the embedded node reads an ekm file from its own buckets only, not from "{url}"')
        try:
            data = self.storage.read(path[3], unquote(path[4]))
        except ObjectMissingError as exc:
            raise DataError(f'unexpected status code (404) when requesting ekm file from "{url}"') from exc
        return parse_key_map(
            data, where=f"key map '{url}'", separator=self.spec.ekm_file_sep, extension=self.spec.output_extension
        )

    def _check_aborted(self) -> None:
        if self.storage.is_job_aborted(self.job):
            raise _AbortedError

    def _save(self) -> None:
        self.storage.write_job(self.job, {self.node: self._json()})

    def _json(self) -> dict[str, Any]:
        failed = bool(self.error)
        done = failed or bool(self._phases["shard_creation"].ended_ns)
        extraction, sorting, creation = (phase.json() for phase in self._phases.values())
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
        phases = zip(names, self._phases.values(), strict=True)
        return {
            "id": self.job,
            "src-bck": wire.bucket_json(self.spec.source.name),
            "dst-bck": wire.bucket_json(self.spec.target.name),
            "started_time": extraction["started_time"],
            "finish_time": creation["end_time"],
            **{name: phase.json()["elapsed"] for name, phase in phases if phase.started_ns},
            "loc-objs": str(self.num_extracted),
            "loc-bytes": str(self.extracted_bytes),
            "Metrics": metrics,
            "aborted": failed,
            "archived": done,
        }


def _timestamp(time_ns: int) -> str:
    if not time_ns:
        return _NEVER
    return f"{datetime.fromtimestamp(time_ns // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.{time_ns % 10**9:09}Z"
