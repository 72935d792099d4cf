#!/usr/bin/env bash
# What can be said here about GPUs, in two parts:
#   tests   those that run on a GPU, through wgpu: any Vulkan driver will do, Mesa's runs on the processor; without one they are linted
#   types   a type check for CUDA
# `scripts/gpu.sh [tests|types]`; without an argument both parts.
set -euo pipefail
cd "$(dirname "$0")/.."
# Optimising Burn's GPU side would take longer than everything else that is checked.
export CARGO_PROFILE_RELEASE_OPT_LEVEL=0
has_driver() { [ -n "$(ls /usr/share/vulkan/icd.d /etc/vulkan/icd.d 2>/dev/null)" ]; }

tests() {
    if ! has_driver && command -v apt-get >/dev/null; then
        root=""
        [ "$(id -u)" = 0 ] || root="sudo -n"
        { $root apt-get update -q && $root apt-get install -qy --no-install-recommends mesa-vulkan-drivers libvulkan1; } ||
            echo "SKIPPED: no Vulkan driver, and none could be installed"
    fi
    if has_driver; then
        # The library, and the program: it trains a small model there and on the CPU, and moves it between them. One build for both.
        built=(-p resolvent -p resolvent-cli --features resolvent-cli/wgpu --locked)
        cargo test --release "${built[@]}" --test wgpu --test devices -- --nocapture --include-ignored
    else
        cargo clippy --release -p resolvent -p resolvent-cli --features resolvent-cli/wgpu --all-targets --locked -- -D warnings
    fi
}

types() {
    # Burn's build script would download a compiler that type checking does not need.
    DOCS_RS=1 cargo check --release -p resolvent --features cuda --locked
}

case "${1:-}" in
    tests | types) "$1" ;;
    *) tests; types ;;
esac
