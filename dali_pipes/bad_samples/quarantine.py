"""A loader's bad samples to a file that the next job is given; format and writer are those of `dali_pipes.formats.quarantine`.

A rank that meets no bad sample leaves no file, and a list of keys that a person wrote may be gone on with.
"""

from pathlib import Path

from dali_pipes.formats.quarantine import Exclusion, QuarantineFile, read_exclusions

__all__ = ["Exclusion", "Quarantine", "read_exclusions"]


class Quarantine(QuarantineFile):
    """A loader's: made with its first sample; of jobs or ranks that name the same file each line comes whole.

    Args:
        path: The file; what is in it already is not written again.
        manifest: The manifest's digest, for the first line.

    Raises:
        DataError: If what is there is no list of samples.
        StoreError: If it cannot be read, or there is no directory to write it to.
    """

    def __init__(self, path: str | Path, *, manifest: str) -> None:
        super().__init__(path, manifest=manifest, is_made=False, takes_lists=True)
