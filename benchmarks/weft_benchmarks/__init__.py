"""Benchmarks that compare weft with other systems; a part of the repository, not of the package.

`baselines` are the baselines of the collectives (`mpi`, `deepspeed`); `overlap`, `p2p` and
`serving` are commands of ``weft bench`` (`commands`, with their `settings`), and `gpu` is for a
GPU. `vllm` serves models by vLLM. weft finds this package by `weft.bench.repository`.
"""
