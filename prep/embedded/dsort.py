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
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from dali_pipes.errors import DataError, PipesError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_names import Template
from dali_pipes.store.shard_set import ShardSet
from prep.embedded import wire
from prep.embedded.storage import BucketExistsError, ObjectMissingError, RefusalError, Storage
from prep.shuffle.contents import Contents, read_input
from prep.shuffle.exchange import Exchange
from prep.shuffle.key_map import KeyMap, parse_key_map
from prep.shuffle.plan import ShufflePlan, make_plan
from prep.shuffle.request import DsortSpec, Request, parse_spec
from prep.workers import Workers

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
        raise RefusalError(400, f"[dsort] parse-spec: {exc}") from exc
    for bucket in (spec.source, spec.target):
        if bucket.provider != "ais":
            raise wire.unsupported(f"dSort of {bucket.provider}:// buckets")
        if (bucket.namespace or {}).get("uuid"):
            raise wire.unsupported("dSort of another cluster's bucket")
        wire.bucket_in((bucket.namespace or {}).get("name", ""), bucket.name)
    if spec.dry_run:
        raise wire.unsupported("dSort with dry_run")
    for name in spec.outputs.ends() if spec.outputs is not None else ():
        wire.check_object_name(f"{name}{spec.options['extension']}")
    return spec


class SortJob:
    """Runs a spec in a thread of its own; ``node`` is the target's name in errors."""

    def __init__(self, spec: DsortSpec, storage: Storage, node: str, *, endpoint: str) -> None:
        self._spec, self._storage, self._node, self._endpoint = spec, storage, node, endpoint
        self.id = f"srt-{os.urandom(5).hex()}"
        self.is_aborted = False
        self._num_extracted = self._extracted_bytes = self._num_files = self._num_planned = self._num_created = 0
        self._error = ""
        self._phases = {name: [0, 0] for name in _PHASES}  # when it began and ended, in nanoseconds

    @property
    def is_done(self) -> bool:
        return bool(self._error or self._phases["shard_creation"][1])

    def start(self) -> None:
        self._storage.created_ns(self._spec.source.bucket)
        with suppress(BucketExistsError):
            self._storage.create_bucket(self._spec.target.bucket)  # as AIS does
        threading.Thread(target=self._run, name=self.id, daemon=True).start()

    def _run(self) -> None:
        try:
            self._sort()
        except (_AbortedError, PipesError, ValueError, OSError) as exc:
            self._error = str(exc)
        except Exception as exc:
            # A bug. The client that waits for the job must hear of it, too.
            self._error = f"{type(exc).__name__}: {exc}"
            raise

    def _sort(self) -> None:
        plan = None
        with self._phase("local_extraction"):
            request = self._request()
            if request is not None:
                with Workers(1) as workers:
                    contents = read_input(request, request.shards.entries(), workers)
                self._num_extracted = len(request.shards.names)
                self._extracted_bytes = int(contents.samples["num_bytes"].sum())
                self._num_files = int(contents.samples["num_members"].sum())
        with self._phase("meta_sorting"):
            if request is not None:
                plan = self._plan(request, contents)
                self._num_planned = len(plan.outputs)
        with self._phase("shard_creation"):
            if plan is not None:
                with Workers(1) as workers, Exchange(plan, workers) as exchange:
                    for output in plan.outputs:
                        self._check_aborted()
                        exchange.write([output])
                        self._num_created += 1

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._check_aborted()
        self._phases[name][0] = time.time_ns()
        yield
        self._phases[name][1] = time.time_ns()

    def _check_aborted(self) -> None:
        if self.is_aborted:
            raise _AbortedError(f"t[{self._node}]: [dsort] {self.id} aborted")

    def _request(self) -> Request | None:
        """The request for the input shards that exist, as AIS does by default; ``None`` if there are none."""
        spec = self._spec
        source, target = (AisStore(self._endpoint, bucket.bucket) for bucket in (spec.source, spec.target))
        existing = frozenset(self._storage.list_names(spec.source.bucket))
        names = tuple(name for name in spec.input_names if name in existing)
        if not names:
            return None
        return Request(
            ShardSet(store=source, names=names),
            target=None if spec.target == spec.source else target,
            outputs=spec.outputs,
            mapped=self._key_map() if spec.ekm_file else None,
            engine="exchange",
            **spec.options,
        )

    def _plan(self, request: Request, contents: Contents) -> ShufflePlan:
        try:
            plan = make_plan(request, contents)
        except ValueError as exc:
            num_names = len(self._spec.outputs) if self._spec.outputs is not None else 0  # AIS's words:
            raise DataError(f"number of shards to be created exceeds expected number of shards ({num_names})") from exc
        if request.target is None and (replaced := set(plan.names).intersection(request.shards.names)):
            raise DataError(f"output shard '{min(replaced)}' is an input too; choose another output_format")
        return plan

    def _key_map(self) -> KeyMap:
        spec, url = self._spec, self._spec.ekm_file
        path, namespace = urlsplit(url).path.split("/", 4), parse_qs(urlsplit(url).query).get("namespace", [""])[0]
        if not url.startswith(f"{self._endpoint}/v1/objects/") or len(path) < 5:
            raise DataError(f'the embedded node reads an ekm file from its own buckets only, not from "{url}"')
        try:
            data = self._storage.read(wire.bucket_in(namespace, path[3]), unquote(path[4]))
        except ObjectMissingError as exc:
            raise DataError(f'unexpected status code (404) when requesting ekm file from "{url}"') from exc
        where = f"key map '{url}'"
        return parse_key_map(data, where=where, separator=spec.ekm_file_sep, extension=spec.options["extension"])

    def status(self) -> dict[str, Any]:
        """The status as AIS reports it; numbers come as text, except durations."""
        phases = {name: _phase_status(*times) for name, times in self._phases.items()}
        phases["local_extraction"] |= {
            "total_count": str(len(self._spec.inputs)),
            "extracted_count": str(self._num_extracted),
            "extracted_size": str(self._extracted_bytes),
            "extracted_record_count": str(self._num_files),
            "extracted_to_disk_count": "0",
            "extracted_to_disk_size": "0",
        }
        phases["shard_creation"] |= {
            "to_create": str(self._num_planned),
            "created_count": str(self._num_created),
            "moved_shard_count": "0",
        }
        ended = {"aborted": bool(self._error), "archived": self.is_done}
        errors = {"errors": [self._error]} if self._error else {}
        return {
            "id": self.id,
            "src-bck": wire.bucket_json(self._spec.source.bucket),
            "dst-bck": wire.bucket_json(self._spec.target.bucket),
            "started_time": phases["local_extraction"]["started_time"],
            "finish_time": phases["shard_creation"]["end_time"],
            "loc-objs": str(self._num_extracted),
            "loc-bytes": str(self._extracted_bytes),
            "Metrics": {**phases, "description": self._spec.options["description"], **errors, **ended},
            **ended,
        }


def _phase_status(started_ns: int, ended_ns: int) -> dict[str, Any]:
    return {
        "started_time": _timestamp(started_ns),
        "end_time": _timestamp(ended_ns),
        "elapsed": (ended_ns or time.time_ns()) - started_ns if started_ns else 0,
        "running": bool(started_ns and not ended_ns),
        "finished": bool(ended_ns),
    }


def _timestamp(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat() if time_ns else "0001-01-01T00:00:00Z"
