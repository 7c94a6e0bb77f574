"""A loader, a setting and a clock: turns in processes of their own, watched from outside."""
