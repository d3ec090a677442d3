"""What tests of several rooms share: real ranks and hosts, plans and their mutants, kernels
compiled without a GPU.
"""
