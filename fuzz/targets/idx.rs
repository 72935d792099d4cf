#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("idx"),
    |data: &[u8]| resolvent_fuzz::idx(data)
);
