"""Bad samples: found, replaced by others, listed."""
