//! A matrix product for each group of rows, as experts need it: tokens lie sorted by their expert,
//! and where each expert's end is data.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[1f32, 2., 3., 4., 5.], [5, 1], &device)?;
//! let w = Tensor::from_slice(&[10f32, 100.], [2, 1, 1], &device)?; // a matrix for each group
//! let ends = Tensor::from_slice(&[3i32, 4], [2], &device)?; // rows 0 to 2, row 3; row 4 is in none
//! assert_eq!(x.grouped_matmul(&w, &ends)?.to_vec::<f32>()?, [10., 20., 30., 400., 0.]);
//! assert_eq!(x.grouped_outer(&x, &ends)?.to_vec::<f32>()?, [14., 16.]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{OpInfo, map1, matmul::number_type, op};
use crate::{
    DType, Error, Result, Tensor,
    backend::{CheckIndexCall, GroupedCall, GroupedOp},
    grad::{Back, record1},
    launch::{check_index, launch},
    map::Builder,
    spmd::{Call, Local, plain},
};
use smallvec::smallvec;

/// The ops of this file. Ends are whole on every rank, so that one that has some of the rows or some
/// of the groups knows which.
pub const OPS: &[OpInfo] = &[MATMUL, OUTER];

const MATMUL: OpInfo = op(
    "grouped_matmul",
    "nk, ekm, f -> nm ; reduce k e sum ; replicate f ; linear 0 ; linear 1",
)
.runs(&["cast"]);
const OUTER: OpInfo = op(
    "grouped_outer",
    "nk, nm, e -> ekm ; reduce n sum ; replicate e ; linear 0 ; linear 1",
)
.runs(&["cast"]);

impl Tensor {
    /// The product of these rows `[n, k]` with the matrix of their group, `matrices [groups, k, m]`.
    /// Group `g` ends before row `ends[g]`, and the next one begins there; rows behind the last end
    /// are in no group and give zeros. Ends are integers, ascending, from 0 to `n`: one beyond is a
    /// fault, one below those before it ends an empty group.
    ///
    /// Where rows are cut over a mesh, every rank multiplies its own; where matrices are, every rank
    /// does so for the groups that it has, and results are partial sums.
    #[track_caller]
    pub fn grouped_matmul(&self, matrices: &Tensor, ends: &Tensor) -> Result<Tensor> {
        let (x, w) = (self, matrices);
        let problem = Problem::of(&MATMUL, x, w, ends)?;
        let (&[_, k], &[e, rows, _]) = (x.dims(), w.dims()) else {
            return Err(problem.shapes("rows are [n, k] and matrices [groups, k, m]"));
        };
        if rows != k || ends.dims() != [e] {
            return Err(problem.shapes("sizes do not fit [n, k], [groups, k, m], [groups]"));
        }
        record1(
            MATMUL.name,
            &[x, w],
            || problem.run(GroupedOp::Rows),
            |_| {
                let (x, w, ends) = (x.kept(), w.kept(), ends.clone());
                Ok(move |back: &Back<'_>| {
                    let gradient = back.grad()?.cast(x.dtype().promote(w.dtype()))?;
                    let of_rows = back.wanted(0, || {
                        let turned = w.transpose(1, 2)?;
                        gradient.grouped_matmul(&turned, &ends)?.cast(x.dtype())
                    })?;
                    let of_matrices =
                        back.wanted(1, || x.grouped_outer(&gradient, &ends)?.cast(w.dtype()))?;
                    Ok(smallvec![of_rows, of_matrices])
                })
            },
        )
    }

    /// For each group of rows the sum of the outer products of these rows `[n, k]` with those of
    /// `other [n, m]`: `[groups, k, m]`, zeros for a group without rows. Groups are those of
    /// [`grouped_matmul`](Self::grouped_matmul), whose gradient of matrices this is.
    #[track_caller]
    pub fn grouped_outer(&self, other: &Tensor, ends: &Tensor) -> Result<Tensor> {
        let (x, y) = (self, other);
        let problem = Problem::of(&OUTER, x, y, ends)?;
        let (&[n, _], &[rows, _], &[groups]) = (x.dims(), y.dims(), ends.dims()) else {
            return Err(problem.shapes("rows are [n, k] and [n, m], ends [groups]"));
        };
        if rows != n {
            return Err(problem.shapes("both have as many rows"));
        }
        record1(
            OUTER.name,
            &[x, y],
            || problem.run(GroupedOp::Sums { groups }),
            |_| {
                let (x, y, ends) = (x.kept(), y.kept(), ends.clone());
                Ok(move |back: &Back<'_>| {
                    let gradient = back.grad()?.cast(x.dtype().promote(y.dtype()))?;
                    let first = back.wanted(0, || {
                        let turned = gradient.transpose(1, 2)?;
                        y.grouped_matmul(&turned, &ends)?.cast(x.dtype())
                    })?;
                    let second =
                        back.wanted(1, || x.grouped_matmul(&gradient, &ends)?.cast(y.dtype()))?;
                    Ok(smallvec![first, second])
                })
            },
        )
    }
}

