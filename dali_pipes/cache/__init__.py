"""What a node keeps of shards: one sparse file a data set, and who fills, holds and evicts what in it."""
