"""Names of the files beside shards: index, manifest, column file and class table."""

LABEL_COMPONENT = "cls"
"""The component that holds a class id in ASCII digits; the name is WebDataset's."""


def index_name(shard: str) -> str:
    """``a/x-000000.tar`` -> ``a/x-000000.index.safetensors``."""
    return f"{shard.removesuffix('.tar')}.index.safetensors"


def manifest_name(prefix: str) -> str:
    """``a/x-`` -> ``a/x-manifest.safetensors``."""
    return f"{prefix}manifest.safetensors"


def version_name(prefix: str, version: int) -> str:
    """``a/x-``, 3 -> ``a/x-manifest@3.safetensors``: the manifest of one version of a data set, which never changes."""
    return f"{version_start(prefix)}{version}.safetensors"


def version_start(prefix: str) -> str:
    """The text with which the names of all versions' manifests begin."""
    return f"{prefix}manifest@"


def columns_name(prefix: str) -> str:
    """``a/x-`` -> ``a/x-columns.safetensors``: see `dali_pipes.formats.sample_columns`."""
    return f"{prefix}columns.safetensors"


def classes_name(prefix: str) -> str:
    """``a/x-`` -> ``a/x-classes.json``: the class table that `pack` writes, ``{"1": "Abyssinian", ...}``."""
    return f"{prefix}classes.json"


def recoded_name(prefix: str) -> str:
    """``a/x-`` -> ``a/x-recoded.json``: what `pack` did to photos, see `dali_pipes.formats.recoded`."""
    return f"{prefix}recoded.json"


def record_names(prefix: str) -> list[str]:
    """``a/x-`` -> ``a/x-written.json``, ``a/x-written-2.json``, ...: see `dali_pipes.data_set.written`.

    A cluster has the record under two of these names, on two targets.
    """
    return [f"{prefix}written.json", *(f"{prefix}written-{number}.json" for number in range(2, 17))]


def transformed_name(name: str, *, etl: str) -> str:
    """The name of the index, manifest or column file for shards that are read through an ETL.

    It cannot be the name of such a file for other shards or another ETL: theirs end in ``index``, ``manifest`` or
    ``columns`` before the suffix, and an ETL's name has no dot.

    >>> transformed_name("a/x-000000.index.safetensors", etl="pets-npy")
    'a/x-000000.index.pets-npy.etl.safetensors'
    """
    return f"{name.removesuffix('.safetensors')}.{etl}.etl.safetensors"
