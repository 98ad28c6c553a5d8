//! Tensors as text: `{}` shows values as NumPy does, `{:?}` the type and the first values.
//!
//! Values are read part by part and joined on the host, so that showing a tensor communicates
//! nothing, is in no ledger, and reads only what it shows. Where parts lie in other processes, `{}`
//! gathers what it shows, and all processes of the mesh must do it together; `{:?}` never does,
//! because errors and assertions of a single process use it.

use crate::Tensor;
use std::fmt;

impl Tensor {
    /// Type and place on one line: `f32[8@dp, 4] on mesh(dp=2) of cpu`.
    fn summary(&self) -> String {
        let mut text = format!("{} on {}", self.type_string(), self.mesh());
        if !self.is_plain() {
            let mut devices: Vec<String> = Vec::new();
            for i in 0..self.mesh().held().len() {
                let name = self.mesh().device(i).to_string();
                if !devices.contains(&name) {
                    devices.push(name);
                }
                if devices.len() > 4 {
                    devices[4] = "...".into();
                    break;
                }
            }
            text = format!("{text} of {}", devices.join(", "));
        }
        if self.requires_grad() {
            text.push_str(", requires_grad");
        }
        text
    }
}

/// The values as in NumPy, shortened where there are more than 1000, and below them the type,
/// where the tensor lies, and whether gradients flow to it. `{:.2}` shows at most two digits after
/// the point (4 unless told). Where values cannot be read it says why; it never fails.
///
/// Of a tensor with parts in several processes all of them must make the text, and
/// [`Mesh::is_first`](crate::Mesh::is_first) says which one prints it.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Tensor, meta};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2", &device)?;
/// let x = Tensor::new(&[[1f32, -2.5, 1000.0], [0.0, f32::NAN, 1.0 / 3.0]], (&mesh, "[@dp, _]"))?;
/// assert_eq!(x.to_string(), "\
/// [[   1.0000,   -2.5000, 1000.0000],
///  [   0.0000,       NaN,    0.3333]]
/// f32[2@dp, 3] on mesh(dp=2) of cpu");
///
/// let long = Tensor::arange(0, 5000, 1, DType::I32, &device)?;
/// assert_eq!(long.to_string(), "[   0,    1,    2, ..., 4997, 4998, 4999]\ni32[5000] on cpu");
///
/// let planned = Tensor::zeros([8, 8], DType::BF16, &meta())?;
/// assert!(planned.to_string().starts_with("bf16[8, 8] on meta: "));
/// # Ok::<(), anymesh_core::Error>(())
/// ```
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[cfg(target_family = "wasm")]
        return f.write_str(&self.summary());
        #[cfg(not(target_family = "wasm"))]
        match values::Values::read(self, values::Cut::edges(self.dims()), true) {
            Ok(values) => {
                values.write(f, f.precision().unwrap_or(4))?;
                write!(f, "\n{}", self.summary())
            }
            Err(error) => write!(f, "{}: its values cannot be shown: {error}", self.summary()),
        }
    }
}

/// The type, where the tensor lies, and its first values (at most 8, if they are in this process),
/// on one line.
///
/// ```
/// # use anymesh_core::{DType, Tensor};
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::arange(0, 100, 1, DType::F32, &device)?.reshape([20, 5])?;
/// assert_eq!(format!("{x:?}"), "f32[20, 5] on cpu [0.0, 1.0, 2.0, 3.0, 4.0, ...]");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary())?;
        #[cfg(not(target_family = "wasm"))]
        match values::Values::read(self, values::Cut::first(self.dims(), 8), false) {
            Ok(values) => values.write_flat(f, self.numel())?,
            // A device without values has none to show; that is no news.
            Err(crate::Error::Unsupported { .. }) => {}
            Err(error) => write!(f, " (its values cannot be shown: {error})")?,
        }
        Ok(())
    }
}

#[cfg(not(target_family = "wasm"))]
mod values {
    use crate::{
        DType, Dims, Element, Error, F8E4M3, F8E5M2, Placement, Reduction, Region, Result, Scalar,
        Tensor, bf16, f16,
        transport::{Part, Transport},
    };
    use std::fmt::{self, Write};

    /// How many values are shown without leaving some out.
    const ALL: usize = 1000;
    /// How many values are shown where some are left out.
    const MOST: usize = 2000;
    /// Columns of a line.
    const WIDTH: usize = 80;

