#!/usr/bin/env bash
# Everything that needs a GPU, in one go and in less than 8 minutes: builds weft in place without a network, runs the GPU tests, then
# the benchmarks, and leaves JSON, pictures and a summary in a folder.
#
#   benchmarks/gpu/check.sh [FOLDER]        FOLDER defaults to $OUT, else to results/gpu
#
# Exit status: 0 if all went well, 1 if something failed (the rest is still done), 3 if there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:-${OUT:-results/gpu}}")
python=${PYTHON:-python3}
mkdir -p "$out"
failed=0

step() {  # NAME SECONDS COMMAND…: run with a limit, its output kept in the folder of the results
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  local begun=$SECONDS
  if timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1; then
    echo "   done in $((SECONDS - begun)) s"
  else
    echo "   FAILED ($?) after $((SECONDS - begun)) s; the end of $out/$name.log:"
    tail -n 15 "$out/$name.log"
    failed=1
  fi
}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu check: torch of $python finds no GPU here; nothing was run" >&2
  exit 3
fi

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
step build 55 "$python" -m pip install --no-index --no-deps --no-build-isolation --target "$tree" . ./bench
export PYTHONPATH=$tree${PYTHONPATH:+:$PYTHONPATH} WEFT_CACHE=$tree/cache TRITON_CACHE_DIR=$tree/triton
export PYTHONSAFEPATH=1  # the weft that was built, not the sources here
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER
weft=("$python" -m weft)

step tests 90 "$python" -m pytest -q tests/engines/test_gpu.py -p no:cacheprovider
step from-host 45 "${weft[@]}" bench all-gather-matmul --peers host --shape 8192x8192x8192 --dtype float16 --ranks 2 \
  --json "$out/from-host.json" --plot "$out/from-host.png"
step all-gather 80 "${weft[@]}" bench all-gather --device cuda --ranks 2 --sizes 2M,32M,512M --comm-sms 4,16,64 --tile 8K,16K \
  --warmup 1 --iterations 5 --json "$out/all-gather.json" --plot "$out/all-gather.png"
step processes 60 "${weft[@]}" bench all-gather-matmul --device cuda --ranks 2 --shape 8192x8192x8192 --dtype bfloat16 \
  --baseline torch --iterations 10 --json "$out/processes.json"
step p2p 35 "${weft[@]}" bench p2p --device cuda --ranks 2 --sizes 4K:64M:16 --comm-sms 4,16,32 --iterations 5 --warmup 1 \
  --json "$out/p2p.json" --plot "$out/p2p.png"
step products 110 "$python" benchmarks/gpu/products.py "$out"
"$python" benchmarks/gpu/summary.py "$out" | tee "$out/summary.md"
exit $failed
