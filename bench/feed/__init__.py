"""The data and the loaders of ``bench feed``."""
