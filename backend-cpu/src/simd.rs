//! Compiles a loop for the vector instructions of the machine it runs on.
//!
//! The same Rust code is compiled for several instruction sets and the best one is picked at run time. Nothing is fused or
//! reordered, so all versions give the same bits.

/// Runs `f`, which is a short loop with everything it calls marked for inlining.
#[inline(always)]
#[allow(unsafe_code)]
pub(crate) fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd")]
        fn avx512<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        if has_avx512() {
            // SAFETY: the instructions that `avx512` is compiled for were found on this machine.
            return unsafe { avx512(f) };
        }
        if has_avx2() {
            // SAFETY: the instructions that `avx2` is compiled for were found on this machine.
            return unsafe { avx2(f) };
        }
    }
    f()
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") && has!("avx512cd")
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("avx2") && has!("fma") && has!("f16c")
}
