"""Time DALI and its peers on the same shards, with the same batches and the same clock."""

__all__: list[str] = []
