#!/usr/bin/env bash
# Runs the portable path of the kernels, and of the layers around attention, in Miri, the interpreter that finds undefined behaviour: data races between threads,
# overlapping parts of a buffer, reads of memory that nothing wrote, pointers out of bounds. Hours on one core.
# Needs a nightly toolchain with the components miri and rust-src. Arguments go to the test binaries: `scripts/miri.sh heads_of_pairs`.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo +nightly miri --version >/dev/null 2>&1 || rustup component add miri rust-src --toolchain nightly
# Isolation would hide the clock from the thread pool, which never ends: its threads are no leak. Tree Borrows accepts
# what the queues of crossbeam do, which the older Stacked Borrows does not.
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-tree-borrows ${MIRIFLAGS:-}"
export RUSTFLAGS="${RUSTFLAGS:-} -A warnings"
cargo +nightly miri test -p resolvent-kernels -p resolvent-layers --test shared_buffers --locked -- --nocapture "$@"
