"""A manifest of shards that do not exist."""

SHARD_SAMPLES = 1000
# Photos of 90 to 130 KB: shards of some 110 MB, as AIStore and WebDataset recommend.
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 90 << 20, 130 << 20
INDEX_BYTES = 60_000
