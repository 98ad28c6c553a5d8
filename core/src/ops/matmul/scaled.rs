//! Products of 8-bit floats that carry scales.

use super::{Ready, check_inner, local_product, product};
use crate::{
    DType, Error, Layout, Result, Shape, Tensor,
    backend::Kernel,
    grad::{Back, Pulled, record1},
    launch::launch_as,
    ops::{
        OpInfo,
        expr::{Expr, check_float, compute_type},
        op, sum_to,
    },
    spmd::{Call, plain},
};
use smallvec::smallvec;

/// Scales are whole on every rank: those of [`Tensor::quantize_f8`] are of the whole tensor.
pub(super) const SCALED: OpInfo = op(
    "matmul_scaled",
    "...mk, ...kn, , -> ...mn ; reduce k sum ; linear 0 ; linear 1",
);

pub(super) const OUTER_SCALED: OpInfo = op(
    "outer_scaled",
    "...n, ...k, , -> nk ; reduce ... sum ; linear 0 ; linear 1",
);

/// Refuses factors that are no matrices of floats, and scales that are not one number each.
fn check_scaled(
    op: &'static str,
    [a, b, a_scale, b_scale]: [&Tensor; 4],
    dtype: DType,
) -> Result<()> {
    plain(op, &[a, b, a_scale, b_scale])?;
    check_float(op, &[a, b, a_scale, b_scale])?;
    if !dtype.is_float() {
        return Err(Error::DType {
            op,
            dtype,
            expected: "a float to store",
        });
    }
    if a.rank() < 2 || b.rank() < 2 {
        return Err(Error::shape(
            op,
            [a, b],
            format!(
                "{} and {}: matrices have two dimensions",
                a.type_string(),
                b.type_string()
            ),
        ));
    }
    match [a_scale, b_scale].into_iter().find(|s| s.rank() != 0) {
        Some(scale) => Err(Error::shape(
            op,
            [scale],
            format!(
                "a scale is one number without dimensions, got {}",
                scale.type_string()
            ),
        )),
        None => Ok(()),
    }
}

/// The gradients of a product of two factors and their scales. `sides` gives those of the factors
/// from that of the result, were nothing scaled.
#[track_caller]
fn scaled_pull(
    back: &Back<'_>,
    kept: &[Tensor; 4],
    sides: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<[Tensor; 2]>,
) -> Result<Pulled> {
    let wide = compute_type(kept);
    let factors = [kept[0].cast(wide)?, kept[1].cast(wide)?];
    let sides = sides(&back.grad()?.cast(wide)?, &factors[0], &factors[1])?;
    let mut pulled: Pulled = smallvec![None; 4];
    for (i, (side, factor)) in sides.iter().zip(&factors).enumerate() {
        let (own, other) = (&kept[2 + i], &kept[3 - i]);
        let side = side.mul(other)?;
        pulled[i] = back.wanted(i, || side.mul(own)?.cast(kept[i].dtype()))?;
        pulled[2 + i] = back.wanted(2 + i, || side.mul(factor)?.sum_all()?.cast(own.dtype()))?;
    }
    Ok(pulled)
}

/// Whether a dtype is a float of 8 bits.
fn is_f8(tensor: &Tensor) -> bool {
    matches!(tensor.dtype(), DType::F8E4M3 | DType::F8E5M2)
}

