"""Graphs for other tasks than classification and segmentation: detection, captions, self-supervision by many crops."""
