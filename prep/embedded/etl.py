"""Run ETLs in the embedded node: start a server of `prep.etl` as a process, and send shards through it.

A cluster starts an image in pods. The node ignores the image and accepts one command, ``python -m prep.etl TRANSFORM``,
which it runs with its own interpreter, as its own user. So ETL is off unless it is allowed. The processes end with the
node, however it ends. They answer on Unix sockets in a folder that only this user can enter.

# Note [jobs]: each job has a thread. Only this process knows its jobs and ETLs, and they end with it.
"""

import contextlib
import http.client
import os
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from dali_pipes.processes.programs import own_program
from prep.embedded import wire
from prep.embedded.storage import BucketMissingError, ObjectMissingError, Storage
from prep.embedded.wire import RefusalError

_COMMAND = ["python", "-m", "prep.etl"]
_SOCKET = "etl"
_START_TIMEOUT_S = 30.0
_POLL_S = 0.05


class _SocketConnection(http.client.HTTPConnection):
    """HTTP on a Unix socket."""

    def __init__(self, path: str, *, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass
class _Etl:
    """A running transform."""

    name: str
    message: dict[str, Any]
    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]
    """It holds the server's socket."""

    def wait(self) -> None:
        """Wait until the server answers; raises `TimeoutError` if it ends or does not answer."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                if self._ask("GET", "/health", timeout_s=_START_TIMEOUT_S)[0].status == 200:
                    return
            time.sleep(_POLL_S)
        raise TimeoutError

    def transform(self, data: bytes, path: str) -> bytes:
        """Return the transformed shard; AIS calls this exchange hpush."""
        try:
            answer, body = self._ask("PUT", quote(f"/{path}"), data)
        except (OSError, http.client.HTTPException) as exc:
            raise RefusalError(502, f"ETL[{self.name}] does not answer: {exc}") from exc
        if answer.status != 200:
            raise RefusalError(answer.status, body.decode(errors="replace") or answer.reason)
        return body

    def _ask(
        self, method: str, path: str, data: bytes | None = None, *, timeout_s: float | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        with contextlib.closing(_SocketConnection(f"{self.folder.name}/{_SOCKET}", timeout=timeout_s)) as connection:
            connection.request(method, path, data)
            answer = connection.getresponse()
            return answer, answer.read()

    def close(self) -> None:
        """End the process. Can be called twice."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


@dataclass
class _Job:
    """A transform of several objects from bucket to bucket."""

    id: str
    bucket: str
    to_bucket: str
    etl: _Etl
    started: str
    num_objects: int = 0
    num_bytes: int = 0
    error: str = ""
    object_errors: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False


