#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("recipes"),
    |data: &[u8]| resolvent_fuzz::recipes(data)
);
