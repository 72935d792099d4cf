#!/usr/bin/env bash
# Stands before rustc (as RUSTC_WRAPPER): only what parses is instrumented, for coverage and comparisons, as cargo-fuzz does it
# for everything. Burn alone would take longer to instrument than to fuzz.
parsers=" resolvent_fuzz resolvent_lab resolvent_probe csv csv_core flate2 image image_webp lzma_rust2 png roxmltree ruzstd
tar zip zune_core zune_jpeg "
previous=""
for argument in "$@"; do
    if [ "$previous" = --crate-name ] && [[ "$parsers" =~ [[:space:]]$argument[[:space:]] ]]; then
        exec "$@" --cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=4 -Cllvm-args=-sanitizer-coverage-level=4 \
            -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
            -Cllvm-args=-sanitizer-coverage-trace-compares
    fi
    previous="$argument"
done
exec "$@"
