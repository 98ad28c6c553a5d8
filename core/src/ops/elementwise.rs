//! What all elementwise ops have in common: an op is a row of data, and one function runs every
//! row.
//!
//! A row says which dtypes the op takes ([`Class`]), what it computes ([`Formula`], on values of
//! one kind) and how it may be sharded. Operands are tensors, which broadcast, or numbers, which
//! become runtime scalars: a new number needs no new kernel. Adding an op is adding a row to a
//! table in `unary.rs`, `activation.rs`, `binary.rs` or `select.rs`.
//!
//! Sharding rules of elementwise ops name the operands (counted from 0) through which partial
//! values pass: after `linear` stand operands that may be partial sums *together* while the others
//! are whole (`linear 0 1` for `add`); alternatives are further clauses (`linear 0 ; linear 1` for
//! `mul`). `monotone` does the same for partial maxima and minima, and is only claimed by functions
//! that are defined everywhere: `log` of the smaller of two partial maxima could be NaN.

use super::{Map, MapRule, OpInfo, common_shape};
use crate::grad::{self, Back, record1};
use crate::{
    DType, Error, MapProgram, Result, Scalar, Tensor,
    map::{Builder, Val},
    table::Table,
};
use smallvec::SmallVec;

/// An operand of an elementwise op: a tensor, or a number.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// A tensor, which broadcasts.
    Tensor(&'a Tensor),
    /// A number. It is weak: it lifts bool to integer to float, and takes the width of the tensors
    /// it meets.
    Number(Scalar),
}

impl<'a> From<&'a Tensor> for Arg<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Arg::Tensor(tensor)
    }
}

macro_rules! arg_from {
    ($($t:ty),*) => {$(
        impl From<$t> for Arg<'_> {
            fn from(number: $t) -> Self {
                Arg::Number(number.into())
            }
        }
    )*};
}
arg_from!(Scalar, bool, u8, u32, i32, i64, f32, f64);

/// Which dtypes an op takes, and what it gives. "The common dtype" is where the operands meet by
/// promotion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Anything; gives the common dtype.
    Any,
    /// Anything but bool; gives the common dtype.
    Number,
    /// Anything; gives floats: integers and bools compute in `f32`.
    Float,
    /// Integers and bools; gives the common dtype.
    Bits,
    /// Integers; gives the common dtype.
    Integer,
    /// Anything, in the common dtype; gives bool.
    Compare,
    /// Anything, each operand as "is not zero"; gives bool.
    Logic,
    /// The first operand is a condition ("is not zero"); the others are anything and give their
    /// common dtype.
    Select,
    /// As `Select`, with the condition second.
    Mask,
}

impl Class {
    /// Which operand is a condition.
    fn condition(self) -> Option<usize> {
        match self {
            Class::Select => Some(0),
            Class::Mask => Some(1),
            _ => None,
        }
    }

    /// The entry of an op of this class in the table of ops.
    pub(crate) const fn info(self, name: &'static str, rule: &'static str) -> OpInfo {
        match self {
            Class::Compare | Class::Logic => super::op(name, rule).without_gradient(super::TRUTH),
            Class::Bits | Class::Integer => {
                super::op(name, rule).without_gradient("is for integers")
            }
            _ => super::op(name, rule),
        }
    }

    /// The dtype an op computes in, or why it has no meaning.
    fn compute(self, op: &'static str, common: DType) -> Result<DType> {
        let refuse = |expected| {
            Err(Error::DType {
                op,
                dtype: common,
                expected,
            })
        };
        match self {
            Class::Float => Ok(common.to_float()),
            Class::Logic => Ok(DType::Bool),
            Class::Number if common == DType::Bool => {
                refuse("a number: cast the bools, or use a logical op")
            }
            Class::Bits if common.is_float() => refuse("integers or bools"),
            Class::Integer if !common.is_int() => refuse("integers"),
            _ => Ok(common),
        }
    }
}

