"""The outputs of a graph: those that are not tensors of one shape, and the type of a delivered batch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from dali_pipes.graph.parse import Parser

LABEL_OUTPUT = "label"
"""The name of the class id in the graphs of `dali_pipes.graph.pipelines`, which leave it out if there is none."""
CU_SEQLENS = "cu_seqlens"
"""The output beside a packed one: where each sample begins in it, and its length."""

if TYPE_CHECKING:
    from torch import Tensor

    class BatchDict(dict[str, Any]):
        """A batch: the graph's outputs by name, each of shape [batch, ...]; at run time a plain dict.

        ``"image"``, ``"mask"`` and ``"label"`` are the tensors of the graphs of `dali_pipes.graph.pipelines`;
        ``"key"`` and ``"valid"`` are what `Outputs` adds. A graph of your own may have other names, of any type.
        """

        @overload
        def __getitem__(self, name: Literal["image", "mask", "label", "valid", "cu_seqlens"], /) -> Tensor: ...
        @overload
        def __getitem__(self, name: Literal["key"], /) -> list[str]: ...
        @overload
        def __getitem__(self, name: str, /) -> Any: ...
        def __getitem__(self, name: str, /) -> Any: ...

else:
    BatchDict = dict[str, Any]


@dataclass(frozen=True, eq=False)
class ListOutput:
    """An output that is not a tensor: batches hold a list of one Python object per sample. Operators cannot take it."""

    parser: Parser


@dataclass(frozen=True, eq=False)
class PackedOutput:
    """An output whose samples have different lengths, and come one after the other in one tensor."""

    node: Any


class Packed(NamedTuple):
    """The samples of a packed output in one batch."""

    tensor: "Tensor"
    """[sum of lengths, ...], on the device of the pipeline's outputs."""
    lengths: list[int]
    """Rows of each sample."""

    @classmethod
    def of(cls, tensor_list: Any) -> "Packed":
        """Join the samples of a TensorList by one copy; on a GPU in torch's current stream."""
        import torch
        from torch.utils.dlpack import from_dlpack

        tensors = [from_dlpack(tensor_list[position]) for position in range(len(tensor_list))]
        lengths = [len(tensor) for tensor in tensors]
        if tensors[0].device.type == "cpu":
            # torch.cat would share the copy among torch's threads. While DALI's threads have the cores, these spin and
            # wait for each other: 870 CPU-us a photo of 110 kB on two busy cores, where this takes 95.
            return cls(torch.from_numpy(np.concatenate([tensor.numpy() for tensor in tensors])), lengths)
        return cls(torch.cat(tensors), lengths)

    def offsets(self) -> "Tensor":
        """Return where each sample begins, and the sum: int32 [B + 1] on the tensor's device; does not wait for it."""
        import torch

        offsets = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32)
        if self.tensor.device.type == "cpu":
            return offsets
        # A copy from pageable memory would wait for all earlier work of the stream.
        return offsets.pin_memory().to(self.tensor.device, non_blocking=True)


def label_advice(given: Sequence[str]) -> str:
    """The end of an error about outputs that do not fit: what to do if it may be the label that is missing."""
    if LABEL_OUTPUT in given:
        return ""
    return (
        f"; there is no '{LABEL_OUTPUT}': the built-in graphs give it if samples have a component 'cls' "
        "(dali-pipes prep pack imagefolder writes it)"
    )
