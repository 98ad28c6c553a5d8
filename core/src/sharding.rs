//! How a tensor lies on a mesh.

use crate::{
    DType, Dims, Error, Layout, Mesh, Result, Scalar, Shape, ShardingSpec, TypeSpec,
    operand::sharding_text,
};
use smallvec::SmallVec;
use std::ops::Range;

/// The most dimensions of a tensor on a mesh. Plain tensors have no such limit.
pub const MAX_RANK: usize = 32;

/// What a tensor on a mesh with more than [`MAX_RANK`] dimensions is answered with.
pub(crate) fn too_many_dimensions(rank: usize) -> Error {
    Error::Sharding {
        sharding: String::new(),
        detail: format!(
            "a tensor of rank {rank} on a mesh: at most {MAX_RANK} dimensions, join some of them with `reshape`"
        ),
    }
}

/// How partial values on the ranks of an axis combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Reduction {
    Sum,
    Max,
    Min,
    Prod,
    And,
    Or,
}

impl Reduction {
    /// Every reduction.
    pub const ALL: [Reduction; 6] = [
        Reduction::Sum,
        Reduction::Max,
        Reduction::Min,
        Reduction::Prod,
        Reduction::And,
        Reduction::Or,
    ];

    /// The same, to take slices of.
    pub(crate) const ALL_STATIC: &'static [Reduction] = &Self::ALL;

    /// The name in types and rules.
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Max => "max",
            Reduction::Min => "min",
            Reduction::Prod => "prod",
            Reduction::And => "and",
            Reduction::Or => "or",
        }
    }

    /// The value that changes nothing, in `dtype`.
    pub fn identity(self, dtype: DType) -> Scalar {
        let bounds = |low: i64, high: i64| {
            if self == Reduction::Max {
                Scalar::Int(low)
            } else {
                Scalar::Int(high)
            }
        };
        match (self, dtype) {
            (Reduction::Sum | Reduction::Or, _) => Scalar::Int(0),
            (Reduction::Prod | Reduction::And, _) => Scalar::Int(1),
            (_, DType::Bool) => Scalar::Bool(self == Reduction::Min),
            (_, DType::U8) => bounds(0, 255),
            (_, DType::U32) => bounds(0, u32::MAX.into()),
            (_, DType::I32) => bounds(i32::MIN.into(), i32::MAX.into()),
            (_, DType::I64) => bounds(i64::MIN, i64::MAX),
            // There is no infinity in this type; its largest value is one.
            (Reduction::Max, DType::F8E4M3) => Scalar::Float(-448.0),
            (_, DType::F8E4M3) => Scalar::Float(448.0),
            (Reduction::Max, _) => Scalar::Float(f64::NEG_INFINITY),
            (_, _) => Scalar::Float(f64::INFINITY),
        }
    }
}

impl std::str::FromStr for Reduction {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = || Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|r| r.name() == text)
            .ok_or_else(|| Error::Parse {
                what: "reduction",
                text: text.into(),
                expected: all(),
            })
    }
}

impl std::fmt::Display for Reduction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// What one mesh axis does to a tensor: the per-axis view of a [`Sharding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank along the axis holds the same.
    Replicate,
    /// The axis cuts this dimension.
    Shard(usize),
    /// The ranks hold parts of a reduction.
    Partial(Reduction),
}

/// For each tensor dimension the mesh axes that cut it (major first), and the axes over which
/// values are partial.
///
/// Axes are counted as in the mesh. An axis is used at most once; an axis that is not used
/// replicates. All partial axes have the same reduction.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Sharding {
    /// (dimension, axis), sorted by dimension; the axes of one dimension in their order.
    cuts: SmallVec<[(u8, u8); 4]>,
    /// Sorted by axis.
    partial: SmallVec<[(u8, Reduction); 2]>,
}

/// A dimension or an axis as shardings hold it. No tensor on a mesh has as many as the largest, so
/// it stands for all that are not there either.
fn named(n: usize) -> u8 {
    u8::try_from(n).unwrap_or(u8::MAX)
}

impl Sharding {
    /// The whole tensor on every rank.
    pub fn replicated() -> Self {
        Self::default()
    }

    /// With dimension `dim` also cut by mesh axis `axis`, inside the cuts it already has.
    pub fn cut(mut self, dim: usize, axis: usize) -> Self {
        let (dim, axis) = (named(dim), named(axis));
        let at = self.cuts.partition_point(|(d, _)| *d <= dim);
        self.cuts.insert(at, (dim, axis));
        self
    }

    /// With partial values along mesh axis `axis`.
    pub fn partial_over(mut self, axis: usize, reduction: Reduction) -> Self {
        let axis = named(axis);
        let at = self.partial.partition_point(|(a, _)| *a < axis);
        self.partial.insert(at, (axis, reduction));
        self
    }

    /// Without what mesh axis `axis` does.
    pub fn without(&self, axis: usize) -> Self {
        let mut out = self.clone();
        out.cuts.retain(|(_, a)| *a as usize != axis);
        out.partial.retain(|(a, _)| *a as usize != axis);
        out
    }

