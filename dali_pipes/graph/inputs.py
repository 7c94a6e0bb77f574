"""Where the two halves meet: what a graph asks for, as inputs of the decode half, and how each batch answers.

A graph is any function ``graph(components, random) -> {output name: DataNode}``. What it takes from `Components` and
`Random` while the decode half is built becomes an input, which each batch then feeds: encoded bytes from the reader
half, and plain arrays of what belongs to a sample and is not pixels (label, crop window, random numbers), computed in
numpy from the plan and the shard indexes, or parsed from components that hold no photo (`dali_pipes.graph.parse`).
What is no tensor, such as text, goes past the decode half, beside its outputs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

from dali_pipes.graph.parse import (
    Parser,
    array_parser,
    bytes_parser,
    json_parser,
    multi_hot_parser,
    npy_parser,
    text_parser,
)
from dali_pipes.reader.samples import Batch

__all__ = [
    "ArrayFunction",
    "Components",
    "Graph",
    "GraphInputs",
    "ListOutput",
    "Random",
    "make_source",
    "once_a_batch",
    "refuse_any_data",
    "resized_crop",
]

Int32s = npt.NDArray[np.int32]
Float64s = npt.NDArray[np.float64]
T = TypeVar("T")
ArrayFunction = Callable[[Batch], npt.NDArray[Any]]
DecoderDevice = Literal["cpu", "mixed"]

_DALI_TYPES = {
    np.dtype(np.float32): types.FLOAT,
    np.dtype(np.int32): types.INT32,
    np.dtype(np.int64): types.INT64,
    np.dtype(np.uint8): types.UINT8,
}
# What a graph may name: an array's own dtype is as often float64 by accident as by intent.
_PARSED_DALI_TYPES = _DALI_TYPES | {
    np.dtype(np.float16): types.FLOAT16,
    np.dtype(np.float64): types.FLOAT64,
    np.dtype(np.int8): types.INT8,
    np.dtype(np.int16): types.INT16,
    np.dtype(np.bool_): types.BOOL,
}
# As the names of operators begin in a pipeline's own listing.
_DECODERS = ("decoders__", "experimental__decoders__", "ImageDecoder")
_RANDOM_PREFIXES = ("random__", "noise__")
_RANDOM = ("Random", "CoinFlip", "Uniform", "NormalDistribution", "BatchPermutation")
# torchvision's RandomResizedCrop gives up and crops the centre after as many tries.
CROP_TRIES = 10


class Graph(Protocol):
    """What the decode half runs: see the functions in `dali_pipes.graph.pipelines` for three to copy."""

    def __call__(self, components: "Components", random: "Random") -> Mapping[str, Any]:
        """The outputs, by name, in the order in which batches hold them: nodes, and what `Components.text` gives."""


@dataclass(frozen=True, eq=False)
class ListOutput:
    """An output that is no tensor: batches hold a list of one Python object a sample. Nothing for operators."""

    parser: Parser


@dataclass(kw_only=True)
class GraphInputs:
    """What a graph asked for, in the order in which it asked."""

    read: list[str]
    """Components to read of each sample, as nodes or to be parsed."""
    components: dict[str, Any]
    """Those that are nodes: component -> node, uint8 [bytes] a sample."""
    parsed: list[Parser]
    """Arrays that are parsed: input ``parsed/0``, ``parsed/1``, ..."""
    arrays: "list[tuple[ArrayFunction, ArrayKind]]"
    """how a batch computes the array, and what it must be each time."""
    photos: set[str]
    """Components of which the graph asked the size: they must have a header that can be read."""
    has_label: bool = False
    """Whether the graph asked for the class id."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """All inputs by name: ``component/image.jpg``, ``array/0``, ``parsed/0``."""

    def used(self, pipeline: Pipeline) -> list[str]:
        """The names of those on which an output of ``pipeline`` depends: DALI never asks for the others."""
        operators = {id(operator) for operator in _operators(pipeline)}
        return [name for name, node in self.nodes.items() if id(node.source) in operators]


@dataclass(frozen=True)
class ArrayKind:
    """What an array of the seam is, batch after batch."""

    dtype: np.dtype[Any]
    ndim: int

    @classmethod
    def of(cls, array: object, *, num_samples: int) -> "ArrayKind":
        """The kind of ``array``.

        Raises:
            TypeError: If it is no array of a dtype that a graph can take, with a row for each of ``num_samples``.
        """
        if isinstance(array, np.ndarray) and array.dtype in _DALI_TYPES and array.shape[:1] == (num_samples,):
            return cls(array.dtype, array.ndim)
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        allowed = ", ".join(str(dtype) for dtype in _DALI_TYPES)
        raise TypeError(
            f"an array of the graph must be numpy's, one row for each of {num_samples} samples, dtype one of "
            f"{allowed}, got {found}; convert it: .astype(np.float32)"
        )


class Components:
    """A sample's components, as bytes or parsed, and plain arrays beside them; what a graph is handed first.

    Where a sample may lack a component (``missing="empty"``), it has no bytes of it, and what is parsed is empty:
    ``""``, ``b""``, ``None``, an array of no elements; `present` tells it from a component that holds nothing.

    Args:
        source: Makes an input node: name, DALI type and number of dimensions in, node out.
        check: Called with each component that the graph takes: refuses one that a sample lacks.
        check_labels: Called when the graph asks for labels.
        example: Some batch of the data set, to learn each array's dtype and dimensions by.
        device: What decoders are to be built for.
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
        """``device=`` for `fn.decoders`: ``"mixed"`` where there is a GPU, else ``"cpu"``."""
        self.inputs = GraphInputs(read=[], components={}, parsed=[], arrays=[], photos=set(), nodes={})
        self._source, self._check, self._check_labels, self._example = source, check, check_labels, example
        self._json: dict[str, Parser] = {}

    def __getitem__(self, component: str) -> Any:
        """The encoded bytes of a component: a node of uint8 [bytes]. ``"jpg;jpeg"`` takes the first that is there."""
        if component not in self.inputs.components:
            self._read(component)
            self.inputs.components[component] = self._input(f"component/{component}", types.UINT8, 1)
        return self.inputs.components[component]

    @property
    def label(self) -> Any:
        """The class id: a node of int64 scalars."""
        self._check_labels()
        self.inputs.has_label = True
        # The example may be a sample that lacks one, and is left out for it.
        return self._array(lambda batch: batch.labels, ArrayKind(np.dtype(np.int64), 1))

    def size(self, component: str) -> Callable[[Batch], tuple[Int32s, Int32s]]:
        """For arrays: a function that gives a batch's photo heights and widths as stored, int32 [B] each."""
        self.inputs.photos.add(component)
        self._check(component)
        return lambda batch: batch.size(component)

    def array(self, function: ArrayFunction) -> Any:
        """A node fed with ``function(batch)``: one row of a float32, int32, int64 or uint8 array [B, ...] a sample.

        The function is called once a batch, in the thread that iterates, with a `Batch`, and once when the pipeline is
        built; what it returns must depend on the batch's samples alone if the run is to be resumed exactly.

        Raises:
            TypeError: If it returns something else.
        """
        return self._array(function, ArrayKind.of(function(self._example), num_samples=len(self._example)))

    def _array(self, function: ArrayFunction, kind: ArrayKind) -> Any:
        node = self._input(f"array/{len(self.inputs.arrays)}", _DALI_TYPES[kind.dtype], kind.ndim - 1)
        self.inputs.arrays.append((function, kind))
        return node

    def present(self, component: str) -> Any:
        """Whether a sample has a component: a node of int32 scalars, 1 or 0. Nothing is read for it."""
        self._check(component)
        return self.array(lambda batch: (batch.places(component).offset >= 0).astype(np.int32))

    def npy(self, component: str, *, dtype: npt.DTypeLike = np.float32, ndim: int = 1) -> Any:
        """The array in a ``.npy`` file: a node of ``dtype``, with ``ndim`` dimensions a sample.

        Stored in either byte order, by rows or columns. Samples may have different shapes; pad or crop them to one
        before they are an output. A file of another dtype or number of dimensions, one that is cut off, or one that
        holds Python objects, makes its sample a bad one.
        """
        found = np.dtype(dtype)
        return self._parsed(npy_parser(component, dtype=found, ndim=ndim), dtype=found, ndim=ndim)

    def json(
        self,
        component: str,
        *,
        to: Callable[[Any], Any] | None = None,
        dtype: npt.DTypeLike = np.float32,
        ndim: int = 1,
    ) -> Any:
        """What a JSON document holds: an output that is a list of one object a sample.

        Args:
            component: Its name.
            to: Makes an array of the object; the result is then a node, as of `parsed`. A component is parsed once a
                sample, whatever the number of these functions.
            dtype: Of the arrays that ``to`` returns.
            ndim: Their dimensions.
        """
        # One parser for all that is made of the component.
        parser = self._json.setdefault(component, json_parser(component))
        if to is None:
            return self._listed(parser)
        found = np.dtype(dtype)
        return self._parsed(array_parser(component, to, dtype=found, ndim=ndim, base=parser), dtype=found, ndim=ndim)

    def text(self, component: str) -> ListOutput:
        """A component's text, in UTF-8, as it is: an output that is a list of one str a sample."""
        return self._listed(text_parser(component))

    def bytes(self, component: str) -> ListOutput:
        """A component's bytes: an output that is a list of one `bytes` a sample."""
        return self._listed(bytes_parser(component))

    def multi_hot(self, component: str, *, num_classes: int, dtype: npt.DTypeLike = np.float32) -> Any:
        """Several class ids a sample: a node of ``dtype`` [num_classes], 1 at each id, else 0.

        The component holds a JSON list of ids, ``[3, 17]``, or ids separated by white space or commas, ``3 17``; one
        outside ``[0, num_classes)`` makes its sample a bad one.
        """
        if num_classes < 1:
            raise ValueError(f"num_classes must be positive, got {num_classes}")
        found = np.dtype(dtype)
        return self._parsed(multi_hot_parser(component, num_classes=num_classes, dtype=found), dtype=found, ndim=1)

    def parsed(
        self,
        component: str,
        function: Callable[[npt.NDArray[np.uint8]], Any],
        *,
        dtype: npt.DTypeLike = np.float32,
        ndim: int = 1,
    ) -> Any:
        """What ``function`` makes of a sample's bytes: a node of ``dtype``, with ``ndim`` dimensions a sample.

        It is called for each sample, in the thread that iterates, with a read-only uint8 array [bytes] that is good for
        as long as it is kept. What it raises makes the sample a bad one. It returns an array, or a number or list of
        numbers that an array of ``dtype`` can hold.
        """
        found = np.dtype(dtype)
        return self._parsed(array_parser(component, function, dtype=found, ndim=ndim), dtype=found, ndim=ndim)

    def _parsed(self, parser: Parser, *, dtype: np.dtype[Any], ndim: int) -> Any:
        if dtype not in _PARSED_DALI_TYPES:
            allowed = ", ".join(str(known) for known in _PARSED_DALI_TYPES)
            raise ValueError(f"dtype must be one of {allowed}, got {dtype}")
        if ndim < 0:
            raise ValueError(f"ndim must not be negative, got {ndim}")
        self._read(parser.component)
        node = self._input(f"parsed/{len(self.inputs.parsed)}", _PARSED_DALI_TYPES[dtype], ndim)
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


