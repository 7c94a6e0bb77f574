"""The decoders of ``bench decode``."""
