"""What `dali-pipes doctor` checks, by subject."""
