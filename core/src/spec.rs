//! Shardings and types as text, by the names of mesh axes: read and printed here, with or without a
//! mesh.

use crate::{DType, Dims, Error, Mesh, Reduction, Result, Shape, Sharding, TensorType};
use std::{fmt, ops::RangeInclusive, str::FromStr};

/// A sharding by the names of axes, before there is a mesh: `[@dp, _, @tp@sp]{sum:pp}`.
///
/// There is an entry for each dimension: the axes that cut it (major first), or `_`. `...` stands
/// for any number of dimensions that are not cut. After the dimensions stand the axes over which
/// values are partial. A name followed by `?` is an axis that a mesh may lack: it then counts as an
/// axis of size 1, so that the same program runs on a smaller mesh or on a single device.
///
/// ```
/// # use anymesh_core::{DType, Mesh, ShardingSpec, Tensor};
/// # let device = anymesh_backend_cpu::device();
/// let rows: ShardingSpec = "[@dp, ..., @tp?]".parse()?;
/// assert_eq!(rows.to_string(), "[@dp, ..., @tp?]");
///
/// let large = Mesh::new("dp=2, tp=2", &device)?;
/// let small = Mesh::new("dp=2", &device)?;
/// assert_eq!(Tensor::zeros([4, 3, 6], DType::F32, (&large, &rows))?.type_string(), "f32[4@dp, 3, 6@tp]");
/// assert_eq!(Tensor::zeros([4, 3, 6], DType::F32, (&small, &rows))?.type_string(), "f32[4@dp, 3, 6]");
///
/// let error = Tensor::zeros([4, 3, 6], DType::F32, (&small, "[@dp, _, @tp]")).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "mesh: there is no axis 'tp' in mesh(dp=2); where a program may run without it, write @tp?"
/// );
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct ShardingSpec {
    /// The axes that cut each dimension, major first.
    dims: Vec<Vec<AxisName>>,
    /// Before which entry of `dims` any number of uncut dimensions may stand.
    rest: Option<usize>,
    /// Axes over which values are partial.
    partial: Vec<(Reduction, AxisName)>,
}

/// A mesh axis by its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct AxisName {
    name: String,
    /// Whether a mesh may lack it.
    optional: bool,
}

impl AxisName {
    /// Reads `tp` or `tp?`.
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let (name, optional) = match text.strip_suffix('?') {
            Some(name) => (name, true),
            None => (text, false),
        };
        crate::mesh::is_axis_name(name).then(|| Self {
            name: name.into(),
            optional,
        })
    }

    /// Its number in a mesh; `None` where the mesh lacks it and may.
    fn on(&self, mesh: &Mesh) -> Result<Option<usize>> {
        match mesh.axis(&self.name) {
            Ok(axis) => Ok(Some(axis)),
            Err(_) if self.optional => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl fmt::Display for AxisName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name, if self.optional { "?" } else { "" })
    }
}

impl ShardingSpec {
    /// The numbers of dimensions that it is for.
    ///
    /// ```
    /// # use anymesh_core::{Result, ShardingSpec};
    /// let ranks = |text: &str| -> Result<_> { Ok(text.parse::<ShardingSpec>()?.ranks()) };
    /// assert_eq!(ranks("[@tp, _]")?, 2..=2);
    /// assert_eq!(ranks("[@tp, ...]")?, 1..=usize::MAX);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn ranks(&self) -> RangeInclusive<usize> {
        let entries = self.dims.len();
        entries..=self.rest.map_or(entries, |_| usize::MAX)
    }

    /// The sharding of a tensor of `rank` dimensions that this says on `mesh`. An axis that the
    /// mesh does not have is an error, unless it was written with `?`.
    pub fn on(&self, mesh: &Mesh, rank: usize) -> Result<Sharding> {
        let entries = self.dims.len();
        if !self.ranks().contains(&rank) {
            return Err(Error::Sharding {
                sharding: self.to_string(),
                detail: format!(
                    "{self} is for {entries}{} dimensions, the tensor has {rank}: write an entry for each, `_` where it is not cut, or `...` for all others",
                    if self.rest.is_some() { " or more" } else { "" }
                ),
            });
        }
        let mut sharding = Sharding::replicated();
        for (entry, axes) in self.dims.iter().enumerate() {
            let skipped = match self.rest {
                Some(rest) if entry >= rest => rank - entries,
                _ => 0,
            };
            for axis in axes {
                if let Some(axis) = axis.on(mesh)? {
                    sharding = sharding.cut(entry + skipped, axis);
                }
            }
        }
        for (reduction, axis) in &self.partial {
            if let Some(axis) = axis.on(mesh)? {
                sharding = sharding.partial_over(axis, *reduction);
            }
        }
        sharding.check(mesh, rank)?;
        Ok(sharding)
    }

    /// What a sharding of a tensor of `rank` dimensions says, by the names of the mesh's axes.
    pub fn of(sharding: &Sharding, mesh: &Mesh, rank: usize) -> Self {
        let name = |axis: usize| AxisName {
            name: mesh
                .axes()
                .get(axis)
                .map_or_else(|| format!("axis{axis}"), |(name, _)| name.clone()),
            optional: false,
        };
        Self {
            dims: (0..rank)
                .map(|d| sharding.axes_of(d).map(name).collect())
                .collect(),
            rest: None,
            partial: sharding.partial().map(|(a, r)| (r, name(a))).collect(),
        }
    }

    /// The axes of one dimension as they are written after it.
    fn write_axes(&self, f: &mut fmt::Formatter<'_>, dim: usize) -> fmt::Result {
        self.dims[dim].iter().try_for_each(|a| write!(f, "@{a}"))
    }

    fn write_partial(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (reduction, axis)) in self.partial.iter().enumerate() {
            write!(f, "{}{reduction}:{axis}", if i == 0 { "{" } else { ", " })?;
        }
        f.write_str(if self.partial.is_empty() { "" } else { "}" })
    }
}