/// The computation of an op, on values of one kind.
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub enum Formula {
    One(for<'b> fn(Val<'b>) -> Val<'b>),
    Two(for<'b> fn(Val<'b>, Val<'b>) -> Val<'b>),
    Three(for<'b> fn(Val<'b>, Val<'b>, Val<'b>) -> Val<'b>),
    Four(for<'b> fn(Val<'b>, Val<'b>, Val<'b>, Val<'b>) -> Val<'b>),
}

impl Formula {
    /// The number of operands.
    pub fn arity(self) -> usize {
        match self {
            Formula::One(_) => 1,
            Formula::Two(_) => 2,
            Formula::Three(_) => 3,
            Formula::Four(_) => 4,
        }
    }

    /// The value of the formula; as many values are given as [`arity`](Self::arity) says.
    fn value<'b>(self, v: &[Val<'b>]) -> Val<'b> {
        match self {
            Formula::One(f) => f(v[0]),
            Formula::Two(f) => f(v[0], v[1]),
            Formula::Three(f) => f(v[0], v[1], v[2]),
            Formula::Four(f) => f(v[0], v[1], v[2], v[3]),
        }
    }
}

impl std::fmt::Debug for Formula {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Formula of {}", self.arity())
    }
}

/// One elementwise op.
#[derive(Clone, Copy, Debug)]
pub struct Elementwise {
    /// Its name and sharding rule.
    pub info: &'static OpInfo,
    /// The dtypes it takes and gives.
    pub class: Class,
    /// What it computes.
    pub formula: Formula,
    /// Its operands, as many as the formula takes.
    pub operands: &'static [Parameter],
    /// For a function of one operand: its slope, where that is not to be derived from the formula.
    pub slope: Option<Slope>,
}

/// The slope of a function of one operand.
#[derive(Clone, Copy)]
pub enum Slope {
    /// As a function of the value, so that the operand need not be kept for the gradient.
    OfValue(for<'b> fn(Val<'b>) -> Val<'b>),
    /// As a function of the operand, where that is shorter than what is derived.
    OfOperand(for<'b> fn(Val<'b>) -> Val<'b>),
}

impl std::fmt::Debug for Slope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Slope::OfValue(_) => "OfValue",
            Slope::OfOperand(_) => "OfOperand",
        })
    }
}

/// An operand of an elementwise op, for callers who go by name.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// The name of the method's parameter; that of the tensor itself comes first.
    pub name: &'static str,
    /// Whether it is always a number, never a tensor.
    pub number: bool,
    /// What the method does to a number before the formula takes it: refuses values outside the
    /// domain, replaces a missing one.
    pub check: Option<fn(Option<f64>) -> Result<f64>>,
}

/// Whether a parameter of this type is always a number.
pub(crate) const fn is_number(t: &str) -> bool {
    matches!(t.as_bytes(), b"f64" | b"Option<f64>")
}

/// The type of a number among a method's parameters, from one that may have been left out.
pub(crate) trait FromNumber: Sized {
    /// An error where the method cannot do without the number.
    fn from_number(op: &'static str, name: &'static str, value: Option<f64>) -> Result<Self>;
}

impl FromNumber for f64 {
    fn from_number(op: &'static str, name: &'static str, value: Option<f64>) -> Result<Self> {
        value.ok_or_else(|| Error::argument(op, name, format!("{name} is missing: give a number")))
    }
}

impl FromNumber for Option<f64> {
    fn from_number(_: &'static str, _: &'static str, value: Option<f64>) -> Result<Self> {
        Ok(value)
    }
}

