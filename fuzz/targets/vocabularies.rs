#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("vocabularies"),
    |data: &[u8]| resolvent_fuzz::vocabularies(data)
);
