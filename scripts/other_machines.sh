#!/usr/bin/env bash
# What can be said here about machines of another kind, in two parts:
#   kernels   the tests of kernels and layers on ARM, emulated, so that NEON computes and is not only compiled: a sample of them, or with
#             `--whole` every one; and a type check of both for WebAssembly
#   program   a type check of everything for Windows and macOS, C parts left out
# `scripts/other_machines.sh [kernels|program|--whole]`; without an argument both parts. What cannot run is named and skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
skipped() { echo "SKIPPED: $*"; }
emulates() { command -v qemu-aarch64 && command -v aarch64-linux-gnu-gcc; } >/dev/null

arm=aarch64-unknown-linux-gnu
# Stored cases through both paths, random problems against the reference, and threads.
tests=(--test golden_reference --test golden_fused --test shared_buffers --test ternary)
level=1
[ "${1:-}" = --whole ] && { tests=(--tests); level=3; }

kernels() {
    if ! emulates && command -v apt-get >/dev/null; then
        root=""
        [ "$(id -u)" = 0 ] || root="sudo -n"
        { $root apt-get update -q && $root apt-get install -qy --no-install-recommends qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross; } ||
            skipped "no emulator of ARM processors, and none could be installed"
    fi
    if ! rustup target add "$arm"; then
        skipped "the target $arm cannot be installed"
    elif ! emulates; then
        cargo check --release -p resolvent-kernels -p resolvent-layers --target "$arm" --locked
    else
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
        # Together, so that the kernels are compiled once, and with less effort: to optimise them takes longer than to emulate them.
        CARGO_PROFILE_RELEASE_OPT_LEVEL=$level cargo test --release -p resolvent-kernels -p resolvent-layers --target "$arm" --locked "${tests[@]}"
    fi

    # WebAssembly has no files and no threads that a program could count on: the kernels and layers alone.
    if rustup target add wasm32-unknown-unknown; then
        cargo check --release -p resolvent-kernels -p resolvent-layers --target wasm32-unknown-unknown --locked
    else
        skipped "the target wasm32-unknown-unknown cannot be installed"
    fi
}

program() {
    # mimalloc is written in C, for which there is no compiler here.
    for target in x86_64-pc-windows-msvc aarch64-apple-darwin; do
        if rustup target add "$target"; then
            cargo check --release -p resolvent-cli --no-default-features --target "$target" --locked
        else
            skipped "the target $target cannot be installed"
        fi
    done
}

case "${1:-}" in
    kernels | program) "$1" ;;
    *) kernels; program ;;
esac
