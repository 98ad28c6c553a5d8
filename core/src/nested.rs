//! Tensors from nested arrays.

use crate::{Dims, Element, Error, F8E4M3, F8E5M2, IntoPlace, Result, Shape, Tensor, bf16, f16};

/// Arrays, slices and vectors of elements, nested to any depth, and single elements: what
/// [`Tensor::new`] takes.
pub trait Nested {
    /// The type of the elements.
    type Element: Element;

    /// Adds the sizes of this level and of those inside of it, as the first value of each level has
    /// them. Without a value only arrays know theirs; others are empty.
    fn sizes(first: Option<&Self>, sizes: &mut Dims);

    /// Adds the elements in row-major order. An error where a size is not the one in `sizes`.
    fn collect(&self, sizes: &[usize], elements: &mut Vec<Self::Element>) -> Result<()>;
}

macro_rules! nested_elements {
    ($($t:ty),*) => {$(
        impl Nested for $t {
            type Element = $t;

            fn sizes(_: Option<&Self>, _: &mut Dims) {}

            fn collect(&self, _: &[usize], elements: &mut Vec<$t>) -> Result<()> {
                elements.push(*self);
                Ok(())
            }
        }
    )*};
}
nested_elements!(bool, u8, u32, i32, i64, F8E4M3, F8E5M2, f16, bf16, f32, f64);

impl<N: Nested + ?Sized> Nested for &N {
    type Element = N::Element;

    fn sizes(first: Option<&Self>, sizes: &mut Dims) {
        N::sizes(first.copied(), sizes);
    }

    fn collect(&self, sizes: &[usize], elements: &mut Vec<Self::Element>) -> Result<()> {
        N::collect(self, sizes, elements)
    }
}

impl<N: Nested> Nested for [N] {
    type Element = N::Element;

    fn sizes(first: Option<&Self>, sizes: &mut Dims) {
        sizes.push(first.map_or(0, <[N]>::len));
        N::sizes(first.and_then(<[N]>::first), sizes);
    }

    fn collect(&self, sizes: &[usize], elements: &mut Vec<Self::Element>) -> Result<()> {
        let (&size, inner) = sizes.split_first().unwrap_or((&0, &[]));
        if self.len() != size {
            return Err(Error::shape(
                "new",
                [&Shape::from(sizes), &Shape::from([self.len()])],
                format!(
                    "a row of {} where the first one has {size}: all rows must have the same length",
                    self.len()
                ),
            ));
        }
        elements.reserve(self.len());
        self.iter().try_for_each(|n| n.collect(inner, elements))
    }
}

impl<N: Nested, const SIZE: usize> Nested for [N; SIZE] {
    type Element = N::Element;

    fn sizes(first: Option<&Self>, sizes: &mut Dims) {
        sizes.push(SIZE);
        N::sizes(first.and_then(|array| array.first()), sizes);
    }

    fn collect(&self, sizes: &[usize], elements: &mut Vec<Self::Element>) -> Result<()> {
        self.as_slice().collect(sizes, elements)
    }
}

impl<N: Nested> Nested for Vec<N> {
    type Element = N::Element;

    fn sizes(first: Option<&Self>, sizes: &mut Dims) {
        <[N]>::sizes(first.map(Vec::as_slice), sizes);
    }

    fn collect(&self, sizes: &[usize], elements: &mut Vec<Self::Element>) -> Result<()> {
        self.as_slice().collect(sizes, elements)
    }
}

impl Tensor {
    /// A tensor from nested arrays, slices or vectors, or from a single element (0-d). The dtype is
    /// that of the elements: write `1f32` where Rust would take a literal for an `f64`.
    ///
    /// ```
    /// # use anymesh_core::{Mesh, Tensor};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &device)?;
    /// assert_eq!(x.type_string(), "f32[2, 2]");
    /// assert_eq!(Tensor::new(vec![vec![1, 2, 3]], &device)?.type_string(), "i32[1, 3]");
    /// assert_eq!(Tensor::new(true, &device)?.type_string(), "bool[]");
    ///
    /// let mesh = Mesh::new("x=2", &device)?;
    /// let rows = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], (&mesh, "[@x, _]"))?;
    /// assert_eq!(rows.shards()[1].1.to_vec::<f32>()?, [3.0, 4.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn new<N: Nested>(values: N, place: impl IntoPlace) -> Result<Self> {
        let mut sizes = Dims::new();
        N::sizes(Some(&values), &mut sizes);
        let mut elements = Vec::new();
        values.collect(&sizes, &mut elements)?;
        Self::from_slice(&elements, Shape::from(sizes), place)
    }
}