impl Elementwise {
    /// Runs the op. At least one operand is a tensor.
    #[track_caller]
    pub fn apply(&self, args: &[Arg<'_>]) -> Result<Tensor> {
        let op = self.info.name;
        let mut tensors = SmallVec::<[&Tensor; 4]>::new();
        for arg in args {
            if let Arg::Tensor(tensor) = arg {
                tensors.push(tensor);
            }
        }
        if tensors.is_empty() || args.len() != self.formula.arity() {
            return Err(Error::argument(
                op,
                "args",
                format!(
                    "takes {} operands, at least one of them a tensor",
                    self.formula.arity()
                ),
            ));
        }
        let condition = self.class.condition();
        let data = args
            .iter()
            .enumerate()
            .filter(|(i, _)| Some(*i) != condition)
            .map(|(_, arg)| *arg);
        let compute = self.class.compute(op, common(data))?;
        let mut key = Key {
            op,
            dtype: compute,
            slots: [Slot::Empty; 4],
        };
        let mut params = SmallVec::<[Scalar; 3]>::new();
        let mut numbers = 0;
        for (i, arg) in args.iter().enumerate() {
            key.slots[i] = match arg {
                Arg::Tensor(t) => Slot::Load(t.dtype()),
                Arg::Number(n) => {
                    numbers |= 1 << i;
                    params.push(number(op, *n, self.operand_dtype(i, compute))?);
                    Slot::Param
                }
            };
        }
        let program = cached(key, |b| {
            let values: SmallVec<[Val<'_>; 4]> = (0..args.len())
                .map(|i| key.slots[i].value(b, self.operand_dtype(i, compute)))
                .collect();
            let result = if self.class == Class::Compare {
                DType::Bool
            } else {
                compute
            };
            b.finish(&[(self.formula.value(&values), result)])
        })?;
        let shape = common_shape(op, &tensors)?;
        let map = Map {
            params: &params,
            rule: MapRule::Op {
                info: self.info,
                numbers,
                partials: self.keeps_partials(args, compute),
            },
            ..Map::new(op, &program, &shape)
        };
        crate::observe::tell(|| {
            let number = |(arg, of): (&Arg<'_>, &Parameter)| match arg {
                Arg::Number(Scalar::Float(x)) => Some((of.name.into(), serde_json::json!(x))),
                Arg::Number(Scalar::Int(x)) => Some((of.name.into(), serde_json::json!(x))),
                Arg::Number(Scalar::Bool(x)) => Some((of.name.into(), serde_json::json!(x))),
                Arg::Tensor(_) => None,
            };
            let numbers = args.iter().zip(self.operands).filter_map(number);
            serde_json::Value::Object(numbers.collect())
        });
        let Some(slope) = self
            .slope
            .filter(|_| compute.is_float() && grad::is_recording(&tensors))
        else {
            return Ok(map.recorded(&tensors)?.remove(0));
        };
        let run = || Ok(map.recorded(&tensors)?.remove(0));
        record1(op, &tensors, run, |out| {
            let (from, program) = (tensors[0].dtype(), program.clone());
            let kept = match slope {
                Slope::OfValue(_) => out.clone(),
                Slope::OfOperand(_) => tensors[0].kept(),
            };
            Ok(move |back: &Back<'_>| {
                let (slope, at) = match slope {
                    Slope::OfValue(slope) => (slope, back.out(0, &kept)),
                    Slope::OfOperand(slope) => (slope, kept.clone()),
                };
                Ok(smallvec::smallvec![Some(times_slope(
                    op,
                    slope,
                    &program,
                    back.grad()?,
                    &at,
                    from
                )?)])
            })
        })
    }

    /// Whether the rule's clauses on partial values, which are about the formula, hold for these
    /// dtypes: a conversion on the way in would round every part.
    fn keeps_partials(&self, args: &[Arg<'_>], compute: DType) -> bool {
        let keeps = |a: &Arg<'_>| !matches!(a, Arg::Tensor(t) if t.dtype().kind() != compute.kind() || t.dtype().size() > compute.size());
        args.iter()
            .enumerate()
            .all(|(i, a)| self.class.condition() == Some(i) || keeps(a))
    }

    fn operand_dtype(&self, operand: usize, compute: DType) -> DType {
        if self.class.condition() == Some(operand) {
            DType::Bool
        } else {
            compute
        }
    }
}

/// The gradient times the slope at `y`, the value or the operand, of a function that `forward`
/// computes.
#[track_caller]
fn times_slope(
    op: &'static str,
    slope: for<'b> fn(Val<'b>) -> Val<'b>,
    forward: &MapProgram,
    gradient: &Tensor,
    y: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    let (wide, loads) = (y.dtype().kind().dtype(), [gradient.dtype(), y.dtype()]);
    let slots = [
        Slot::Load(loads[0]),
        Slot::Load(loads[1]),
        Slot::Param,
        Slot::Empty,
    ];
    // A slot that no formula has tells these programs from those of the op itself.
    let program = cached(Key { op, dtype, slots }, |b| {
        b.finish(&[(
            b.load(loads[0]).cast(wide) * slope(b.load(loads[1]).cast(wide)),
            dtype,
        )])
    })?;
    // Where the value is infinite so is the slope, though nothing is divided here.
    let rule = if gradient.dtype().size() <= dtype.size() && !forward.has_pole(&[]) {
        MapRule::Linear
    } else {
        MapRule::Unknown
    };
    Ok(Map {
        rule,
        ..Map::new(op, &program, y.shape())
    }
    .recorded(&[gradient, y])?
    .remove(0))
}

/// The dtype in which operands meet: first the tensors, then the weak numbers.
fn common<'a>(args: impl Iterator<Item = Arg<'a>> + Clone) -> DType {
    let tensors = args.clone().filter_map(|a| {
        if let Arg::Tensor(t) = a {
            Some(t.dtype())
        } else {
            None
        }
    });
    let numbers = args.filter_map(|a| {
        if let Arg::Number(n) = a {
            Some(n)
        } else {
            None
        }
    });
    numbers.fold(
        tensors.reduce(DType::promote).unwrap_or(DType::Bool),
        |dtype, n| n.promote(dtype),
    )
}

