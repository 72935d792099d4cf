#!/usr/bin/env bash
# Fuzzes every reader: `scripts/fuzz.sh [SECONDS [TARGET...]]`, each target for a minute unless told otherwise. With
# `RUNS=NUMBER`, each until so many inputs were tried. What a target finds is kept in fuzz/artifacts/TARGET and ends its run;
# what it has learnt is kept in fuzz/corpus/TARGET for the next time.
#
# libFuzzer runs without a sanitizer: the readers are safe Rust, where a panic, a hang, an overflowing sum (checked here) and
# memory beyond the budget are what can go wrong.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
seconds="${1:-60}"
shift || true
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}" RUSTC_WRAPPER="$PWD/rustc.sh" CARGO_TERM_COLOR=never
cargo build --release --locked --quiet
programs="$CARGO_TARGET_DIR/release"
targets=("$@")
[ $# -gt 0 ] || targets=(annotations checkpoints fits idx mechanisms npy npz pictures recipes safetensors shards tar texts vocabularies zip)
# One thread: two would try the same input at different speeds.
export RAYON_NUM_THREADS=1 RESOLVENT_SEEDS="$PWD/corpus"
limits=(-max_total_time="$seconds")
[ -z "${RUNS:-}" ] || limits=(-runs="$RUNS")
failed=0
for target in "${targets[@]}"; do
    mkdir -p "artifacts/$target" "corpus/$target"
    log="artifacts/$target.log"
    if "$programs/$target" "corpus/$target" -artifact_prefix="artifacts/$target/" "${limits[@]}" -timeout=10 \
        -rss_limit_mb=1024 -max_len=65536 -print_final_stats=1 >"$log" 2>&1; then
        found="nothing found"
    else
        found="FAILED: see fuzz/$log"
        failed=1
    fi
    executions="$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")"
    printf '%-14s %12s executions  %s\n' "$target" "${executions:-?}" "$found"
done
rm -rf /dev/shm/resolvent-fuzz-*
exit "$failed"
