"""Tools that benchmarks measure and emulate with: processes, buckets, a gateway, a training step, the machine."""
