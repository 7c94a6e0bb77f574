"""Benchmarks of single parts of the path: fetch, cache, resume, order, pack; some beside other tools."""
