"""Compute which samples each step of an epoch reads, from the seed, the selection and the shards; no I/O."""