/// The operands of either op, whose dtypes were checked.
struct Problem<'t> {
    info: &'static OpInfo,
    a: &'t Tensor,
    b: &'t Tensor,
    ends: &'t Tensor,
    dtype: DType,
}

impl<'t> Problem<'t> {
    fn of(info: &'static OpInfo, a: &'t Tensor, b: &'t Tensor, ends: &'t Tensor) -> Result<Self> {
        let op = info.name;
        let dtype = number_type(op, &[a, b])?;
        if !dtype.is_float() {
            let expected = "floats";
            return Err(Error::DType {
                op,
                dtype,
                expected,
            });
        }
        if !matches!(ends.dtype(), DType::I32 | DType::I64 | DType::U32) {
            let expected = "ends that are integers: i32, i64 or u32";
            let dtype = ends.dtype();
            return Err(Error::DType {
                op,
                dtype,
                expected,
            });
        }
        Ok(Self {
            info,
            a,
            b,
            ends,
            dtype,
        })
    }

    fn shapes(&self, detail: &str) -> Error {
        let operands = [self.a, self.b, self.ends];
        let types = operands.map(Tensor::type_string).join(", ");
        Error::shape(self.info.name, operands, format!("{types}: {detail}"))
    }

    #[track_caller]
    fn run(&self, mode: GroupedOp) -> Result<Tensor> {
        let (op, n) = (self.info.name, self.a.dims()[0]);
        let (a, b) = (self.a.cast(self.dtype)?, self.b.cast(self.dtype)?);
        if plain(op, &[&a, &b, self.ends])? {
            let ends = rows_of(op, self.ends, 0, n, n)?;
            return product(op, &a, &b, &ends, 0, mode);
        }
        Call::of(self.info, &[&a, &b, self.ends]).run1(|l: &Local<'_>| {
            let rows = l.part('n').map_or(0..n, |(rows, _)| rows);
            let ends = rows_of(op, &l[2], rows.start, rows.len(), n)?;
            let first = match mode {
                GroupedOp::Rows => l.part('e').map_or(0, |(groups, _)| groups.start),
                GroupedOp::Sums { .. } => 0,
            };
            product(op, &l[0], &l[1], &ends, first, mode)
        })
    }
}

/// Where groups end among the `len` rows from `start` on of `n`, i32.
#[track_caller]
fn rows_of(op: &'static str, ends: &Tensor, start: usize, len: usize, n: usize) -> Result<Tensor> {
    if ends.numel() == 0 {
        return ends.cast(DType::I32);
    }
    let indices = ends.view()?;
    check_index(
        ends.device(),
        CheckIndexCall {
            op,
            indices,
            len: n + 1,
        },
    )?;
    if len == n {
        return ends.cast(DType::I32);
    }
    let b = Builder::new();
    let end = b.load(ends.dtype()).cast(DType::I32) - b.param(DType::I32);
    let end = end.max(0).min(b.param(DType::I32));
    let program = b.finish(&[(end, DType::I32)])?;
    map1(
        op,
        &program,
        &[ends],
        &[(start as i64).into(), (len as i64).into()],
    )
}

/// The product of plain operands of one dtype.
#[track_caller]
fn product(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    ends: &Tensor,
    first: usize,
    mode: GroupedOp,
) -> Result<Tensor> {
    let ([n, k], m) = ([a.dims()[0], a.dims()[1]], b.dims()[b.rank() - 1]);
    let (shape, groups, summed) = match mode {
        GroupedOp::Rows => (vec![n, m], b.dims()[0], k),
        GroupedOp::Sums { groups } => (vec![groups, k, m], groups, n),
    };
    if shape.contains(&0) {
        return a.no_elements(a.dtype(), shape.into());
    }
    if groups == 0 || summed == 0 {
        return Tensor::zeros(shape, a.dtype(), a.device());
    }
    let call = GroupedCall {
        op,
        a: a.view()?,
        b: b.view()?,
        ends: ends.view()?,
        first,
        mode,
        dtype: a.dtype(),
    };
    Ok(launch(a.mesh(), call)?.remove(0))
}
