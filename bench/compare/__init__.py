"""Compare the outputs of loaders on the same shards, then time the loaders in turns, in processes of their own."""
