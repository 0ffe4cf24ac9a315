#!/usr/bin/env bash
# Runs what pack-gpu.sh packed. It lies beside MANIFEST and programs.tar.xz on the GPU machine and
# needs bash, tar, xz and a CUDA 13 driver and runtime there; neither Rust nor a network.
#
#   run-gpu.sh tests    [OPTIONS] [-- ARGS]   every test, the GPU ones included
#   run-gpu.sh sanitize [OPTIONS]             the tests on small shapes, under each tool of compute-sanitizer
#   run-gpu.sh bench    [OPTIONS] [-- ARGS]   every bench; its JSON lines are gathered in bench.jsonl
#   run-gpu.sh all      [OPTIONS]             the three in turn (the default)
#   run-gpu.sh run NAME [-- ARGS]             one program by its name, an example first, as it is
#
#   --out DIR        where logs and summary.txt go (default: gpu-results)
#   --only GLOB      only the programs whose name matches
#   --filter TEXT    sanitize: tests whose name holds TEXT (default: sanitize)
#   --tools "T ..."  sanitize: tools of compute-sanitizer (default: memcheck racecheck initcheck)
#   --timeout S      seconds that one program may take (default: 600)
#
# Ends with one line a program and a non-zero status if anything failed. The real CUDA libraries are
# looked for in ${CUDA_HOME:-/usr/local/cuda}/lib64. Programs find the packed revision in
# CANDLE_TOPK_REV, to write it beside what they measure.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
  echo "run-gpu: $*" >&2
  exit 2
}
usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}

mode=all name='' out=gpu-results only='*' filter=sanitize tools='memcheck racecheck initcheck' limit=600
case ${1:-} in
  tests | sanitize | bench | all)
    mode=$1
    shift
    ;;
  run)
    [ $# -ge 2 ] || usage
    mode=run name=$2
    shift 2
    ;;
esac
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --out) out=$2 ;;
    --only) only=$2 ;;
    --filter) filter=$2 ;;
    --tools) tools=$2 ;;
    --timeout) limit=$2 ;;
    *) usage ;;
  esac
  shift 2
done
[ $# -eq 0 ] || shift # the --
case $mode in
  all | sanitize) [ $# -eq 0 ] || fail "$mode takes no arguments for the programs" ;;
esac

[ -f "$here/MANIFEST" ] || fail "no MANIFEST beside this script: run scripts/pack-gpu.sh and copy dist/gpu here"
CANDLE_TOPK_REV=$(sed -n 's/^revision //p' "$here/MANIFEST")
export CANDLE_TOPK_REV
cuda=${CUDA_HOME:-/usr/local/cuda}
[ -d "$cuda/lib64" ] || echo "run-gpu: $cuda/lib64 is missing; the CUDA libraries must be on LD_LIBRARY_PATH" >&2
export LD_LIBRARY_PATH="$cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
xz -dc "$here/programs.tar.xz" | tar -C "$programs" -xf - || fail "programs.tar.xz could not be unpacked"

if [ "$mode" = run ]; then
  for kind in example bench test; do
    if [ -x "$programs/$kind/$name" ]; then
      "$programs/$kind/$name" "$@"
      exit
    fi
  done
  fail "no program is called '$name'; MANIFEST lists them"
fi

mkdir -p "$out" || fail "cannot write to $out"
summary=$out/summary.txt
failures=0 skipped=''
row_format='%-10s %-28s %7s %7s %9s  %s\n'
{
  echo "revision $CANDLE_TOPK_REV, run $(date -u +%Y-%m-%dT%H:%M:%SZ)"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "nvidia-smi shows no GPU"
  # shellcheck disable=SC2059
  printf "$row_format" run program passed failed seconds result
} >"$summary"

# packed KIND: the names of that kind that --only leaves.
packed() {
  local kind name
  while read -r kind name; do
    # shellcheck disable=SC2053
    if [ "$kind" = "$1" ] && [[ $name == $only ]]; then echo "$name"; fi
  done <"$here/MANIFEST"
}

# logged LOG COMMAND...: runs it under the time limit; sets rc and seconds.
logged() {
  local log=$1 start=${EPOCHREALTIME/[.,]/} took
  shift
  timeout -k 10 "$limit" "$@" >"$log" 2>&1 </dev/null
  rc=$?
  took=$((${EPOCHREALTIME/[.,]/} - start))
  seconds=$((took / 1000000)).$(printf %02d $((took / 10000 % 100)))
}

# row RUN PROGRAM RESULT LOG: one line of the table; any RESULT but "ok..." is a failure.
# The counts are those of the test runner's own closing line.
row() {
  local counts passed failed
  counts=$(grep -a '^test result: ' "$4" | tail -1)
  passed=$(sed -n 's/.* \([0-9]*\) passed.*/\1/p' <<<"$counts")
  failed=$(sed -n 's/.* \([0-9]*\) failed.*/\1/p' <<<"$counts")
  # shellcheck disable=SC2059
  printf "$row_format" "$1" "$2" "${passed:--}" "${failed:--}" "$seconds" "$3" | tee -a "$summary"
  case $3 in
    ok*) ;;
    *)
      failures=$((failures + 1))
      echo "--- the end of $4"
      tail -n 40 "$4"
      echo "---"
      ;;
  esac
}

