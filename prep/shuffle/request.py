"""Hold the options of a shuffle, and check them before anything is read."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dali_pipes.store.base import Store
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.shard_names import EXTENSIONS, check_object_name, extension_of
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.templates import Template
from prep.shuffle.key_map import Grouping, KeyMap
from prep.shuffle.order import Algorithm

Engine = Literal["auto", "dsort", "client"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for; `prep.shuffle.shuffle.shuffle` explains each field."""

    shards: ShardSet
    target: Store
    prefix: str
    outputs: Template | None = None
    """``None``: as many names under the prefix as are needed, or those of a key map."""
    algorithm: Algorithm
    seed: int
    """What a `Grouping` draws from."""
    shard_bytes: int | None
    mapped: KeyMap | Grouping | None
    drop_unmapped: bool
    extension: str
    engine: str
    overwrite: bool
    dry_run: bool
    spool_dir: Path | None
    show_progress: bool
    description: str = "dali-pipes prep shuffle"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether input or output is a directory, so that no cluster can do it."""
        return self.shards.store.cluster is None or self.target.cluster is None

    @property
    def needs_labels(self) -> bool:
        """Whether samples are grouped by class."""
        return isinstance(self.mapped, Grouping) and self.mapped.by in ("class", "balanced")


def check_request(request: Request) -> None:
    """Refuse a request that the engine cannot do; raises `ValueError`."""
    if request.engine not in get_args(Engine):
        raise ValueError(f"engine must be one of {', '.join(get_args(Engine))}, got '{request.engine}'")
    if request.extension not in EXTENSIONS:
        raise ValueError(f"extension must be one of {', '.join(EXTENSIONS)}, got '{request.extension}'")
    if request.shard_bytes is not None and request.shard_bytes < 1:
        raise ValueError(f"shard_bytes must be positive, got {request.shard_bytes}")
    if request.drop_unmapped and not isinstance(request.mapped, KeyMap):
        raise ValueError("drop_unmapped leaves out samples that a key map does not name; no key map is given")
    input_extension(request.shards.names)
    if request.engine == "dsort" and request.is_local:
        raise ValueError(
            f"'{request.shards.store.url}' is a directory; engine 'dsort' needs a bucket, because dSort runs in the "
            "AIStore cluster: use --engine client, or pack the shards into ais://BUCKET"
        )
    templates = [request.outputs] if request.outputs is not None else []
    templates += request.mapped.outputs if isinstance(request.mapped, KeyMap) else ()
    for template in templates:
        for end in template.ends():
            check_object_name(end, url=request.target.locate(end))


def check_prefix(prefix: str, *, url: str) -> None:
    """Refuse a prefix with which output names cannot start; raises `ValueError`."""
    if not prefix or re.search(r"[{}\s]", prefix):
        raise ValueError(f"a prefix must hold neither braces nor white space for dSort, got '{prefix}'")
    if prefix.endswith("/") or prefix[-1].isdigit():
        raise ValueError(
            f"a prefix must end in a name's start that is not a digit, such as 'shuffled-', got '{prefix}'"
        )
    check_object_name(prefix, url=f"{url}/{prefix}")


def input_extension(names: Sequence[str]) -> str:
    """The extension of all shards; raises `ValueError` if they differ, or end in none that is known."""
    found = sorted({extension_of(name) for name in names})
    if len(found) != 1 or not found[0]:
        odd = next((name for name in names if not extension_of(name)), names[0])
        raise ValueError(
            f"shards must all end in one of {', '.join(EXTENSIONS)}, got '{odd}'"
            if "" in found
            else f"shards must all end alike, got {' and '.join(found)}"
        )
    return found[0]


def check_input(shards: ShardSet) -> dict[str, ObjectEntry]:
    """The shards as the store lists them; raises `StoreError` if one is not there."""
    return {entry.name: entry for entry in shards.entries()}


def common_prefix(names: Sequence[str]) -> str:
    """The beginning of all names, digits included."""
    return os.path.commonprefix(names)  # noqa: RUF071 (by character is what is meant)
