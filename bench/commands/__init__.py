"""The commands of ``dali-pipes bench``, one a file, each with its options; what several share is in `options`."""
