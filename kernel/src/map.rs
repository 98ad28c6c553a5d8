//! Elementwise programs as data.
//!
//! A [`MapProgram`] is a short list of scalar instructions in single-assignment form: instruction
//! `i` defines register `i`. Unary and binary ops, casts, `where`, padding, concatenation,
//! triangles, random values, optimizer updates and the front part of reductions are all map
//! programs. The CPU runs a program over blocks of elements; a GPU kernel is expanded from it.
//! Fusing two ops is concatenating their programs.
//!
//! ```
//! use anymesh_kernel::{DType, map::Builder};
//! let b = Builder::new();
//! let x = b.load(DType::F32);
//! let y = b.load(DType::F32);
//! let program = b.finish(&[(((x - y) * (x - y)), DType::F32)]).unwrap();
//! assert_eq!(program.to_string(), "r0 = load 0 f32\nr1 = load 1 f32\nr2 = sub r0 r1\nr3 = mul r2 r2\nstore r3 f32\n");
//! ```

mod build;
mod derive;
pub mod formulas;
mod functions;
mod poles;
mod slope;

pub use build::{Builder, Operand, Val};
pub use derive::Derivative;
pub use functions::{Binary, Unary};

use crate::{DType, Kind, Scalar};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

/// Index of the instruction that defines a value.
pub type Reg = u16;

/// At most this many input tensors in one program.
pub const MAX_INPUTS: usize = 6;
/// At most this many outputs.
pub const MAX_OUTPUTS: usize = 4;
/// At most this many inputs and outputs together, one less where an integer division can fault:
/// browsers bind eight buffers to a kernel, and a fault is written to one of them.
pub const MAX_BUFFERS: usize = 8;

/// One instruction; its result is the register of its own position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Inst {
    /// The element of an input; zero outside the input's window.
    Load(u8),
    /// Whether the current position is inside the window of an input (bool).
    Inside(u8),
    /// The value of an affine form of the current position: an index, not data.
    Index(u8),
    /// A runtime scalar.
    Param(u8),
    /// A constant of the kind.
    Const(Scalar, Kind),
    /// A function of one register.
    Unary(Unary, Reg),
    /// A function of two registers of one kind.
    Binary(Binary, Reg, Reg),
    /// The second where the first (bool) holds, else the third.
    Select(Reg, Reg, Reg),
    /// Converts to a dtype and holds the result as that dtype's kind: `u8` wraps to 8 bits (floats
    /// saturate), small floats round, floats to integers truncate and saturate (NaN gives 0), to
    /// bool means "is not zero".
    Cast(Reg, DType),
    /// The same value, which nothing may look through: where a value was stored and loaded again
    /// before two programs became one. Compilers contract a product and a sum, or compute what two
    /// programs share once; fences with different numbers (from 1 on) keep them from doing so across
    /// what were programs of their own, so that a joined program gives the bits of its parts.
    Fence(Reg, u8),
    /// A word of Philox 4x32-10 (u32): counter (index, stream), key (seed low, seed high); all but
    /// `index` are u32.
    Philox {
        /// Global element index, i32 or i64.
        index: Reg,
        /// Low and high half of the seed, and the stream.
        key: [Reg; 3],
        /// Which of the four output words.
        word: u8,
    },
}

impl Inst {
    /// Calls `f` with each register it reads.
    pub fn operands(&self, mut f: impl FnMut(Reg)) {
        match *self {
            Inst::Load(_) | Inst::Inside(_) | Inst::Index(_) | Inst::Param(_) | Inst::Const(..) => {
            }
            Inst::Unary(_, a) | Inst::Cast(a, _) | Inst::Fence(a, _) => f(a),
            Inst::Binary(_, a, b) => [a, b].into_iter().for_each(f),
            Inst::Select(a, b, c) => [a, b, c].into_iter().for_each(f),
            Inst::Philox { index, key, .. } => {
                f(index);
                key.into_iter().for_each(f);
            }
        }
    }

    /// The input it reads.
    fn input(&self) -> Option<usize> {
        match *self {
            Inst::Load(k) | Inst::Inside(k) => Some(k as usize),
            _ => None,
        }
    }

    /// The same instruction of other registers.
    pub fn over(&self, register: impl Fn(Reg) -> Reg) -> Inst {
        self.renumbered(register, |input| input)
    }

