"""Remember the bad samples of a rank, and repair their batches: good samples take their places.

A sample is bad if the shard index or a photo's bytes say so (a GIF, too many pixels), if a component cannot be parsed,
or if DALI cannot decode it. ``on_error="raise"`` names it and stops; ``"substitute"`` lists it and replaces it with
another sample.

A bad sample is replaced by the nearest good one before it in its batch, else by the nearest after it. If the whole
batch is bad, one sample from outside replaces all of it: the nearest good one before the batch's first sample in its
shard, else the nearest after it, else the first good sample of the following shards. So the result depends on the order
and on which samples are bad, and not on the time when they were found.

DALI does not always name the sample that it cannot decode, and loses the batch. But the batch's inputs are still here.
The repair decodes sixteenths of the batch, and sixteenths of these, in a retry pipeline apart from the batches in
flight, which also decodes the repaired batch: by the same graph, on the same device, with the same random numbers. It
does not use a GPU's JPEG engines: which photos they get depends on the number of samples, and they may decode a photo
that the other decoders refuse.

# Note [decoders' own lines]: libjpeg, libpng and nvImageCodec write a line to stderr whenever they refuse a photo, from
DALI's threads, and no option turns that off. So the repair decodes a bad photo as rarely as it can.
"""

import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline
from torch.utils.dlpack import from_dlpack

from dali_pipes.arrays import Int64s
from dali_pipes.errors import DecodeError, printable
from dali_pipes.formats.quarantine import CAUSE_CHARS, Quarantine
from dali_pipes.graph.decode import BatchInputs, DecodePipeline
from dali_pipes.graph.finish import Packed
from dali_pipes.graph.photos import reason_of
from dali_pipes.options import BadSamples
from dali_pipes.reader.batch import NUM_NAMED, Batch
from dali_pipes.reader.samples import StoredSamples

# If this many samples fail besides those of the first batch, and none succeeds, the graph is at fault.
NUM_PROOFS = 8
# Parts into which the repair cuts a batch that DALI refuses, see Note [decoders' own lines].
NUM_PARTS = 16
# Bad samples that are tried in the place of others, in all batches. Each costs a read and a decoding.
MAX_UNFIT = 1000

_log = logging.getLogger(__name__)


class BadSample(NamedTuple):
    """A sample that cannot be read or decoded."""

    shard: str
    key: str
    component: str
    """The component at fault; empty if that is not known."""
    cause: str

    def __str__(self) -> str:
        shard, key, component = (printable(name) for name in (self.shard, self.key, self.component))
        where = f"component '{component}' " if component else ""
        return f"shard '{shard}', key '{key}': {where}{printable(self.cause, max_chars=CAUSE_CHARS)}"


class BadSamplesSeen:
    """The bad samples that one loader has seen; each is counted, logged and listed once."""

    def __init__(self, policy: BadSamples, *, quarantine: Quarantine | None) -> None:
        self._policy, self._quarantine = policy, quarantine
        self.seen: dict[int, BadSample] = {}
        """The bad samples of this rank's batches by ordinal, in the order in which they were seen."""
        self.unfit: set[int] = set()
        """Ordinals of further bad samples, which were tried as replacements, or only filled a batch. They belong to
        other ranks or other batches, and count there."""

    def positions(self, batch: Batch) -> list[int]:
        """Find the positions in a batch of samples that are known to be bad."""
        if not self.seen and not self.unfit:
            return []
        num_valid, known_bad = batch.num_valid, self.seen.keys() | self.unfit
        ordinals = batch.ordinals.tolist()
        return [at for at, ordinal in enumerate(ordinals) if ordinal in (self.seen if at < num_valid else known_bad)]

    def add(self, batch: Batch, problems: Mapping[int, tuple[str, str]]) -> None:
        """Add the bad samples of a batch; ``problems``: position in the batch -> the component at fault, and why.

        A sample counts, and is listed, if it is the batch's own: neither one that replaces another, nor one that only
        fills the batch.

        Raises:
            DecodeError: If bad samples must not be substituted, or there are too many now; names them.
        """
        found: dict[int, BadSample] = {}
        for position, (component, cause) in sorted(problems.items()):
            shard, key = batch.name(position)
            found.setdefault(int(batch.ordinals[position]), BadSample(shard, key, component, cause))
        if self._policy.on_error == "raise":
            first, *others = found.values()
            names = ", ".join(f"'{printable(other.key)}'" for other in others[:NUM_NAMED])
            more = f"; bad in this batch as well: {names}" if others else ""
            raise DecodeError(
                f"{first}{more}; leave it out (select=Select(exclude=...)), or replace bad samples by others "
                "(bad_samples=BadSamples(on_error='substitute'))"
            )
        counted = {int(batch.ordinals[at]) for at in problems if at < batch.num_valid and at not in batch.substituted}
        self.unfit.update(found.keys() - counted)
        new = {ordinal: bad for ordinal, bad in found.items() if ordinal in counted and ordinal not in self.seen}
        for ordinal, bad in new.items():
            if self._quarantine is not None:
                self._quarantine.add(*bad)  # first: after an error the batch is tried again
            self.seen[ordinal] = bad
            _log.warning("bad sample, another one replaces it: %s", bad)
        if new and len(self.seen) > self._policy.max_bad:
            where = f", all in '{self._quarantine.path}'" if self._quarantine is not None else ""
            last = list(self.seen.values())[-1]
            raise DecodeError(
                f"{len(self.seen)} samples are bad, max_bad={self._policy.max_bad} are allowed{where}; the last: "
                f"{last}; look at the data, leave them out (select=Select(exclude=...)), or raise max_bad"
            )


