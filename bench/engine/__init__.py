"""Run any benchmark: take rounds of turns, each in a process of its own, and make a record of them."""
