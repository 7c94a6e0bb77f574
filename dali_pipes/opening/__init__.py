"""Opening a loader: its arguments, its parts, and the decode settings that fit the machine."""
