"""Make indexed WebDataset shards from source files: pack, shuffle (dSort), index. Needs neither DALI nor torch."""
