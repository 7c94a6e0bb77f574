"""Run ETLs in the embedded node: each transform in a worker process.

A cluster starts an image in pods. The node ignores the image and accepts one command, ``python -m prep.etl TRANSFORM``.
It runs the transform with its own interpreter, as its own user. So ETL is off unless it is allowed. The processes end
with the node, however it ends. Jobs and ETLs are known to this process alone, and end with it.
"""

import os
import threading
from datetime import UTC, datetime
from functools import cache
from typing import Any

from dali_pipes.errors import DataError, PipesError
from prep.embedded import wire
from prep.embedded.storage import RefusalError, Storage
from prep.etl.transforms import load_transform
from prep.workers import Report, Workers

_COMMAND = ["python", "-m", "prep.etl"]


class _Etl:
    """A transform in a process of its own, which does one shard at a time.

    Raises `ValueError` if there is no such transform, `PipesError` if the process ended.
    """

    def __init__(self, name: str, message: dict[str, Any], transform: str) -> None:
        self.name, self.message, self.is_running = name, message, True
        self._transform, self._lock = transform, threading.Lock()
        self._workers = Workers(1, isolated=True, setup=_close_off, advice="start the ETL again")
        try:
            self.transform(b"", "")  # without a path, it is only imported
        except BaseException:
            self.close()
            raise

    def transform(self, data: bytes, path: str) -> bytes:
        """Return the transformed shard, whose path is ``BUCKET/NAME``; also raises `DataError`."""
        with self._lock:
            task = self._transform, data, path
            (made,) = self._workers.map(_transform, [task], name=lambda _: f"ETL[{self.name}]")
            return made

    def close(self) -> None:
        """End the process, also within a shard. Can be called twice."""
        self.is_running = False
        self._workers.close()


# In the worker


def _close_off() -> None:
    """Take the cluster's tokens from the transform, which asks no cluster; send what it prints to stderr."""
    os.dup2(2, 1)
    for name in [name for name in os.environ if name.startswith("AIS_")]:
        del os.environ[name]


def _transform(task: tuple[str, bytes, str], report: Report) -> bytes:
    name, data, path = task
    transform = _load(name)
    return transform.transform(data, path) if path else b""


_load = cache(load_transform)

# In the node