class Random:
    """Random numbers that belong to the sample; what a graph is handed second.

    Each call opens a stream of its own, named by its kind and number; pass ``stream=`` to keep it when calls are added.
    A stream is a function of ``(seed, epoch, ordinal, occurrence, stream)``: another batch size, another number of
    ranks or a resumed run sees the same numbers. (Pixels to the last bit are another matter on a GPU, see
    `dali_pipes.tuning`.)
    """

    def __init__(self, components: Components) -> None:
        self._components = components
        self._num_streams = 0

    def uniform(self, low: float = 0.0, high: float = 1.0, *, stream: str | None = None) -> Any:
        """A node of float32 scalars in ``[low, high)``."""
        name = self._name("uniform", stream)
        # The largest float32 below high: rounding to float32 could reach it.
        last = np.nextafter(np.float32(high), np.float32(low))

        def draw(batch: Batch) -> npt.NDArray[np.float32]:
            return np.minimum((low + (high - low) * batch.uniforms(name, 1)[:, 0]).astype(np.float32), last)

        return self._components.array(draw)

    def coin_flip(self, probability: float = 0.5, *, stream: str | None = None) -> Any:
        """A node of int32 scalars, 1 with this probability, else 0: what ``mirror=`` takes."""
        name = self._name("coin_flip", stream)
        return self._components.array(lambda batch: (batch.uniforms(name, 1)[:, 0] < probability).astype(np.int32))

    def resized_crop(
        self,
        component: str,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        stream: str | None = None,
    ) -> tuple[Any, Any]:
        """A random window of a photo: nodes of its start and its shape, int32 [2] (rows, columns) each.

        Computed from the height and width in the shard index, so that `fn.decoders.image_slice` decodes the window
        only. See `resized_crop` for how it is drawn.
        """
        name = self._name("resized_crop", stream)
        size = self._components.size(component)

        @once_a_batch
        def window(batch: Batch) -> Int32s:
            height, width = size(batch)
            return resized_crop(height, width, batch.uniforms(name, 2 * CROP_TRIES + 2), scale=scale, ratio=ratio)

        return (
            self._components.array(lambda batch: window(batch)[:, :2]),
            self._components.array(lambda batch: window(batch)[:, 2:]),
        )

    def _name(self, kind: str, stream: str | None) -> str:
        self._num_streams += 1
        return stream if stream is not None else f"{kind}/{self._num_streams - 1}"


