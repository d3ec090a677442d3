"""Kernels in Triton, and in its lower-level language Gluon, one per file; only this package needs
Triton.
"""
