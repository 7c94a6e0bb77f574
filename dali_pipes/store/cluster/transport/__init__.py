"""HTTP with the nodes of a cluster: rules, limits, sessions that wait, and what failures mean."""
