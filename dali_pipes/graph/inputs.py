"""Collect the inputs that a graph asks for: components, arrays computed from a batch, and parsed values.

Each node that a graph takes from `Components` or `Random` becomes an input of the decode pipeline, fed once a batch:
with encoded bytes, or with an array that is computed in numpy from the plan and the shard indexes, or parsed from other
components (`dali_pipes.graph.parse`). Text and other outputs that are not tensors bypass the decode pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from nvidia.dali import types

from dali_pipes.arrays import Int32s
from dali_pipes.graph.finish import Finisher
from dali_pipes.graph.parse import Parser, class_ids, json_value, npy_array, text_of
from dali_pipes.reader.batch import Batch
from dali_pipes.reader.samples import StoredSamples

T = TypeVar("T")
DecoderDevice = Literal["cpu", "mixed"]
ArrayFunction = Callable[[Batch], npt.NDArray[Any]]

# dtype -> what DALI calls it.
_DALI_TYPES: dict[np.dtype[Any], Any] = {
    np.dtype(types.to_numpy_type(kind)): kind for kind in (types.FLOAT, types.INT32, types.INT64, types.UINT8)
}
# More dtypes are allowed where the graph names one. A computed array may be float64 by accident.
_PARSED_DALI_TYPES = _DALI_TYPES | {
    np.dtype(types.to_numpy_type(kind)): kind
    for kind in (types.FLOAT16, types.FLOAT64, types.INT8, types.INT16, types.BOOL)
}


class PackedOutput(NamedTuple):
    """An output whose samples have different lengths, and come one after the other in one tensor."""

    node: Any


class DecodedPhotos(NamedTuple):
    """The photos of a sample that a graph decodes."""

    components: tuple[str, ...] = ()
    """Components whose bytes reach an image decoder."""
    same_size: tuple[tuple[str, str], ...] = ()
    """Pairs of components that share a crop, such as a photo and its mask: both must have the same size."""
    upright: frozenset[str] = frozenset()
    """Those of `components` that their decoders turn upright, if the shard indexes keep orientations."""


@dataclass(kw_only=True)
class GraphInputs:
    """The inputs that a graph asked for, by name and in its order, and its outputs that bypass the pipeline."""

    read: list[str] = field(default_factory=list)
    """Components to read of each sample, as nodes or to be parsed."""
    components: dict[str, Any] = field(default_factory=dict)
    """The components whose encoded bytes the graph takes, and their nodes: uint8 [bytes] per sample."""
    array_nodes: dict[str, Any] = field(default_factory=dict)
    """The nodes of all other inputs, by name: ``array/0``, ``array/1``, ..., ``parsed/0``, ..."""
    arrays: dict[str, ArrayFunction] = field(default_factory=dict)
    parsed: dict[str, Parser] = field(default_factory=dict)
    decoded: DecodedPhotos = field(default_factory=DecodedPhotos)
    photos: set[str] = field(default_factory=set)
    """Components whose size the graph asked for: their header must be readable."""
    sized: set[tuple[str, bool]] = field(default_factory=set)
    """These components, each with whether the size is that of the upright photo."""
    same_size: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of components that the graph named in `Components.same_size`."""
    has_label: bool = False
    lists: dict[str, Parser] = field(default_factory=dict)
    """Outputs that are not tensors."""
    finishers: dict[str, Finisher] = field(default_factory=dict)
    """The outputs that are finished on the CPU."""
    packed: str | None = None
    """The name of the output whose samples come in one tensor, if there is one."""


