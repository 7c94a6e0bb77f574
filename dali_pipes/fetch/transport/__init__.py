"""HTTP connections of the fetch threads, driven by an event loop."""