    pub(crate) fn renumbered(&self, r: impl Fn(u16) -> u16, input: impl Fn(u8) -> u8) -> Inst {
        match *self {
            Inst::Load(k) => Inst::Load(input(k)),
            Inst::Inside(k) => Inst::Inside(input(k)),
            Inst::Unary(op, a) => Inst::Unary(op, r(a)),
            Inst::Binary(op, a, b) => Inst::Binary(op, r(a), r(b)),
            Inst::Select(a, b, c) => Inst::Select(r(a), r(b), r(c)),
            Inst::Cast(a, dtype) => Inst::Cast(r(a), dtype),
            Inst::Fence(a, number) => Inst::Fence(r(a), number),
            Inst::Philox { index, key, word } => Inst::Philox {
                index: r(index),
                key: key.map(r),
                word,
            },
            other => other,
        }
    }
}

/// A validated elementwise program. Made by a [`Builder`], never changed, and cheap to clone,
/// compare and hash: its handles share the [instructions](Program).
#[derive(Clone)]
pub struct MapProgram(Arc<Hashed>);

/// A program and what is asked of it at every launch.
struct Hashed {
    hash: u64,
    can_fault: bool,
    program: Program,
}

/// What a [`MapProgram`] consists of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// The instructions.
    pub insts: Vec<Inst>,
    /// The kind of each register.
    pub kinds: Vec<Kind>,
    /// The dtype of each input.
    pub inputs: Vec<DType>,
    /// The kind of each affine index (i32 or i64).
    pub indices: Vec<Kind>,
    /// The kind of each runtime scalar.
    pub params: Vec<Kind>,
    /// What is stored, and as what.
    pub outputs: Vec<(Reg, DType)>,
}

impl Program {
    /// Whether an instruction can raise a fault.
    fn faults(&self, inst: usize) -> bool {
        matches!(
            self.insts[inst],
            Inst::Binary(Binary::FloorDiv | Binary::TruncDiv | Binary::Rem, a, _)
                if !self.kinds[a as usize].is_float()
        )
    }

    /// Products that have more than one use. Compilers contract a product with the sum that is its only
    /// use, and some multiply its constants into those of other products: where a joined program drops an
    /// output, one that had two uses must not become such.
    pub fn shared_products(&self) -> Vec<bool> {
        let mut uses = vec![0u32; self.insts.len()];
        for inst in &self.insts {
            inst.operands(|r| uses[usize::from(r)] += 1);
        }
        for (reg, _) in &self.outputs {
            uses[usize::from(*reg)] += 1;
        }
        let products = self.insts.iter().zip(uses);
        products
            .map(|(inst, uses)| uses > 1 && matches!(inst, Inst::Binary(Binary::Mul, ..)))
            .collect()
    }

    /// Marks all that marked registers are computed from.
    fn mark_operands(&self, marked: &mut [bool]) {
        for i in (0..self.insts.len()).rev() {
            if marked[i] {
                self.insts[i].operands(|r| marked[r as usize] = true);
            }
        }
    }
}

impl From<Program> for MapProgram {
    fn from(program: Program) -> Self {
        // The same in every process: names of kernels are made from it.
        let mut hasher = DefaultHasher::new();
        program.hash(&mut hasher);
        Self(Arc::new(Hashed {
            hash: hasher.finish(),
            can_fault: (0..program.insts.len()).any(|i| program.faults(i)),
            program,
        }))
    }
}

impl std::ops::Deref for MapProgram {
    type Target = Program;

    fn deref(&self) -> &Program {
        &self.0.program
    }
}

impl PartialEq for MapProgram {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.hash == other.0.hash && **self == **other
    }
}

impl Eq for MapProgram {}

impl Hash for MapProgram {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl std::fmt::Debug for MapProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

impl MapProgram {
    /// A number that programs are told apart by, mostly.
    pub(crate) fn number(&self) -> u64 {
        self.0.hash
    }

    /// A program that copies one input, converting its dtype.
    pub fn cast(from: DType, to: DType) -> Self {
        let cast = if from == to {
            None
        } else {
            Some(Inst::Cast(0, to))
        };
        Program {
            kinds: [Some(from.kind()), cast.map(|_| to.kind())]
                .into_iter()
                .flatten()
                .collect(),
            insts: [Some(Inst::Load(0)), cast].into_iter().flatten().collect(),
            inputs: vec![from],
            indices: vec![],
            params: vec![],
            outputs: vec![(u16::from(from != to), to)],
        }
        .into()
    }

