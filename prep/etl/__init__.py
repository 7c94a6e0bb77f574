"""Apply a function of a sample to whole shards: on this machine, in a cluster's pods, or in the embedded node."""
