"""The order of an epoch: seed, selection and shards in, the samples of every step out. Pure arithmetic, no I/O."""