impl Tensor {
    /// `(self * scale) @ (other * other_scale)` stored as `dtype`, for matrices or stacks of them
    /// that [`quantize_f8`](Tensor::quantize_f8) made. Scales are one number each, without
    /// dimensions, and stay on the device; sums are multiplied by both and rounded once.
    ///
    /// On NVIDIA GPUs with 8-bit tensor cores (compute capability 8.9 and later) it is a kernel of
    /// them, if one operand at least is `f8e4m3`, the result is `f32`, `f16` or `bf16`, and all
    /// sizes but the rows of this tensor are multiples of 16. They add in `f32`, but inside of one
    /// instruction, over 32 products at a time on Hopper, with fewer bits: an error of `2^-13` of
    /// the largest of them is usual. Elsewhere it is a product of `f16`, which has all values of
    /// both formats, with sums in `f32`.
    ///
    /// A number for each row instead of one for all is a product with scales of one, times the
    /// numbers.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[1f32, -2.0, 3.0, 0.5], [2, 2], &device)?;
    /// let (codes, scale) = x.quantize_f8(DType::F8E4M3)?;
    /// let squares = codes.matmul_scaled(&codes, &scale, &scale, DType::F32)?;
    /// // Factors have 4 bits, so a product is wrong by an eighth at the most; here 1 + 6 are added.
    /// let error = squares.sub(&x.matmul(&x)?)?.abs()?.amax(&[], false)?;
    /// assert!(error.item()?.to_f64() < 7.0 / 8.0);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn matmul_scaled(
        &self,
        other: &Tensor,
        scale: &Tensor,
        other_scale: &Tensor,
        dtype: DType,
    ) -> Result<Tensor> {
        let op = "matmul_scaled";
        let operands = [self, other, scale, other_scale];
        check_scaled(op, operands, dtype)?;
        check_inner(op, self, other, self.rank() - 1, other.rank() - 2)?;
        crate::observe::tell(|| serde_json::json!({ "dtype": dtype.name() }));
        let forward = || self.multiplied_and_scaled(other, [scale, other_scale], dtype);
        record1(op, &operands, forward, |_| {
            let kept = operands.map(|t| t.kept());
            Ok(move |back: &Back<'_>| {
                scaled_pull(back, &kept, |g, a, b| {
                    let wide = g.dtype();
                    Ok([
                        sum_to(op, &product(op, g, &b.t()?, wide)?, a.shape())?,
                        sum_to(op, &product(op, &a.t()?, g, wide)?, b.shape())?,
                    ])
                })
            })
        })
    }

    /// The sum over all rows of the outer products of two tensors of rows, `[..., n]` and
    /// `[..., k]`, each times its scale: `[n, k]`, stored as `dtype`. What
    /// [`matmul_scaled`](Tensor::matmul_scaled) is to a product, this is to the gradient of its right
    /// factor, and the same holds for it.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[1f32, -2.0, 3.0, 0.5], [2, 2], &device)?.cast(DType::F8E5M2)?;
    /// let two = Tensor::new(2f32, &device)?;
    /// let sums = x.outer_scaled(&x, &two, &two, DType::F32)?;
    /// assert_eq!(sums.to_vec::<f32>()?, [40.0, -2.0, -2.0, 17.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn outer_scaled(
        &self,
        other: &Tensor,
        scale: &Tensor,
        other_scale: &Tensor,
        dtype: DType,
    ) -> Result<Tensor> {
        let op = "outer_scaled";
        let operands = [self, other, scale, other_scale];
        check_scaled(op, operands, dtype)?;
        let rows = self.rank() - 1;
        if self.dims()[..rows] != other.dims()[..other.rank() - 1] {
            return Err(Error::shape(
                op,
                [self, other],
                format!(
                    "{} and {} have different rows",
                    self.type_string(),
                    other.type_string()
                ),
            ));
        }
        crate::observe::tell(|| serde_json::json!({ "dtype": dtype.name() }));
        let forward = || {
            if !self.is_plain() {
                return Call::of(&OUTER_SCALED, &operands)
                    .run1(|l| l[0].outer_scaled(&l[1], &l[2], &l[3], dtype));
            }
            let rows = self.dims()[..rows].iter().product();
            let [left, right] = [self, other].map(|t| t.reshape([rows, t.dims()[t.rank() - 1]]));
            (left?.t()?).multiplied_and_scaled(&right?, [scale, other_scale], dtype)
        };
        record1(op, &operands, forward, |_| {
            let kept = operands.map(|t| t.kept());
            Ok(move |back: &Back<'_>| {
                scaled_pull(back, &kept, |g, a, b| {
                    let wide = g.dtype();
                    Ok([product(op, b, &g.t()?, wide)?, product(op, a, g, wide)?])
                })
            })
        })
    }

    /// [`matmul_scaled`](Self::matmul_scaled) without a gradient, for operands that were checked.
    #[track_caller]
    fn multiplied_and_scaled(
        &self,
        other: &Tensor,
        scales: [&Tensor; 2],
        dtype: DType,
    ) -> Result<Tensor> {
        let op = "matmul_scaled";
        if !self.is_plain() {
            let batch = |t: &Tensor| Shape::from(&t.dims()[..t.rank() - 2]);
            batch(self).broadcast(op, &batch(other))?;
            return Call::of(&SCALED, &[self, other, scales[0], scales[1]])
                .run1(|l| l[0].matmul_scaled(&l[1], &l[2], &l[3], dtype));
        }
        let small = is_f8(self) && is_f8(other);
        if small && let Some(out) = self.scaled_at_once(other, scales, dtype)? {
            return Ok(out);
        }
        let compute = match small {
            true => DType::F16,
            false => compute_type([self, other]),
        };
        let sums = product(
            op,
            &self.cast(compute)?,
            &other.cast(compute)?,
            compute.kind().dtype(),
        )?;
        Expr::new(op, &[&sums, scales[0], scales[1]]).map(dtype, |a| a.x[0] * a.x[1] * a.x[2])
    }

    /// The product by one kernel, where the device has one. Tensor cores want both operands dense
    /// along the dimension that is summed over; what is not is copied, if that is all that lacks.
    fn scaled_at_once(
        &self,
        other: &Tensor,
        scales: [&Tensor; 2],
        dtype: DType,
    ) -> Result<Option<Tensor>> {
        let op = "matmul_scaled";
        let scales = [scales[0].cast(DType::F32)?, scales[1].cast(DType::F32)?];
        let kernel = |a: &Tensor, b: &Tensor| -> Result<Option<(Shape, Kernel)>> {
            let Ready::Launch(shape, mut call) = local_product(op, a, b, dtype)? else {
                return Ok(None);
            };
            call.scales = Some(Box::new([scales[0].view()?, scales[1].view()?]));
            Ok(Some((shape, Kernel::from(*call))))
        };
        let supports = |kernel: &Kernel| self.device().backend().supports(kernel);
        let Some((shape, as_they_lie)) = kernel(self, other)? else {
            return Ok(None);
        };
        if supports(&as_they_lie) {
            return launch_as(self.mesh(), shape, as_they_lie).map(Some);
        }
        if !supports(&dense_inside(as_they_lie)) {
            return Ok(None);
        }
        let (a, b) = (self.contiguous()?, other.t()?.contiguous()?.t()?);
        match kernel(&a, &b)? {
            Some((shape, kernel)) if supports(&kernel) => {
                launch_as(self.mesh(), shape, kernel).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// The same product as if its operands were dense along the dimension that is summed over.
fn dense_inside(mut kernel: Kernel) -> Kernel {
    if let Kernel::Matmul(call) = &mut kernel {
        call.a.layout = Layout::contiguous(call.a.layout.shape.clone());
        let rank = call.b.layout.shape.rank();
        let mut axes: Vec<usize> = (0..rank).collect();
        axes.swap(rank - 2, rank - 1);
        let turned = call.b.layout.permute(&axes).shape;
        call.b.layout = Layout::contiguous(turned).permute(&axes);
    }
    kernel
}
