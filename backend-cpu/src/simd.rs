//! Compiles a loop for the vector instructions of the machine it runs on.
//!
//! The same Rust code is compiled for several instruction sets and the best one is picked at run
//! time. Nothing is fused or reordered, so all versions give the same bits.

/// A loop to vectorise. Implementations mark `run`, and all it calls, `#[inline(always)]`: what is
/// not inlined is compiled once only, for the least of machines.
pub(crate) trait Kernel {
    type Out;
    fn run(self) -> Self::Out;
}

/// A closure as a kernel. Closures cannot be marked, so this is for bodies that are inlined for
/// being short.
struct Short<F>(F);

impl<R, F: FnOnce() -> R> Kernel for Short<F> {
    type Out = R;
    #[inline(always)]
    fn run(self) -> R {
        (self.0)()
    }
}

/// Runs a short loop.
#[inline(always)]
pub(crate) fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    dispatch(Short(f))
}

/// Runs a kernel with the best instructions there are.
#[inline(always)]
#[allow(unsafe_code)]
pub(crate) fn dispatch<K: Kernel>(kernel: K) -> K::Out {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd")]
        fn avx512<K: Kernel>(kernel: K) -> K::Out {
            kernel.run()
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<K: Kernel>(kernel: K) -> K::Out {
            kernel.run()
        }
        if has_avx512() {
            // SAFETY: the instructions that `avx512` is compiled for were found on this machine.
            return unsafe { avx512(kernel) };
        }
        if has_avx2() {
            // SAFETY: the instructions that `avx2` is compiled for were found on this machine.
            return unsafe { avx2(kernel) };
        }
    }
    kernel.run()
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
