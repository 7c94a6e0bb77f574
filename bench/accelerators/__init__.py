"""Emulate accelerators as MLPerf Storage does, and find how many of them a loader feeds: ``bench run --au``."""