    /// Whether any instruction can raise a fault (integer division).
    pub fn can_fault(&self) -> bool {
        self.0.can_fault
    }

    /// Registers that hold an element of an input of `dtype` as it was loaded, at least at some
    /// positions: loads, and choices between such and other values. An output of that dtype stores
    /// the element's bits, which a NaN may lose on its way through a wider float. Bools are never
    /// moved: in memory any byte but 0 is true, and loading makes it 1.
    pub fn moved(&self, dtype: DType) -> Vec<bool> {
        let mut moved = Vec::with_capacity(self.insts.len());
        for inst in &self.insts {
            let own = match *inst {
                Inst::Load(k) => dtype != DType::Bool && self.inputs[k as usize] == dtype,
                Inst::Select(_, yes, no) => moved[yes as usize] || moved[no as usize],
                // Rounding to what it is already.
                Inst::Cast(a, to) => to == dtype && moved[a as usize],
                Inst::Fence(a, _) => moved[a as usize],
                _ => false,
            };
            moved.push(own);
        }
        moved
    }

    /// Registers whose values are needed to store the outputs, or may fault: all that are used but
    /// those that an output only [moves](Self::moved).
    pub fn computed(&self) -> Vec<bool> {
        let mut computed: Vec<bool> = (0..self.insts.len()).map(|i| self.faults(i)).collect();
        for (reg, dtype) in &self.outputs {
            let moved = self.moved(*dtype);
            let mut stored = vec![false; self.insts.len()];
            stored[*reg as usize] = true;
            // Operands come before what reads them, so one way down the list marks all.
            for i in (0..self.insts.len()).rev() {
                match self.insts[i] {
                    _ if !stored[i] => {}
                    _ if !moved[i] => computed[i] = true,
                    Inst::Select(condition, yes, no) => {
                        computed[condition as usize] = true;
                        stored[yes as usize] = true;
                        stored[no as usize] = true;
                    }
                    Inst::Cast(a, _) | Inst::Fence(a, _) => stored[a as usize] = true,
                    _ => {}
                }
            }
        }
        self.mark_operands(&mut computed);
        computed
    }

    /// How many fences have numbers of their own.
    pub fn fences(&self) -> usize {
        let number = |inst: &Inst| match inst {
            Inst::Fence(_, number) => usize::from(*number),
            _ => 0,
        };
        self.insts.iter().map(number).max().unwrap_or(0)
    }

    /// The same program without instructions that no output needs; one that may fault stays. Inputs,
    /// indices and parameters stay what they are.
    pub fn without_unused(&self) -> Self {
        let mut used: Vec<bool> = (0..self.insts.len()).map(|i| self.faults(i)).collect();
        for (reg, _) in &self.outputs {
            used[usize::from(*reg)] = true;
        }
        self.mark_operands(&mut used);
        if used.iter().all(|used| *used) {
            return self.clone();
        }
        let mut place = Vec::with_capacity(used.len());
        let mut program = Program {
            insts: vec![],
            kinds: vec![],
            ..Program::clone(self)
        };
        for (i, inst) in self.insts.iter().enumerate() {
            place.push(program.insts.len() as Reg);
            if used[i] {
                (program.insts).push(inst.renumbered(|r| place[usize::from(r)], |k| k));
                program.kinds.push(self.kinds[i]);
            }
        }
        for (reg, _) in &mut program.outputs {
            *reg = place[usize::from(*reg)];
        }
        program.into()
    }

