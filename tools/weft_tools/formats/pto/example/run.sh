#!/bin/sh
# Compile the program with the headers of PTO_ISA, a clone of pto-isa, and run it on PTO's simulator
# for CPUs: PTO_ISA=folder ./run.sh -r sim. CXX: a compiler of C++20, g++ from 13 on or clang.
set -eu
cd "$(dirname "$0")"
mode=
while getopts r: option; do
    case $option in
    r) mode=$OPTARG ;;
    *) exit 2 ;;
    esac
done
if [ "$mode" != sim ]; then
    echo "give -r sim: this folder has the kernels of a device, but no program that starts them there" >&2
    exit 2
fi
: "${PTO_ISA:?names no clone of pto-isa}"
${CXX:-g++} -std=c++20 -O2 -D__CPU_SIM -include cstdint -include cstddef \
    -I"$PTO_ISA/include" -I"$PTO_ISA/include/common" -I"$PTO_ISA/tests/cpu/stubs" \
    ./*_kernel.cpp main.cpp -o program -lpthread
./program data
