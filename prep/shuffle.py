"""Shards in a bucket to shuffled shards in the same bucket: dSort in the AIStore cluster, checked before and after.

dSort is trusted with nothing: a job whose input is not there "succeeds", and one that loses a sample would not say so.
So the request is made from what is there, and both sides are read and compared.
"""

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prep.contents import check_same, check_unique, digest_contents
from prep.errors import DataError, StoreError, shown
from prep.manifest import classes_name, columns_name, index_name, manifest_name
from prep.progress import bar
from prep.store import PROVIDERS, AisStore, error_text
from prep.urls import ShardSet, check_object_name

if TYPE_CHECKING:
    from aistore.sdk.dsort.core import Dsort
    from aistore.sdk.dsort.types import JobInfo

__all__ = ["DEFAULT_OUTPUT_PREFIX", "ShardRange", "ShuffleReport", "dsort_spec", "shard_range", "shuffle"]

DEFAULT_OUTPUT_PREFIX = "shuffled-"

# Digits in the names of output shards, as in those that `pack` writes.
OUTPUT_DIGITS = 6
# Output names beyond those that sizes ask for: an unused name costs nothing, one too few fails the job.
SPARE_NAMES = 16
POLL_S = (0.05, 1.0)
"""The first pause between two looks at the job, doubled up to the second: short for small jobs, light for long ones."""

_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<digits>[0-9]+)\.tar", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ShuffleReport:
    """What a shuffle did."""

    url: str
    """``ais://pets/shuffled-``: what the output's names start with."""
    shards: tuple[str, ...]
    """The output shards, in order; dSort makes the last one as small as it comes out."""
    num_input_shards: int
    num_samples: int
    """The same number, and the same samples, on both sides."""
    num_bytes: int
    """Of the output shards."""
    elapsed_s: float


class ShardRange(NamedTuple):
    """Names that count up without a gap: what dSort's template can say."""

    prefix: str
    start: int
    stop: int
    num_digits: int

    @property
    def template(self) -> str:
        """``samples-{000000..000003}``: both ends are in it, the extension is not."""
        return f"{self.prefix}{{{self.start:0{self.num_digits}d}..{self.stop - 1:0{self.num_digits}d}}}"

    @property
    def names(self) -> Iterator[str]:
        return (f"{self.prefix}{number:0{self.num_digits}d}.tar" for number in range(self.start, self.stop))

    def __contains__(self, name: object) -> bool:
        match = _NUMBERED.fullmatch(str(name))
        return (
            match is not None
            and match["prefix"] == self.prefix
            and len(match["digits"]) == max(self.num_digits, len(str(int(match["digits"]))))
            and self.start <= int(match["digits"]) < self.stop
        )