    /// What is shown of each dimension: the first few and the last few.
    pub(super) struct Cut(Vec<(usize, usize)>);

    impl Cut {
        /// Everything, or of each long dimension as many at both ends as leaves a readable text.
        pub(super) fn edges(dims: &[usize]) -> Self {
            let of = |edge: usize| -> Vec<(usize, usize)> {
                let ends = |n: usize| if n > 2 * edge { (edge, edge) } else { (n, 0) };
                dims.iter().map(|n| ends(*n)).collect()
            };
            let count = |cut: &[(usize, usize)]| {
                cut.iter().fold(1usize, |n, (a, b)| n.saturating_mul(a + b))
            };
            if dims.iter().product::<usize>() <= ALL {
                return Self(dims.iter().map(|n| (*n, 0)).collect());
            }
            let mut cut = of(3);
            for edge in [2, 1] {
                if count(&cut) > MOST {
                    cut = of(edge);
                }
            }
            // Many dimensions of two elements: only the first of the outer ones.
            for d in 0..cut.len() {
                if count(&cut) > MOST {
                    cut[d] = (1, 0);
                }
            }
            Self(cut)
        }

        /// At most `count` elements from the beginning.
        pub(super) fn first(dims: &[usize], mut count: usize) -> Self {
            let mut cut: Vec<(usize, usize)> = dims
                .iter()
                .rev()
                .map(|n| {
                    let shown = (*n).min(count);
                    count /= shown.max(1);
                    (shown, 0)
                })
                .collect();
            cut.reverse();
            Self(cut)
        }
    }

    /// The values that are shown, on the host.
    pub(super) struct Values {
        dims: Vec<usize>,
        cut: Vec<(usize, usize)>,
        /// Of the shown part, in row-major order.
        elements: Vec<Scalar>,
        dtype: DType,
    }

    impl Values {
        /// What is shown of a tensor; where `gather` is set, all processes do this together.
        pub(super) fn read(x: &Tensor, Cut(cut): Cut, gather: bool) -> Result<Self> {
            let (x, dims) = (x.detach(), x.dims().to_vec());
            let count: usize = cut.iter().map(|(a, b)| a + b).product();
            let mut elements = vec![Scalar::Int(0); count];
            // The corners: of each dimension its beginning or its end.
            let mut corners = vec![(Region::default(), Dims::new())];
            for (n, (head, tail)) in dims.iter().zip(&cut) {
                let ends = [(0, *head, 0), (n - tail, *tail, *head)];
                corners = corners
                    .iter()
                    .flat_map(|(region, to)| {
                        ends.iter()
                            .filter(|(_, len, _)| *len > 0)
                            .map(|(start, len, at)| {
                                let (mut region, mut to) = (region.clone(), to.clone());
                                region.start.push(*start);
                                region.shape.push(*len);
                                to.push(*at);
                                (region, to)
                            })
                    })
                    .collect();
            }
            for (region, to) in &corners {
                let values = read(&x, region, gather)?;
                for (i, value) in values.into_iter().enumerate() {
                    let (mut rest, mut stride, mut at) = (i, 1, 0);
                    for d in (0..dims.len()).rev() {
                        at += (to[d] + rest % region.shape[d]) * stride;
                        rest /= region.shape[d];
                        stride *= cut[d].0 + cut[d].1;
                    }
                    elements[at] = value;
                }
            }
            Ok(Self {
                dims,
                cut,
                elements,
                dtype: x.dtype(),
            })
        }

        pub(super) fn write(&self, f: &mut fmt::Formatter<'_>, digits: usize) -> fmt::Result {
            let texts = texts(&self.elements, self.dtype, digits);
            if self.dims.contains(&0) {
                return f.write_str("[]");
            }
            self.level(f, &texts, 0)
        }

