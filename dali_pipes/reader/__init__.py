"""Read batches of encoded bytes from the cache file, in the order of a plan."""
