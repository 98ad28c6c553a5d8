//! The operators `+ - * / %`, `& | ^ << >>`, and unary `-` and `!`.
//!
//! Operands are tensors, borrowed or not, results of other ops, and numbers. An operator gives a
//! [`Result`]; one that meets the error of an operand passes it on, so that an expression needs one
//! `?` at its end:
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let a = Tensor::new(&[1f32, 2.0], &device)?;
//! let b = Tensor::new(&[10f32, 20.0], &device)?;
//! assert_eq!((&a * &b + &a)?.to_vec::<f32>()?, [11.0, 42.0]);
//! assert_eq!((&b - (1.0 - &a))?.to_vec::<f32>()?, [10.0, 21.0]);
//! assert_eq!((&a + b.sqrt()? * 2)?.dims(), [2]);
//! let odd = (Tensor::new(&[1, 2, 3], &device)? & 1)?;
//! assert_eq!(odd.to_vec::<i32>()?, [1, 0, 1]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```
//!
//! Rust's rules on foreign types leave three forms out, which want a `?` after their first part: two
//! results (`(&a * &b)? + &c * &d`), a result and a number (`(&a * 2.0)? + 1.0`), and the negation
//! of a result. For the same reason a number on the left is an `f64` or an `i64`, as a literal is;
//! on the right it is of any type.

use super::{binary::Rows, elementwise::Elementwise};
use crate::{Arg, Result, Scalar, Tensor};
use std::ops;

/// What may stand to the right of an operator: a tensor, a borrowed one, the result of another op,
/// or a number.
pub trait Term<'a> {
    /// The operand, or the error of the op that was to make it.
    fn value(self) -> Result<Value<'a>>;
}

/// An operand of an operator.
#[derive(Clone, Debug)]
pub enum Value<'a> {
    /// A tensor that only the operator needs.
    Owned(Tensor),
    /// A tensor.
    Borrowed(&'a Tensor),
    /// A number.
    Number(Scalar),
}

impl Value<'_> {
    fn arg(&self) -> Arg<'_> {
        match self {
            Value::Owned(tensor) => tensor.into(),
            Value::Borrowed(tensor) => (*tensor).into(),
            Value::Number(number) => (*number).into(),
        }
    }
}

impl<'a> Term<'a> for Tensor {
    fn value(self) -> Result<Value<'a>> {
        Ok(Value::Owned(self))
    }
}

impl<'a> Term<'a> for &'a Tensor {
    fn value(self) -> Result<Value<'a>> {
        Ok(Value::Borrowed(self))
    }
}

impl<'a> Term<'a> for Result<Tensor> {
    fn value(self) -> Result<Value<'a>> {
        self.map(Value::Owned)
    }
}

macro_rules! terms {
    ($($t:ty),*) => {$(
        impl<'a> Term<'a> for $t {
            fn value(self) -> Result<Value<'a>> {
                Ok(Value::Number(self.into()))
            }
        }
    )*};
}
terms!(Scalar, bool, u8, u32, i32, i64, f32, f64);

/// Runs the op of an operator. The ledger names the line of the operator.
#[track_caller]
fn apply<'a>(row: &Elementwise, left: impl Term<'a>, right: impl Term<'a>) -> Result<Tensor> {
    let (left, right) = (left.value()?, right.value()?);
    row.apply(&[left.arg(), right.arg()])
}

/// `left op right` for each of the numbers that may stand on the left.
macro_rules! operators {
    ($($trait:ident $method:ident $row:ident ($($number:ty),*);)*) => {$(
        impl<'a, R: Term<'a>> ops::$trait<R> for &'a Tensor {
            type Output = Result<Tensor>;
            #[track_caller]
            fn $method(self, right: R) -> Result<Tensor> {
                apply(&Rows::$row, self, right)
            }
        }

        impl<'a, R: Term<'a>> ops::$trait<R> for Tensor {
            type Output = Result<Tensor>;
            #[track_caller]
            fn $method(self, right: R) -> Result<Tensor> {
                apply(&Rows::$row, self, right)
            }
        }

        operators!(@left $trait $method $row Result<Tensor> $(, $number)*);
    )*};
    (@left $trait:ident $method:ident $row:ident $($left:ty),*) => {$(
        impl ops::$trait<Tensor> for $left {
            type Output = Result<Tensor>;
            #[track_caller]
            fn $method(self, right: Tensor) -> Result<Tensor> {
                apply(&Rows::$row, self, right)
            }
        }

        impl ops::$trait<&Tensor> for $left {
            type Output = Result<Tensor>;
            #[track_caller]
            fn $method(self, right: &Tensor) -> Result<Tensor> {
                apply(&Rows::$row, self, right)
            }
        }
    )*};
}
operators! {
    Add add add (f64, i64);
    Sub sub sub (f64, i64);
    Mul mul mul (f64, i64);
    Div div div (f64, i64);
    Rem rem remainder (f64, i64);
    BitAnd bitand bitwise_and (i64);
    BitOr bitor bitwise_or (i64);
    BitXor bitxor bitwise_xor (i64);
    Shl shl shl ();
    Shr shr shr ();
}

macro_rules! unary_operators {
    ($($trait:ident $method:ident $op:ident $t:ty;)*) => {$(
        impl ops::$trait for $t {
            type Output = Result<Tensor>;
            #[track_caller]
            fn $method(self) -> Result<Tensor> {
                Tensor::$op(&self)
            }
        }
    )*};
}
unary_operators! {
    Neg neg neg Tensor;
    Neg neg neg &Tensor;
    Not not bitwise_not Tensor;
    Not not bitwise_not &Tensor;
}
