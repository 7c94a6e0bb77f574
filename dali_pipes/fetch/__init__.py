"""Fetch shards from an object store or a directory into checked extents of the cache file."""
