"""A batch with bad samples in it to one that can be decoded: the bad ones found, good ones in their places.

The rule: a bad sample is replaced by the nearest good one before it in its batch, else by the nearest after it; in a
batch of bad samples only, by the first one's nearest good neighbour in its shard, before it or else after, else by the
first good one of the shards that follow. So what is delivered depends on the order and on which samples are bad, and
not on when that was found out.

DALI names a sample that it cannot decode at times, at times not, and loses the batch. What was fed is still here: the
culprits are found by decoding halves of the batch, and halves of those, apart from the batches that are in flight; the
repaired batch is decoded there as well, by the same graph, on the same device, with the same random numbers.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline
from torch.utils.dlpack import from_dlpack

from dali_pipes.bad_samples.policy import BadSamplesSeen
from dali_pipes.errors import DecodeError
from dali_pipes.graph.decode import BatchInputs, DecodePipeline
from dali_pipes.reader.samples import Batch, Samples

__all__ = ["Repair"]

# Samples of which none can be decoded before it is taken for the graph's fault, beside those of the first batch.
NUM_PROOFS = 8

Int64s = npt.NDArray[np.int64]
Problems = Mapping[int, tuple[str, str]]
"""Position in a batch -> the component that is at fault, and why."""


class Repair:
    """What a loader does about bad samples.

    Args:
        decode: The loader's graph.
        samples: The data set.
        met: Those that were met before; told of each one that is found, and asked whether that is an error.
        read: Some bytes of a shard, by its number, from where it is stored: it may have left the image by then.
        read_index: A shard's index, likewise.
    """

    def __init__(
        self,
        decode: DecodePipeline,
        *,
        samples: Samples,
        met: BadSamplesSeen,
        read: Callable[[int, int, int], bytes],
        read_index: Callable[[int], bytes],
    ) -> None:
        self._decode, self._samples, self._met = decode, samples, met
        self._read, self._read_index = read, read_index
        self._decoded: BatchInputs | None = None

    def feed(self, batch: Batch, encoded: Sequence[Any]) -> BatchInputs:
        """What the decode half is handed for a batch, without the samples that are known to be bad.

        Raises:
            DecodeError: If there are some, and they are not to be substituted, or are too many.
        """
        refused = batch.refused(self._decode.decoded_components)
        if refused:
            self._met.add(batch, refused)
        return self._completed(batch, encoded, {*self._met.positions(batch), *refused})

    def delivered(self, fed: BatchInputs) -> None:
        """Take note of a batch that DALI could decode: it shows that the graph can be run."""
        self._decoded = fed

    def decode(self, fed: BatchInputs, error: RuntimeError) -> tuple[BatchInputs, dict[str, Any]]:
        """The outputs of a batch that DALI refused, with others in the places of those that it cannot decode.

        Raises:
            DecodeError: If they are not to be substituted, are too many, or it is no sample's fault.
        """
        with contextlib.closing(self._decode.twin()) as twin:
            while True:
                bad = self._culprits(twin, fed, error)
                if bad:
                    self._met.add(fed.batch, bad)
                    fed = self._completed(fed.batch, fed.encoded, set(bad))
                try:
                    # Copied: they are to outlive the pipeline that made them.
                    return fed, {
                        name: output if isinstance(output, list) else from_dlpack(output).clone()
                        for name, output in twin.decode(fed).items()
                    }
                except RuntimeError as exc:
                    if not bad:
                        raise DecodeError(f"{_among(fed.batch)}: {reason_of(exc)}") from exc
                    error = exc

    def close(self) -> None:
        """Give up what is kept. Can be called twice."""
        self._decoded = None

    def _culprits(self, twin: DecodePipeline, fed: BatchInputs, error: RuntimeError) -> dict[int, tuple[str, str]]:
        """The samples that DALI cannot decode, each with the reason that it gives for that one alone."""
        batch = fed.batch
        # What is there twice is tried once.
        each = {
            pair: at for at, pair in enumerate(zip(batch.ordinals.tolist(), batch.occurrences.tolist(), strict=True))
        }
        found: dict[int, RuntimeError] = {}
        parts: list[tuple[list[int], RuntimeError]] = [(sorted(each.values()), error)]
        while parts:
            part, refused = parts.pop()
            if len(part) == 1:
                found[int(batch.ordinals[part[0]])] = refused
                continue
            halves = (part[len(part) // 2 :], part[: len(part) // 2])
            parts += [(half, exc) for half in halves if (exc := _refusal(twin, fed.part(half))) is not None]
        positions = [at for at, ordinal in enumerate(batch.ordinals.tolist()) if ordinal in found]
        if len(positions) == len(batch):
            self._check_graph(twin, batch, error)
        causes = {ordinal: self._cause(fed, ordinal, exc) for ordinal, exc in found.items()}
        return {at: causes[int(batch.ordinals[at])] for at in positions}

    def _check_graph(self, twin: DecodePipeline, batch: Batch, error: RuntimeError) -> None:
        """Every sample of a batch fails: is it they, or is it the graph or the device?

        Raises:
            DecodeError: If what was decoded before fails now, or, where nothing was yet, other samples fail as well.
        """
        if self._decoded is not None:
            if (exc := _refusal(twin, self._decoded.part([0]))) is not None:
                raise DecodeError(
                    f"DALI fails on every batch now, also on one that it has decoded before: {reason_of(exc)}"
                ) from exc
            return
        num_failed = 0
        for other in self._others(batch, num=1):
            if num_failed == NUM_PROOFS:
                break
            if other.refused(self._decode.decoded_components):
                continue
            fed, unparsed = self._decode.complete(other, self._encoded(other))
            if unparsed:
                continue
            if _refusal(twin, fed) is None:
                self._decoded = fed
                return
            num_failed += 1
        if num_failed:
            raise DecodeError(
                f"the graph fails on all of {len(set(batch.ordinals.tolist())) + num_failed} samples that were tried, "
                f"the first of them {', '.join(batch.keys[:3])}: {reason_of(error)}"
            ) from error

    def _cause(self, fed: BatchInputs, ordinal: int, error: RuntimeError) -> tuple[str, str]:
        """The component that is at fault, if it can be told, and what DALI and Pillow say of it."""
        position = int(np.argmax(fed.batch.ordinals == ordinal))
        components = self._decode.decoded_components
        operator = re.search(r"operator `(?:nvidia\.dali\.)?([^`]*)`", str(error))
        is_decoder = operator is not None and "decoders" in operator[1]
        for component in components:
            encoded = fed.encoded[self._decode.read_components.index(component)]
            data = np.array(encoded[position])
            if (is_decoder and len(components) == 1) or not _decodes(data):
                opinion = _pillow_says(data)
                return component, f"cannot be decoded: {reason_of(error)}{f'; Pillow: {opinion}' if opinion else ''}"
        return "", f"cannot be processed: {operator[1] if operator else 'DALI'} says: {reason_of(error)}"

    def _completed(self, batch: Batch, encoded: Sequence[Any], bad: set[int]) -> BatchInputs:
        """The batch with good samples in the places of bad ones, of which some may not have been looked at yet."""
        while True:
            if bad:
                batch, encoded = self._replaced(batch, encoded, bad)
            fed, unparsed = self._decode.complete(batch, encoded)
            if not unparsed:
                return fed
            self._met.add(batch, unparsed)
            bad = set(unparsed)

    def _replaced(self, batch: Batch, encoded: Sequence[Any], bad: set[int]) -> tuple[Batch, Sequence[Any]]:
        substituted = tuple(sorted({*batch.substituted, *bad}))
        sources = _sources(len(batch), bad)
        if sources is None:
            return self._neighbours(batch, substituted)
        replaced = batch.replaced(batch.ordinals[sources], batch.occurrences[sources], substituted=substituted)
        return replaced, [[samples[position] for position in sources.tolist()] for samples in encoded]

    def _neighbours(self, batch: Batch, substituted: tuple[int, ...]) -> tuple[Batch, Sequence[Any]]:
        """The batch made of one sample that is not in it."""
        for made in self._others(batch, num=len(batch), substituted=substituted):
            if not (refused := made.refused(self._decode.decoded_components)):
                return made, self._encoded(made)
            self._met.add(made, refused)
        raise DecodeError(
            f"shard '{batch.name(0)[0]}', key '{batch.name(0)[1]}': no good sample of the data set is left that could "
            "stand in for it"
        )

    def _others(self, batch: Batch, *, num: int, substituted: tuple[int, ...] = ()) -> Iterator[Batch]:
        """For each sample that is not known to be bad, the first one's neighbours first: a batch of nothing else."""
        for neighbours in self._samples.neighbours(int(batch.ordinals[0])):
            candidates = [ordinal for ordinal in neighbours.tolist() if ordinal not in self._met]
            if not candidates:
                continue
            rows = self._samples.rows_from(np.array(candidates, np.int64), self._read_index)
            for ordinal in candidates:
                repeated = np.full(num, ordinal, np.int64)
                yield batch.replaced(repeated, np.zeros_like(repeated), substituted=substituted, rows=rows)

    def _encoded(self, batch: Batch) -> list[list[npt.NDArray[np.uint8]]]:
        """The bytes of a batch of one sample and its repeats."""
        return [[self._bytes(batch, component)] * len(batch) for component in self._decode.read_components]

    def _bytes(self, batch: Batch, component: str) -> npt.NDArray[np.uint8]:
        places, shard = batch.places(component), int(batch.rows.shard[0])
        if places.offset[0] < 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._read(shard, int(places.offset[0]), int(places.size[0])), np.uint8)