        /// One level of brackets around `texts`, which are its elements.
        fn level(&self, f: &mut fmt::Formatter<'_>, texts: &[String], depth: usize) -> fmt::Result {
            let Some(&(head, tail)) = self.cut.get(depth) else {
                return f.write_str(&texts[0]);
            };
            let inner = texts.len() / (head + tail);
            let gap = head + tail < self.dims[depth];
            let last = depth + 1 == self.dims.len();
            // Further rows begin below the first; matrices have an empty line between them.
            let separator = format!(
                ",{}{}",
                "\n".repeat(self.dims.len() - depth - 1),
                " ".repeat(depth + 1)
            );
            f.write_char('[')?;
            let mut column = depth + 1;
            let mut first = true;
            let mut next = |f: &mut fmt::Formatter<'_>, width: usize| {
                if first {
                    first = false;
                } else if !last {
                    f.write_str(&separator)?;
                } else if column + 2 + width >= WIDTH {
                    write!(f, ",\n{}", " ".repeat(depth + 1))?;
                    column = depth + 1;
                } else {
                    f.write_str(", ")?;
                    column += 2;
                }
                column += width;
                Ok(())
            };
            for i in 0..head + tail {
                if gap && i == head {
                    next(f, 3)?;
                    f.write_str("...")?;
                }
                let texts = &texts[i * inner..(i + 1) * inner];
                next(f, texts[0].len())?;
                self.level(f, texts, depth + 1)?;
            }
            if gap && tail == 0 {
                next(f, 3)?;
                f.write_str("...")?;
            }
            f.write_char(']')
        }

