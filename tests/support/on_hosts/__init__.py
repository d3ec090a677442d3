"""Checks for ranks on several hosts, by what they look at; `host_ranks` runs them by name."""
