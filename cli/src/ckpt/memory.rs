//! How memory is shared out.

use super::{bytes, human, wrong};
use anymesh::checkpoint::Result;
use clap::Args;

/// The program itself, its lists and what the allocator keeps.
const BASE: usize = 24 << 20;
/// What a thread that reads a checkpoint holds beside what it was asked for.
const WINDOW: usize = 8 << 20;
/// Below this the parts would be too small to be read well.
const LEAST: usize = 64 << 20;
/// Above this larger parts save nothing.
const LARGEST: usize = 64 << 20;

/// A limit of memory.
#[derive(Args)]
pub(crate) struct Memory {
    /// Memory that the command may take, such as 256M. More means fewer and larger reads.
    #[arg(long, default_value = "256M", value_parser = bytes, value_name = "BYTES")]
    memory_limit: usize,
}

/// What each of several threads may hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share {
    /// How many threads there are.
    pub(crate) threads: usize,
    /// Bytes of a tensor that one of them holds at a time. Three times as much again is left for
    /// what it is made of.
    pub(crate) chunk: usize,
}

impl Memory {
    /// The share of each of up to so many threads.
    pub(crate) fn share(&self, threads: usize) -> Result<Share> {
        if self.memory_limit < LEAST {
            return Err(wrong(format!(
                "--memory-limit {} is too little: give at least {}",
                human(self.memory_limit),
                human(LEAST)
            )));
        }
        let data = self.memory_limit - BASE;
        // A thread with less than its window and as much again costs more than it helps.
        let threads = threads.clamp(1, (data / (2 * WINDOW)).max(1));
        let chunk = ((data / threads).saturating_sub(WINDOW) / 4).clamp(1 << 20, LARGEST);
        Ok(Share { threads, chunk })
    }

    /// The share of one thread.
    pub(crate) fn chunk(&self) -> Result<usize> {
        self.share(1).map(|share| share.chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_out_stays_below_the_limit() {
        for limit in [64 << 20, 100 << 20, 256 << 20, 1 << 30, 8 << 30] {
            for threads in [1, 2, 4, 16, 1000] {
                let Share { threads, chunk } = Memory {
                    memory_limit: limit,
                }
                .share(threads)
                .expect("enough");
                assert!(
                    BASE + threads * (4 * chunk + WINDOW) <= limit,
                    "{limit} {threads} {chunk}"
                );
            }
        }
        assert!(
            Memory {
                memory_limit: 10 << 20
            }
            .share(1)
            .is_err()
        );
    }
}