/// As it is written: `[@dp, _]{sum:tp}`.
impl fmt::Display for ShardingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for dim in 0..=self.dims.len() {
            let separator = if dim == 0 { "" } else { ", " };
            if self.rest == Some(dim) {
                write!(f, "{separator}...")?;
            }
            if let Some(axes) = self.dims.get(dim) {
                let first = dim == 0 && self.rest != Some(0);
                f.write_str(if first { "" } else { ", " })?;
                f.write_str(if axes.is_empty() { "_" } else { "" })?;
                self.write_axes(f, dim)?;
            }
        }
        f.write_str("]")?;
        self.write_partial(f)
    }
}

impl FromStr for ShardingSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let error = || Error::Parse {
            what: "sharding",
            text: text.into(),
            expected: "an entry for each dimension, such as [@dp, _, @tp@sp]{sum:pp}".into(),
        };
        let (entries, partial) = text
            .trim()
            .strip_prefix('[')
            .and_then(|t| t.split_once(']'))
            .ok_or_else(error)?;
        let mut spec = Self::default();
        for entry in list(entries) {
            if entry == "..." && spec.rest.is_none() {
                spec.rest = Some(spec.dims.len());
                continue;
            }
            let axes = entry.strip_prefix('_').unwrap_or(entry);
            let (before, axes) = cut_axes(axes).ok_or_else(error)?;
            // An entry is `_`, or it begins with an axis.
            if !before.is_empty() || entry.is_empty() {
                return Err(error());
            }
            spec.dims.push(axes);
        }
        spec.partial = partial_axes(partial).ok_or_else(error)??;
        Ok(spec)
    }
}

/// The type of a tensor by the names of axes, before there is a mesh:
/// `f32[1024@dp, 4096@tp]{sum:sp}`.
///
/// ```
/// # use anymesh_core::{DType, Mesh, TypeSpec};
/// let weight: TypeSpec = "bf16[4096@tp?, 1024]".parse()?;
/// assert_eq!((weight.dtype, weight.shape.dims()), (DType::BF16, &[4096, 1024][..]));
/// let mesh = Mesh::new("tp=4", &anymesh_core::meta())?;
/// assert_eq!(weight.on(&mesh)?.to_string_on(&mesh), "bf16[4096@tp, 1024]");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypeSpec {
    /// The elements.
    pub dtype: DType,
    /// The global shape.
    pub shape: Shape,
    /// How it lies on a mesh.
    pub sharding: ShardingSpec,
}

impl TypeSpec {
    /// The type on a mesh. An axis that the mesh does not have is an error, unless it was written
    /// with `?`.
    pub fn on(&self, mesh: &Mesh) -> Result<TensorType> {
        Ok(TensorType {
            dtype: self.dtype,
            shape: self.shape.clone(),
            sharding: self.sharding.on(mesh, self.shape.rank())?,
        })
    }
}

/// As it is written: `f32[1024@dp, 4096@tp]{sum:sp}`.
impl fmt::Display for TypeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (dim, size) in self.shape.dims().iter().enumerate() {
            write!(f, "{}{size}", if dim == 0 { "" } else { ", " })?;
            self.sharding.write_axes(f, dim)?;
        }
        f.write_str("]")?;
        self.sharding.write_partial(f)
    }
}

impl FromStr for TypeSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let error = || Error::Parse {
            what: "tensor type",
            text: text.into(),
            expected: "dtype[size@axis, ..]{reduction:axis, ..}, such as f32[8@dp, 16@tp]{sum:sp}"
                .into(),
        };
        let (dtype, rest) = text.trim().split_once('[').ok_or_else(error)?;
        let (entries, partial) = rest.split_once(']').ok_or_else(error)?;
        let (mut shape, mut sharding) = (Dims::new(), ShardingSpec::default());
        for entry in list(entries) {
            let (size, axes) = cut_axes(entry).ok_or_else(error)?;
            shape.push(size.parse().map_err(|_| error())?);
            sharding.dims.push(axes);
        }
        sharding.partial = partial_axes(partial).ok_or_else(error)??;
        let shape = Shape::from(shape);
        shape.checked_numel("type")?;
        Ok(Self {
            dtype: dtype.trim().parse()?,
            shape,
            sharding,
        })
    }
}