class Repair:
    """Replaces a loader's bad samples.

    ``read`` reads bytes of a shard, by its number, first byte and size; the shard may have left the cache.
    """

    def __init__(
        self,
        decode: DecodePipeline,
        *,
        stored: StoredSamples,
        seen: BadSamplesSeen,
        read: Callable[[int, int, int], bytes],
    ) -> None:
        self._decode, self._stored, self._seen, self._read = decode, stored, seen, read
        self._decoded: BatchInputs | None = None  # one sample that DALI could decode: the graph can be run

    def feed(self, batch: Batch, encoded: Mapping[str, Any]) -> BatchInputs:
        """Make the inputs of a batch, with other samples in the places of those that are known to be bad."""
        return self._completed(batch, encoded, set(self._seen.positions(batch)))

    def decode(self, inputs: BatchInputs, error: RuntimeError) -> tuple[BatchInputs, dict[str, Any]]:
        """Decode a batch that DALI refused, with other samples in the places of the bad ones.

        Raises:
            DecodeError: If bad samples must not be substituted, too many are bad, or no sample is at fault.
        """
        with contextlib.closing(self._decode.second_pipeline(hw_decoder_load=0.0)) as retry:
            while True:
                bad = self._culprits(retry, inputs, error)
                if bad:
                    self._seen.add(inputs.batch, bad)
                    inputs = self._completed(inputs.batch, inputs.encoded, set(bad))
                try:
                    # Copied, because they are used after the pipeline that made them is closed.
                    decoded = {name: _copied(output) for name, output in retry.decode(inputs).items()}
                except RuntimeError as exc:
                    if not bad:
                        raise DecodeError(
                            f"DALI cannot decode one of the {len(inputs.batch)} samples {inputs.batch.some_keys}: "
                            f"{reason_of(exc)}"
                        ) from exc
                    error = exc
                    continue
                if not bad:
                    _log.warning(
                        "DALI failed on the batch of %s (%s), and then decoded each of its samples: none is replaced",
                        inputs.batch.some_keys,
                        reason_of(error),
                    )
                return inputs, decoded

    def note_decoded(self, inputs: BatchInputs) -> None:
        """Keep a sample of the first batch that DALI could decode: it proves that the graph can be run."""
        if self._decoded is None:
            sample = inputs.part([0])
            copied = {component: [np.array(data) for data in samples] for component, samples in sample.encoded.items()}
            self._decoded = sample._replace(encoded=copied)

    def _culprits(self, retry: DecodePipeline, inputs: BatchInputs, error: RuntimeError) -> dict[int, tuple[str, str]]:
        """Find the samples that DALI cannot decode, each with the reason that it gives for this sample alone."""
        batch = inputs.batch
        # A sample that is in the batch twice is tried once.
        pairs = zip(batch.ordinals.tolist(), batch.occurrences.tolist(), strict=True)
        parts = _cut(sorted({pair: at for at, pair in enumerate(pairs)}.values()))
        found: dict[int, RuntimeError] = {}
        while parts:
            part = parts.pop()
            refused = _refusal(retry, inputs.part(part))
            if refused is not None and len(part) > 1:
                parts += _cut(part)
            elif refused is not None:
                found[int(batch.ordinals[part[0]])] = refused
        positions = [at for at, ordinal in enumerate(batch.ordinals.tolist()) if ordinal in found]
        if len(positions) == len(batch):
            self._check_graph(retry, batch, error)
        causes = {ordinal: self._cause(inputs, ordinal, exc) for ordinal, exc in found.items()}
        return {at: causes[int(batch.ordinals[at])] for at in positions}

    def _check_graph(self, retry: DecodePipeline, batch: Batch, error: RuntimeError) -> None:
        """Refuse to blame all samples of a batch if a sample that was decoded before, or neighbours, fail as well."""
        if self._decoded is not None:
            proofs: Iterator[BatchInputs] = iter([self._decoded])
        else:
            completed = (self._decode.complete(other, self._encoded(other)) for other in self._others(batch, num=1))
            proofs = itertools.islice((inputs for inputs, problems in completed if not problems), NUM_PROOFS)
        is_tried = False
        for inputs in proofs:
            if _refusal(retry, inputs) is None:
                self.note_decoded(inputs)
                return
            is_tried = True
        if is_tried:
            raise DecodeError(
                f"DALI fails on every sample that was tried, also on others than those of the batch of "
                f"{batch.some_keys}: the graph or the device is at fault: {reason_of(error)}"
            ) from error

    def _cause(self, inputs: BatchInputs, ordinal: int, error: RuntimeError) -> tuple[str, str]:
        """Find the component at fault, empty if it is not known, and what DALI reports."""
        position = int(np.argmax(inputs.batch.ordinals == ordinal))
        operator = re.search(r"operator `(?:nvidia\.dali\.)?([^`]*)`", str(error))
        if operator is None or "decoders" in operator[1]:
            components = self._decode.inputs.decoded.components
            for component in components:
                if len(components) == 1 or not _decodes(np.array(inputs.encoded[component][position])):
                    return component, f"cannot be decoded: {reason_of(error)}"
        return "", f"cannot be processed: {operator[1] if operator else 'DALI'} says: {reason_of(error)}"

    def _completed(self, batch: Batch, encoded: Mapping[str, Any], bad: set[int]) -> BatchInputs:
        """Make a batch's inputs, with good samples in the places of bad ones, also of those that it finds."""
        while True:
            if bad:
                substituted = tuple(sorted({*batch.substituted, *bad}))
                sources = _sources(len(batch), bad)
                if sources is None:
                    return self._from_outside(batch, substituted)
                batch = batch.replaced(batch.ordinals[sources], batch.occurrences[sources], substituted=substituted)
                encoded = {name: [samples[at] for at in sources.tolist()] for name, samples in encoded.items()}
            inputs, problems = self._decode.complete(batch, encoded)
            if not problems:
                return inputs
            self._seen.add(batch, problems)
            bad = set(problems)

    def _from_outside(self, batch: Batch, substituted: tuple[int, ...]) -> BatchInputs:
        """Make the inputs of a batch that has no good sample, of one good sample of the data set."""
        shard, key = (printable(name) for name in batch.name(0))
        for made in self._others(batch, num=len(batch), substituted=substituted):
            inputs, problems = self._decode.complete(made, self._encoded(made))
            if not problems:
                return inputs
            self._seen.add(made, problems)
            if len(self._seen.unfit) > MAX_UNFIT:
                raise DecodeError(
                    f"shard '{shard}', key '{key}': more than {MAX_UNFIT} samples that could replace the bad ones of a "
                    "batch are bad as well; look at the data: dali-pipes prep verify URL"
                )
        raise DecodeError(f"shard '{shard}', key '{key}': the data set has no good sample left to replace it")

    def _others(self, batch: Batch, *, num: int, substituted: tuple[int, ...] = ()) -> Iterator[Batch]:
        """Yield batches that repeat one sample, for each neighbour of the first sample that is not known to be bad."""
        for neighbours in self._stored.neighbours(int(batch.ordinals[0])):
            known = self._seen.seen.keys() | self._seen.unfit
            candidates = [ordinal for ordinal in neighbours.tolist() if ordinal not in known]
            if not candidates:
                continue
            rows = self._stored.rows(np.array(candidates, np.int64))
            for ordinal in candidates:
                repeated = np.full(num, ordinal, np.int64)
                yield batch.replaced(repeated, np.zeros_like(repeated), substituted=substituted, rows=rows)

    def _encoded(self, batch: Batch) -> dict[str, list[npt.NDArray[np.uint8]]]:
        """Read the bytes of a batch that repeats one sample."""
        encoded = {}
        for component in self._decode.inputs.read:
            places = batch.places(component)
            data = b""
            if places.offset[0] >= 0:
                data = self._read(int(batch.rows.shard[0]), int(places.offset[0]), int(places.size[0]))
            encoded[component] = [np.frombuffer(data, np.uint8)] * len(batch)
        return encoded


