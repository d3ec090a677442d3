#!/usr/bin/env bash
# The first part on a machine with one GPU, in at most 240 s: the assumptions of the engine about a GPU, weft rung by rung, the
# product kernel beside torch.mm, and two processes that share the GPU.
#
#   benchmarks/gpu/first.sh      results in $OUT, as common.sh describes
#
# Most valuable first; whatever fails, the rest is done. Exit status: 1 if anything failed, or there is no GPU.
set -uo pipefail
budget=${BUDGET:-232}
source "$(dirname "$0")/common.sh"
begin
step build 60 bash -c "source '$here/common.sh'; build"
warm_in_background
step doctor 90 "$python" -m weft doctor --gpu --json "$out/assumptions.json"
warmed

device=$([ "$gpus" = 0 ] && echo cpu || echo cuda)
ladder=("$python" "$here/ladder.py" "$out/ladder.jsonl" --device $device --limit 25)
rm -f "$out/ladder.jsonl"
ends=$((SECONDS + 100))
for _ in 1 2 3 4 5 6; do  # a rung that hangs ends the process: the next attempt goes on after it
  ((ends - SECONDS < 8)) && break
  step ladder $((ends - SECONDS)) "${ladder[@]}"
  [ $? = 1 ] || break
done
# As in a program whose driver loads kernels at their first launch: weft loads those of a call before a comm lane waits for its products.
step lazy 40 env CUDA_MODULE_LOADING=LAZY "${ladder[@]}" --prefix "lazy: " --only "matmul_reduce_scatter push, torch" \
  "matmul_all_reduce one_shot, torch" "other layouts, triton"
# As in a program that sets no variables: the doctor asks for the GPU before it sets them, so that they may be late.
step late-variables 40 env -u CUDA_MODULE_LOADING -u CUDA_DEVICE_MAX_CONNECTIONS "$python" -m weft doctor --gpu --only queues \
  --json "$out/late.json"
step rates 40 "$python" "$here/rates.py" "$out/rates.json" quick
bench_of_processes processes 50 all-gather-matmul --device cuda --shape 4096x4096x4096 --dtype bfloat16 --warmup 1 --iterations 5
keep_kernels
finish
