"""What becomes of samples that cannot be decoded: refused, substituted, written down."""