def shuffle(
    shards: ShardSet,
    *,
    output_prefix: str = DEFAULT_OUTPUT_PREFIX,
    seed: int = 0,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    show_progress: bool = False,
) -> ShuffleReport:
    """Write the samples of ``shards``, in an order drawn from ``seed``, to new shards in the same bucket.

    The input is kept; its class table is copied beside the output. The embedded node gives the same shards for the same
    seed. A cluster of several targets does not (seen on AIS 4.9): it permutes records in the order in which its targets
    happened to deliver them.

    Args:
        shards: The input, whose names must count up without a gap.
        output_prefix: What the names of the output start with, within the bucket.
        seed: Not negative, below 2**63.
        shard_bytes: An output shard is full when its components take this much; ``None``: the input's mean.
        overwrite: Delete what is under the output's names first.
        show_progress: Draw bars.

    Raises:
        ValueError: If the shards are not in a bucket, their names do not count up, or an argument is out of range.
        StoreError: If an input shard is not there, output shards are and ``overwrite`` is false, the cluster has no
            dSort that works, or the job fails; what it wrote by then is deleted.
        DataError: If the input is no readable tar, or has a key twice: two samples of one key that come to stand
            together would be read as one. If the output does not hold exactly the input's samples: the text names some
            that are missing, extra or changed; the output is then left as it is, to be looked into.
    """
    started = time.perf_counter()
    store = shards.store
    if not isinstance(store, AisStore):
        raise ValueError(
            f"'{store.url}' is a directory; shuffle needs a bucket, because dSort runs in the AIStore cluster: "
            "dali-pipes prep pack ... ais://BUCKET, then shuffle ais://BUCKET/samples-"
        )
    source = shard_range(shards.names)
    _check_request([source.prefix, output_prefix], bucket_url=store.url, seed=seed, shard_bytes=shard_bytes)
    listed = {entry.name for entry in store.list(source.prefix)}
    missing = [name for name in shards.names if name not in listed]
    if missing:
        raise StoreError(f"no shard {shown([store.locate(name) for name in missing])}; {len(shards.names)} were named")
    stale = _check_output(store, shards, output_prefix, overwrite=overwrite)
    went_in = digest_contents(store, shards.names, what="read", show_progress=show_progress)
    check_unique(store, shards.names, went_in)
    shard_bytes = shard_bytes if shard_bytes is not None else max(1, -(-went_in.num_bytes // len(shards.names)))
    output = _output_range(output_prefix, num_bytes=went_in.num_bytes, shard_bytes=shard_bytes)
    spec = dsort_spec(source, output, bucket=store.bucket, scheme=store.scheme, seed=seed, shard_bytes=shard_bytes)
    for name in stale:
        store.delete(name)

    _run_job(store, spec, output, num_input_shards=len(shards.names), show_progress=show_progress)
    made = [entry for entry in store.list(output_prefix) if entry.name in output]
    names = tuple(entry.name for entry in made)
    if not names:
        raise DataError(f"dSort at '{store.url}' reported success and wrote no shard; {len(shards.names)} went in")
    came_out = digest_contents(store, names, what="verify", show_progress=show_progress)
    check_same(store, shards.names, names, went_in, came_out)
    if store.size(classes_name(shards.prefix)) is not None:
        store.write(classes_name(output_prefix), store.read(classes_name(shards.prefix)))
    return ShuffleReport(
        url=store.locate(output_prefix),
        shards=names,
        num_input_shards=len(shards.names),
        num_samples=len(went_in.rows),
        num_bytes=sum(entry.size for entry in made),
        elapsed_s=time.perf_counter() - started,
    )


def shard_range(names: Sequence[str]) -> ShardRange:
    """The range that shard names count through.

    Raises:
        ValueError: If they do not count up without a gap, in digits of one width.

    >>> shard_range(["a-008.tar", "a-009.tar", "a-010.tar"]).template
    'a-{008..010}'
    """
    match = _NUMBERED.fullmatch(names[0])
    if match is None:
        raise ValueError(f"shard '{names[0]}' has no number before .tar; dSort takes names that count up")
    start, num_digits = int(match["digits"]), len(match["digits"])
    counted = ShardRange(match["prefix"], start, start + len(names), num_digits)
    for expected, name in zip(counted.names, names, strict=True):
        if name != expected:
            raise ValueError(f"shards must count up without a gap for dSort: expected '{expected}', got '{name}'")
    return counted


def dsort_spec(
    source: ShardRange, output: ShardRange, *, bucket: str, scheme: str = "ais", seed: int, shard_bytes: int
) -> dict[str, Any]:
    """The request for a dSort job that shuffles.

    Nothing but fields that AIStore knows: a server answers others by closing the connection.

    Raises:
        ValueError: If a value is one that dSort would refuse, or misread without a word.
    """
    prefixes = [source.prefix, output.prefix]
    _check_request(prefixes, bucket_url=f"{scheme}://{bucket}", seed=seed, shard_bytes=shard_bytes)
    for shards in (source, output):
        if shards.stop <= shards.start:
            raise ValueError(f"a range must hold at least one name, got {shards}")
    place = {"name": bucket, "provider": PROVIDERS[scheme]}
    return {
        "description": "dali-pipes prep shuffle",
        "input_bck": place,
        "input_format": {"template": source.template},
        "input_extension": ".tar",
        "output_bck": place,
        "output_format": output.template,
        "output_extension": ".tar",
        "output_shard_size": f"{shard_bytes}B",
        "algorithm": {"kind": "shuffle", "seed": str(seed)},
    }


def _check_request(prefixes: Sequence[str], *, bucket_url: str, seed: int, shard_bytes: int | None) -> None:
    for prefix in prefixes:
        if not prefix or re.search(r"[{}\s]", prefix):
            raise ValueError(f"a prefix must hold neither braces nor white space for dSort, got '{prefix}'")
        if prefix.endswith("/") or prefix[-1].isdigit():
            raise ValueError(
                f"a prefix must end in a name's start that is no digit, such as 'shuffled-', got '{prefix}'"
            )
        check_object_name(prefix, url=f"{bucket_url}/{prefix}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {seed}")
    if shard_bytes is not None and shard_bytes < 1:
        raise ValueError(f"shard_bytes must be positive, got {shard_bytes}")


def _output_range(prefix: str, *, num_bytes: int, shard_bytes: int) -> ShardRange:
    # Every shard but the last is filled to shard_bytes at least.
    count = -(-num_bytes // shard_bytes) + SPARE_NAMES
    if count > 10**OUTPUT_DIGITS:
        raise ValueError(f"{count} output shards, names count to {10**OUTPUT_DIGITS}; use a larger --shard-bytes")
    return ShardRange(prefix, 0, count, OUTPUT_DIGITS)


def _check_output(store: AisStore, shards: ShardSet, prefix: str, *, overwrite: bool) -> list[str]:
    """What is to be deleted before the job: shards under the output's names, and what describes such."""
    entries = store.list(prefix)
    found = [entry.name for entry in entries if re.fullmatch(rf"{re.escape(prefix)}[0-9]+\.tar", entry.name)]
    if set(shards.names).intersection(found):
        raise ValueError(f"output prefix '{prefix}' names the input itself; choose another with --output")
    if found and not overwrite:
        raise StoreError(
            f"'{store.locate(prefix)}' holds {len(found)} shards already, from '{found[0]}'; "
            "--overwrite replaces them, or choose another prefix with --output"
        )
    described = {manifest_name(prefix), columns_name(prefix), classes_name(prefix), *map(index_name, found)}
    return [*(entry.name for entry in entries if entry.name in described), *found]


# The job


def _run_job(
    store: AisStore, spec: Mapping[str, Any], output: ShardRange, *, num_input_shards: int, show_progress: bool
) -> None:
    """Start the job and wait for it; one that does not end well is aborted, and what it wrote deleted."""
    dsort = store.client.dsort()
    try:
        _start(store, dsort, spec)
        _wait(store, dsort, num_input_shards=num_input_shards, show_progress=show_progress)
    except BaseException:
        with contextlib.suppress(StoreError):
            if dsort.dsort_id:
                with store.asking(store.url):
                    dsort.abort()
        with contextlib.suppress(StoreError):
            for entry in store.list(output.prefix):
                if entry.name in output:
                    store.delete(entry.name)
        raise


def _start(store: AisStore, dsort: "Dsort", spec: Mapping[str, Any]) -> None:
    from aistore.sdk.errors import AISError, ErrBckNotFound

    with tempfile.TemporaryDirectory(prefix="dali-pipes-shuffle-") as folder:
        path = Path(folder) / "dsort.json"
        path.write_text(json.dumps(spec))
        with store.asking(store.url):
            try:
                dsort.start(path)
            except ErrBckNotFound:
                raise
            except AISError as exc:
                # 400: AIS 5.0, whose own broadcast fails. 404, 501: built without dSort.
                if exc.status_code not in (400, 404, 405, 501):
                    raise
                raise StoreError(
                    f"no dSort that works at {store.endpoint}: {error_text(exc)}; it needs an "
                    "AIStore built with dSort, 4.x (5.0 has it and cannot start it). Without it, index the shards as "
                    "they are: dali-pipes prep index URL"
                ) from exc


def _wait(store: AisStore, dsort: "Dsort", *, num_input_shards: int, show_progress: bool) -> None:
    pause, longest = POLL_S
    with bar(what="dSort", total=2 * num_input_shards, unit="shards", shown=show_progress) as drawn:
        while True:
            with store.asking(store.url):
                jobs = list(dsort.get_job_info().values())
            failures = [text for job in jobs for text in job.metrics.errors or () if text]
            if failures or any(job.metrics.aborted or job.aborted for job in jobs):
                reason = failures[0] if failures else "aborted"
                raise StoreError(f"dSort job '{dsort.dsort_id}' at {store.endpoint} failed: {reason}")
            _draw(drawn, jobs, num_input_shards=num_input_shards)
            if jobs and all(job.metrics.shard_creation.finished for job in jobs):
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _draw(drawn: Any, jobs: Sequence["JobInfo"], *, num_input_shards: int) -> None:
    """Half a bar for the shards taken apart, half for those put together; each job counts for one target."""
    extracted = sum(int(job.metrics.local_extraction.extracted_count) for job in jobs)
    created = sum(int(job.metrics.shard_creation.created_count) for job in jobs)
    to_create = sum(int(job.metrics.shard_creation.to_create) for job in jobs)
    drawn.total = num_input_shards + (to_create or num_input_shards)
    drawn.update(extracted + created - drawn.n)
