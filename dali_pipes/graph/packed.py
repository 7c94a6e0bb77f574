"""Join samples of different lengths to one tensor."""

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch


class Packed(NamedTuple):
    """The samples of one output, one after the other."""

    tensor: "torch.Tensor"
    """[sum of lengths, ...], on the device of the pipeline's outputs."""
    lengths: list[int]
    """Rows of each sample."""

    def offsets(self) -> "torch.Tensor":
        """Return where each sample begins, and the sum: int32 [B + 1] on the tensor's device; does not wait for it."""
        import torch

        offsets = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32)
        if self.tensor.device.type == "cpu":
            return offsets
        # A copy from pageable memory would wait for all earlier work of the stream.
        return offsets.pin_memory().to(self.tensor.device, non_blocking=True)


def packed(tensor_list: Any) -> Packed:
    """Join the samples of a TensorList by one copy; on a GPU in torch's current stream."""
    import torch
    from torch.utils.dlpack import from_dlpack

    tensors = [from_dlpack(tensor_list[position]) for position in range(len(tensor_list))]
    lengths = [len(tensor) for tensor in tensors]
    if tensors[0].device.type == "cpu":
        # torch.cat would share the copy among torch's threads. While DALI's threads have the cores, these spin and wait
        # for each other: 870 CPU-us a photo of 110 kB on two busy cores, where this takes 95.
        return Packed(torch.from_numpy(np.concatenate([tensor.numpy() for tensor in tensors])), lengths)
    return Packed(torch.cat(tensors), lengths)
