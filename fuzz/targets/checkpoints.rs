#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("checkpoints"),
    |data: &[u8]| resolvent_fuzz::checkpoints(data)
);
