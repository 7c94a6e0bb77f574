"""An AIStore-compatible node in one process, over a folder, on loopback: for the first run, tests and laptops."""