def _sources(num: int, bad: set[int]) -> Int64s | None:
    """For each position find the nearest good one, which may be itself; ``None`` if no position is good."""
    good = np.array([position for position in range(num) if position not in bad], np.int64)
    if not len(good):
        return None
    before = np.searchsorted(good, np.arange(num), side="right") - 1
    return good[np.maximum(before, 0)]


def _cut(positions: list[int]) -> list[list[int]]:
    """Cut positions into `NUM_PARTS` or fewer parts."""
    size = -(-len(positions) // NUM_PARTS)
    return [positions[start : start + size] for start in range(0, len(positions), size)]


def _copied(output: Any) -> Any:
    if isinstance(output, list | Packed):
        return output
    return from_dlpack(output).clone()


def _refusal(retry: DecodePipeline, inputs: BatchInputs) -> RuntimeError | None:
    try:
        retry.decode(inputs)
    except RuntimeError as exc:
        return exc
    return None


def _decodes(data: npt.NDArray[np.uint8]) -> bool:
    """Whether DALI's decoders can decode a photo of an allowed format, whatever the graph does with it then."""
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True)
    with pipeline:
        encoded = fn.external_source(source=lambda: [data], batch=True, dtype=types.UINT8, ndim=1)
        pipeline.set_outputs(fn.decoders.image(encoded, device="cpu", output_type=types.RGB))
    try:
        pipeline.run()
    except RuntimeError:
        return False
    return True