def resized_crop(
    height: Int32s, width: Int32s, uniforms: Float64s, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> Int32s:
    """Windows as torchvision's ``RandomResizedCrop.get_params`` draws them, from given uniform numbers.

    Ten tries of an area, uniform in ``scale`` of the photo's, and an aspect ratio, log-uniform in ``ratio``; the first
    that fits is placed uniformly. If none fits: the centre, of the nearest ratio allowed.

    Args:
        height: int32 [B], rows of the photo.
        width: int32 [B].
        uniforms: float64 [B, 22] in [0, 1).
        scale: Least and greatest share of the area.
        ratio: Least and greatest width / height.

    Returns:
        int32 [B, 4]: start row, start column, rows, columns.
    """
    tries = uniforms[:, :-2].reshape(len(uniforms), CROP_TRIES, 2)
    area = height.astype(np.float64) * width  # [B]
    target = area[:, None] * (scale[0] + (scale[1] - scale[0]) * tries[:, :, 0])
    log_ratio = math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * tries[:, :, 1]
    aspect = np.exp(log_ratio)
    columns = np.rint(np.sqrt(target * aspect)).astype(np.int32)  # [B, try]
    rows = np.rint(np.sqrt(target / aspect)).astype(np.int32)
    fits = (columns > 0) & (columns <= width[:, None]) & (rows > 0) & (rows <= height[:, None])
    pick = np.argmax(fits, axis=1)[:, None]
    drawn_rows, drawn_columns = (np.take_along_axis(drawn, pick, axis=1)[:, 0] for drawn in (rows, columns))
    whole_rows = np.where(width < ratio[0] * height, np.rint(width / ratio[0]), height).astype(np.int32)
    whole_columns = np.where(width > ratio[1] * height, np.rint(height * ratio[1]), width).astype(np.int32)
    any_fits = np.asarray(fits.any(axis=1))
    final_rows = np.where(any_fits, drawn_rows, whole_rows)
    final_columns = np.where(any_fits, drawn_columns, whole_columns)
    place = np.where(any_fits[:, None], uniforms[:, -2:], 0.5)
    slack = np.stack([height - final_rows, width - final_columns], axis=1)
    # Where a window was drawn each of its slack + 1 places is as likely; where the centre is taken, slack // 2.
    start = np.where(any_fits[:, None], np.floor(place * (slack + 1)), slack // 2).astype(np.int32)
    return np.concatenate([start, np.stack([final_rows, final_columns], axis=1)], axis=1).astype(np.int32)


def once_a_batch(function: Callable[[Batch], T]) -> Callable[[Batch], T]:
    """Keep the last batch's result, for what several arrays of a batch are cut from."""
    kept: list[tuple[Batch, T]] = []

    def kept_function(batch: Batch) -> T:
        if not kept or kept[0][0] is not batch:
            kept[:] = [(batch, function(batch))]
        return kept[0][1]

    return kept_function


def make_source(feed: Callable[[str], Any]) -> Callable[[str, Any, int], Any]:
    """Input nodes that ask ``feed(name)`` for each batch, inside the pipeline that is being defined."""

    def source(name: str, dtype: Any, ndim: int) -> Any:
        # Encoded bytes are not copied again: a TensorList is shared, not borrowed, so it lives until it was decoded.
        no_copy = name.startswith("component/")
        return fn.external_source(source=lambda: feed(name), batch=True, dtype=dtype, ndim=ndim, no_copy=no_copy)

    return source


def refuse_any_data(pipeline: Pipeline) -> None:
    """Refuse decoders that are to give whatever an image holds: a gray JPEG then ends the process (DALI 2.4, SIGSEGV).

    Args:
        pipeline: One whose outputs are set; built or not.

    Raises:
        ValueError: If one of its decoders has ``output_type=types.ANY_DATA``; says what to use.
    """
    for operator in _operators(pipeline):
        name, text = _spec(operator)
        if name.startswith(_DECODERS) and f"output_type: {int(types.ANY_DATA)}\n" in text:
            raise ValueError(
                f"decoder '{operator.name}' of the graph has output_type=types.ANY_DATA, with which a gray JPEG ends "
                "the process; give it output_type=types.RGB, or types.GRAY for masks"
            )


def random_operators(pipeline: Pipeline) -> list[str]:
    """The names of DALI's own random operators in a graph, each once."""
    names = {_spec(operator)[0] for operator in _operators(pipeline)}
    return sorted(name for name in names if name.startswith(_RANDOM_PREFIXES) or any(word in name for word in _RANDOM))


def _spec(operator: Any) -> tuple[str, str]:
    """An operator's own name, and the only view of its arguments, defaults and all: a line each."""
    text = str(operator.spec)
    return text.removeprefix("OpSpec for ").partition(":")[0], text


def _operators(pipeline: Pipeline) -> list[Any]:
    """Those on which an output depends."""
    if not pipeline._py_graph_built:
        pipeline._build_graph()  # makes the list, as building the pipeline would; starts nothing
    return list(pipeline._ops)
