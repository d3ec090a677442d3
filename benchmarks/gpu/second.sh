#!/usr/bin/env bash
# The second part on a machine with one GPU, in at most 300 s: the tests that need a GPU, then speeds.
#
#   benchmarks/gpu/second.sh     results in $OUT, as common.sh describes
#
# What the first part left (kernels.tgz, a wheel) saves time if it is put into .gpu. Most valuable first; whatever fails, the rest is
# done, as far as the time goes. Exit status: 1 if anything failed or was skipped, or there is no GPU.
set -uo pipefail
budget=${BUDGET:-292}
source "$(dirname "$0")/common.sh"
begin

step build 60 bash -c "source '$here/common.sh'; build"
warm_in_background
step tests 75 "$python" -m pytest -v -n 5 --timeout 45 -p no:cacheprovider -p shorter_waits tests/gpu/test_gpu.py
warmed
step fused 75 "$python" "$here/fused.py" "$out/fused.json" 2,4
bench from-host 40 all-gather-matmul --peers host --shape 8192x8192x8192 --dtype float16 --ranks 2 --iterations 10
bench all-gather 60 all-gather --device cuda --ranks 2 --sizes 2M,32M,512M --comm-sms 4,16,64 --tile 16K --warmup 1 --iterations 4
bench p2p 30 p2p --device cuda --ranks 2 --sizes 4K:64M:16 --comm-sms 4,16,32 --warmup 1 --iterations 5
bench_of_processes processes-torch 50 all-gather-matmul --device cuda --shape 8192x8192x8192 --dtype bfloat16 --baseline torch --iterations 5
step rates 60 "$python" "$here/rates.py" "$out/rates.json" full
[ "$gpus" = 0 ] && finish # the rest is of speeds alone

source "$here/five_systems.sh"
# The cores of this machine, which are more than those on which weft was measured before.
square=(all-gather-matmul --shape 1024x1024x1024 --iterations 10)
bench cpu-link 25 "${square[@]}" --link-gbps auto
bench cpu-float32 25 "${square[@]}"
bench cpu-bfloat16 25 "${square[@]}" --dtype bfloat16
for ranks in 2 8 16; do
  bench cpu-$ranks 25 all-gather-matmul -n $ranks --threads $((16 / ranks)) --shape 4096x4096x4096 --iterations 5
done
finish
