"""Collect the inputs that a graph asks for: components, arrays computed from a batch, and parsed values.

A graph is any function ``graph(components, random) -> {output name: node}``. Each node that it takes from `Components`
or `Random` becomes an input of the decode pipeline. It is fed once for each batch, with encoded bytes from the reader
pipeline, or with an array that belongs to the samples (label, crop, random numbers). Arrays are computed in numpy from
the plan and the shard indexes, or parsed from other components (`dali_pipes.graph.parse`). Text and other outputs that
are not tensors bypass the decode pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from nvidia.dali import types

from dali_pipes.graph import parse
from dali_pipes.graph.parse import Parser
from dali_pipes.reader.batch import Batch, DecodedPhotos

Int32s = npt.NDArray[np.int32]
T = TypeVar("T")
ArrayFunction = Callable[[Batch], npt.NDArray[Any]]
DecoderDevice = Literal["cpu", "mixed"]

_DALI_TYPES = {
    np.dtype(np.float32): types.FLOAT,
    np.dtype(np.int32): types.INT32,
    np.dtype(np.int64): types.INT64,
    np.dtype(np.uint8): types.UINT8,
}
# More dtypes are allowed where the graph names one. A computed array may be float64 by accident.
_PARSED_DALI_TYPES = _DALI_TYPES | {
    np.dtype(np.float16): types.FLOAT16,
    np.dtype(np.float64): types.FLOAT64,
    np.dtype(np.int8): types.INT8,
    np.dtype(np.int16): types.INT16,
    np.dtype(np.bool_): types.BOOL,
}


@dataclass(frozen=True, eq=False)
class ListOutput:
    """An output that is not a tensor: batches hold a list of one Python object per sample. Operators cannot take it."""

    parser: Parser


@dataclass(frozen=True)
class ArrayKind:
    """The dtype and number of dimensions that an array of the graph must have in every batch."""

    dtype: np.dtype[Any]
    ndim: int

    @classmethod
    def of(cls, array: object, *, num_samples: int) -> "ArrayKind":
        """Return the kind of ``array``.

        Raises:
            TypeError: If it is not an array of a dtype that a graph can take, with a row for each of ``num_samples``.
        """
        if isinstance(array, np.ndarray) and array.dtype in _DALI_TYPES and array.shape[:1] == (num_samples,):
            return cls(array.dtype, array.ndim)
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        allowed = ", ".join(str(dtype) for dtype in _DALI_TYPES)
        raise TypeError(
            f"an array of the graph must be numpy's, one row for each of {num_samples} samples, dtype one of "
            f"{allowed}, got {found}; convert it: .astype(np.float32)"
        )


@dataclass(kw_only=True)
class GraphInputs:
    """The inputs that a graph asked for, in the order in which it asked."""

    read: list[str] = field(default_factory=list)
    """Components to read of each sample, as nodes or to be parsed."""
    components: list[str] = field(default_factory=list)
    """Components whose encoded bytes the graph takes: inputs ``component/image.jpg``, ..., uint8 [bytes] per sample."""
    decoded: DecodedPhotos = field(default_factory=DecodedPhotos)
    """The components among these whose bytes reach an image decoder, and those whose photos must have the same size."""
    parsed: list[Parser] = field(default_factory=list)
    """Arrays that are parsed: inputs ``parsed/0``, ``parsed/1``, ..."""
    arrays: list[tuple[ArrayFunction, ArrayKind]] = field(default_factory=list)
    """The function that computes each array from a batch, and its kind: inputs ``array/0``, ``array/1``, ..."""
    photos: set[str] = field(default_factory=set)
    """Components whose size the graph asked for: their header must be readable."""
    same_size: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of components that the graph named in `Components.same_size`."""
    has_label: bool = False
    """Whether the graph asked for the class id."""
    lists: dict[str, Parser] = field(default_factory=dict)
    """Outputs that are not tensors, by name."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """All inputs by name."""


class Components:
    """A sample's components, as bytes or parsed, and arrays beside them; the first argument of a graph.

    Where a sample may lack a component (``missing="empty"``), its bytes and its parsed value are empty: ``""``,
    ``b""``, ``None``, an array of no elements. `present` distinguishes a missing component from an empty one.

    Args:
        source: Makes an input node from a name, a DALI type and a number of dimensions.
        check: Called with each component that the graph takes; raises if a sample lacks it.
        check_labels: Called when the graph asks for labels; raises if a sample has none.
        example: Any batch of the data set; it shows each array's dtype and number of dimensions.
        device: The device for which decoders are built.
    """

    def __init__(
        self,
        *,
        source: Callable[[str, Any, int], Any],
        check: Callable[[str], None],
        check_labels: Callable[[], None],
        example: Batch,
        device: DecoderDevice,
    ) -> None:
        self.device = device
        """``device=`` for the decoders of photos: ``"mixed"`` if a GPU decodes, else ``"cpu"``."""
        self.inputs = GraphInputs()
        self._source, self._check, self._check_labels, self._example = source, check, check_labels, example
        self._json: dict[str, Parser] = {}

    def __getitem__(self, component: str) -> Any:
        """The encoded bytes of a component: a node of uint8 [bytes].

        ``"jpg;jpeg"`` takes the first of these components that a sample has.
        """
        name = f"component/{component}"
        if name not in self.inputs.nodes:
            self._read(component)
            self.inputs.components.append(component)
            self._input(name, types.UINT8, 1)
        return self.inputs.nodes[name]

    @property
    def label(self) -> Any:
        """The class id: a node of int64 scalars."""
        self._check_labels()
        self.inputs.has_label = True
        # The kind is not learnt from the example: that sample may lack a label and be excluded for it.
        return self._array(lambda batch: batch.labels, ArrayKind(np.dtype(np.int64), 1))

    def size(self, component: str) -> Callable[[Batch], tuple[Int32s, Int32s]]:
        """Return a function for `array`, which computes the heights and widths of a batch's photos: pixels, int32 [B]
        each.

        Sizes are those of the stored photos. A photo that the sample lacks has the size 1 x 1; a photo whose header
        cannot be read has the size 0 x 0.
        """
        self.inputs.photos.add(component)
        self._check(component)
        return lambda batch: batch.size(component)

    def same_size(self, photo: str, mask: str) -> None:
        """Make each sample bad whose mask has another height or width than its photo.

        Such a mask does not fit the photo, but each can be cropped, so no other check finds it. Components that the
        graph decodes with the same crop are compared anyway.
        """
        for component in (photo, mask):
            self.inputs.photos.add(component)
            self._check(component)
        self.inputs.same_size.append((photo, mask))

    def on_device(self, node: Any) -> Any:
        """Move a node to the loader's device, where the operators after it then run; on the CPU it is unchanged.

        For masks: ``components.on_device(fn.decoders.image(components["png"], device="cpu", output_type=types.GRAY))``.
        No NVIDIA decoder decodes PNG on a GPU, and DALI runs one ``"mixed"`` decoder at a time.
        """
        return node if self.device == "cpu" or node.device == "gpu" else node.gpu()

    def array(self, function: ArrayFunction) -> Any:
        """A node fed with the rows of ``function(batch)``, a float32, int32, int64 or uint8 array [B, ...].

        The function is called with a `Batch`: once when the pipeline is built, with one sample of the data set; then
        once for each batch, in the thread that iterates. A run can be resumed exactly only if the result depends on the
        batch's samples alone.

        Raises:
            TypeError: If the function returns something else.
        """
        return self._array(function, ArrayKind.of(function(self._example), num_samples=len(self._example)))

    def present(self, component: str) -> Any:
        """A node of int32 scalars: 1 if a sample has the component, else 0. The component is not read."""
        self._check(component)
        return self.array(lambda batch: (batch.places(component).offset >= 0).astype(np.int32))

    def npy(self, component: str, *, dtype: npt.DTypeLike = np.float32, ndim: int = 1) -> Any:
        """The array in a ``.npy`` file: a node of ``dtype``, with ``ndim`` dimensions for each sample.

        The file may have either byte order, by rows or by columns. Samples may have different shapes; pad or crop them
        to one shape before you return them as an output. A sample is bad if its file has another dtype or number of
        dimensions, is cut off, or holds Python objects.
        """
        return self._parsed(parse.npy_parser(component, dtype=np.dtype(dtype), ndim=ndim))

    def json(
        self,
        component: str,
        *,
        to: Callable[[Any], Any] | None = None,
        dtype: npt.DTypeLike = np.float32,
        ndim: int = 1,
    ) -> Any:
        """The objects in JSON documents: an output that is a list of one object for each sample.

        Args:
            component: Its name.
            to: Makes an array of the object; the result is then a node, as in `parsed`. Each document is parsed once,
                whatever the number of these functions.
            dtype: Of the arrays that ``to`` returns.
            ndim: Their number of dimensions.
        """
        parser = self._json.setdefault(component, parse.json_parser(component))
        if to is None:
            return self._listed(parser)
        return self._parsed(parse.array_parser(component, to, dtype=np.dtype(dtype), ndim=ndim, base=parser))

    def text(self, component: str) -> ListOutput:
        """A component's text in UTF-8, unchanged: an output that is a list of one `str` for each sample."""
        return self._listed(parse.text_parser(component))

    def bytes(self, component: str) -> ListOutput:
        """A component's bytes: an output that is a list of one `bytes` for each sample."""
        return self._listed(parse.bytes_parser(component))

    def multi_hot(self, component: str, *, num_classes: int, dtype: npt.DTypeLike = np.float32) -> Any:
        """Several class ids of each sample: a node of ``dtype`` [num_classes], 1 at each id, else 0.

        The component holds a JSON list of ids, ``[3, 17]``, or ids separated by white space or commas, ``3 17``. A
        sample with an id outside ``[0, num_classes)`` is bad.
        """
        if num_classes < 1:
            raise ValueError(f"num_classes must be positive, got {num_classes}")
        return self._parsed(parse.multi_hot_parser(component, num_classes=num_classes, dtype=np.dtype(dtype)))

    def parsed(
        self,
        component: str,
        function: Callable[[npt.NDArray[np.uint8]], Any],
        *,
        dtype: npt.DTypeLike = np.float32,
        ndim: int = 1,
    ) -> Any:
        """The arrays that ``function`` makes of a sample's bytes: a node of ``dtype``, with ``ndim`` dimensions.

        The function is called once for each sample, in the thread that iterates, with a read-only uint8 array [bytes]
        that stays valid while it is kept. It returns an array, or a number or list of numbers that an array of
        ``dtype`` can hold. If it raises an exception, the sample is bad.
        """
        return self._parsed(parse.array_parser(component, function, dtype=np.dtype(dtype), ndim=ndim))

    def _array(self, function: ArrayFunction, kind: ArrayKind) -> Any:
        node = self._input(f"array/{len(self.inputs.arrays)}", _DALI_TYPES[kind.dtype], kind.ndim - 1)
        self.inputs.arrays.append((function, kind))
        return node

    def _parsed(self, parser: Parser) -> Any:
        if parser.dtype not in _PARSED_DALI_TYPES:
            allowed = ", ".join(str(known) for known in _PARSED_DALI_TYPES)
            raise ValueError(f"dtype must be one of {allowed}, got {parser.dtype}")
        if parser.ndim < 0:
            raise ValueError(f"ndim must not be negative, got {parser.ndim}")
        self._read(parser.component)
        node = self._input(f"parsed/{len(self.inputs.parsed)}", _PARSED_DALI_TYPES[parser.dtype], parser.ndim)
        self.inputs.parsed.append(parser)
        return node

    def _listed(self, parser: Parser) -> ListOutput:
        self._read(parser.component)
        return ListOutput(parser)

    def _input(self, name: str, dtype: Any, ndim: int) -> Any:
        node = self.inputs.nodes[name] = self._source(name, dtype, ndim)
        return node

    def _read(self, component: str) -> None:
        if component not in self.inputs.read:
            self._check(component)
            self.inputs.read.append(component)


def once_a_batch(function: Callable[[Batch], T]) -> Callable[[Batch], T]:
    """Wrap a function so that it keeps the last batch's result, from which several arrays of the batch are made."""
    kept: list[tuple[Batch, T]] = []

    def kept_function(batch: Batch) -> T:
        if not kept or kept[0][0] is not batch:
            kept[:] = [(batch, function(batch))]
        return kept[0][1]

    return kept_function
