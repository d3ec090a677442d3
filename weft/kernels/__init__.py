"""Kernels: one file for each, with what it means, how it runs, and how long it takes."""
