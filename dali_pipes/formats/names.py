"""Names: of the members of an archive, and of the files that describe shards; and the JSON that such files hold."""

import json
from typing import Any

LABEL_COMPONENT = "cls"
"""The component that holds a class id in ASCII digits; the name is WebDataset's."""
_FOLDER = ".dali-pipes/"
INDEX_ENDING, MANIFEST_ENDING = ".index.safetensors", "manifest.safetensors"


def split_key(name: str) -> tuple[str, str] | None:
    """Key and component of an archive member, split as in WebDataset. All code splits names by this function.

    The key is the path up to the first dot after the last slash, with its directory. The component is the rest, in its
    original case (the index lower-cases it, as WebDataset does).

    Returns:
        ``(key, component)``, or ``None`` for a name that belongs to no sample: a base name that has no dot, starts with
        a dot, or ends at its first dot. (WebDataset 1.0 gives ``dir/.hidden.x`` the key ``dir/``. Such a member,
        typically macOS's ``._photo.jpg``, is not a sample here or in other readers.)

    >>> split_key("a/001.seg.png")
    ('a/001', 'seg.png')
    >>> split_key("v1.0/001.jpg")
    ('v1.0/001', 'jpg')
    >>> split_key("a/README") is None
    True
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, component = base.partition(".")
    if not stem or not dot or not component:
        return None
    return f"{folder}{slash}{stem}", component


def described(start: str) -> str:
    """``a/x-`` -> ``.dali-pipes/a/x-``: the names of all files that describe shards ``a/x-...`` start with it.

    So a listing of ``a/x-`` has the shards alone.
    """
    return f"{_FOLDER}{start}"


def start_of(name: str, ending: str = "") -> str:
    """``.dali-pipes/a/x-manifest.safetensors``, ``manifest.safetensors`` -> ``a/x-``: undoes `described`."""
    return name.removeprefix(_FOLDER).removesuffix(ending)


def path_in_folder(name: str) -> str:
    """The path of an object in a directory. There the folder lies beside the shards.

    So a directory can be moved, or opened by its parent's path.

    >>> path_in_folder(".dali-pipes/a/x-manifest.safetensors"), path_in_folder("a/x-000000.tar")
    ('a/.dali-pipes/x-manifest.safetensors', 'a/x-000000.tar')
    """
    if not name.startswith(_FOLDER):
        return name
    folder, slash, base = start_of(name).rpartition("/")
    return f"{folder}{slash}{_FOLDER}{base}"


def index_name(shard: str) -> str:
    """``a/x-000000.tar`` -> ``.dali-pipes/a/x-000000.index.safetensors``."""
    return described(f"{shard.removesuffix('.tar')}{INDEX_ENDING}")


def manifest_name(prefix: str) -> str:
    """``a/x-`` -> ``.dali-pipes/a/x-manifest.safetensors``."""
    return described(f"{prefix}{MANIFEST_ENDING}")


def version_name(prefix: str, version: int) -> str:
    """``a/x-``, 3 -> ``.dali-pipes/a/x-manifest@3.safetensors``: the manifest of a version, which never changes."""
    return f"{version_start(prefix)}{version}.safetensors"


def version_start(prefix: str) -> str:
    """The text with which the names of all versions' manifests begin."""
    return described(f"{prefix}manifest@")


def columns_name(prefix: str) -> str:
    """``a/x-`` -> ``.dali-pipes/a/x-columns.safetensors``: see `dali_pipes.formats.sample_columns`."""
    return described(f"{prefix}columns.safetensors")


def classes_name(prefix: str) -> str:
    """``a/x-`` -> ``.dali-pipes/a/x-classes.json``: the class table that `pack` writes, ``{"1": "Bengal", ...}``."""
    return described(f"{prefix}classes.json")


def recoded_name(prefix: str) -> str:
    """``a/x-`` -> ``.dali-pipes/a/x-recoded.json``: what `pack` did to photos, see `dali_pipes.formats.manifest`."""
    return described(f"{prefix}recoded.json")


def record_names(prefix: str) -> list[str]:
    """``a/x-`` -> ``.dali-pipes/a/x-written.json``, ``...-written-2.json``, ...: see `dali_pipes.data_set.written`.

    A cluster has the record under two of these names, on two targets.
    """
    start = described(f"{prefix}written")
    return [f"{start}.json", *(f"{start}-{number}.json" for number in range(2, 17))]


def transformed_name(name: str, *, etl: str) -> str:
    """The name of the index, manifest or column file for shards that are read through an ETL.

    It cannot be the name of such a file for other shards or another ETL: theirs end in ``index``, ``manifest`` or
    ``columns`` before the suffix, and an ETL's name has no dot.

    >>> transformed_name("a/x-000000.index.safetensors", etl="pets-npy")
    'a/x-000000.index.pets-npy.etl.safetensors'
    """
    return f"{name.removesuffix('.safetensors')}.{etl}.etl.safetensors"


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text of any origin.

    Raises:
        ValueError: If it is not JSON, not UTF-8, holds a number of more digits than Python converts or half of a pair
            of surrogates, or is nested deeper than Python's stack.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        value = json.loads(text)
        if "\\u" in text:  # only an escape stands for what is not UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    return value
