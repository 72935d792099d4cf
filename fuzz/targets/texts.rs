#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("texts"),
    |data: &[u8]| resolvent_fuzz::texts(data)
);