    /// The same cuts with nothing partial.
    pub fn whole(&self) -> Self {
        Self {
            cuts: self.cuts.clone(),
            partial: SmallVec::new(),
        }
    }

    /// From what each mesh axis does; axes that cut the same dimension do so in mesh order.
    pub fn from_placements(placements: &[Placement]) -> Self {
        placements
            .iter()
            .enumerate()
            .fold(Self::default(), |s, (axis, placement)| match *placement {
                Placement::Replicate => s,
                Placement::Shard(dim) => s.cut(dim, axis),
                Placement::Partial(reduction) => s.partial_over(axis, reduction),
            })
    }

    /// What each of the `axes` mesh axes does; the order of axes that cut the same dimension is not
    /// told.
    pub fn placements(&self, axes: usize) -> Vec<Placement> {
        (0..axes).map(|axis| self.placement(axis)).collect()
    }

    /// What one mesh axis does.
    pub fn placement(&self, axis: usize) -> Placement {
        if let Some((dim, _)) = self.cuts.iter().find(|(_, a)| *a as usize == axis) {
            return Placement::Shard(*dim as usize);
        }
        match self.partial.iter().find(|(a, _)| *a as usize == axis) {
            Some((_, reduction)) => Placement::Partial(*reduction),
            None => Placement::Replicate,
        }
    }

    /// The mesh axes that cut tensor dimension `dim`, major first.
    pub fn axes_of(&self, dim: usize) -> impl DoubleEndedIterator<Item = usize> + Clone + '_ {
        self.cuts
            .iter()
            .filter(move |(d, _)| *d as usize == dim)
            .map(|(_, a)| *a as usize)
    }

    /// (dimension, axis) of every cut, by dimension, major first.
    pub fn cuts(&self) -> impl ExactSizeIterator<Item = (usize, usize)> + Clone + '_ {
        self.cuts.iter().map(|(d, a)| (*d as usize, *a as usize))
    }

    /// The (dimension, axis) pairs of one dimension, major first.
    pub(crate) fn cuts_of(&self, dim: usize) -> &[(u8, u8)] {
        let start = self.cuts.partition_point(|(d, _)| (*d as usize) < dim);
        let end = self.cuts.partition_point(|(d, _)| *d as usize <= dim);
        &self.cuts[start..end]
    }

    /// Mesh axes that cut some dimension, a bit for each.
    pub(crate) fn cut_mask(&self) -> u32 {
        self.cuts.iter().fold(0, |mask, (_, a)| mask | 1 << a)
    }

    /// Mesh axes over which values are partial, a bit for each.
    pub(crate) fn partial_mask(&self) -> u32 {
        self.partial.iter().fold(0, |mask, (a, _)| mask | 1 << a)
    }

    /// Without what the mesh axes of `mask` do.
    pub(crate) fn without_mask(&self, mask: u32) -> Self {
        let mut out = self.clone();
        out.cuts.retain(|(_, a)| mask & 1 << *a == 0);
        out.partial.retain(|(a, _)| mask & 1 << *a == 0);
        out
    }

    /// Mesh axes whose ranks hold parts of a reduction.
    pub fn partial(&self) -> impl ExactSizeIterator<Item = (usize, Reduction)> + Clone + '_ {
        self.partial.iter().map(|(a, r)| (*a as usize, *r))
    }

    /// Whether values are partial over some axis.
    pub fn is_partial(&self) -> bool {
        !self.partial.is_empty()
    }

    /// Whether every rank holds everything.
    pub fn is_replicated(&self) -> bool {
        self.cuts.is_empty() && self.partial.is_empty()
    }

    /// Refuses axes the mesh does not have or that are used twice, and dimensions the tensor does
    /// not have.
    pub fn check(&self, mesh: &Mesh, rank: usize) -> Result<()> {
        let fail = |detail: String| {
            let sharding = sharding_text(self, rank, mesh);
            Err(Error::Sharding { sharding, detail })
        };
        if rank > MAX_RANK && !mesh.is_single() {
            return Err(too_many_dimensions(rank));
        }
        let mut used = 0u32;
        for axis in self
            .cuts
            .iter()
            .map(|(_, a)| *a)
            .chain(self.partial.iter().map(|(a, _)| *a))
        {
            let Some((name, _)) = mesh.axes().get(axis as usize) else {
                return fail(format!("there is no mesh axis {axis} in {mesh}"));
            };
            if used & 1 << axis != 0 {
                return fail(format!(
                    "mesh axis {name} is used twice: an axis cuts one dimension or carries one reduction"
                ));
            }
            used |= 1 << axis;
        }
        if let Some((_, other)) = self.partial.iter().find(|(_, r)| *r != self.partial[0].1) {
            return fail(format!(
                "partial {} and {other} at once: their order would matter, so a tensor has partial values of one reduction",
                self.partial[0].1
            ));
        }
        match self.cuts.iter().find(|(d, _)| *d as usize >= rank) {
            Some((d, a)) => fail(format!(
                "mesh axis {} cuts dimension {d} of a tensor of rank {rank}",
                mesh.axes()[*a as usize].0
            )),
            None => Ok(()),
        }
    }

    /// Which part of a dimension of size `n` a rank holds.
    pub fn range(&self, mesh: &Mesh, rank: usize, dim: usize, n: usize) -> Range<usize> {
        let (part, parts) = mesh.part(rank, self.axes_of(dim));
        split(n, part, parts)
    }

    /// Elements of the largest part.
    pub(crate) fn largest_part(&self, mesh: &Mesh, shape: &Shape) -> u64 {
        let part = |d: usize| {
            let parts = self.axes_of(d).map(|a| mesh.size(a)).product();
            shape[d].div_ceil(parts) as u64
        };
        (0..shape.rank()).map(part).product()
    }

    /// Which part of a tensor a rank holds.
    pub fn region(&self, mesh: &Mesh, rank: usize, shape: &Shape) -> Region {
        let mut region = Region {
            start: smallvec::smallvec![0; shape.rank()],
            shape: shape.dims().into(),
        };
        let mut i = 0;
        while let Some(&(dim, _)) = self.cuts.get(i) {
            let range = self.range(mesh, rank, dim as usize, shape[dim as usize]);
            region.start[dim as usize] = range.start;
            region.shape[dim as usize] = range.len();
            while self.cuts.get(i).is_some_and(|(d, _)| *d == dim) {
                i += 1;
            }
        }
        region
    }

    /// The type of a tensor as text: `f32[1024@dp, 4096@tp]{sum:sp}`.
    pub fn type_string(&self, dtype: DType, shape: &Shape, mesh: &Mesh) -> String {
        let sharding = ShardingSpec::of(self, mesh, shape.rank());
        let shape = shape.clone();
        TypeSpec {
            dtype,
            shape,
            sharding,
        }
        .to_string()
    }
}

