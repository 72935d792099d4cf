#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("tar"),
    |data: &[u8]| resolvent_fuzz::tar(data)
);