class Etls:
    """The ETLs of one node. Thread-safe; methods raise `RefusalError`.

    Args:
        storage: The objects.
        endpoint: The node's address, for messages.
        node: The target's name in the status of jobs.
        only: The one transform that may run; ``None`` for any.
    """

    def __init__(self, storage: Storage, *, endpoint: str, node: str, only: str | None = None) -> None:
        self._storage, self._endpoint, self._node, self._only = storage, endpoint, node, only
        self._lock = threading.Lock()
        self._etls: dict[str, _Etl] = {}
        self._jobs: dict[str, _Job] = {}

    def close(self) -> None:
        """End all ETLs. Can be called twice."""
        with self._lock:
            etls, self._etls = list(self._etls.values()), {}
        for etl in etls:
            etl.close()

    def start(self, message: dict[str, Any]) -> str:
        """Do ``PUT /v1/etl``: start the transform, and return an id when its server answers."""
        name = wire.field_of(message, "name", str)
        command = wire.field_of(wire.field_of(message, "runtime", dict), "command", list)
        if not name or len(command) != len(_COMMAND) + 1 or command[:-1] != _COMMAND:
            raise wire.unsupported(f"ETL '{name}' with the command {command} (here: {' '.join(_COMMAND)} TRANSFORM)")
        if self._only is not None and command[-1] != self._only:
            raise RefusalError(403, f"ETL[{name}]: this node runs the transform '{self._only}' only")
        with self._lock:  # held during the start, so that a second ETL with this name is refused
            if name in self._etls:
                raise RefusalError(409, f"ETL[{name}] already exists", "ErrETLAlreadyExists")
            self._etls[name] = self._run(name, str(command[-1]), message)
        return os.urandom(6).hex()

    def stop(self, name: str) -> None:
        """End an ETL's process; `delete` forgets it."""
        self._find(name).close()

    def delete(self, name: str) -> None:
        """Forget a stopped ETL."""
        etl = self._find(name)
        if etl.process.poll() is None:
            raise RefusalError(400, f"ETL[{name}] is running: stop it first")
        with self._lock:
            self._etls.pop(name, None)

    def infos(self) -> list[dict[str, Any]]:
        """List the ETLs, as the answer to ``GET /v1/etl``."""
        with self._lock:
            etls = list(self._etls.values())
        return [
            {"id": etl.name, "stage": "Running" if etl.process.poll() is None else "Aborted", "xaction_id": ""}
            for etl in etls
        ]

    def details(self, name: str, *, job: str) -> dict[str, Any]:
        """Describe an ETL, and the errors of one of its jobs."""
        init = {key: self._find(name).message.get(key) for key in ("name", "communication", "runtime")}
        failed = self._jobs[job].object_errors if job in self._jobs else []
        return {"init_msg": init, "obj_errors": failed}

    def transform(self, name: str, bucket: str, object_name: str) -> bytes:
        """Return an object's transformed bytes; also raises `ObjectMissingError`."""
        etl = self._find(name, to_run=True)
        return etl.transform(self._storage.read(bucket, object_name), f"{bucket}/{object_name}")

    def start_job(self, bucket: str, value: dict[str, Any]) -> str:
        """Do the action ``etl-listrange``: start a job, and return its id."""
        names = wire.field_of(value, "objnames", list)
        if not names or value.get("pipeline") or value.get("dry_run") or value.get("ext"):
            raise wire.unsupported("an ETL job that is not a list of objects for one ETL, with their names kept")
        to_bucket = str(wire.field_of(value, "tobck", dict).get("name", ""))
        self._storage.bucket_props(bucket), self._storage.bucket_props(to_bucket)
        prepend = wire.field_of(value, "prepend", str)
        for name in names:
            wire.check_object_name(f"{prepend}{name}")
        etl = self._find(wire.field_of(value, "id", str))
        job = _Job(os.urandom(6).hex(), bucket, to_bucket, etl, datetime.now(UTC).isoformat())
        self._jobs[job.id] = job
        threading.Thread(target=self._run_job, args=(job, names, prepend), daemon=True).start()
        return job.id

    def snapshots(self, job_id: str) -> dict[str, list[dict[str, Any]]]:
        """Return the progress of a job, by target."""
        job = self._jobs.get(job_id)
        if job is None:
            raise RefusalError(404, f'xaction "{job_id}" does not exist', "ErrNotFound")
        snapshot = {
            "id": job.id,
            "kind": "etl-listrange",
            "start-time": job.started,
            "src-bck": wire.bucket_json(job.bucket),
            "dst-bck": wire.bucket_json(job.to_bucket),
            "stats": {"loc-objs": job.num_objects, "loc-bytes": job.num_bytes},
            "aborted": bool(job.error),
            "abort-err": job.error,
            "is_idle": job.is_done,
        }
        return {self._node: [snapshot]}

    def _find(self, name: str, *, to_run: bool = False) -> _Etl:
        with self._lock:
            etl = self._etls.get(name)
        # For a target, a stopped ETL does not exist.
        if etl is None or (to_run and etl.process.poll() is not None):
            raise RefusalError(404, f'{name} does not exist - try starting new ETL with "{self._endpoint}/v1/etl"')
        return etl

    def _run(self, name: str, transform: str, message: dict[str, Any]) -> _Etl:
        folder = tempfile.TemporaryDirectory(prefix="dali-pipes-etl-")  # short: a socket's path has 107 bytes at most
        arguments = [transform, "--socket", f"{folder.name}/{_SOCKET}", "--owner", str(os.getpid())]
        # The server asks no cluster, so it gets no tokens and certificates of one.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AIS_")}
        with tempfile.TemporaryFile() as stderr:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                own_program("prep.etl", *arguments),
                stdin=subprocess.PIPE,  # closed when the node ends
                stdout=subprocess.DEVNULL,  # the framework's log
                stderr=stderr,
                env=environment | {"AIS_TARGET_URL": self._endpoint},
                start_new_session=True,
            )
            etl = _Etl(name, message, process, folder)
            try:
                etl.wait()
            except TimeoutError:
                etl.close()
                stderr.seek(0)
                said = stderr.read().decode(errors="replace").strip() or f"no answer in {_START_TIMEOUT_S:g} s"
                raise RefusalError(400, f"ETL[{name}] did not start: {said}") from None
        return etl

    def _run_job(self, job: _Job, names: list[str], prepend: str) -> None:
        for name in names:
            try:
                data = self.transform(job.etl.name, job.bucket, name)
                self._storage.write(job.to_bucket, f"{prepend}{name}", [memoryview(data)])
            except (RefusalError, ObjectMissingError, BucketMissingError, OSError) as exc:
                is_missing = isinstance(exc, ObjectMissingError | BucketMissingError)
                text = f"ais://{job.bucket}/{name} does not exist" if is_missing else str(exc)
                code = exc.status if isinstance(exc, RefusalError) else 404 if is_missing else 507
                job.object_errors.append({"obj_name": name, "msg": text, "ecode": code})
                job.error = text  # the job stops here, as AIS's default is
                break
            job.num_objects += 1
            job.num_bytes += len(data)
        job.is_done = True
