"""Independent models of what the documents promise: `python -m tests.models`."""