class Components:
    """A sample's components, as bytes or parsed, and arrays beside them; the first argument of a graph.

    Where a sample may lack a component (``missing="empty"``), its bytes and its parsed value are empty: ``""``,
    ``b""``, ``None``, an array of no elements. `present` distinguishes a missing component from an empty one.

    Args:
        source: Makes an input node from a name, a DALI type and a number of dimensions.
        samples: The data set, which refuses what it lacks.
        example: Any batch of the data set; it shows each array's dtype and number of dimensions.
        device: The device for which decoders are built.
    """

    def __init__(
        self,
        *,
        source: Callable[[str, Any, int], Any],
        samples: StoredSamples,
        example: Batch,
        device: DecoderDevice,
    ) -> None:
        self.device = device
        """``device=`` for the decoders of photos: ``"mixed"`` if a GPU decodes, else ``"cpu"``."""
        self.inputs = GraphInputs()
        self._source, self._samples, self._example = source, samples, example
        self._json: dict[str, Parser] = {}

    def __getitem__(self, component: str) -> Any:
        """The encoded bytes of a component: a node of uint8 [bytes].

        ``"jpg;jpeg"`` takes the first of these components that a sample has.
        """
        if component not in self.inputs.components:
            self._read(component)
            self.inputs.components[component] = self._source(f"component/{component}", types.UINT8, 1)
        return self.inputs.components[component]

    def photo(self, name: str | None = None, *, besides: str | None = None) -> str:
        """The name of the component that holds the sample's photo; a ``name`` is returned unchanged.

        Without one it is the only component that is a photo by its extension and not a mask, nor the one of
        ``besides``: ``"jpg"``, ``"image.jpg"``, ``"png"``, ... If each sample has exactly one of several, as in a
        folder that mixes ``.jpg`` and ``.JPEG``, it is ``"jpg;jpeg"``, the most frequent one first. A component is a
        mask if a word of its name says so (``seg.png``, ``trimap.png``), or if it is a PNG beside a photo of another
        format.

        Raises:
            DataError: If no component is a photo, or if several could be; names them.
        """
        return self._samples.photo(besides=besides or "") if name is None else name

    def mask(self, name: str | None = None, *, photo: str) -> str:
        """The name of the component that holds the mask of ``photo``, as in `photo`: the only mask by its name, or else
        the only other photo.
        """
        return self._samples.mask(photo=photo) if name is None else name

    def has_mask(self, *, photo: str) -> bool:
        """Whether the name of a component says that it is the mask of ``photo``."""
        return self._samples.has_mask(photo=photo)

    @property
    def has_labels(self) -> bool:
        """Whether the data set has labels at all: a sample with ``cls``. If not, the built-in graphs give none."""
        return self._samples.has_labels

    @property
    def label(self) -> Any:
        """The class id: a node of int64 scalars."""
        self._samples.check_labels()
        self.inputs.has_label = True
        # The kind is not learnt from the example: that sample may lack a label and be excluded for it.
        return self._array(lambda batch: batch.labels, (np.dtype(np.int64), 1))

    def orient(self, wanted: bool | None = None) -> bool:
        """Whether photos are turned upright by their EXIF orientations: yes, unless the graph's user wants it not.

        Give the result to decoders as ``adjust_orientation=``, and as ``orient=`` to `size` and `Random.resized_crop`.
        Each component, mask or photo, is turned by its own EXIF data.
        """
        return wanted is not False

    def size(self, component: str, *, orient: bool = False) -> Callable[[Batch], tuple[Int32s, Int32s]]:
        """Return a function for `array`, which computes heights and widths of a batch's photos: pixels, int32 [B] each.

        A photo that the sample lacks has the size 1 x 1; a photo whose header cannot be read has the size 0 x 0. With
        ``orient`` they are those of the upright photos, see `orient`; by default those of the stored ones.
        """
        self.inputs.photos.add(component)
        self.inputs.sized.add((component, orient))
        self._samples.check_component(component)
        return lambda batch: batch.size(component, orient=orient)

    def bucket_shape(self) -> Any:
        """Height and width of the batch's bucket: a node of int32 [2] (rows, columns), equal for all its samples.

        They are one of ``dali_pipes.buckets(...).shapes``, the same on all ranks in a step.

        Raises:
            ValueError: If the loader has no buckets.
        """
        return self.array(bucket_shapes)

    def packed(self, node: Any) -> PackedOutput:
        """An output of samples with different lengths: one tensor [sum of lengths, ...], sample after sample.

        ``node`` has the length of each sample as its first axis; the other axes are alike. The batch also has
        ``"cu_seqlens"``, int32 [B + 1] on the loader's device, with the place of each sample's first row, and the sum.
        A graph has one such output at most.
        """
        return PackedOutput(node)

    def same_size(self, photo: str, mask: str) -> None:
        """Make each sample bad whose mask has another height or width than its photo.

        Components that the graph decodes with the same crop are compared anyway.
        """
        for component in (photo, mask):
            self.inputs.photos.add(component)
            self._samples.check_component(component)
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
        return self._array(function, _kind_of(function(self._example), self._example))

    def present(self, component: str) -> Any:
        """A node of int32 scalars: 1 if a sample has the component, else 0. The component is not read."""
        self._samples.check_component(component)
        return self.array(lambda batch: batch.places(component).is_there.astype(np.int32))

    def npy(self, component: str, *, dtype: npt.DTypeLike = np.float32, ndim: int = 1) -> Any:
        """The array in a ``.npy`` file: a node of ``dtype``, with ``ndim`` dimensions for each sample.

        The file may have either byte order, by rows or by columns. Samples may have different shapes; pad or crop them
        to one shape before you return them as an output. A sample is bad if its file has another dtype or number of
        dimensions, is cut off, or holds Python objects.
        """
        return self.parsed(component, npy_array, dtype=dtype, ndim=ndim)

    def json(
        self,
        component: str,
        *,
        to: Callable[..., Any] | None = None,
        beside: Sequence[Any] = (),
        dtype: npt.DTypeLike = np.float32,
        ndim: int = 1,
    ) -> Any:
        """The objects in JSON documents: an output that is a list of one object for each sample.

        With ``to``, which makes an array of the object, the result is a node, as in `parsed`, whose other arguments are
        taken, too. Each document is parsed once, whatever the number of these functions.
        """
        if component not in self._json:
            self._json[component] = self.listed(component, json_value)
        document = self._json[component]
        if to is None:
            return document
        return self._parsed(component, to, beside=beside, dtype=dtype, ndim=ndim, base=document)

    def text(self, component: str) -> Parser:
        """A component's text in UTF-8, unchanged: an output that is a list of one `str` for each sample."""
        return self.listed(component, text_of, empty=str)

    def bytes(self, component: str) -> Parser:
        """A component's bytes: an output that is a list of one `bytes` for each sample."""
        return self.listed(component, bytes, empty=bytes)

    def multi_hot(self, component: str, *, num_classes: int, dtype: npt.DTypeLike = np.float32) -> Any:
        """Several class ids of each sample: a node of ``dtype`` [num_classes], 1 at each id, else 0.

        The component holds a JSON list of ids, ``[3, 17]``, or ids separated by white space or commas, ``3 17``. A
        sample with an id outside ``[0, num_classes)`` is bad.
        """
        if num_classes < 1:
            raise ValueError(f"num_classes must be positive, got {num_classes}")

        def row(ids: Sequence[int] = ()) -> npt.NDArray[Any]:
            if wrong := [number for number in ids if not 0 <= number < num_classes]:
                raise ValueError(f"expected class ids in [0, {num_classes}), found {wrong[0]}")
            found: npt.NDArray[Any] = np.zeros(num_classes, dtype)
            found[[*ids]] = 1
            return found

        return self.parsed(component, lambda data: row(class_ids(data)), dtype=dtype, empty=row)

    def parsed(
        self,
        component: str,
        function: Callable[..., Any],
        *,
        beside: Sequence[Any] = (),
        dtype: npt.DTypeLike = np.float32,
        ndim: int = 1,
        empty: Callable[[], Any] | None = None,
    ) -> Any:
        """The arrays that ``function`` makes of a sample's bytes: a node of ``dtype``, with ``ndim`` dimensions.

        The function is called once for each sample, in the thread that iterates, with a read-only uint8 array [bytes]
        that stays valid while it is kept. It returns an array, or a number or list of numbers that an array of
        ``dtype`` can hold. If it raises an exception, the sample is bad.

        Args:
            component: Its name.
            function: See above.
            beside: Nodes of `array` and of `Random`. The function gets the sample's value of each as a further
                argument, in numpy: with the nodes of ``random.resized_crop`` it can move boxes with their photo.
            dtype: Of the arrays.
            ndim: Their number of dimensions.
            empty: Makes the array of a sample that lacks the component; by default it has zero length in each
                dimension, or is 0 if ``ndim`` is 0.

        Raises:
            ValueError: If an entry of ``beside`` is another node: its values are not known before the pipeline runs.
        """
        return self._parsed(component, function, beside=beside, dtype=dtype, ndim=ndim, empty=empty)

    def listed(
        self,
        component: str,
        function: Callable[..., Any],
        *,
        beside: Sequence[Any] = (),
        empty: Callable[[], Any] = lambda: None,
    ) -> Parser:
        """The objects that ``function`` makes of a sample's bytes: an output that is a list of one for each sample.

        The arguments are those of `parsed`; ``empty`` makes the object of a sample that lacks the component.
        """
        self._read(component)
        return Parser(component=component, parse=function, empty=empty, beside=self._functions_of(beside))

    def _array(self, function: ArrayFunction, kind: tuple[np.dtype[Any], int]) -> Any:
        """Make an input whose arrays have this dtype and number of dimensions in every batch."""

        def array_of(batch: Batch) -> npt.NDArray[Any]:
            try:
                array = function(batch)
            except Exception as exc:
                exc.add_note(f"in an array of the graph, for the batch of {batch.some_keys}")
                raise
            if (found := _kind_of(array, batch)) != kind:
                raise TypeError(f"dtype and dimensions of an array of the graph were {kind}, and are {found} now")
            return np.ascontiguousarray(array)

        name, (dtype, ndim) = f"array/{len(self.inputs.arrays)}", kind
        self.inputs.array_nodes[name] = self._source(name, _DALI_TYPES[dtype], ndim - 1)
        self.inputs.arrays[name] = array_of
        return self.inputs.array_nodes[name]

    def _functions_of(self, nodes: Sequence[Any]) -> list[ArrayFunction]:
        # By identity: == of nodes makes an operator.
        functions = {id(self.inputs.array_nodes[name]): function for name, function in self.inputs.arrays.items()}
        for node in nodes:
            if id(node) not in functions:
                raise ValueError(
                    f"beside takes nodes of components.array, components.label and random, got {type(node).__name__}: "
                    "the values of another node are not known before the pipeline runs"
                )
        return [functions[id(node)] for node in nodes]

    def _parsed(
        self,
        component: str,
        function: Callable[..., Any],
        *,
        beside: Sequence[Any],
        dtype: npt.DTypeLike,
        ndim: int,
        empty: Callable[[], Any] | None = None,
        base: Parser | None = None,
    ) -> Any:
        wanted = np.dtype(dtype)
        if wanted not in _PARSED_DALI_TYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _PARSED_DALI_TYPES))}, got {wanted}")
        if ndim < 0:
            raise ValueError(f"ndim must not be negative, got {ndim}")
        self._read(component)
        name = f"parsed/{len(self.inputs.parsed)}"
        self.inputs.parsed[name] = Parser(
            component=component,
            parse=function,
            empty=empty or (lambda: np.zeros((0,) * ndim, wanted)),
            base=base,
            beside=self._functions_of(beside),
            dtype=wanted,
            ndim=ndim,
        )
        self.inputs.array_nodes[name] = self._source(name, _PARSED_DALI_TYPES[wanted], ndim)
        return self.inputs.array_nodes[name]

    def _read(self, component: str) -> None:
        if component not in self.inputs.read:
            self._samples.check_component(component)
            self.inputs.read.append(component)


