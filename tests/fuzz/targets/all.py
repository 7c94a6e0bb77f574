"""All targets, by name."""

from tests.fuzz.target import Target
from tests.fuzz.targets.annotations import Annotations
from tests.fuzz.targets.archives import Archives
from tests.fuzz.targets.cache_files import CacheSlots, CacheTables
from tests.fuzz.targets.formats import ColumnFiles, Manifests, ShardIndexes
from tests.fuzz.targets.http_answers import ListingAnswers, ObjectAnswers
from tests.fuzz.targets.node_requests import NodeRequests
from tests.fuzz.targets.parquet_cells import ParquetFiles
from tests.fuzz.targets.photo_batches import PhotoBatches
from tests.fuzz.targets.photos import Photos
from tests.fuzz.targets.texts import Texts

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        Photos,
        PhotoBatches,
        Archives,
        Manifests,
        ShardIndexes,
        ColumnFiles,
        ParquetFiles,
        Texts,
        Annotations,
        CacheTables,
        CacheSlots,
        NodeRequests,
        ObjectAnswers,
        ListingAnswers,
    )
}
