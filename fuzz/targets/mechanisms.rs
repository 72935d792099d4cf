#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("mechanisms"),
    |data: &[u8]| resolvent_fuzz::mechanisms(data)
);