/// A number as a runtime scalar of a dtype. Integers that do not fit are refused: wrapping them
/// would make `u8 > -1` false.
pub(crate) fn number(op: &'static str, value: Scalar, dtype: DType) -> Result<Scalar> {
    if dtype.is_float() {
        return Ok(Scalar::Float(value.to_f64()));
    }
    if dtype == DType::Bool {
        return Ok(Scalar::Bool(value.to_bool()));
    }
    let n = value.to_i64();
    let fits = match dtype {
        DType::U8 => u8::try_from(n).is_ok(),
        DType::U32 => u32::try_from(n).is_ok(),
        DType::I32 => i32::try_from(n).is_ok(),
        _ => true,
    };
    if fits {
        Ok(Scalar::Int(n))
    } else {
        Err(Error::argument(
            op,
            "value",
            format!("the number {n} does not fit {dtype}: cast the tensor to a wider type"),
        ))
    }
}

/// Identifies a program that core builds: the op, the dtype it computes in, and where each operand
/// comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) op: &'static str,
    pub(crate) dtype: DType,
    pub(crate) slots: [Slot; 4],
}

impl std::hash::Hash for Key {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        // One word, because every small op asks: the ends of its name stand for it.
        let name = self.op.as_bytes();
        let [first, last] = [name.first(), name.last()].map(|b| b.copied().unwrap_or(0));
        let [a, b, c, d] = self.slots.map(|slot| match slot {
            Slot::Empty => 0,
            Slot::Param => 1,
            Slot::Load(dtype) => 2 + dtype as u8,
        });
        let rest = [self.dtype as u8, a, b, c, d, first, last, name.len() as u8];
        state.write_u64(u64::from_le_bytes(rest));
    }
}

/// Where an operand of a program comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Slot {
    Empty,
    Load(DType),
    Param,
}

impl Slot {
    /// The operand as a value of the kind of `dtype`. Small floats are not rounded on the way in:
    /// only the result is.
    fn value<'b>(self, b: &'b Builder, dtype: DType) -> Val<'b> {
        match self {
            Slot::Load(from) => b.load(from).cast(dtype.kind().dtype()),
            _ => b.param(dtype),
        }
    }
}

/// The program for `key`, built on first use. Each thread keeps its own, so that a small op never
/// waits for a lock.
pub(crate) fn cached(
    key: Key,
    build: impl FnOnce(&Builder) -> Result<MapProgram>,
) -> Result<MapProgram> {
    thread_local! {
        static PROGRAMS: Table<Key, MapProgram> = Table::default();
    }
    if let Some(program) = PROGRAMS.with(|all| all.get(&key)) {
        return Ok(program);
    }
    let program = build(&Builder::new())?;
    PROGRAMS.with(|all| all.insert(key, program.clone()));
    Ok(program)
}

