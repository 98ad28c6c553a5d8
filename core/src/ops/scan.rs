//! Running reductions along one axis: element `i` of the result covers elements `0..=i` of the
//! input.
//!
//! Where the axis is cut over a mesh, every rank scans its part, and what the parts before it came
//! to is put in front: only totals cross. So it is in the backward pass: the gradient of a scan is
//! one in the other direction.

mod gradient;

use super::{OpInfo, expr::Expr, index::picked, need_float_math, op};
use crate::{
    DType, Error, Result, Tensor,
    backend::{ScanCall, ScanOp},
    launch::launch,
    split,
    spmd::{Call, join_parts, parts_of},
    tensor::Outputs,
};
use gradient::{log_sum_exp, product, sum};

/// The ops of this file.
pub const OPS: &[OpInfo] = &[CUMSUM, CUMPROD, CUMMAX, CUMMIN, LOGCUMSUMEXP];

const CUMSUM: OpInfo = op("cumsum", "...r -> ...r ; stats r 1 ; linear 0").runs(&["cast"]);
const CUMPROD: OpInfo = op("cumprod", "...r -> ...r ; stats r 1 ; through prod 0").runs(&["cast"]);
const CUMMAX: OpInfo = op("cummax", "...r -> ...r, ...r ; stats r 2").runs(&["cast"]);
const CUMMIN: OpInfo = op("cummin", "...r -> ...r, ...r ; stats r 2").runs(&["cast"]);
const LOGCUMSUMEXP: OpInfo = op("logcumsumexp", "...r -> ...r ; stats r 1").runs(&["cast"]);

impl Tensor {
    /// Running sum. `bool` and `u8` give `i32`, other integers keep their type and wrap.
    ///
    /// ```
    /// # let device = anymesh_backend_cpu::device();
    /// let x = anymesh_core::Tensor::from_slice(&[1f32, 2.0, 3.0], [3], &device)?;
    /// assert_eq!(x.cumsum(0)?.to_vec::<f32>()?, [1.0, 3.0, 6.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn cumsum(&self, axis: i64) -> Result<Tensor> {
        sum(
            &self.cast(super::reduce::sum_type(self.dtype()))?,
            self.shape().axis("cumsum", axis)?,
            false,
        )
    }

    /// Running product, with the dtypes of `cumsum`.
    #[track_caller]
    pub fn cumprod(&self, axis: i64) -> Result<Tensor> {
        product(
            &self.cast(super::reduce::sum_type(self.dtype()))?,
            self.shape().axis("cumprod", axis)?,
        )
    }

    /// Running maximum and its position (`i32`; the latest among equals). From the first NaN on,
    /// the maximum is NaN.
    #[track_caller]
    pub fn cummax(&self, axis: i64) -> Result<(Tensor, Tensor)> {
        extreme(&CUMMAX, self, axis, ScanOp::Max)
    }

    /// Running minimum and its position (`i32`; the latest among equals). From the first NaN on,
    /// the minimum is NaN.
    #[track_caller]
    pub fn cummin(&self, axis: i64) -> Result<(Tensor, Tensor)> {
        extreme(&CUMMIN, self, axis, ScanOp::Min)
    }

    /// `log(cumsum(exp(x)))` without overflow.
    #[track_caller]
    pub fn logcumsumexp(&self, axis: i64) -> Result<Tensor> {
        log_sum_exp(
            &self.cast(self.dtype().to_float())?,
            self.shape().axis("logcumsumexp", axis)?,
        )
    }
}

#[track_caller]
fn extreme(
    info: &'static OpInfo,
    x: &Tensor,
    axis: i64,
    scan_op: ScanOp,
) -> Result<(Tensor, Tensor)> {
    let op = info.name;
    let axis = x.shape().axis(op, axis)?;
    picked(op, x, axis, true, || {
        // Bools scan as the integers 0 and 1, in the same order.
        let numbers = if x.dtype() == DType::Bool {
            x.cast(DType::U8)?
        } else {
            x.clone()
        };
        let (values, positions) = Scan {
            info,
            axis,
            scan: scan_op,
            positions: true,
            backwards: false,
        }
        .of(&numbers)?;
        let positions = positions.ok_or_else(|| Error::DeviceFailed {
            device: x.device().to_string(),
            detail: format!("{op} returned no positions"),
        })?;
        Ok((values.cast(x.dtype())?, positions))
    })
}

struct Scan {
    info: &'static OpInfo,
    axis: usize,
    scan: ScanOp,
    /// Whether to tell where an extreme is.
    positions: bool,
    /// Whether element `i` covers `i..` instead.
    backwards: bool,
}

impl Scan {
    /// Scans a tensor that may lie on a mesh.
    #[track_caller]
    fn of(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let Scan {
            info,
            axis,
            positions,
            ..
        } = *self;
        if positions {
            super::reduce::check_positions(info.name, x.dims()[axis])?;
        }
        if x.is_plain() {
            return self.run(x);
        }
        let outputs = |(values, positions): (Tensor, Option<Tensor>)| -> Outputs {
            std::iter::once(values).chain(positions).collect()
        };
        let mut out = Call::of(info, &[x]).bind('r', &[axis]).run_or(
            |l| Ok(outputs(self.run(&l[0])?)),
            |inputs| Ok(outputs(self.run_parts(&inputs[0])?)),
        )?;
        let positions = if positions { out.pop() } else { None };
        Ok((out.remove(0), positions))
    }

