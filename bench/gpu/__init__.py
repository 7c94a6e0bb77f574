"""Time and check decoding on a GPU, or the same code on the CPU."""
