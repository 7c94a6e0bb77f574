"""Opening a loader: its arguments, and the parts that they name."""
