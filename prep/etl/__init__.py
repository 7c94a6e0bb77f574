"""A function of a sample, applied to whole shards: here, in the pods of AIStore's ETL, or in the embedded node.

One class, `ShardTransform`, does it everywhere, so the bytes are the same. Importing this brings neither Pillow nor
the SDK.
"""

from prep.etl.cluster import NoEtlError, get_transformed, run_offline, running_etl, start_etl, stop_etl
from prep.etl.local import TransformReport, transform_shards
from prep.etl.source import TransformedStore, etl_of, through_etl
from prep.etl.transforms import FunctionTransform, PetsTransform, ShardTransform, load_transform

__all__ = [
    "FunctionTransform",
    "NoEtlError",
    "PetsTransform",
    "ShardTransform",
    "TransformReport",
    "TransformedStore",
    "etl_of",
    "get_transformed",
    "load_transform",
    "run_offline",
    "running_etl",
    "start_etl",
    "stop_etl",
    "through_etl",
    "transform_shards",
]
