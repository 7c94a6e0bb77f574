"""The dSort of an embedded node: the spec of a job, its shards, and the job itself."""
