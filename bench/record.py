"""A report to a file, whole or not at all; that it can be written is found out before the minutes that it takes."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.store import LocalStore

__all__ = ["check_target", "write_record"]


def check_target(path: Path) -> None:
    """Refuse a path that `write_record` could not write.

    Raises:
        ValueError: If it is a directory, or lies in one that is not there or takes no file.
    """
    if path.is_dir():
        raise ValueError(f"--json '{path}': expected a file, found a directory")
    if not path.parent.is_dir():
        raise ValueError(f"--json '{path}': no such directory '{path.parent}'")
    try:
        if _is_special(path):
            path.open("a").close()
        else:
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as exc:
        raise ValueError(f"--json '{path}': cannot be written: {exc.strerror}; name another file") from exc


def write_record(report: Mapping[str, Any], path: Path) -> None:
    """Write JSON; an earlier file is replaced once all is written.

    Raises:
        StoreError: If the disk is full, or the directory is gone.
    """
    text = json.dumps(report, indent=2) + "\n"
    if _is_special(path):
        path.write_text(text)
        return
    # A link's target is replaced, not the link.
    target = path.resolve()
    LocalStore(target.parent).write(target.name, text.encode())


def _is_special(path: Path) -> bool:
    """``/dev/stdout`` or a pipe, which a rename would replace."""
    return path.exists() and not path.is_file()
