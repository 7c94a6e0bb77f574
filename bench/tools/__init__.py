"""What benchmarks measure and emulate with: processes, servers, a gateway, a training step, memory, the machine."""
