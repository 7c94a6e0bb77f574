"""The loaders that `bench` times: ours, those that show its bounds, and the peers."""