        /// The values behind each other, of a tensor of `numel` elements.
        pub(super) fn write_flat(&self, f: &mut fmt::Formatter<'_>, numel: usize) -> fmt::Result {
            let mut texts = texts(&self.elements, self.dtype, 4);
            for text in &mut texts {
                *text = text.trim_start().into();
            }
            if texts.len() < numel {
                texts.push("...".into());
            }
            write!(f, " [{}]", texts.join(", "))
        }
    }

    /// The values of a box of a tensor: from the parts that this process holds, or from those of all
    /// processes, which then all take part.
    fn read(x: &Tensor, region: &Region, gather: bool) -> Result<Vec<Scalar>> {
        if x.is_plain() {
            return Ok(scalars(x.dtype(), &x.window(region)?.to_bytes()?));
        }
        let (mesh, sharding) = (x.mesh(), x.sharding());
        mesh.check_here("display")?;
        let partial = sharding.partial().next().map(|(_, reduction)| reduction);
        let mut pieces: Vec<(usize, Region, Region)> = Vec::new();
        let mut seen: Vec<Region> = Vec::new();
        for rank in 0..mesh.ranks() {
            let held = sharding.region(mesh, rank, x.shape());
            // Ranks that hold the same are read once; parts of a reduction differ.
            let copy = match partial {
                Some(_) => (0..mesh.axes().len()).any(|axis| {
                    sharding.placement(axis) == Placement::Replicate
                        && mesh.coordinate(rank, axis) != 0
                }),
                None => seen.contains(&held),
            };
            if let Some(common) = held.intersect(region).filter(|r| !copy && r.numel() > 0) {
                pieces.push((rank, held.clone(), common));
                seen.push(held);
            }
        }
        let inside = |outer: &Region, common: &Region| Region {
            start: (common.start.iter().zip(&outer.start))
                .map(|(a, b)| a - b)
                .collect(),
            shape: common.shape.clone(),
        };
        let mut parts = Vec::with_capacity(pieces.len());
        for (rank, held, common) in &pieces {
            let own = mesh.position_of(*rank).map(|i| x.part(i));
            let own = own.map(|part| part.window(&inside(held, common)));
            parts.push((*rank, common.numel(), own.transpose()?));
        }
        let values = match mesh.transport().filter(|_| !mesh.is_local() && gather) {
            Some(transport) => gathered(x, &parts, &**transport)?,
            None => {
                let elsewhere = || {
                    let detail = "parts of it lie in other processes: `{}` shows them, in all processes at once";
                    Error::argument("display", "self", detail).of([x])
                };
                let mut values = Vec::new();
                for (_, _, part) in &parts {
                    let part = part.as_ref().ok_or_else(elsewhere)?;
                    values.extend(scalars(x.dtype(), &part.to_bytes()?));
                }
                values
            }
        };
        let mut values = values.into_iter();
        let mut out = vec![None; region.numel()];
        for (_, _, common) in &pieces {
            let at =
                inside(region, common).of(&crate::Layout::contiguous(region.shape.clone().into()));
            for (at, value) in at.positions().zip(values.by_ref()) {
                out[at] = Some(match (out[at], partial) {
                    (Some(other), Some(reduction)) => combined(reduction, x.dtype(), other, value),
                    _ => value,
                });
            }
        }
        let none = || Error::argument("display", "self", "no rank holds some of its values");
        out.into_iter()
            .collect::<Option<_>>()
            .ok_or_else(|| none().of([x]))
    }

    /// The values of what ranks hold, one after the other, in every process.
    fn gathered(
        x: &Tensor,
        pieces: &[(usize, usize, Option<Tensor>)],
        transport: &dyn Transport,
    ) -> Result<Vec<Scalar>> {
        let mesh = x.mesh();
        // Everybody takes part, also who has nothing that is shown.
        let mut parts = Vec::with_capacity(mesh.ranks());
        for rank in 0..mesh.ranks() {
            let piece = pieces.iter().find(|(r, ..)| *r == rank);
            parts.push(match (piece, mesh.position_of(rank)) {
                (Some((_, n, Some(part))), _) => Part::new(rank, &part.reshape([*n])?),
                (None, Some(at)) => {
                    let nothing = Tensor::zeros([0], x.dtype(), mesh.device(at))?;
                    Part::new(rank, &nothing)
                }
                (piece, _) => Part::elsewhere(rank, x.dtype(), [piece.map_or(0, |p| p.1)]),
            });
        }
        let joined = transport.all_gather(mesh, &parts, 0)?;
        match joined.into_iter().flatten().next() {
            Some(joined) => Ok(scalars(x.dtype(), &joined.to_bytes()?)),
            None => Ok(vec![]),
        }
    }

    /// Elements as numbers.
    fn scalars(dtype: DType, bytes: &[u8]) -> Vec<Scalar> {
        fn all<T: Element>(bytes: &[u8], number: impl Fn(T) -> Scalar) -> Vec<Scalar> {
            T::from_bytes(bytes).into_iter().map(number).collect()
        }
        match dtype {
            DType::Bool => all(bytes, Scalar::Bool),
            DType::U8 => all::<u8>(bytes, Scalar::from),
            DType::U32 => all::<u32>(bytes, Scalar::from),
            DType::I32 => all::<i32>(bytes, Scalar::from),
            DType::I64 => all(bytes, Scalar::Int),
            DType::F8E4M3 => all::<F8E4M3>(bytes, |v| v.to_f32().into()),
            DType::F8E5M2 => all::<F8E5M2>(bytes, |v| v.to_f32().into()),
            DType::F16 => all::<f16>(bytes, |v| v.to_f32().into()),
            DType::BF16 => all::<bf16>(bytes, |v| v.to_f32().into()),
            DType::F32 => all::<f32>(bytes, Scalar::from),
            DType::F64 => all(bytes, Scalar::Float),
        }
    }

    /// What two parts of a reduction come to. Integers wrap as those of the dtype do; floats need
    /// no rounding for the few digits that are shown.
    fn combined(reduction: Reduction, dtype: DType, a: Scalar, b: Scalar) -> Scalar {
        let float = |f: fn(f64, f64) -> f64| Scalar::Float(f(a.to_f64(), b.to_f64()));
        let int = |f: fn(i64, i64) -> i64| {
            let value = f(a.to_i64(), b.to_i64());
            Scalar::Int(match dtype {
                DType::U8 => i64::from(value as u8),
                DType::U32 => i64::from(value as u32),
                DType::I32 => i64::from(value as i32),
                _ => value,
            })
        };
        let nan_or = |f: fn(f64, f64) -> f64| match a.to_f64().is_nan() || b.to_f64().is_nan() {
            true => Scalar::Float(f64::NAN),
            false => float(f),
        };
        match (reduction, dtype.is_float()) {
            (Reduction::Sum, true) => float(|a, b| a + b),
            (Reduction::Prod, true) => float(|a, b| a * b),
            (Reduction::Max, true) => nan_or(f64::max),
            (Reduction::Min, true) => nan_or(f64::min),
            (Reduction::And, _) => Scalar::Bool(a.to_bool() && b.to_bool()),
            (Reduction::Or, _) => Scalar::Bool(a.to_bool() || b.to_bool()),
            (Reduction::Max, _) if dtype == DType::Bool => Scalar::Bool(a.to_bool() || b.to_bool()),
            (Reduction::Min, _) if dtype == DType::Bool => Scalar::Bool(a.to_bool() && b.to_bool()),
            (Reduction::Sum, false) => int(i64::wrapping_add),
            (Reduction::Prod, false) => int(i64::wrapping_mul),
            (Reduction::Max, false) => int(i64::max),
            (Reduction::Min, false) => int(i64::min),
        }
    }

    /// The numbers as text, all of the same width.
    fn texts(values: &[Scalar], dtype: DType, digits: usize) -> Vec<String> {
        let texts: Vec<String> = if dtype.is_float() {
            let values: Vec<f64> = values.iter().map(|v| v.to_f64()).collect();
            floats(&values, digits)
        } else {
            values
                .iter()
                .map(|v| match v {
                    Scalar::Bool(b) => b.to_string(),
                    Scalar::Int(i) => i.to_string(),
                    Scalar::Float(f) => f.to_string(),
                })
                .collect()
        };
        let width = texts.iter().map(String::len).max().unwrap_or(0);
        texts.into_iter().map(|t| format!("{t:>width$}")).collect()
    }

    /// Floats with as many digits after the point as they need together, at most `digits`. As in
    /// NumPy, powers of ten come in where a value would otherwise have no digits or too many.
    fn floats(values: &[f64], digits: usize) -> Vec<String> {
        let finite = || values.iter().filter(|v| v.is_finite());
        let sizes = || finite().map(|v| v.abs()).filter(|v| *v > 0.0);
        let scientific = sizes().any(|v| v >= 1e8 || v < 0.1f64.powi(digits.max(1) as i32));
        let text = |v: f64, digits: usize| match (v.is_finite(), scientific) {
            (false, _) => v.to_string(),
            (true, false) => format!("{v:.digits$}"),
            (true, true) => {
                let text = format!("{v:.digits$e}");
                let (value, power) = text.split_once('e').unwrap_or((&text, "0"));
                let sign = if power.starts_with('-') { '-' } else { '+' };
                format!("{value}e{sign}{:0>2}", power.trim_start_matches('-'))
            }
        };
        // Zeros at the end that all of them have are left out, but for one.
        let needed = |v: &f64| {
            let text = text(*v, digits);
            let number = text.split('e').next().unwrap_or("");
            let fraction = number.split_once('.').map_or("", |(_, fraction)| fraction);
            fraction.trim_end_matches('0').len()
        };
        let digits = finite().map(needed).max().unwrap_or(0).max(1).min(digits);
        values.iter().map(|v| text(*v, digits)).collect()
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn floats_have_the_digits_they_need() {
            let check = |values: &[f64], expected: &[&str]| {
                assert_eq!(floats(values, 4), expected, "{values:?}");
            };
            check(&[1.0, 2.0], &["1.0", "2.0"]);
            check(&[0.0, -0.0], &["0.0", "-0.0"]);
            check(&[1.5, 0.25], &["1.50", "0.25"]);
            check(&[1.0 / 3.0, 2.0], &["0.3333", "2.0000"]);
            check(&[0.1f32.into(), 1.0], &["0.1", "1.0"]);
            check(&[1e-5, 1.0], &["1.0e-05", "1.0e+00"]);
            check(&[1.23456e-7, 0.0], &["1.2346e-07", "0.0000e+00"]);
            check(&[1e8, 1.0], &["1.0e+08", "1.0e+00"]);
            check(&[12345678.0, 1.0], &["12345678.0", "1.0"]);
            check(&[f64::MAX], &["1.7977e+308"]);
            check(
                &[f64::NAN, f64::INFINITY, -f64::INFINITY, 1.0],
                &["NaN", "inf", "-inf", "1.0"],
            );
            check(&[f64::NAN], &["NaN"]);
            assert_eq!(floats(&[1.0, 2.5], 0), ["1", "2"]);
            assert_eq!(floats(&[1.256, 2.5], 2), ["1.26", "2.50"]);
        }

        #[test]
        fn whatever_the_shape_few_values_are_read() {
            let count = |dims: &[usize]| {
                let Cut(cut) = Cut::edges(dims);
                cut.iter().map(|(a, b)| a + b).product::<usize>()
            };
            assert_eq!(count(&[1000]), 1000);
            assert_eq!(count(&[1001]), 6);
            assert_eq!(count(&[100, 100]), 36);
            assert_eq!(count(&[0, 5000]), 0);
            for dims in [&[2; 30][..], &[7; 10], &[3; 12], &[1 << 40; 1], &[10; 6]] {
                assert!(count(dims) <= MOST, "{dims:?}: {}", count(dims));
            }
            let Cut(first) = Cut::first(&[20, 5], 8);
            assert_eq!(first, [(1, 0), (5, 0)]);
            assert_eq!(Cut::first(&[4, 0], 8).0, [(4, 0), (0, 0)]);
        }
    }
}
