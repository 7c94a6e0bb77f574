"""Parts of the path by themselves: fetch, cache, resume, order, pack, against what others use for it."""
