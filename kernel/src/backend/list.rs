//! Lists of launches that come again.

use super::{Buffer, Buffers};
use crate::Scalar;

/// A list of launches that is known before any of them is made, as [deferred
/// execution](super::Backend::list) runs them.
#[derive(Clone, Copy, Debug)]
pub struct List<'l> {
    /// Lists of one number make the same launches, but for memory and [numbers](Self::numbers).
    pub number: u64,
    /// The memory from before the list that is read in it, in the order in which it is first read.
    pub operands: &'l [&'l Buffer],
    /// The numbers that its programs are given, in the order of the launches.
    pub numbers: &'l [Scalar],
}

/// The operands of a launch, by position: nothing where one is held by others, too.
pub type Operands<'o> = &'o dyn Fn(usize) -> Option<Buffer>;

/// Goes along a [`List`], launch by launch. The list ends when this is dropped.
pub trait Steps {
    /// The results of the next launch, if the device makes it again by itself. Where it does not, the
    /// launch is to be made, and [told](Self::made).
    fn again(&mut self, operands: Operands<'_>) -> Option<Buffers>;

    /// The next launch was made by the caller and gave this.
    fn made(&mut self, operands: Operands<'_>, results: &[Buffer]);

    /// Asked before the first launch: whether the device makes all of them again by itself, with all
    /// memory where it lay. Then it is not asked launch by launch: the caller lets go of the list's
    /// operands and asks for the results that are `wanted`, which are all that anybody holds.
    /// `given_up` are those of the list's operands that only the caller holds, by position.
    fn whole(&mut self, _wanted: &[Wanted], _given_up: Operands<'_>) -> bool {
        false
    }

    /// If [`whole`](Self::whole) was promised: what was wanted, in its order.
    fn results(&mut self) -> Option<Buffers> {
        None
    }
}

/// A result of a launch of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which launch of the list.
    pub launch: u32,
    /// Which of its results.
    pub result: u8,
}