ended() { # what rc says, for a program that is no success
  case $rc in
    124 | 137) echo "FAILED: over $limit s" ;;
    *) echo "FAILED: exit status $rc" ;;
  esac
}

none() { # none RUN WHY: having run nothing is a failure, but no reason to fail the rest of all
  echo "$1: $2" | tee -a "$summary"
  if [ "$mode" = all ]; then skipped+=" $1"; else failures=$((failures + 1)); fi
}

run_tests() {
  local names test result log
  names=$(packed test)
  [ -n "$names" ] || {
    none test "no test of that name is packed"
    return
  }
  for test in $names; do
    log=$out/test-$test.log
    logged "$log" "$programs/test/$test" --include-ignored "$@"
    result=ok
    if [ $rc -ne 0 ]; then
      result=$(ended)
    elif ! grep -aq '^test result: ok' "$log"; then
      result="FAILED: no test result in the log"
    fi
    row test "$test" "$result" "$log"
  done
}

run_sanitize() {
  local sanitizer='' candidate tool test names='' log verdict result
  for candidate in "$(command -v compute-sanitizer)" "$cuda/bin/compute-sanitizer" "$cuda/compute-sanitizer/compute-sanitizer"; do
    [ -x "$candidate" ] && sanitizer=$candidate && break
  done
  [ -n "$sanitizer" ] || {
    none sanitize "skipped: compute-sanitizer is neither on PATH nor in $cuda"
    return
  }
  for test in $(packed test); do
    if "$programs/test/$test" --include-ignored --list "$filter" 2>/dev/null | grep -q ': test$'; then
      names+=" $test"
    fi
  done
  [ -n "$names" ] || {
    none sanitize "no packed test has '$filter' in its name"
    return
  }
  for tool in $tools; do
    for test in $names; do
      log=$out/$tool-$test.log
      # One test at a time: the tools keep their records per process, and a report should name one culprit.
      logged "$log" "$sanitizer" --tool "$tool" --error-exitcode 99 \
        "$programs/test/$test" --include-ignored --test-threads=1 "$filter"
      # racecheck's hazards can be warnings, which the exit status does not show: its summary does.
      verdict=$(grep -aoE '(ERROR|RACECHECK) SUMMARY: .*' "$log" | tail -1)
      result=ok
      if [ -z "$verdict" ]; then
        [ $rc -ne 0 ] && result=$(ended) || result="FAILED: the tool gave no summary"
      elif [ $rc -ne 0 ]; then
        result="$(ended); $verdict"
      elif ! [[ $verdict =~ SUMMARY:\ 0\  ]]; then
        result="FAILED: $verdict"
      fi
      row "$tool" "$test" "$result" "$log"
    done
  done
}

run_bench() {
  local names bench result log
  names=$(packed bench)
  [ -n "$names" ] || {
    none bench "no bench of that name is packed"
    return
  }
  : >"$out/bench.jsonl"
  for bench in $names; do
    log=$out/bench-$bench.log
    logged "$log" "$programs/bench/$bench" --bench "$@" # --bench: as cargo calls a bench
    result="ok, $(grep -ac '^{' "$log") JSON lines"
    [ $rc -eq 0 ] || result=$(ended)
    grep -a '^{' "$log" >>"$out/bench.jsonl"
    row bench "$bench" "$result" "$log"
  done
}

case $mode in
  tests) run_tests "$@" ;;
  sanitize) run_sanitize ;;
  bench) run_bench "$@" ;;
  all)
    run_tests
    run_sanitize
    run_bench
    ;;
esac

if [ $failures -gt 0 ]; then
  echo "$failures FAILED" >>"$summary"
else
  echo "all passed${skipped:+, skipped:$skipped}" >>"$summary"
fi
echo
cat "$summary"
[ $failures -eq 0 ]
