"""Shards to figures: DALI and its peers on the same shards, the same batches, the same clock."""

__all__: list[str] = []
