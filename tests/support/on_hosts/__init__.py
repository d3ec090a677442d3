"""Checks for ranks on several hosts, one module per topic; `host_ranks` runs them by name."""
