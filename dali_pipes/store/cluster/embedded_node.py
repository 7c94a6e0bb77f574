"""Run the embedded node over a folder, in a process of its own that ends with its owner."""

import logging
import os
import tempfile
from pathlib import Path

from dali_pipes.errors import StoreError
from dali_pipes.processes.programs import ServerProcess

_log = logging.getLogger(__name__)

ALLOW_ETL = "DALI_PIPES_EMBEDDED_ETL"
"""The environment variable that allows an embedded node to run transforms, if it is ``1``."""

BUCKETS = "buckets"
"""The subfolder of a node's folder that has a folder for each bucket."""


def bucket_names(folder: Path) -> list[str]:
    """The buckets in a node's folder, sorted; a namespace is a folder ``#NAME`` with the folders of its buckets."""
    buckets = folder / BUCKETS
    found = [path for depth in ("[!#]*", "#*/*") for path in buckets.glob(depth) if path.is_dir()]
    return sorted(path.relative_to(buckets).as_posix() for path in found)


def claim_folder(folder: Path) -> None:
    """Create a node's folder, which is for its owner alone (mode 0700).

    Other users could otherwise read and replace its objects past the node, and hold its locks. The mode of an existing
    folder is set if the folder is empty or a node's; a warning says so.

    Raises:
        OSError: If it cannot be created or changed.
        StoreError: If it is another user's; or if others can enter it, and it holds files that are not a node's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.stat()
    if stat.st_uid != os.geteuid():
        raise StoreError(
            f"the folder '{folder}' belongs to user {stat.st_uid}, and this process is user {os.geteuid()}; an "
            "embedded node keeps its objects in a folder of its own user: choose another one"
        )
    mode = stat.st_mode & 0o777
    if not mode & 0o077:
        return
    if any(folder.iterdir()) and not (folder / BUCKETS).is_dir():
        raise StoreError(
            f"the folder '{folder}' is open to other users (mode {mode:04o}) and holds other files than an embedded "
            f"node's; choose another one, or close it: chmod 700 '{folder}'"
        )
    folder.chmod(0o700)
    _log.warning("closed the embedded node's folder '%s' to other users: mode %04o is now 0700", folder, mode)


def start(
    directory: Path,
    *,
    port: int = 0,
    allow_etl: bool | None = None,
    etl_function: str | None = None,
    latency_s: float = 0.0,
) -> ServerProcess:
    """Start a node over ``directory`` and wait until it answers.

    Args:
        directory: Created if it does not exist, see `claim_folder`. Several nodes may serve one folder at a time.
        port: The port; 0 for a free one.
        allow_etl: Whether clients, which are processes of this user, may run transforms; see `prep embedded`.
            ``None``: only if the environment's ``DALI_PIPES_EMBEDDED_ETL`` is ``1``.
        etl_function: The one transform that clients may run, whatever the environment says; not with ``allow_etl``.
        latency_s: Slept before each request is answered: an object's GET waits twice, for the redirect and for the
            bytes. Connections do not wait for each other.

    Raises:
        StoreError: If the node did not start; shows its messages. Also the errors of `claim_folder`.
    """
    try:
        claim_folder(directory)
        # Not a pipe, which would fill if nobody reads it. This file has no name and goes with its last user.
        stderr = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed below
    except OSError as exc:
        raise StoreError(f"the embedded node cannot use the folder '{directory}': {exc.strerror}") from exc
    arguments = ["--dir", str(directory.resolve()), "--port", str(port), "--latency-s", repr(latency_s)]
    environment = dict(os.environ)
    if etl_function is not None:
        arguments += ["--etl-function", etl_function]
    elif allow_etl:
        arguments.append("--allow-etl")
    elif allow_etl is not None:
        environment.pop(ALLOW_ETL, None)  # otherwise the node would obey the variable
    with stderr:
        try:
            return ServerProcess("prep.embedded", *arguments, stderr=stderr, environment=environment)
        except OSError as exc:
            stderr.seek(0)
            said = stderr.read().decode(errors="replace").strip().removeprefix("error: ")
            raise StoreError(f"the embedded node over '{directory}' did not start: {said or exc}") from exc
