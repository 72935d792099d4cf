#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("pictures"),
    |data: &[u8]| resolvent_fuzz::pictures(data)
);
