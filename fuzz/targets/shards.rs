#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("shards"),
    |data: &[u8]| resolvent_fuzz::shards(data)
);