def _kind_of(array: object, batch: Batch) -> tuple[np.dtype[Any], int]:
    """Return dtype and number of dimensions of a batch's array; a `TypeError` if a graph cannot take it."""
    if isinstance(array, np.ndarray) and array.dtype in _DALI_TYPES and array.shape[:1] == (len(batch),):
        return array.dtype, array.ndim
    found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
    raise TypeError(
        f"an array of the graph must be numpy's, one row for each of {len(batch)} samples, dtype one of "
        f"{', '.join(map(str, _DALI_TYPES))}, got {found}; convert it: .astype(np.float32)"
    )


def bucket_shapes(batch: Batch) -> Int32s:
    """Return height and width of the batch's bucket for each sample: int32 [B, 2]."""
    if batch.shape is None:
        raise ValueError(
            "the graph asks for the shape of the batch's bucket, and the loader has no buckets; pass "
            "select=dali_pipes.Select(buckets=dali_pipes.buckets(area=...))"
        )
    return np.tile(np.array(batch.shape, np.int32), (len(batch), 1))


def once_a_batch(function: Callable[[Batch], T]) -> Callable[[Batch], T]:
    """Wrap a function so that it keeps the last batch's result, from which several arrays of the batch are made."""
    kept: list[tuple[Batch, T]] = []

    def kept_function(batch: Batch) -> T:
        if not kept or kept[0][0] is not batch:
            kept[:] = [(batch, function(batch))]
        return kept[0][1]

    return kept_function
