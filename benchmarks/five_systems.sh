#!/bin/sh
# The measurements of the five published systems that weft takes over, scaled to a machine without accelerators. At the end it draws the
# pictures of docs/comparison.md and writes its tables, beside the published figures.
# usage: benchmarks/five_systems.sh WEFT DIRECTORY      from the root of the repository; 7 minutes on two cores of a Xeon
set -eu
weft=$1 into=$2
mkdir -p "$into"

fused() { # NAME COMMAND…: on a link that takes as long as the product
  name=$1
  shift
  "$weft" bench "$@" --link-gbps auto --json "$into/$name.json" >"$into/$name.txt"
}

# 1. AllGather + GEMM: half of each published size, 2 to 8 ranks; 2 to 16 ranks with the same product; and its chunks for each source
for case in 2:1024x1024x512 2:2048x2048x1024 2:2048x2048x2048 2:4096x2048x2048 4:2048x2048x2048 4:4096x2048x2048 8:4096x2048x2048 \
  8:8192x2048x2048; do
  fused "streaming-${case%%:*}-${case##*:}" all-gather-matmul -n "${case%%:*}" --shape "${case##*:}" --algorithm push \
    --dtype float16 --out-dtype float32 --warmup 1 --iterations 5
done
for ranks in 2 4 8 16; do
  fused "ranks-$ranks" all-gather-matmul -n $ranks --shape 1024x1024x512 --algorithm push --warmup 1 --iterations 10
done
for chunks in 4 16 64 128; do
  fused "chunks-$chunks" all-gather-matmul --shape 2048x2048x1024 --algorithm push --chunk-rows $((1024 / chunks)) --iterations 10
done

# 2. AllGatherMatmul in three steps: a quarter of each size of one rank, 2 and 4 ranks
for ranks in 2 4; do
  fused "steps-$ranks" all-gather-matmul -n $ranks --shape $((256 * ranks))x2560x1280 --algorithm push --dtype bfloat16 --bias \
    --return-gathered --ablate --iterations 15 --timeline "$into/steps-$ranks.png"
done

# 3. get, synchronous, asynchronous and staged: the published sizes
"$weft" bench p2p --sizes 4K:4M:4 --iterations 15 --json "$into/copies.json" >"$into/copies.txt"

# 4. a row-parallel linear layer in 1, 2 and 4 chunks, in 2 also into symmetric memory, and a product beside an all-gather: an eighth of
# rows and columns, and a quarter of each rank's K of the layer
for chunks in 1 2 4; do
  fused "linear-$chunks" matmul-all-reduce --shape 1024x4096x1024 --algorithm push --chunk-rows $((1024 / 2 / chunks)) \
    --dtype bfloat16 --iterations 15
done
fused linear-symmetric matmul-all-reduce --shape 1024x4096x1024 --algorithm push --chunk-rows 256 --symmetric-out --dtype bfloat16 \
  --iterations 15
"$weft" bench overlap --shape 1024x1024x1024 --size 1M --iterations 20 --link-gbps auto --json "$into/beside.json" >"$into/beside.txt"

# 5. all-gather of 2 to 128 MiB for each rank
"$weft" bench all-gather --sizes 2M:128M:4 --dtype float16 --iterations 7 --json "$into/gather.json" >"$into/gather.txt"

# the page
cp "$into/steps-2.png" docs/images/steps.png
python3 benchmarks/kept.py "$into"/*.json >"$into.csv"
python3 benchmarks/five_systems.py "$into.csv"
