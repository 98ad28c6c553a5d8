//! Faults that only the data shows: reported through a small buffer, read with the next download or
//! sync.
//!
//! The buffer has four words: what happened, the offending index (two words, signed), the size it
//! was checked against. Several lanes may write it at once; any one of them is a true report.

use crate::words::B4;
use anymesh_kernel::Error;
use cubecl::prelude::*;

/// Words of the fault buffer.
pub(crate) const WORDS: usize = 4;

const DIVISION: u32 = 1;
const INDEX: u32 = 2;

/// Flags lanes whose integer divisor is zero.
#[cube]
pub(crate) fn division(faults: &mut [u32], lanes: B4) {
    let bits = crate::words::U4::cast_from(lanes);
    let any =
        bits.extract(0usize) | bits.extract(1usize) | bits.extract(2usize) | bits.extract(3usize);
    if any != 0u32 {
        faults[0usize] = 1u32;
    }
}

/// [`division`] in a buffer that is bound only where the program can fault.
pub(crate) fn divided(
    scope: &Scope,
    faults: &mut SequenceExpand<Box<[u32]>>,
    lanes: NativeExpand<B4>,
) {
    let faults = faults.__expand_index_mut_method(scope, 0usize.into());
    division::expand(scope, faults, lanes);
}

/// Flags an index that is out of range.
#[cube]
pub(crate) fn index(faults: &mut [u32], low: u32, high: u32, len: u32) {
    faults[0usize] = 2u32;
    faults[1usize] = low;
    faults[2usize] = high;
    faults[3usize] = len;
}

/// The fault in a downloaded buffer, if there is one.
pub(crate) fn decode(words: &[u32]) -> Option<Error> {
    match words {
        [DIVISION, ..] => Some(Error::DivisionByZero {
            op: "an earlier op on this device",
        }),
        [INDEX, low, high, len] => {
            let index = (u64::from(*high) << 32 | u64::from(*low)) as i64;
            Some(Error::IndexOutOfRange {
                op: "an earlier op on this device",
                index,
                len: *len as usize,
            })
        }
        _ => None,
    }
}
