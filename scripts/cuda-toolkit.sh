#!/usr/bin/env bash
# A CUDA 13.0 toolkit that compiles and links the `cuda` feature on a Linux machine without a GPU or
# an installed CUDA. Nothing made here can run a kernel.
#
#   eval "$(scripts/cuda-toolkit.sh [DIR])"
#
# prepares DIR (default: ${XDG_CACHE_HOME:-~/.cache}/candle-topk/cuda-13.0) on the first call and
# prints the exports. Needs python3 with pip, gcc, g++, cargo and, the first time, a network.
#
# - nvcc and its headers come from NVIDIA's wheels on PyPI.
# - The libraries that Candle links are replaced by stubs: shared objects with the real soname and
#   every symbol that cudarc binds, all empty. The linker is content, and at run time the loader
#   takes the real libraries of the GPU machine.
#
# 13.0 and not newer: a driver refuses the PTX of an nvcc newer than itself, and 580.x is CUDA 13.0.
set -euo pipefail

nvcc_version=13.0.88
wheels=(
  "nvidia-cuda-nvcc==$nvcc_version"
  "nvidia-nvvm==$nvcc_version"
  "nvidia-cuda-crt==$nvcc_version"
  "nvidia-cuda-cccl==13.0.85"
  "nvidia-cuda-runtime==13.0.96"
)

say() { echo "cuda-toolkit: $*" >&2; }
fail() {
  say "$@"
  exit 1
}

crate=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/candle-topk/cuda-13.0}
mkdir -p "$(dirname "$dir")"
dir=$(cd "$(dirname "$dir")" && pwd)/$(basename "$dir")

# The stubs depend on cudarc's version, so the stamp names it beside nvcc's.
cudarc_version=$(awk '$1 == "name" && $3 == "\"cudarc\"" { getline; gsub(/"/, "", $3); print $3 }' "$crate/Cargo.lock")
[ -n "$cudarc_version" ] || fail "Cargo.lock names no cudarc"
stamp=.candle-topk-toolkit
made="nvcc $nvcc_version, stubs of cudarc $cudarc_version"

ready() { [ "$(cat "$dir/$stamp" 2>/dev/null)" = "$made" ]; }

check_tools() {
  command -v python3 >/dev/null || fail "python3 is missing: install it (Debian: apt-get install python3 python3-pip)"
  python3 -m pip --version >/dev/null 2>&1 || fail "pip is missing: install it (Debian: apt-get install python3-pip)"
  local tool
  for tool in gcc g++; do # nvcc hands the host half of every .cu file to g++
    command -v $tool >/dev/null || fail "$tool is missing: install it (Debian: apt-get install gcc g++)"
  done
  command -v cargo >/dev/null || fail "cargo is missing: install Rust from https://rustup.rs"
  [ "$(uname -s)" = Linux ] || fail "NVIDIA publishes these wheels for Linux alone"
}

# stub LIBRARY SONAME BINDINGS PREFIX: one library of empty functions.
stub() {
  local symbols
  symbols=$(grep -ohE "pub (unsafe )?fn $4[A-Za-z0-9_]*" "$cudarc/src/$3/sys/mod.rs" | awk '{ print $NF }' | sort -u)
  [ -n "$symbols" ] || fail "cudarc $cudarc_version: no function $4... among its $3 bindings"
  awk '{ print "void " $1 "(void) {}" }' <<<"$symbols" |
    gcc -shared -fPIC -w -x c - -o "$home/lib/lib$1.so" -Wl,-soname,"$2"
}

prepare() { # into $new, which becomes $dir only when all of it is there
  check_tools
  say "preparing $dir ($made)"
  rm -rf "$new"
  mkdir -p "$new"

  PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
    python3 -m pip install --quiet --no-deps --only-binary=:all: --target "$new" "${wheels[@]}" >&2 ||
    fail "pip could not install ${wheels[*]}"
  local home=$new/nvidia/cu13
  ln -s lib "$home/lib64"
  ln -s libcudart.so.13 "$home/lib/libcudart.so" # the wheel has the runtime, not the name to link by

  # Cargo says where cudarc's sources are, and fetches them if they are not there yet.
  local cudarc
  cudarc=$(cargo metadata --quiet --format-version 1 --features cuda --manifest-path "$crate/Cargo.toml" |
    python3 -c '
import json, os, sys
found = [p for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc" and p["version"] == sys.argv[1]]
print(os.path.dirname(found[0]["manifest_path"]))' "$cudarc_version") ||
    fail "cargo could not tell where the sources of cudarc $cudarc_version are"

  stub cuda libcuda.so.1 driver 'cu[A-Z]'
  stub cublas libcublas.so.13 cublas cublas
  stub cublasLt libcublasLt.so.13 cublaslt cublasLt
  stub curand libcurand.so.10 curand curand
  stub nvrtc libnvrtc.so.13 nvrtc nvrtc

  "$home/bin/nvcc" --version >/dev/null || fail "the nvcc of the wheels does not start"
  echo "$made" >"$new/$stamp"
  rm -rf "$dir"
  mv "$new" "$dir"
}

if ! ready; then
  command -v flock >/dev/null || fail "flock is missing: install it (Debian: apt-get install util-linux)"
  # An old toolkit is replaced; a folder that is something else is the caller's, and stays.
  if [ -e "$dir" ] && [ ! -e "$dir/$stamp" ] && [ -n "$(ls -A "$dir")" ]; then
    fail "$dir exists and was not made by this script: remove it or name another folder"
  fi
  new=$dir.partial
  exec 9>"$dir.lock"
  flock -n 9 || {
    say "waiting for another run to prepare $dir"
    flock 9
  }
  # Asked again: the run that held the lock may have done it.
  if ! ready; then prepare; fi
  exec 9>&-
fi

home=$(printf %q "$dir/nvidia/cu13")
# 90 is the H100 and H200; on a machine without a GPU there is nothing to ask.
echo "export CUDA_HOME=$home CUDA_PATH=$home CUDA_COMPUTE_CAP=\"\${CUDA_COMPUTE_CAP:-90}\""
echo "export PATH=$home/bin:\"\$PATH\""
echo "export LIBRARY_PATH=$home/lib\"\${LIBRARY_PATH:+:\$LIBRARY_PATH}\""
