"""The loaders on the same shards: outputs compared, then timed in turns, each in processes of its own."""
