#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("zip"),
    |data: &[u8]| resolvent_fuzz::zip(data)
);
