#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("annotations"),
    |data: &[u8]| resolvent_fuzz::annotations(data)
);
