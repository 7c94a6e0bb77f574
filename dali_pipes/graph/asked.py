"""What a graph asked for: its inputs, by kind, and its outputs that are not tensors of one shape."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import types

from dali_pipes.graph.parse import Parser
from dali_pipes.reader.batch import Batch, DecodedPhotos

ArrayFunction = Callable[[Batch], npt.NDArray[Any]]

CU_SEQLENS = "cu_seqlens"
"""The output beside a packed one: where each sample begins in it, and its length."""

DALI_TYPES = {
    np.dtype(np.float32): types.FLOAT,
    np.dtype(np.int32): types.INT32,
    np.dtype(np.int64): types.INT64,
    np.dtype(np.uint8): types.UINT8,
}
# More dtypes are allowed where the graph names one. A computed array may be float64 by accident.
PARSED_DALI_TYPES = DALI_TYPES | {
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


@dataclass(frozen=True, eq=False)
class PackedOutput:
    """An output whose samples have different lengths, and come one after the other in one tensor."""

    node: Any


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
        if isinstance(array, np.ndarray) and array.dtype in DALI_TYPES and array.shape[:1] == (num_samples,):
            return cls(array.dtype, array.ndim)
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        allowed = ", ".join(str(dtype) for dtype in DALI_TYPES)
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
    sized: set[tuple[str, bool]] = field(default_factory=set)
    """These components, each with whether the size is that of the upright photo."""
    same_size: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of components that the graph named in `Components.same_size`."""
    has_label: bool = False
    """Whether the graph asked for the class id."""
    lists: dict[str, Parser] = field(default_factory=dict)
    """Outputs that are not tensors, by name."""
    packed: str | None = None
    """The name of the output whose samples come in one tensor, if there is one."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """All inputs by name."""
