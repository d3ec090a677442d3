# Sourced by first.sh, second.sh and five_systems.sh: folders, variables, and steps with limits.
#
# $OUT (default results/gpu) has at any moment at most eight files: a log, JSON, the compiled kernels and a wheel.
# PYTHON is the interpreter with torch (default python3), BUDGET the seconds of all steps.
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
cd "$here/../.." || exit 1  # the repository's root
out=$(realpath -m "${OUT:-results/gpu}")
python=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')
work=${TMPDIR:-/tmp}/weft-gpu  # the same on every machine: Triton's cache has absolute paths
tree=$work/tree json=$work/json cache=$work/cache kit=$PWD/.gpu
log=$out/all.log
failed=0

export PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONPATH=$tree:$here${PYTHONPATH:+:$PYTHONPATH}
export WEFT_CACHE=$cache/weft TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER

begin() {  # make the folders, and say what is here
  mkdir -p "$out" "$cache"
  rm -rf "$json" && mkdir -p "$json"
  : >"$log"
  [ -d "$cache/triton" ] || [ ! -e "$kit/kernels.tgz" ] || tar -C "$cache" -xzf "$kit/kernels.tgz"
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>>"$log") || gpus=0
  {
    date -u
    uname -r
    nproc
    "$python" --version
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
    "$python" -m pip list 2>/dev/null | grep -iE '^(torch|triton|nanobind|scikit.build.core|numpy|typer|rich|pytest.*) '
  } >>"$log" 2>&1
  if [ "$gpus" = 0 ]; then
    say "torch of $python finds no GPU here: steps check themselves on the CPU, or refuse"
    failed=1
  fi
}

say() { echo "$@" | tee -a "$log"; }

left() { echo $((budget - SECONDS)); }

step() {  # NAME SECONDS COMMAND…: with a limit, its output in the log; skipped when the time is up
  local name=$1 limit=$2 begun=$SECONDS rest status
  shift 2
  rest=$(left)
  if ((rest < 8)); then
    say "== $name: SKIPPED, $rest s are left"
    failed=1
    return 1
  fi
  ((limit > rest)) && limit=$rest
  say "== $name (at $SECONDS s, at most $limit s)"
  timeout --kill-after=3 "$limit" "$@" >>"$log" 2>&1
  status=$?
  if [ $status = 0 ]; then
    say "   $name: done after $((SECONDS - begun)) s"
  else
    say "   $name: FAILED ($status) after $((SECONDS - begun)) s"
    failed=1
  fi
  return $status
}

bench() {  # NAME SECONDS BENCHMARK OPTIONS…: a step of weft bench; bench.json has its result by its name
  bench_with "$1" "$2" "$python" -m weft bench "${@:3}"
}

bench_of_processes() {  # the same of two processes, also where they share a GPU
  bench_with "$1" "$2" "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m weft bench "${@:3}"
}

bench_with() {
  local name=$1 status
  step "$name" "${@:2}" --json "$json/$name.json"
  status=$?
  "$python" "$here/collect.py" "$json" "$out/bench.json" 2>>"$log"
  return $status
}

warm_in_background() {  # compile with 12 processes beside other steps; without a GPU one kernel, as a check
  if [ "$gpus" = 0 ]; then set -- 1 --only signals; else set -- 12; fi  # of 16 cores
  timeout 120 "$python" "$here/warm.py" "$@" >"$work/warm.log" 2>&1 & # its processes end with it
  warming=$!
}

warmed() {  # wait until kernels are compiled, at most 30 s, and keep them for the next start
  for _ in $(seq 60); do kill -0 $warming 2>/dev/null || break; sleep 0.5; done
  kill $warming 2>/dev/null
  wait $warming || failed=1
  say "   kernels: $(find "$TRITON_CACHE_DIR" -name '*.cubin' 2>/dev/null | wc -l) compiled by warm.py and others, at $SECONDS s"
  cat "$work/warm.log" >>"$log"
  keep_kernels
}

keep_kernels() {  # the kernels compiled so far, for the next start of a machine
  tar -C "$cache" -czf "$out/kernels.tgz" triton 2>>"$log"
  [ "$(stat -c %s "$out/kernels.tgz" 2>/dev/null || echo 0)" -lt 16000000 ] || rm -f "$out/kernels.tgz"
}

finish() {  # the tables, and the exit status
  timeout 20 "$python" "$here/summary.py" "$out" 2>&1 | tee -a "$log"
  say "all: $SECONDS s"
  exit $failed
}

importable() { (cd / && "$python" -c 'import weft._native, weft_tools' 2>/dev/null); }

fresh_sources() {  # those of the checkout, over what a wheel has brought
  cp -r weft "$tree/" && cp -r tools/weft_tools "$tree/" && importable
}

from_wheels() {  # FOLDER: wheels of weft and of its benchmarks
  ls "$1"/torch_weft-*.whl "$1"/torch_weft_tools-*.whl >/dev/null 2>&1 || return 1
  rm -rf "$tree"
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$tree" "$1"/torch_weft*.whl && fresh_sources
}

by_pip() {  # wheels made here, without a network; that of weft is kept for the next start
  "$python" -m pip wheel -q --no-index --no-deps --no-build-isolation --wheel-dir "$work/wheels" . ./tools &&
    from_wheels "$work/wheels" && cp "$work"/wheels/torch_weft-*.whl "$out/"
}

by_cmake() {  # should pip or scikit-build-core refuse; commands are found by metadata
  rm -rf "$tree" "$work/build"
  mkdir -p "$tree" && "$python" "$here/metadata.py" "$tree" &&
    cmake -S native -B "$work/build" -DCMAKE_BUILD_TYPE=Release -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" \
      -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" &&
    cmake --build "$work/build" -j 16 && mkdir -p "$tree/weft" && cp "$work/build"/_native*.so "$tree/weft/" && fresh_sources
}

build() { importable || from_wheels "$kit" || by_pip || by_cmake; }