/// What stands between commas; nothing at all is an empty list.
fn list(text: &str) -> impl Iterator<Item = &str> {
    let some = !text.trim().is_empty();
    text.split(',').map(str::trim).filter(move |_| some)
}

/// Reads `4096@tp@dp?`: what stands before the axes, and the axes.
fn cut_axes(entry: &str) -> Option<(&str, Vec<AxisName>)> {
    let mut parts = entry.split('@');
    let before = parts.next().unwrap_or("").trim();
    Some((before, parts.map(AxisName::parse).collect::<Option<_>>()?))
}

/// Reads `{sum:tp, sum:sp?}`, or nothing. `None` where it is not of this form; the error is that of
/// a reduction that does not exist.
fn partial_axes(text: &str) -> Option<Result<Vec<(Reduction, AxisName)>>> {
    let text = text.trim();
    if text.is_empty() {
        return Some(Ok(Vec::new()));
    }
    let inner = text.strip_prefix('{')?.strip_suffix('}')?;
    let mut partial = Vec::new();
    for part in inner.split(',') {
        let (reduction, axis) = part.split_once(':')?;
        let axis = AxisName::parse(axis)?;
        match reduction.trim().parse() {
            Ok(reduction) => partial.push((reduction, axis)),
            Err(error) => return Some(Err(error)),
        }
    }
    Some(Ok(partial))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_print_as_they_are_read() {
        for text in [
            "[]",
            "[_]",
            "[...]",
            "[@dp]",
            "[@dp, _, @tp@sp?]{sum:pp?}",
            "[..., @tp]",
            "[@dp, ...]",
            "[@dp, ..., @tp, _]{max:a, max:b}",
        ] {
            assert_eq!(text.parse::<ShardingSpec>().unwrap().to_string(), text);
        }
        for text in ["f32[]", "bf16[8@dp?, 4@tp@sp]{sum:pp}", "bool[0, 3]{or:a}"] {
            assert_eq!(text.parse::<TypeSpec>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_spec_is_refused() {
        for bad in [
            "",
            "@dp",
            "[@dp",
            "[@dp,]",
            "[dp]",
            "[@]",
            "[@d p]",
            "[__]",
            "[..., ...]",
            "[_]{}",
            "[_]{sum}",
            "[_]{mean:dp}",
            "[4@dp]",
            "[@dp??]",
        ] {
            assert!(bad.parse::<ShardingSpec>().is_err(), "{bad}");
        }
        for bad in ["f32", "f32[", "f32[,]", "f32[...]", "f32[_]", "f32[2,,3]"] {
            assert!(bad.parse::<TypeSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn dots_stand_for_the_dimensions_that_are_not_named() {
        let mesh = Mesh::new("a=2, b=2", &crate::meta()).unwrap();
        let on = |text: &str, rank| {
            let sharding = text.parse::<ShardingSpec>().unwrap().on(&mesh, rank)?;
            Ok(ShardingSpec::of(&sharding, &mesh, rank).to_string())
        };
        assert_eq!(on("[...]", 0), Ok("[]".to_string()));
        assert_eq!(on("[@a, ...]", 3), Ok("[@a, _, _]".into()));
        assert_eq!(on("[@a, ...]", 1), Ok("[@a]".into()));
        assert!(matches!(on("[@a, ...]", 0), Err(Error::Sharding { .. })));
        assert_eq!(on("[..., @b]", 1), Ok("[@b]".into()));
        assert_eq!(on("[@a, ..., @b]", 4), Ok("[@a, _, _, @b]".into()));
        assert!(matches!(
            on("[@a, ..., @b]", 1),
            Err(Error::Sharding { .. })
        ));
        assert!(matches!(on("[@a]", 2), Err(Error::Sharding { .. })));
        assert!(matches!(on("[@a@a]", 1), Err(Error::Sharding { .. })));
    }

    #[test]
    fn an_axis_that_may_be_missing_is_left_out_and_another_is_named_in_the_error() {
        let mesh = Mesh::new("dp=2", &crate::meta()).unwrap();
        let ty = |text: &str| Ok(text.parse::<TypeSpec>()?.on(&mesh)?.to_string_on(&mesh));
        assert_eq!(
            ty("f32[8@dp@tp?, 4@ep?]{sum:sp?}"),
            Ok("f32[8@dp, 4]".to_string())
        );
        assert_eq!(
            ty("f32[8@dp?, 4@tp]"),
            Err(Error::NoSuchAxis {
                axis: "tp".into(),
                mesh: "mesh(dp=2)".into()
            })
        );
    }
}
