//! What the device says about itself where `ANYMESH_GPU_LOG` asks for it: `1` for compiled kernels,
//! memory and failures, `2` also for each launch, and then each is waited for, so that a kernel that
//! breaks the device is the last one named.

use std::sync::OnceLock;

/// How much is asked for.
pub fn level() -> u8 {
    static LEVEL: OnceLock<u8> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let text = std::env::var("ANYMESH_GPU_LOG").unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    })
}

/// Writes a line to standard error, if at least `least` is asked for.
pub fn say(least: u8, text: impl FnOnce() -> String) {
    if level() >= least {
        eprintln!("anymesh gpu: {}", text());
    }
}
