//! Which instruction sets are there to be tested: all that the processor has.

use resolvent_kernels::simd::Level;

#[test]
fn no_level_of_this_processor_is_left_out() {
    let available = Level::available();
    assert_eq!(available[0], Level::Portable);
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        let avx2 = has!("avx2") && has!("fma") && has!("bmi2");
        let avx512 = has!("avx512f") && has!("avx512bw") && has!("avx512cd") && has!("avx512dq") && has!("avx512vl");
        assert_eq!(available.contains(&Level::Avx2), avx2);
        assert_eq!(available.contains(&Level::Avx512), avx2 && avx512);
    }
    #[cfg(target_arch = "aarch64")]
    assert!(available.contains(&Level::Neon));
    let fastest = available.last().copied();
    if std::env::var_os("RESOLVENT_SIMD").is_none() {
        assert_eq!(Level::selected().ok(), fastest);
    }
}
