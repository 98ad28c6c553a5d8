//! A transformer layer with separate projections and a gated MLP, as a program that is the same on
//! every mesh.

use anymesh_core::{
    DType, Mesh, Result, Tensor,
    ops::{AttentionOptions, NormOptions},
};

/// How large it is.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) sequences: usize,
    pub(crate) length: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) hidden: usize,
    pub(crate) dtype: DType,
}

/// How it lies on the mesh: the stream between blocks, weights whose rows are outputs of a column
/// cut, weights of a row cut, and the factors of norms.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    pub(crate) stream: &'static str,
    pub(crate) columns: &'static str,
    pub(crate) rows: &'static str,
    pub(crate) norms: &'static str,
}

/// Layouts over the axes `dp` and `tp`.
pub(crate) const LAYOUTS: [Layout; 3] = [
    Layout {
        name: "tensor parallel",
        stream: "[@dp, _, _]",
        columns: "[@tp, _]",
        rows: "[_, @tp]",
        norms: "[_]",
    },
    Layout {
        name: "tensor and sequence parallel",
        stream: "[@dp, @tp, _]",
        columns: "[@tp, _]",
        rows: "[_, @tp]",
        norms: "[_]",
    },
    Layout {
        name: "weights over dp too",
        stream: "[@dp, _, _]",
        columns: "[@tp, @dp]",
        rows: "[@dp, @tp]",
        norms: "[@dp]",
    },
];

/// The parameters in the order in which the layer uses them, and its input: all are leaves.
pub(crate) fn parameters(sizes: &Sizes, layout: &Layout, mesh: &Mesh) -> Result<Vec<Tensor>> {
    let Sizes {
        width,
        hidden,
        dtype,
        ..
    } = *sizes;
    let weight = |rows: usize, columns: usize, place: &str| {
        Tensor::full([rows, columns], 0.01, dtype, (mesh, place))?.require_grad()
    };
    let norm = || Tensor::ones([width], dtype, (mesh, layout.norms))?.require_grad();
    Ok(vec![
        norm()?,
        weight(width, width, layout.columns)?,
        weight(width, width, layout.columns)?,
        weight(width, width, layout.columns)?,
        weight(width, width, layout.rows)?,
        norm()?,
        weight(hidden, width, layout.columns)?,
        weight(hidden, width, layout.columns)?,
        weight(width, hidden, layout.rows)?,
        Tensor::ones(
            [sizes.sequences, sizes.length, width],
            dtype,
            (mesh, layout.stream),
        )?
        .require_grad()?,
    ])
}

/// The layer, lying as its input does.
pub(crate) fn forward(sizes: &Sizes, layout: &Layout, p: &[Tensor]) -> Result<Tensor> {
    let (x, depth) = (&p[9], sizes.width / sizes.heads);
    let h = x.rms_norm(&NormOptions::new().weight(&p[0]))?;
    let heads = |w: &Tensor| {
        h.linear(w, None)?
            .reshape([sizes.sequences, sizes.length, sizes.heads, depth])?
            .transpose(1, 2)
    };
    let seen = heads(&p[1])?
        .attention(&heads(&p[2])?, &heads(&p[3])?, &AttentionOptions::causal())?
        .out;
    let mixed = seen
        .transpose(1, 2)?
        .reshape([sizes.sequences, sizes.length, sizes.width])?
        .linear(&p[4], None)?;
    let x = x.add(&mixed)?.reshard(layout.stream)?;
    let h = x.rms_norm(&NormOptions::new().weight(&p[5]))?;
    let gated = h.linear(&p[6], None)?.swiglu2(&h.linear(&p[7], None)?)?;
    x.add(&gated.linear(&p[8], None)?)?.reshard(layout.stream)
}

/// Forward and backward; the gradient of every parameter and of the input, as each of them lies.
pub(crate) fn step(sizes: &Sizes, layout: &Layout, p: &[Tensor]) -> Result<Vec<Tensor>> {
    let y = forward(sizes, layout, p)?;
    let gradients = y.backward_with(&y.detach())?;
    p.iter().map(|w| gradients.of(w)).collect()
}
