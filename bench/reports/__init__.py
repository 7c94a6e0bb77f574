"""Make tables, pages and verdicts from records."""