    /// Scans on one device.
    fn run(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let (device, shape) = (x.device(), x.shape().clone());
        if self.scan == ScanOp::LogSumExp {
            need_float_math(self.info.name, device, x.dtype())?;
        }
        if x.numel() == 0 {
            let positions = self.positions.then(|| x.no_elements(DType::I32, shape));
            return Ok((x.clone(), positions.transpose()?));
        }
        if self.backwards {
            let (values, found) = Scan {
                backwards: false,
                ..*self
            }
            .run(&x.flip(&[self.axis as i64])?)?;
            return Ok((values.flip(&[self.axis as i64])?, found));
        }
        let call = ScanCall {
            op: self.info.name,
            input: x.view()?,
            axis: self.axis,
            mode: self.scan,
            positions: self.positions,
        };
        let mut out = launch(x.mesh(), call)?;
        let found = if self.positions { out.pop() } else { None };
        Ok((out.remove(0), found))
    }

    /// Scans an axis that is cut: each part for itself, then with what the parts before it came to.
    #[track_caller]
    fn run_parts(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let (mesh, n, parts) = (x.mesh(), x.dims()[self.axis], parts_of(x, self.axis));
        // Small floats are rounded once, at the end.
        let wide = x.dtype().kind().dtype();
        let mut scans = vec![];
        let (mut totals, mut places) = (vec![], vec![]);
        for (i, rank) in mesh.held() {
            let (values, found) = self.run(&x.held(i).cast(wide)?)?;
            let start = x.sharding().range(mesh, rank, self.axis, n).start;
            let found = found.map(|at| at.add(start as i64)).transpose()?;
            totals.push(self.last(&values)?);
            places.extend(found.as_ref().map(|at| self.last(at)).transpose()?);
            scans.push((rank, values, found));
        }
        let totals = join_parts(x, self.axis, 1, totals)?;
        let places = if self.positions {
            Some(join_parts(x, self.axis, 1, places)?)
        } else {
            None
        };
        let (mut values, mut found) = (vec![], vec![]);
        for (i, (rank, here, at)) in scans.into_iter().enumerate() {
            let (part, _) = mesh.part(rank, x.sharding().axes_of(self.axis));
            let before = if self.backwards {
                part + 1..parts
            } else {
                0..part
            };
            let full = |p: &usize| !split(n, *p, parts).is_empty();
            let (here, at) = match !before.clone().any(|p| full(&p)) || here.numel() == 0 {
                true => (here, at),
                false => {
                    let of = |t: &Tensor| {
                        if n >= parts {
                            return t.narrow(self.axis as i64, before.start, before.len());
                        }
                        // Parts without elements have no total.
                        let slices = before
                            .clone()
                            .filter(full)
                            .map(|p| t.narrow(self.axis as i64, p, 1))
                            .collect::<Result<Vec<_>>>()?;
                        Tensor::concat(&slices.iter().collect::<Vec<_>>(), self.axis as i64)
                    };
                    let (total, which) = self.run(&of(&totals.held(i))?)?;
                    let place = match (&places, which) {
                        (Some(places), Some(which)) => Some(
                            self.last(&of(&places.held(i))?.gather(self.axis as i64, &which)?)?,
                        ),
                        _ => None,
                    };
                    self.continued((self.last(&total)?, place), (here, at))?
                }
            };
            values.push(here.cast(x.dtype())?);
            found.extend(at);
        }
        let whole = |dtype: DType, parts: Vec<Tensor>| {
            Tensor::from_parts(mesh, x.sharding().clone(), dtype, x.shape().clone(), parts)
        };
        Ok((
            whole(x.dtype(), values),
            self.positions.then(|| whole(DType::I32, found)),
        ))
    }

    /// The slice along the axis where the scan ends; zeros, which nobody reads, where there is
    /// none.
    fn last(&self, x: &Tensor) -> Result<Tensor> {
        match x.dims()[self.axis].checked_sub(1) {
            Some(last) => x.narrow(self.axis as i64, if self.backwards { 0 } else { last }, 1),
            None => Tensor::zeros(x.shape().with(self.axis, 1), x.dtype(), x.device()),
        }
    }

    /// A scan that goes on where another ended.
    fn continued(
        &self,
        (total, place): (Tensor, Option<Tensor>),
        (here, at): (Tensor, Option<Tensor>),
    ) -> Result<(Tensor, Option<Tensor>)> {
        let stays = match self.scan {
            ScanOp::Sum => return Ok((here.add(&total)?, None)),
            ScanOp::Prod => return Ok((here.mul(&total)?, None)),
            ScanOp::LogSumExp => {
                let sum = Expr::new(self.info.name, &[&here, &total]).map(here.dtype(), |a| {
                    let (top, low) = (a.x[0].max(a.x[1]), a.x[0].min(a.x[1]));
                    top.is_inf().select(top, top + (low - top).exp().log1p())
                })?;
                return Ok((sum, None));
            }
            ScanOp::Max => here.lt(&total)?,
            ScanOp::Min => here.gt(&total)?,
        };
        // The latest among equals counts, and the latest NaN.
        let stays = if here.dtype().is_float() {
            stays.logical_or(&total.isnan()?.logical_and(&here.isnan()?.logical_not()?)?)?
        } else {
            stays
        };
        let at = match (place, at) {
            (Some(place), Some(at)) => Some(stays.where_(&place, &at)?),
            _ => None,
        };
        Ok((stays.where_(&total, &here)?, at))
    }
}