def _sources(num: int, bad: set[int]) -> Int64s | None:
    """For each position the one that stands there: itself, or the nearest good one; ``None`` if none is good.

    >>> _sources(6, {0, 2, 3}).tolist()
    [1, 1, 1, 1, 4, 5]
    """
    good = np.array([position for position in range(num) if position not in bad], np.int64)
    if not len(good):
        return None
    before = np.searchsorted(good, np.arange(num), side="right") - 1
    return good[np.maximum(before, 0)]


def _refusal(twin: DecodePipeline, fed: BatchInputs) -> RuntimeError | None:
    try:
        twin.decode(fed)
    except RuntimeError as exc:
        return exc
    return None


def _decodes(data: npt.NDArray[np.uint8]) -> bool:
    """Whether DALI's decoders take it, whatever a graph does with it then."""
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True)
    with pipeline:
        encoded = fn.external_source(source=lambda: [data], batch=True, dtype=types.UINT8, ndim=1)
        pipeline.set_outputs(fn.decoders.image(encoded, device="cpu", output_type=types.RGB))
    try:
        pipeline.run()
    except RuntimeError:
        return False
    return True


def _pillow_says(data: npt.NDArray[np.uint8]) -> str:
    """Why Pillow cannot read it either, in words; nothing where it can."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data.tobytes())) as photo:
                photo.load()
    except Exception as exc:  # noqa: BLE001 (Pillow raises what it meets)
        # Its text for what it cannot identify names an object in memory.
        return str(exc).partition(" <")[0][:120] or type(exc).__name__
    return ""


def reason_of(exc: RuntimeError) -> str:
    """What DALI says of a failure, in a line."""
    reason = str(exc).partition("encountered:")[2].strip() or str(exc)
    # What it is called in a batch that nobody else has seen, and where it lay in the image, is left out.
    reason = re.split(r"C\+\+ context|Current pipeline object is no longer valid", reason)[0]
    reason = re.sub(r" sample #\d+ :.*", " ", reason)
    return " ".join(reason.split())


def _among(batch: Batch) -> str:
    keys = ", ".join(batch.keys[:8]) + (", ..." if len(batch) > 8 else "")
    return f"DALI cannot decode one of the {len(batch)} samples {keys}"
