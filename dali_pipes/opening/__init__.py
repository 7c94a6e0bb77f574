"""Opening a loader: its arguments, its parts, and a loader that is opened when it is first needed."""