    /// Whether the position itself matters (not only the elements there).
    pub fn is_positional(&self) -> bool {
        self.insts
            .iter()
            .any(|i| matches!(i, Inst::Index(_) | Inst::Inside(_)))
    }
}

impl std::fmt::Display for MapProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lower = |s: String| s.to_lowercase();
        for (i, inst) in self.insts.iter().enumerate() {
            write!(f, "r{i} = ")?;
            match *inst {
                Inst::Load(k) => write!(f, "load {k} {}", self.inputs[k as usize])?,
                Inst::Inside(k) => write!(f, "inside {k}")?,
                Inst::Index(k) => write!(f, "index {k}")?,
                Inst::Param(k) => write!(f, "param {k} {}", self.params[k as usize].dtype())?,
                Inst::Const(value, kind) => write!(f, "const {value:?} {}", kind.dtype())?,
                Inst::Unary(op, a) => write!(f, "{} r{a}", lower(format!("{op:?}")))?,
                Inst::Binary(op, a, b) => write!(f, "{} r{a} r{b}", lower(format!("{op:?}")))?,
                Inst::Select(c, a, b) => write!(f, "select r{c} r{a} r{b}")?,
                Inst::Cast(a, dtype) => write!(f, "cast r{a} {dtype}")?,
                Inst::Fence(a, number) => write!(f, "fence {number} r{a}")?,
                Inst::Philox { index, key, word } => write!(f, "philox r{index} {key:?} {word}")?,
            }
            writeln!(f)?;
        }
        for (reg, dtype) in &self.outputs {
            writeln!(f, "store r{reg} {dtype}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn products_with_several_uses_are_known() {
        let builder = Builder::new();
        let (a, b) = (builder.load(DType::F32), builder.load(DType::F32));
        let shared = a * b;
        let own = shared * a;
        let outputs = [(shared + a, DType::F32), (own + b, DType::F32)];
        let program = builder.finish(&outputs).expect("valid");
        let found = program.shared_products();
        let products: Vec<bool> = (program.insts.iter().zip(&found))
            .filter(|(inst, _)| matches!(inst, Inst::Binary(Binary::Mul, ..)))
            .map(|(_, found)| *found)
            .collect();
        assert_eq!(products, [true, false]);
        assert_eq!(found.iter().filter(|found| **found).count(), 1);
    }

    #[test]
    fn mixed_kinds_are_refused_at_finish() {
        let b = Builder::new();
        let x = b.load(DType::F32);
        let y = b.load(DType::I32);
        let sum = x + y;
        assert!(b.finish(&[(sum, DType::F32)]).is_err());
    }

    #[test]
    fn a_program_binds_no_more_buffers_than_a_browser_has() {
        let program = |inputs: usize, outputs: usize, dtype: DType| {
            let b = Builder::new();
            let first = b.load(dtype);
            let sum = (1..inputs).fold(first, |sum, _| sum.floor_div(b.load(dtype)));
            b.finish(&vec![(sum, dtype); outputs])
        };
        assert!(program(4, 4, DType::F32).is_ok(), "AdamW with a copy");
        assert!(program(6, 2, DType::F32).is_ok());
        assert!(program(6, 1, DType::I32).is_ok());
        for (inputs, outputs, dtype) in [
            (7, 1, DType::F32),
            (1, 5, DType::F32),
            (5, 4, DType::F32),
            (4, 4, DType::I32),
        ] {
            let error = program(inputs, outputs, dtype).expect_err("too many");
            assert!(matches!(error, Error::Argument { .. }), "{error}");
        }
    }

    #[test]
    fn storing_converts_between_kinds() {
        let b = Builder::new();
        let x = b.load(DType::BF16);
        let program = b.finish(&[(x.gt(0.0), DType::F32)]).expect("valid");
        assert_eq!(program.kinds.last(), Some(&Kind::F32));
    }

    #[test]
    fn what_is_only_moved_is_not_computed() {
        let b = Builder::new();
        let (x, y, c) = (
            b.load(DType::BF16),
            b.load(DType::BF16),
            b.load(DType::Bool),
        );
        let (chosen, zero) = (c.select(x, y), b.constant(0.0, DType::F32));
        let filled = x.inside().select(chosen, zero);
        let program = b
            .finish(&[(filled, DType::BF16), (y * 2.0, DType::BF16)])
            .expect("valid");
        // x, y, c; c ? x : y, 0; inside x; inside ? that : 0; 2, y * 2.
        assert_eq!(
            program.moved(DType::BF16),
            [true, true, false, true, false, false, true, false, false]
        );
        assert_eq!(
            program.computed(),
            [false, true, true, false, true, true, false, true, true]
        );
        assert!(!program.moved(DType::F32).contains(&true));
    }

    #[test]
    fn what_may_fault_is_computed() {
        let b = Builder::new();
        let (x, y) = (b.load(DType::I32), b.load(DType::I32));
        let _ = x.rem(y);
        let program = b.finish(&[(x, DType::I32)]).expect("valid");
        assert_eq!(program.computed(), [true, true, true]);
    }

    #[test]
    fn only_integer_division_faults() {
        let program = |dtype| {
            let b = Builder::new();
            let (x, y) = (b.load(dtype), b.load(dtype));
            b.finish(&[(x.rem(y), dtype)]).expect("valid")
        };
        assert!(program(DType::I32).can_fault());
        assert!(!program(DType::F16).can_fault());
    }
}
