"""What a shuffle is asked for by name to what it works on: shards, key maps, and an epoch's seed and place."""

import hashlib
from pathlib import Path

from dali_pipes.errors import StoreError
from dali_pipes.store.messages import is_loopback
from dali_pipes.store.urls import is_remote, open_store
from prep.shuffle.key_map import KeyMap, parse_key_map

__all__ = ["epoch_prefix", "epoch_seed", "load_key_map"]

# A key map of a million keys is some 30 MB.
MAX_KEY_MAP_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 60.0


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch's shards.

    >>> epoch_seed(0, 1), epoch_seed(0, 2), epoch_seed(1, 1)
    (8372147079113586533, 6049555782909542890, 1066406101564956322)
    """
    if epoch < 0:
        raise ValueError(f"epoch must not be negative, got {epoch}")
    return int.from_bytes(hashlib.blake2b(f"{seed}/epoch/{epoch}".encode(), digest_size=8).digest()) >> 1


def epoch_prefix(prefix: str, epoch: int) -> str:
    """Where an epoch's shards go: beside those of ``prefix``, and not under it, which still names one set.

    >>> epoch_prefix("train/shuffled-", 1)
    'train/e000001-shuffled-'
    """
    folder, slash, base = prefix.rpartition("/")
    return f"{folder}{slash}e{epoch:06d}-{base}"


def load_key_map(where: str | Path, *, endpoint: str | None, separator: str = "", extension: str = ".tar") -> KeyMap:
    """An external key map from a file, an object (``ais://...``) or a URL.

    Raises:
        StoreError: If it cannot be read.
        DataError: If it is none: see `parse_key_map`.
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