class Etls:
    """The ETLs of one node. Thread-safe; methods raise `RefusalError`. ``only`` is the one transform that may run."""

    def __init__(self, storage: Storage, *, endpoint: str, node: str, only: str | None = None) -> None:
        self._storage, self._endpoint, self._node, self._only = storage, endpoint, node, only
        self._lock = threading.Lock()
        self._etls: dict[str, _Etl] = {}
        self._jobs: dict[str, dict[str, Any]] = {}  # id -> status, as AIS reports it
        self._object_errors: dict[str, list[dict[str, Any]]] = {}  # of a job

    def close(self) -> None:
        with self._lock:
            etls, self._etls = list(self._etls.values()), {}
        for etl in etls:
            etl.close()

    def start(self, message: dict[str, Any]) -> str:
        """Do ``PUT /v1/etl``: start the transform, and return an id when it can be used."""
        name = wire.field_of(message, "name", str)
        command = wire.field_of(wire.field_of(message, "runtime", dict), "command", list)
        if not name or len(command) != len(_COMMAND) + 1 or command[:-1] != _COMMAND:
            raise wire.unsupported(f"ETL '{name}' with the command {command} (here: {' '.join(_COMMAND)} TRANSFORM)")
        if self._only is not None and command[-1] != self._only:
            raise RefusalError(403, f"ETL[{name}]: this node runs the transform '{self._only}' only")
        with self._lock:  # held during the start, so that a second ETL with this name is refused
            if name in self._etls:
                raise RefusalError(409, f"ETL[{name}] already exists", "ErrETLAlreadyExists")
            try:
                self._etls[name] = _Etl(name, message, str(command[-1]))
            except (ValueError, PipesError) as exc:
                raise RefusalError(400, f"ETL[{name}] did not start: {exc}") from None
        return os.urandom(6).hex()

    def stop(self, name: str) -> None:
        self._find(name).close()

    def delete(self, name: str) -> None:
        if self._find(name).is_running:
            raise RefusalError(400, f"ETL[{name}] is running: stop it first")
        with self._lock:
            self._etls.pop(name, None)

    def infos(self) -> list[dict[str, Any]]:
        with self._lock:
            etls = list(self._etls.values())
        return [{"id": etl.name, "stage": "Running" if etl.is_running else "Aborted", "xaction_id": ""} for etl in etls]

    def details(self, name: str, *, job: str) -> dict[str, Any]:
        """Describe an ETL, and the errors of one of its jobs."""
        init = {key: self._find(name).message.get(key) for key in ("name", "communication", "runtime")}
        return {"init_msg": init, "obj_errors": self._object_errors.get(job, [])}

    def transform(self, name: str, bucket: str, object_name: str) -> bytes:
        etl = self._find(name)
        if not etl.is_running:  # for a target, it does not exist
            raise self._missing(name)
        data = self._storage.read(bucket, object_name)
        try:
            return etl.transform(data, f"{bucket}/{object_name}")
        except DataError as exc:
            raise RefusalError(422, str(exc)) from None
        except (PipesError, OSError, ValueError) as exc:  # it crashed, or was stopped meanwhile
            raise RefusalError(502, f"ETL[{name}] does not answer: {exc}") from None

    def start_job(self, bucket: str, value: dict[str, Any]) -> str:
        """Do the action ``etl-listrange``: start a job, and return its id."""
        names = wire.field_of(value, "objnames", list)
        if not names or value.get("pipeline") or value.get("dry_run") or value.get("ext"):
            raise wire.unsupported("an ETL job that is not a list of objects for one ETL, with their names kept")
        to = wire.field_of(value, "tobck", dict)
        to_bucket = wire.bucket_in(str((to.get("namespace") or {}).get("name", "")), str(to.get("name", "")))
        self._storage.bucket_props(bucket), self._storage.bucket_props(to_bucket)
        prepend = wire.field_of(value, "prepend", str)
        for name in names:
            wire.check_object_name(f"{prepend}{name}")
        etl = self._find(wire.field_of(value, "id", str))
        job: dict[str, Any] = {
            "id": os.urandom(6).hex(),
            "kind": "etl-listrange",
            "start-time": datetime.now(UTC).isoformat(),
            "src-bck": wire.bucket_json(bucket),
            "dst-bck": wire.bucket_json(to_bucket),
            "stats": {"loc-objs": 0, "loc-bytes": 0},
            "aborted": False,
            "abort-err": "",
            "is_idle": False,
        }
        self._jobs[job["id"]] = job
        objects = [(name, f"{prepend}{name}") for name in names]
        threading.Thread(target=self._run_job, args=(job, etl.name, bucket, to_bucket, objects), daemon=True).start()
        return str(job["id"])

    def _run_job(
        self, job: dict[str, Any], etl: str, bucket: str, to_bucket: str, objects: list[tuple[str, str]]
    ) -> None:
        for name, to_name in objects:
            try:
                data = self.transform(etl, bucket, name)
                self._storage.write(to_bucket, to_name, [data])
            except (RefusalError, OSError) as exc:
                status = exc.status if isinstance(exc, RefusalError) else 507
                self._object_errors[job["id"]] = [{"obj_name": name, "msg": str(exc), "ecode": status}]
                job |= {"aborted": True, "abort-err": str(exc)}  # the job stops here, as AIS's default is
                break
            job["stats"]["loc-objs"] += 1
            job["stats"]["loc-bytes"] += len(data)
        job["is_idle"] = True

    def snapshots(self, job_id: str) -> dict[str, list[dict[str, Any]]]:
        if job_id not in self._jobs:
            raise RefusalError(404, f'xaction "{job_id}" does not exist', "ErrNotFound")
        return {self._node: [self._jobs[job_id]]}

    def _find(self, name: str) -> _Etl:
        with self._lock:
            etl = self._etls.get(name)
        if etl is None:
            raise self._missing(name)
        return etl

    def _missing(self, name: str) -> RefusalError:
        return RefusalError(404, f'{name} does not exist - try starting new ETL with "{self._endpoint}/v1/etl"')
