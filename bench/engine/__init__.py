"""The one engine of every benchmark: rounds of turns, each in a process of its own, to a record."""
