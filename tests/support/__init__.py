"""Helpers shared by tests: real ranks and hosts, plans and their mutants, kernels compiled without
a GPU.
"""
