"""Read the inputs of a shuffle: contents of shards, names of a spec, key maps, and seed and prefix of an epoch."""

import hashlib
from pathlib import Path

import numpy as np

from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import LABEL_COMPONENT, manifest_name
from dali_pipes.store.base import Bucket
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.messages import is_loopback
from dali_pipes.store.shard_set import missing_shards
from dali_pipes.store.templates import Template
from dali_pipes.store.urls import is_remote, open_store
from prep.shuffle.compare import check_unique
from prep.shuffle.contents import Contents, indexed_contents, read_contents
from prep.shuffle.dsort_spec import DsortSpec
from prep.shuffle.key_map import KeyMap, parse_key_map
from prep.shuffle.request import Request

# A key map of a million keys takes about 30 MB.
MAX_KEY_MAP_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 60.0
# Missing shards that an error names.
_NUM_MISSING = 3


def read_input(request: Request, listed: dict[str, ObjectEntry]) -> Contents:
    """The contents of the input; by its indexes, if a dry run needs no more. Raises `DataError`: see `shuffle`."""
    shards, algorithm = request.shards, request.algorithm
    components = {algorithm.component.lower()} if algorithm.component else set()
    components |= {LABEL_COMPONENT} if request.needs_labels else set()
    manifest = find_manifest(shards) if all(name.endswith(".tar") for name in shards.names) else None
    if request.dry_run and manifest is not None:
        sizes = dict(zip(manifest.names, manifest.shard_bytes.tolist(), strict=True))
        if all(sizes.get(name) == listed[name].size for name in shards.names):
            found = indexed_contents(shards.store, shards.names, components=sorted(components))
            if found is not None:
                return found
    contents = read_contents(
        shards.store, shards.names, components=sorted(components), what="read", show_progress=request.show_progress
    )
    counts = {} if manifest is None else dict(zip(manifest.names, manifest.samples.tolist(), strict=True))
    for name, count in zip(shards.names, np.diff(contents.starts).tolist(), strict=True):
        if counts.get(name, count) != count:
            raise DataError(
                f"manifest '{shards.store.locate(manifest_name(shards.prefix))}' counts {counts[name]} samples in "
                f"'{name}', the shard holds {count}; index the shards again: dali-pipes prep index {shards.url}"
            )
    if not contents.num_samples:
        raise DataError(f"'{shards.url}': the {len(shards.names)} shards hold no sample")
    check_unique(shards.store, contents)
    return contents


def spec_names(spec: DsortSpec, store: Bucket) -> tuple[str, ...]:
    """The names of a spec's input shards; raises `StoreError` if some are not there."""
    if not isinstance(spec.inputs, Template):
        return spec.inputs
    if len(spec.inputs):
        return _template_names(spec.inputs, spec.input_extension, store)
    # A cluster would accept a prefix and read nothing; here a prefix stands for its shards.
    names = tuple(e.name for e in store.list(spec.inputs.prefix) if e.name.endswith(spec.input_extension))
    if not names:
        raise StoreError(f"'{store.locate(spec.inputs.prefix)}' matches no {spec.input_extension}")
    return names


def _template_names(template: Template, extension: str, store: Bucket) -> tuple[str, ...]:
    """The names of a template. It may stand for more names than memory holds, so the third missing one ends it."""
    listed = {entry.name for entry in store.list(template.prefix)}
    names: list[str] = []
    missing: list[str] = []
    for stem in template.names():
        names.append(f"{stem}{extension}")
        if names[-1] not in listed:
            missing.append(names[-1])
        if len(missing) == _NUM_MISSING:
            break
    if missing:
        raise missing_shards(store, missing, num_named=len(template))
    return tuple(names)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch.

    >>> epoch_seed(0, 1), epoch_seed(0, 2), epoch_seed(1, 1)
    (8372147079113586533, 6049555782909542890, 1066406101564956322)
    """
    if epoch < 0:
        raise ValueError(f"epoch must not be negative, got {epoch}")
    return int.from_bytes(hashlib.blake2b(f"{seed}/epoch/{epoch}".encode(), digest_size=8).digest()) >> 1


def epoch_prefix(prefix: str, epoch: int) -> str:
    """The prefix of an epoch's shards: beside those of ``prefix``, which still names one set.

    >>> epoch_prefix("train/shuffled-", 1)
    'train/e000001-shuffled-'
    """
    folder, slash, base = prefix.rpartition("/")
    return f"{folder}{slash}e{epoch:06d}-{base}"


def load_key_map(where: str | Path, *, endpoint: str | None, separator: str = "", extension: str = ".tar") -> KeyMap:
    """Read an external key map from a file, an object (``ais://...``) or a URL.

    Raises:
        StoreError: If it cannot be read.
        DataError: If it is not a key map: see `parse_key_map`.
    """
    text = str(where)
    if is_remote(text):
        store, name = open_store(text, endpoint=endpoint)
        data = store.read(name)
    elif text.startswith(("http://", "https://")):
        data = _fetch(text)
    else:
        try:
            data = Path(text).read_bytes()
        except OSError as exc:
            raise StoreError(f"cannot read key map '{text}': {exc.strerror or exc}") from exc
    return parse_key_map(data, where=f"key map '{text}'", separator=separator, extension=extension)


def _fetch(url: str) -> bytes:
    import requests

    try:
        with requests.Session() as session:
            session.trust_env = not is_loopback(url)  # no proxy reaches this machine
            answer = session.get(url, timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S))
        answer.raise_for_status()
    except requests.RequestException as exc:
        raise StoreError(f"cannot read key map '{url}': {exc}") from exc
    if len(answer.content) > MAX_KEY_MAP_BYTES:
        raise StoreError(f"key map '{url}' has {len(answer.content)} bytes, at most {MAX_KEY_MAP_BYTES} are read")
    return answer.content
