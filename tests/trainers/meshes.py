"""A model that is split over several processes, by tensor parallelism and by FSDP2."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.trainers.tiny import TinyModel


def sharded_model(data: DeviceMesh, model: DeviceMesh) -> FSDPModule:
    """Split each layer over the processes of one data rank, and its parameters over the data ranks: FSDP2."""
    tiny = TinyModel()
    parallelize_module(tiny.layers, model, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return fully_shard(tiny, mesh=data)
