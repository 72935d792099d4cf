#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("npy"),
    |data: &[u8]| resolvent_fuzz::npy(data)
);
