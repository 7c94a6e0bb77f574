"""Loaders of other projects, each set up as its own documentation recommends."""
