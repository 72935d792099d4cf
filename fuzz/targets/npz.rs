#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("npz"),
    |data: &[u8]| resolvent_fuzz::npz(data)
);
