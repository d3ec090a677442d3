#!/usr/bin/env bash
# The published sizes of the five systems that weft takes over, on a machine with one GPU that all ranks share, as
# docs/comparison.md has them for other machines.
#
#   benchmarks/gpu/five_systems.sh     results in $OUT, as common.sh describes; at most 590 s
#
# One case of each system comes first, then the others, as far as the time goes.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then # else the script that sources this has begun
  set -uo pipefail
  budget=${BUDGET:-585}
  source "$(dirname "$0")/common.sh"
  begin
  step build 60 bash -c "source '$here/common.sh'; build"
fi

published() { # NAME BENCHMARK OPTIONS…
  bench "$1" 45 "$2" --device cuda --warmup 1 --iterations 10 "${@:3}"
}

streaming() { # RANKS:SHAPE ENGINE OPTIONS…: a product that streams rows in
  published "1-streaming-${1/:/-}-$2${3:-}" all-gather-matmul -n "${1%%:*}" --shape "${1##*:}" --algorithm push --dtype float16 \
    --engine "$2" "${@:3}"
}

# 1. AllGather + GEMM, and each of the others once
streaming 2:4096x4096x4096 triton
# 2. AllGatherMatmul in three steps: 1024 rows of each rank
published 2-steps-4 all-gather-matmul -n 4 --shape 4096x10240x5120 --algorithm push --dtype float16 --bias --return-gathered --ablate
# 3. get, here by the copy engine and by SMs
published 3-copies p2p --sizes 4K:4M:4 --comm-sms 1,4,16
# 4. a product beside an all-gather, and a row-parallel linear layer
published 4-beside overlap -n 2 --shape 8192x8192x8192 --size 64M --dtype float16 --gather copy-engine,kernel --comm-sms 8,16
# 5. all-gather by numbers of SMs
published 5-gather-2 all-gather -n 2 --sizes 2M:512M:16 --dtype float16 --comm-sms 8,32,64 --tile 16K

# the smallest also without the time of Python
streaming 2:2048x2048x1024 triton
streaming 2:2048x2048x1024 triton --graph
for case in 2:8192x4096x4096 4:4096x4096x4096 8:16384x4096x4096; do streaming $case triton; done
for case in 2:2048x2048x1024 2:4096x4096x4096 8:16384x4096x4096; do streaming $case streams; done
linear() { # NAME OPTIONS…: a row-parallel linear layer in two chunks; K is each rank's half of the published one
  published "4-linear$1" matmul-all-reduce -n 2 --shape 8192x16384x8192 --algorithm push --chunk-rows 2048 --dtype bfloat16 "${@:2}"
}
linear ""
linear -symmetric --symmetric-out
published 5-gather-4 all-gather -n 4 --sizes 2M:128M:4 --dtype float16 --comm-sms 4,8,16,32 --tile 8K,16K
for case in 2:4096x4096x2048 4:8192x4096x4096 8:8192x4096x4096; do streaming $case triton; done

[ "${BASH_SOURCE[0]}" != "$0" ] || finish
