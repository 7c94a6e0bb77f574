"""What benchmarks measure and emulate with: processes, buckets, a gateway, a training step, memory, the machine."""
