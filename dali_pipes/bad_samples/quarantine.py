"""List a loader's bad samples in a file for the next job; the format is that of `dali_pipes.formats.quarantine`.

A rank that sees no bad sample makes no file. A list of keys that a person wrote may be continued.
"""

from pathlib import Path

from dali_pipes.formats.quarantine import Exclusion, QuarantineFile, read_exclusions

__all__ = ["Exclusion", "Quarantine", "read_exclusions"]


class Quarantine(QuarantineFile):
    """A loader's quarantine file, made with its first sample. Jobs and ranks may share a file: each line is whole.

    Args:
        path: The file; samples that it lists already are not listed again.
        manifest: The manifest's digest, for the first line.

    Raises:
        DataError: If the file is there and does not list samples.
        StoreError: If it cannot be read, or its directory is missing.
    """

    def __init__(self, path: str | Path, *, manifest: str) -> None:
        super().__init__(path, manifest=manifest, is_made=False, takes_lists=True)
