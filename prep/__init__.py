"""Source files to indexed WebDataset shards: pack, shuffle (dSort), index. Needs neither DALI nor torch."""
