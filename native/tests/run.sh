#!/usr/bin/env bash
# Build and run the native tests plainly and under each sanitizer.
set -euo pipefail
cd "$(dirname "$0")"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for sanitizer in none thread address,undefined; do
  flags=(-std=c++17 -O1 -g -Wall -Wextra -pthread)
  [ "$sanitizer" = none ] || flags+=("-fsanitize=$sanitizer" -fno-omit-frame-pointer -fno-sanitize-recover=all)
  echo "== $sanitizer"
  "${CXX:-c++}" "${flags[@]}" core.cpp ../board.cpp ../copy.cpp ../mesh.cpp ../reduce.cpp ../segment.cpp ../signals.cpp ../strided.cpp ../transfers.cpp ../world.cpp -o "$out/core"
  TSAN_OPTIONS=halt_on_error=1 "$out/core"
done