/// Makes a table of rows and a method of `Tensor` for each:
/// `name(x, further: type) Class "sharding rule" = formula;`. An argument may be checked or
/// converted first: `alpha: f64 as nonzero("celu", alpha)?`. A formula of one operand may be
/// followed by its slope as a function of its value: `exp(x) ... = x.exp() => |y| y;`, or of the
/// operand: `sin(x) ... = x.sin(), slope |x| x.cos();`.
macro_rules! elementwise {
    ($($(#[$doc:meta])* $name:ident($x:ident $(, $arg:ident: $t:ty $(as $convert:expr)?)*) $class:ident $rule:literal = $formula:expr $(=> $slope:expr)? $(, slope $at:expr)?;)*) => {
        /// The rows of this file, by name.
        #[derive(Debug)]
        pub struct Rows;

        #[allow(non_upper_case_globals, missing_docs)]
        impl Rows {$(
            pub const $name: $crate::ops::elementwise::Elementwise = $crate::ops::elementwise::Elementwise {
                info: &$crate::ops::elementwise::Class::$class.info(stringify!($name), $rule),
                class: $crate::ops::elementwise::Class::$class,
                formula: $crate::ops::elementwise::formula!(($x $($arg)*) $formula),
                operands: &[
                    $crate::ops::elementwise::Parameter { name: stringify!($x), number: false, check: None },
                    $($crate::ops::elementwise::Parameter {
                        name: stringify!($arg),
                        number: $crate::ops::elementwise::is_number(stringify!($t)),
                        check: $crate::ops::elementwise::check!($name $arg $t $(, $convert)?),
                    }),*
                ],
                slope: $crate::ops::elementwise::slope!($($slope)? $(, $at)?),
            };
        )*}

        /// The rows of this file.
        pub const TABLE: &[$crate::ops::elementwise::Elementwise] = &[$(Rows::$name),*];

        /// The ops of this file.
        pub const OPS: &[$crate::ops::OpInfo] = &[$(*Rows::$name.info),*];

        // One lifetime for all operands; methods that have none beside the tensor do not need it
        // named.
        #[allow(clippy::needless_lifetimes)]
        impl $crate::Tensor {$(
            $(#[$doc])*
            #[track_caller]
            pub fn $name<'a>(&'a self $(, $arg: $t)*) -> $crate::Result<$crate::Tensor> {
                $($(let $arg = $convert;)?)*
                Rows::$name.apply(&[self.into() $(, $arg.into())*])
            }
        )*}
    };
}

macro_rules! formula {
    (($a:ident) $body:expr) => {
        $crate::ops::elementwise::Formula::One(|$a| $body)
    };
    (($a:ident $b:ident) $body:expr) => {
        $crate::ops::elementwise::Formula::Two(|$a, $b| $body)
    };
    (($a:ident $b:ident $c:ident) $body:expr) => {
        $crate::ops::elementwise::Formula::Three(|$a, $b, $c| $body)
    };
    (($a:ident $b:ident $c:ident $d:ident) $body:expr) => {
        $crate::ops::elementwise::Formula::Four(|$a, $b, $c, $d| $body)
    };
}

macro_rules! slope {
    () => {
        None
    };
    ($slope:expr) => {
        Some($crate::ops::elementwise::Slope::OfValue($slope))
    };
    (, $slope:expr) => {
        Some($crate::ops::elementwise::Slope::OfOperand($slope))
    };
}

macro_rules! check {
    ($op:ident $arg:ident $t:ty) => {
        None
    };
    ($op:ident $arg:ident $t:ty, $convert:expr) => {
        Some(|value| {
            let $arg = <$t as $crate::ops::elementwise::FromNumber>::from_number(
                stringify!($op),
                stringify!($arg),
                value,
            )?;
            Ok($convert)
        })
    };
}

pub(crate) use {check, elementwise, formula, slope};
