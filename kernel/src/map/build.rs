//! Programs are built from expressions.

use super::{Binary, Inst, MAX_BUFFERS, MAX_INPUTS, MAX_OUTPUTS, MapProgram, Program, Reg, Unary};
use crate::{DType, Error, Kind, Result, Scalar};
use std::cell::RefCell;

#[derive(Clone, Default, Debug)]
pub(super) struct State {
    pub(super) insts: Vec<Inst>,
    pub(super) kinds: Vec<Kind>,
    pub(super) inputs: Vec<DType>,
    pub(super) indices: Vec<Kind>,
    pub(super) params: Vec<Kind>,
    pub(super) error: Option<String>,
}

/// Builds a [`MapProgram`] from expressions on [`Val`]s. A mistake (mixed kinds, too many inputs)
/// is reported by [`finish`](Builder::finish).
#[derive(Default, Debug)]
pub struct Builder(pub(super) RefCell<State>);

/// A value inside a program that is being built. Arithmetic on it appends instructions.
#[derive(Clone, Copy, Debug)]
pub struct Val<'b> {
    pub(super) builder: &'b Builder,
    pub(super) reg: Reg,
}

impl Builder {
    /// An empty program.
    pub fn new() -> Self {
        Self::default()
    }

    /// The value of an instruction; one that is there already is not computed again. Formulas and
    /// above all their derivatives repeat themselves.
    pub(super) fn push(&self, inst: Inst, kind: Kind) -> Val<'_> {
        let mut state = self.0.borrow_mut();
        let reg = state.insts.iter().position(|known| *known == inst);
        let reg = reg.unwrap_or_else(|| {
            state.insts.push(inst);
            state.kinds.push(kind);
            state.insts.len() - 1
        });
        Val {
            builder: self,
            reg: reg as Reg,
        }
    }

    pub(super) fn fail(&self, message: String) {
        self.0.borrow_mut().error.get_or_insert(message);
    }

    /// Declares the next input and loads its element.
    pub fn load(&self, dtype: DType) -> Val<'_> {
        let input = self.0.borrow().inputs.len();
        self.0.borrow_mut().inputs.push(dtype);
        self.push(Inst::Load(input as u8), dtype.kind())
    }

    /// Declares the next affine index (i32 or i64) and gives its value.
    pub fn index(&self, dtype: DType) -> Val<'_> {
        if !matches!(dtype, DType::I32 | DType::I64) {
            self.fail(format!("an index is an i32 or an i64, not a {dtype}"));
        }
        let (kind, index) = (dtype.kind(), self.0.borrow().indices.len());
        self.0.borrow_mut().indices.push(kind);
        self.push(Inst::Index(index as u8), kind)
    }

    /// Declares the next runtime scalar: a number that is given with each run, so that another value
    /// needs no other program. It is held as the kind of `dtype`, unrounded.
    pub fn param(&self, dtype: DType) -> Val<'_> {
        let (kind, param) = (dtype.kind(), self.0.borrow().params.len());
        self.0.borrow_mut().params.push(kind);
        self.push(Inst::Param(param as u8), kind)
    }

    /// A constant, held as the kind of `dtype`, unrounded.
    pub fn constant(&self, value: impl Into<Scalar>, dtype: DType) -> Val<'_> {
        let kind = dtype.kind();
        self.push(Inst::Const(value.into(), kind), kind)
    }

    /// A word of the random stream at `index`.
    pub fn philox<'b>(&'b self, index: Val<'b>, key: [Val<'b>; 3], word: u8) -> Val<'b> {
        self.push(
            Inst::Philox {
                index: index.reg,
                key: key.map(|k| k.reg),
                word,
            },
            Kind::U32,
        )
    }

    /// The program so far, with one output. More may be built afterwards.
    pub(super) fn peek(&self, result: Val<'_>, dtype: DType) -> Result<Program> {
        let copy = Builder(RefCell::new(self.0.borrow().clone()));
        let result = Val {
            builder: &copy,
            reg: result.reg,
        };
        // An input that turns out not to be needed does not count.
        let inputs = std::mem::take(&mut copy.0.borrow_mut().inputs);
        let program = copy.finish(&[(result, dtype)])?;
        Ok(Program {
            inputs,
            ..Program::clone(&program)
        })
    }

    /// Checks and closes the program; `outputs` are stored as the given dtypes (converting within
    /// the same class).
    pub fn finish(&self, outputs: &[(Val<'_>, DType)]) -> Result<MapProgram> {
        let mut state = self.0.borrow_mut();
        let mut outs = Vec::with_capacity(outputs.len());
        for (value, dtype) in outputs {
            let mut reg = value.reg;
            if state.kinds[reg as usize] != dtype.kind() {
                state.insts.push(Inst::Cast(reg, *dtype));
                state.kinds.push(dtype.kind());
                reg = (state.insts.len() - 1) as Reg;
            }
            outs.push((reg, *dtype));
        }
        let state = std::mem::take(&mut *state);
        let program = MapProgram::from(Program {
            insts: state.insts,
            kinds: state.kinds,
            inputs: state.inputs,
            indices: state.indices,
            params: state.params,
            outputs: outs,
        });
        let (inputs, outputs) = (program.inputs.len(), program.outputs.len());
        let most = MAX_BUFFERS - usize::from(program.can_fault());
        let fits = inputs <= MAX_INPUTS && outputs <= MAX_OUTPUTS && inputs + outputs <= most;
        let error = state.error.or_else(|| {
            (!fits).then(|| {
                format!(
                    "{inputs} inputs and {outputs} outputs: a program takes at most {MAX_INPUTS} inputs, {MAX_OUTPUTS} outputs, and {most} of both together; split it in two"
                )
            })
        });
        match error {
            Some(detail) => Err(Error::argument("map", "program", detail)),
            None => Ok(program),
        }
    }
}

impl<'b> Val<'b> {
    /// What the value is held as.
    pub fn kind(self) -> Kind {
        self.builder.0.borrow().kinds[self.reg as usize]
    }

    /// The builder this value belongs to.
    pub fn builder(self) -> &'b Builder {
        self.builder
    }

    /// A constant of the same kind as this value.
    pub fn lit(self, value: impl Into<Scalar>) -> Val<'b> {
        self.builder.constant(value, self.kind().dtype())
    }

    /// Applies a unary function.
    pub fn unary(self, op: Unary) -> Val<'b> {
        let kind = self.kind();
        if !op.takes(kind) {
            self.builder
                .fail(format!("{op:?} is not defined on {kind:?}"));
        }
        self.builder.push(Inst::Unary(op, self.reg), op.gives(kind))
    }

    /// Applies a binary function.
    pub fn binary(self, op: Binary, other: Val<'b>) -> Val<'b> {
        let (kind, right) = (self.kind(), other.kind());
        if !op.takes(kind) || kind != right {
            self.builder
                .fail(format!("{op:?} is not defined on {kind:?} and {right:?}"));
        }
        let inst = Inst::Binary(op, self.reg, other.reg);
        self.builder.push(inst, op.gives(kind))
    }

    /// `yes` where this bool holds, else `no`.
    pub fn select(self, yes: Val<'b>, no: Val<'b>) -> Val<'b> {
        if self.kind() != Kind::Bool || yes.kind() != no.kind() {
            self.builder.fail(format!(
                "select needs a bool and two equal kinds, got {:?}, {:?}, {:?}",
                self.kind(),
                yes.kind(),
                no.kind()
            ));
        }
        self.builder
            .push(Inst::Select(self.reg, yes.reg, no.reg), yes.kind())
    }

    /// Whether the position is inside the window of the input that this value loads.
    pub fn inside(self) -> Val<'b> {
        let inst = self.builder.0.borrow().insts[self.reg as usize];
        let Inst::Load(input) = inst else {
            self.builder
                .fail("`inside` is asked of a loaded value".into());
            return self;
        };
        self.builder.push(Inst::Inside(input), Kind::Bool)
    }

    /// Converts to `dtype` (see [`Inst::Cast`]); no instruction where the value is held without
    /// loss as that dtype, or was loaded as it.
    pub fn cast(self, dtype: DType) -> Val<'b> {
        let loaded = {
            let state = self.builder.0.borrow();
            matches!(state.insts[self.reg as usize], Inst::Load(k) if state.inputs.get(k as usize) == Some(&dtype))
        };
        if loaded || self.kind().dtype() == dtype {
            self
        } else {
            self.builder.push(Inst::Cast(self.reg, dtype), dtype.kind())
        }
    }
}

