"""Records of runs to tables, pages and verdicts."""
