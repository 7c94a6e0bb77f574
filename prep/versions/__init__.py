"""Change a data set: each change gives it a new version beside the older ones, which stay readable."""
