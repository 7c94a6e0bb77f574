"""The shards that a node keeps: one sparse file for each data set, which loaders fill, hold and evict from."""