macro_rules! val_unary {
    ($($(#[$doc:meta])* $name:ident $op:ident),*) => {
        #[allow(missing_docs)]
        impl<'b> Val<'b> {$($(#[$doc])* pub fn $name(self) -> Val<'b> { self.unary(Unary::$op) })*}
    };
}
val_unary!(abs Abs, sign Sign, exp Exp, expm1 Expm1, log Log, log1p Log1p, sqrt Sqrt, rsqrt Rsqrt, sin Sin, cos Cos, tanh Tanh, erf Erf, floor Floor, trunc Trunc, is_nan IsNan, is_inf IsInf);

macro_rules! val_binary {
    ($($name:ident $op:ident),*) => {
        #[allow(missing_docs)]
        impl<'b> Val<'b> {$(pub fn $name(self, other: impl Operand<'b>) -> Val<'b> { let other = other.of(self); self.binary(Binary::$op, other) })*}
    };
}
val_binary!(pow Pow, max Max, min Min, eq Eq, ne Ne, lt Lt, le Le, gt Gt, ge Ge, and And, or Or, xor Xor, floor_div FloorDiv, rem Rem);

/// The right side of an expression: another value, or a literal that takes the left side's kind.
pub trait Operand<'b> {
    /// As a value next to `other`.
    fn of(self, other: Val<'b>) -> Val<'b>;
}

impl<'b> Operand<'b> for Val<'b> {
    fn of(self, _: Val<'b>) -> Val<'b> {
        self
    }
}

impl<'b> Operand<'b> for f64 {
    fn of(self, other: Val<'b>) -> Val<'b> {
        other.lit(self)
    }
}

impl<'b> Operand<'b> for i64 {
    fn of(self, other: Val<'b>) -> Val<'b> {
        other.lit(self)
    }
}

macro_rules! val_operator {
    ($($trait:ident $name:ident $op:ident),*) => {$(
        impl<'b, O: Operand<'b>> std::ops::$trait<O> for Val<'b> {
            type Output = Val<'b>;
            fn $name(self, other: O) -> Val<'b> {
                let other = other.of(self);
                self.binary(Binary::$op, other)
            }
        }
    )*};
}
val_operator!(Add add Add, Sub sub Sub, Mul mul Mul, Div div Div);

impl<'b> std::ops::Neg for Val<'b> {
    type Output = Val<'b>;
    fn neg(self) -> Val<'b> {
        self.unary(Unary::Neg)
    }
}

impl<'b> std::ops::Not for Val<'b> {
    type Output = Val<'b>;
    fn not(self) -> Val<'b> {
        self.unary(Unary::Not)
    }
}
