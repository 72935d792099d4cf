#![no_main]

libfuzzer_sys::fuzz_target!(
    init: resolvent_fuzz::seed("safetensors"),
    |data: &[u8]| resolvent_fuzz::safetensors(data)
);
