"""Kernels, one file for each, with its meaning, its execution and its predicted time; and
weights.
"""
