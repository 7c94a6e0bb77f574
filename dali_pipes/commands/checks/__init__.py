"""The checks of `dali-pipes doctor`, by subject."""
