#!/bin/sh
# Measure what the fused operators are built on: every collective compared with gloo, Open MPI and MPICH, one-sided copies, and overlap.
# usage: benchmarks/collectives.sh WEFT DIRECTORY RANKS     after `make baselines`, from the root of the repository
set -eu
weft=$1 into=$2 ranks=$3
mkdir -p "$into"
baselines=gloo,openmpi,mpich,intel-mpi sizes=8,4K,64K,1M,16M,64M
[ "$ranks" = 2 ] || baselines=mpich sizes=8,4K,64K,1M,16M
for operation in all-gather all-reduce reduce-scatter broadcast all-to-all; do
  "$weft" bench $operation -n "$ranks" --sizes $sizes --baseline $baselines \
    --warmup 1 --iterations 7 --json "$into/$operation-$ranks.json" --plot "$into/$operation-$ranks.png" >"$into/$operation-$ranks.txt"
done
if [ "$ranks" = 2 ]; then
  "$weft" bench p2p --iterations 15 --json "$into/p2p.json" --plot "$into/p2p.png" >"$into/p2p.txt"
  "$weft" bench overlap --shape 2048x2048x1024 --iterations 12 --link-gbps auto --json "$into/overlap.json" --plot "$into/overlap.png" >"$into/overlap.txt"
fi
