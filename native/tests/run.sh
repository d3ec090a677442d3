#!/usr/bin/env bash
# Build and run the native tests plainly and under each sanitizer: all sources as one, which takes half as long as one by one.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
shopt -s extglob
sources=(!(python)/*.cpp)  # which needs Python
sanitizers=(none thread address,undefined)
builds=()
for sanitizer in "${sanitizers[@]}"; do
  flags=(-std=c++17 -O1 -g1 -Wall -Wextra -pthread -rdynamic)  # -g1: reports name lines; -rdynamic: the team is looked up
  [ "$sanitizer" = none ] || flags+=("-fsanitize=$sanitizer" -fno-omit-frame-pointer -fno-sanitize-recover=all)
  [ "$sanitizer" != address,undefined ] || flags+=(-O0)  # optimised, its many checks take most of the time to compile
  printf '#include "%s"\n' "${sources[@]}" | "${CXX:-c++}" "${flags[@]}" -I. -x c++ - -o "$out/$sanitizer" &
  builds+=($!)
done
for build in "${builds[@]}"; do wait "$build"; done
for sanitizer in "${sanitizers[@]}"; do
  echo "== $sanitizer"
  TSAN_OPTIONS=halt_on_error=1 "$out/$sanitizer"
done