/// Part `part` of `parts` of `n` things: `[part * n / parts, (part + 1) * n / parts)`.
///
/// It is balanced, any `n` will do, and it refines: a cut by `(a, b)` joined over `b` is the cut by
/// `a`.
pub fn split(n: usize, part: usize, parts: usize) -> Range<usize> {
    // part * n / parts without overflow.
    let at = |i: usize| i * (n / parts) + i * (n % parts) / parts;
    at(part)..at(part + 1)
}

/// A box of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Region {
    /// Its first element.
    pub start: Dims,
    /// Its size.
    pub shape: Dims,
}

impl Region {
    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The part of a layout that the box is.
    pub(crate) fn of(&self, layout: &Layout) -> Layout {
        let mut part = layout.clone();
        for d in 0..self.shape.len() {
            if self.shape[d] != part.shape[d] {
                part = part.slice(d, self.start[d], 1, self.shape[d]);
            }
        }
        part
    }

    /// What two boxes have in common, `None` where that is nothing.
    pub fn intersect(&self, other: &Region) -> Option<Region> {
        let mut out = self.clone();
        for d in 0..self.start.len() {
            let start = self.start[d].max(other.start[d]);
            let end = (self.start[d] + self.shape[d]).min(other.start[d] + other.shape[d]);
            if start >= end {
                return None;
            }
            (out.start[d], out.shape[d]) = (start, end - start);
        }
        Some(out)
    }
}

/// Dtype, shape and sharding: what `f32[1024@dp, 4096@tp]{sum:sp}` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// The elements.
    pub dtype: DType,
    /// The global shape.
    pub shape: Shape,
    /// How it lies on the mesh.
    pub sharding: Sharding,
}

impl TensorType {
    /// Reads a type; axis names are those of `mesh`. [`TypeSpec`] reads one before there is a mesh.
    ///
    /// ```
    /// # use anymesh_core::{Mesh, TensorType};
    /// # let mesh = Mesh::new("dp=2, tp=4, sp=2", &anymesh_backend_cpu::device())?;
    /// let t = TensorType::parse("f32[1024@dp, 4096@tp]{sum:sp}", &mesh)?;
    /// assert_eq!(t.to_string_on(&mesh), "f32[1024@dp, 4096@tp]{sum:sp}");
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Self> {
        text.parse::<TypeSpec>()?.on(mesh)
    }

    /// As text, with the names of the axes of `mesh`.
    pub fn to_string_on(&self, mesh: &Mesh) -> String {
        self.sharding.type_string(self.dtype, &self.shape, mesh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_by_two_axes_joined_over_the_minor_one_is_the_cut_by_the_major_one() {
        for n in 0..40 {
            for (a, b) in [(2, 3), (3, 2), (4, 4), (1, 5)] {
                for i in 0..a {
                    let joined = split(n, i * b, a * b).start..split(n, i * b + b - 1, a * b).end;
                    assert_eq!(joined, split(n, i, a), "n = {n}, {a} x {b}");
                }
            }
        }
    }

    #[test]
    fn parts_of_the_largest_sizes_do_not_overflow() {
        let n = usize::MAX / 8;
        assert_eq!(split(n, 4095, 4096).end, n);
    }
}
