#!/usr/bin/env bash
# Packs the GPU tests, benches and examples for a machine that has a GPU but no Rust and no network.
#
#   scripts/pack-gpu.sh [--only KIND[,KIND...]] [--ablation]      KIND: test, bench, example
#
# writes dist/gpu: the programs (one archive), a MANIFEST, and run-gpu.sh, which runs them there.
# Where no nvcc is on PATH, scripts/cuda-toolkit.sh supplies one. Builds go to $CARGO_TARGET_DIR,
# by default ${XDG_CACHE_HOME:-~/.cache}/candle-topk/target-cuda. All are release builds, so that
# tests, benches and examples share one compilation of Candle and of its kernels. With --ablation the
# benches have the variants of kernels that `--bench kernels -- --ablation` measures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

limit_mib=64 # what dist/gpu may come to, so that it stays easy to send

fail() {
  echo "pack-gpu: $*" >&2
  exit 1
}
usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}

kinds=test,bench,example
features=cuda
while [ $# -gt 0 ]; do
  case $1 in
    --only)
      [ $# -ge 2 ] || usage
      kinds=$2
      shift 2
      ;;
    --ablation)
      features=cuda,ablation
      shift
      ;;
    *) usage ;;
  esac
done
for kind in ${kinds//,/ }; do
  case $kind in test | bench | example) ;; *) fail "unknown kind '$kind': test, bench and example are known" ;; esac
done

for tool in cargo git python3 strip tar xz; do
  command -v $tool >/dev/null || fail "$tool is missing (Debian: apt-get install git python3 binutils tar xz-utils)"
done
if ! command -v nvcc >/dev/null; then
  exports=$(scripts/cuda-toolkit.sh) # on its own line: a failure inside eval would go unnoticed
  eval "$exports"
fi
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/candle-topk/target-cuda}

# Taken before the build: a revision read afterwards may be of sources that were not built.
revision=$(git rev-parse HEAD)
[ -z "$(git status --porcelain)" ] || revision+=-dirty

# programs KIND: builds them and prints "NAME PATH" for each executable.
programs() {
  local build
  case $1 in
    test) build=(cargo test --no-run --lib --tests) ;;
    bench) build=(cargo bench --no-run --benches) ;;
    example) build=(cargo build --examples) ;;
  esac
  [ "$1" = bench ] || build+=(--release)
  "${build[@]}" --features "$features" --message-format json-render-diagnostics | python3 -c '
import json, sys
kinds = {"test": ("lib", "test"), "bench": ("bench",), "example": ("example",)}[sys.argv[1]]
for line in sys.stdin:
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["executable"] and message["target"]["kind"][0] in kinds:
        target = message["target"]
        # The emulation of kernels needs a compiler and its sources, and no GPU.
        if target["name"] != "emulation": print("lib" if "lib" in target["kind"] else target["name"], message["executable"])
' "$1"
}

new=dist/gpu.partial
rm -rf $new
mkdir -p $new
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
{
  echo "revision $revision"
  echo "built $(date -u +%Y-%m-%dT%H:%M:%SZ)"
  echo "nvcc $(nvcc --version | sed -n 's/.*release [0-9.]*, V//p'), compute capability ${CUDA_COMPUTE_CAP:-of the local GPU}"
} >$new/MANIFEST

for kind in ${kinds//,/ }; do
  found=$(programs "$kind")
  [ -n "$found" ] || {
    echo "pack-gpu: there is no $kind to pack" >&2
    continue
  }
  mkdir -p "$stage/$kind"
  while read -r name path; do
    strip -o "$stage/$kind/$name" "$path"
    echo "$kind $name" >>$new/MANIFEST
  done <<<"$found"
done
grep -qE '^(test|bench|example) ' $new/MANIFEST || fail "nothing was built"

# Most of a program is Candle, kernels included, and the same in all of them. One archive whose
# window spans several programs keeps that once: three came to 5 MiB, where one alone is 4.5. So xz
# runs on one thread, as a window per thread would lose it, at level 3: 6 is five times slower for
# an eighth less.
echo "pack-gpu: compressing $(du -sm "$stage" | cut -f1) MiB" >&2
tar -C "$stage" --sort=name --owner=0 --group=0 -cf - . | xz -T1 --lzma2=preset=3,dict=192MiB >$new/programs.tar.xz
cp scripts/run-gpu.sh $new/

rm -rf dist/gpu
mv $new dist/gpu
cat dist/gpu/MANIFEST
bytes=$(cat dist/gpu/* | wc -c)
printf 'dist/gpu: %d.%d MiB\n' $((bytes / 1048576)) $((bytes % 1048576 * 10 / 1048576))
[ "$bytes" -lt $((limit_mib * 1048576)) ] || fail "dist/gpu is over $limit_mib MiB: pack less with --only"
