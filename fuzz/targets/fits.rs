#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("fits"),
    |data: &[u8]| resolvent_fuzz::fits(data)
);
