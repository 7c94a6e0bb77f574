"""The decode half: encoded bytes and arrays in, the user's graph, finished tensors out."""
