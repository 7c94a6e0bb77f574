"""Make tables, plots and verdicts from records."""
