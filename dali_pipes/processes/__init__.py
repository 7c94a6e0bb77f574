"""Processes: this one among the ranks of a job, its forked children, and the programs that it starts."""
