//! Words of the random stream.

use super::{Step, slice};
use crate::{
    frame::{Frame, Src},
    scalar,
    simd::{Kernel, dispatch},
};
use anymesh_kernel::{Kind, map::Inst};

pub(super) fn philox(step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) {
    let Inst::Philox { index, key, word } = step.inst else {
        return;
    };
    let key = key.map(|k| frame.src::<u32>(k));
    match step.kind {
        Kind::I32 => philox_words(
            frame.src::<i32>(index),
            |v| v as u64,
            key,
            word,
            slice(out, len),
        ),
        _ => philox_words(
            frame.src::<i64>(index),
            |v| v as u64,
            key,
            word,
            slice(out, len),
        ),
    }
}

fn philox_words<T: Copy>(
    index: Src<'_, T>,
    wide: impl Fn(T) -> u64,
    key: [Src<'_, u32>; 3],
    word: u8,
    out: &mut [u32],
) {
    match (index, key) {
        (Src::Many(indices), [Src::One(low), Src::One(high), Src::One(stream)]) => {
            let words = Words {
                key: [low, high],
                stream,
                indices,
                wide,
                out,
            };
            // A loop for each word: a constant position in the result lets the loop vectorise.
            match word {
                0 => dispatch(Word::<_, _, 0>(words)),
                1 => dispatch(Word::<_, _, 1>(words)),
                2 => dispatch(Word::<_, _, 2>(words)),
                _ => dispatch(Word::<_, _, 3>(words)),
            }
        }
        (index, [low, high, stream]) => {
            for (i, out) in out.iter_mut().enumerate() {
                let index = wide(index.at(i));
                *out = scalar::philox(
                    [index as u32, (index >> 32) as u32, stream.at(i), 0],
                    [low.at(i), high.at(i)],
                )[word as usize & 3];
            }
        }
    }
}

/// Random words of one stream.
struct Words<'a, T, W> {
    key: [u32; 2],
    stream: u32,
    indices: &'a [T],
    wide: W,
    out: &'a mut [u32],
}

struct Word<'a, T, W, const N: usize>(Words<'a, T, W>);

impl<T: Copy, W: Fn(T) -> u64, const N: usize> Kernel for Word<'_, T, W, N> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Words {
            key,
            stream,
            indices,
            wide,
            out,
        } = self.0;
        for (out, index) in out.iter_mut().zip(indices) {
            let index = wide(*index);
            *out = scalar::philox([index as u32, (index >> 32) as u32, stream, 0], key)[N];
        }
    }
}
