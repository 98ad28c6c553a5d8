//! Compiles a loop for the vector instructions of the machine it runs on.
//!
//! The same Rust code is compiled for several instruction sets and the best one is picked at run
//! time. Nothing is reordered, and nothing is fused but where a kernel says so, so all other versions
//! give the same bits.

/// A loop to vectorise. Implementations mark `run`, and all it calls, `#[inline(always)]`: what is
/// not inlined is compiled once only, for the least of machines.
pub(crate) trait Kernel: Sized {
    type Out;
    fn run(self) -> Self::Out;
    /// The same on a machine that has fused multiplication and addition; what calls `mul_add` does
    /// so here alone, because elsewhere it is a slow function.
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        allow(dead_code)
    )]
    #[inline(always)]
    fn fused(self) -> Self::Out {
        self.run()
    }
}

/// Makes a [`Kernel`] of a body that is generic over whether products and sums are fused.
macro_rules! fused_or_not {
    ($out:ty) => {
        type Out = $out;
        #[inline(always)]
        fn run(self) -> $out {
            self.body::<false>()
        }
        #[inline(always)]
        fn fused(self) -> $out {
            self.body::<true>()
        }
    };
}
pub(crate) use fused_or_not;

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
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,fma")]
        fn avx512<K: Kernel>(kernel: K) -> K::Out {
            kernel.fused()
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<K: Kernel>(kernel: K) -> K::Out {
            kernel.fused()
        }
        match level() {
            // SAFETY: the instructions that `avx512` is compiled for were found on this machine.
            Level::Avx512 => return unsafe { avx512(kernel) },
            // SAFETY: the instructions that `avx2` is compiled for were found on this machine.
            Level::Avx2 => return unsafe { avx2(kernel) },
            Level::Least => {}
        }
    }
    // Every one of these machines has it.
    #[cfg(target_arch = "aarch64")]
    return kernel.fused();
    #[cfg(not(target_arch = "aarch64"))]
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) enum Level {
    Least,
    Avx2,
    Avx512,
}

/// What this machine has, looked up once: short loops ask as often as long ones.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn level() -> Level {
    use std::sync::LazyLock;
    static LEVEL: LazyLock<Level> = LazyLock::new(|| {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx512f")
            && has!("avx512bw")
            && has!("avx512dq")
            && has!("avx512vl")
            && has!("avx512cd")
            && has!("fma")
        {
            Level::Avx512
        } else if has!("avx2") && has!("fma") && has!("f16c") {
            Level::Avx2
        } else {
            Level::Least
        }
    });
    *LEVEL
}
