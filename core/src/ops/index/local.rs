//! Lookups on one device, which may hold only a part of what is indexed.

use super::super::{
    Map,
    elementwise::{Key, Slot, cached},
    launch::{check_index, launch},
    map1, same_device,
};
use crate::{
    DType, Error, Layout, Result, Scalar, Shape, Tensor,
    backend::{CheckIndexCall, GatherCall, IndexAxis},
};
use smallvec::SmallVec;
use std::ops::Range;

/// The part of a dimension that a rank holds, and the whole size.
pub(in crate::ops) type Part = (Range<usize>, usize);

/// A dimension of the source, its index, and the part of the dimension that is here where that is
/// not all.
pub(in crate::ops) struct Indexed<'a> {
    pub(in crate::ops) axis: usize,
    pub(in crate::ops) index: &'a Tensor,
    pub(in crate::ops) part: Option<Part>,
}

/// An index tensor as a kernel's operand over `shape`, for a dimension of size `len`.
pub(in crate::ops) fn index_axis(
    index: &Tensor,
    shape: &Shape,
    len: usize,
    stride: isize,
) -> Result<IndexAxis> {
    let mut indices = index.view()?;
    indices.layout = indices.layout.expand(shape);
    Ok(IndexAxis {
        indices,
        len,
        stride,
    })
}

/// An empty dimension has no element to take, whatever the index is.
pub(in crate::ops) fn check_not_empty(op: &'static str, tensor: &Tensor) -> Result<()> {
    if tensor.numel() == 0 {
        return Err(Error::Shape {
            op,
            detail: format!("{} has no elements to index", tensor.type_string()),
        });
    }
    Ok(())
}

/// Indices into a whole dimension seen from a rank that holds a part of it: the place in that part
/// (0 where it is elsewhere), and whether it is here. Places outside the whole dimension are a
/// fault.
pub(in crate::ops) fn localize(
    op: &'static str,
    index: &Tensor,
    (part, whole): &Part,
) -> Result<(Tensor, Tensor)> {
    if index.numel() > 0 {
        // The ranks that do not hold a place would not notice that it is nowhere.
        let call = CheckIndexCall {
            op,
            indices: index.view()?,
            len: *whole,
        };
        check_index(index.device(), call)?;
    }
    let wide = index.dtype() == DType::I64 || i32::try_from(*whole).is_err();
    let dtype = if wide { DType::I64 } else { DType::I32 };
    let program = cached(
        Key {
            op: "part of an index",
            dtype,
            slots: [
                Slot::Load(index.dtype()),
                Slot::Empty,
                Slot::Empty,
                Slot::Empty,
            ],
        },
        |b| {
            let (x, whole, start, end) = (
                b.load(index.dtype()).cast(dtype),
                b.param(dtype.kind()),
                b.param(dtype.kind()),
                b.param(dtype.kind()),
            );
            let place = x.lt(0).select(x + whole, x);
            let here = place.ge(start).and(place.lt(end));
            b.finish(&[
                (here.select(place - start, place.lit(0i64)), dtype),
                (here, DType::Bool),
            ])
        },
    )?;
    let params = [*whole, part.start, part.end].map(|n| Scalar::Int(n as i64));
    let mut out = Map {
        params: &params,
        ..Map::new(op, &program, index.shape())
    }
    .run(&[index.into()], index.device())?;
    let here = out.remove(1);
    Ok((out.remove(0), here))
}

/// What a rank gives for elements it does not hold: added to any number, -0 changes nothing, not
/// even the sign of a zero.
fn absent(dtype: DType) -> Scalar {
    match dtype {
        DType::Bool => Scalar::Bool(false),
        _ if dtype.is_float() => Scalar::Float(-0.0),
        _ => Scalar::Int(0),
    }
}

/// Runs a gather: `layout` reads `src` over the output's shape with stride 0 in the indexed
/// dimensions; `axes` pairs dimensions of `src` with index tensors that broadcast to that shape.
pub(in crate::ops) fn run_gather(
    op: &'static str,
    src: &Tensor,
    layout: Layout,
    axes: &[Indexed<'_>],
) -> Result<Tensor> {
    let (shape, dtype) = (layout.shape.clone(), src.dtype());
    let elements = shape.checked_numel(op)?;
    for indexed in axes {
        same_device(op, &[src, indexed.index])?;
    }
    if elements == 0 {
        return src.no_elements(dtype, shape);
    }
    let mut masks = SmallVec::<[Tensor; 1]>::new();
    let mut places = SmallVec::<[Tensor; 1]>::new();
    for Indexed { index, part, .. } in axes {
        let Some(part) = part else {
            places.push((*index).clone());
            continue;
        };
        let (place, here) = localize(op, index, part)?;
        places.push(place);
        masks.push(here);
    }
    if axes.iter().any(|a| {
        a.part
            .as_ref()
            .is_some_and(|(part, whole)| part.is_empty() && *whole > 0)
    }) {
        return Tensor::full(shape, absent(dtype), dtype, src.device());
    }
    check_not_empty(op, src)?;
    let mut view = src.view()?;
    view.layout = layout;
    let steps = |(Indexed { axis, .. }, place): (&Indexed<'_>, &Tensor)| {
        index_axis(
            place,
            &shape,
            src.shape()[*axis],
            src.layout().strides[*axis],
        )
    };
    let call = GatherCall {
        op,
        src: view,
        axes: axes.iter().zip(&places).map(steps).collect::<Result<_>>()?,
    };
    let found = launch(src.mesh(), call)?.remove(0);
    masks.iter().try_fold(found, |found, here| {
        let slots = [
            Slot::Load(DType::Bool),
            Slot::Load(dtype),
            Slot::Empty,
            Slot::Empty,
        ];
        let program = cached(
            Key {
                op: "what is here",
                dtype,
                slots,
            },
            |b| {
                let (here, x) = (b.load(DType::Bool), b.load(dtype));
                b.finish(&[(here.select(x, x.lit(absent(dtype))), dtype)])
            },
        )?;
        map1(op, &program, &[here, &found], &[])
    })
}

/// Picks along one axis of `src`, whose other dimensions are at least those of the index.
pub(in crate::ops) fn pick(
    op: &'static str,
    src: &Tensor,
    axis: usize,
    index: &Tensor,
    part: Option<Part>,
) -> Result<Tensor> {
    let mut layout = Layout {
        shape: index.shape().clone(),
        ..src.layout().clone()
    };
    layout.strides[axis] = 0;
    run_gather(op, src, layout, &[Indexed { axis, index, part }])
}

/// Picks along one axis; the other dimensions of `src` and the index broadcast.
pub(in crate::ops) fn take(
    op: &'static str,
    src: &Tensor,
    axis: usize,
    index: &Tensor,
    part: Option<Part>,
) -> Result<Tensor> {
    let shape = src
        .shape()
        .with(axis, 1)
        .broadcast(op, &index.shape().with(axis, 1))?
        .with(axis, index.shape()[axis]);
    let mut layout = src.layout().clone();
    (layout.shape, layout.strides[axis]) = (layout.shape.with(axis, 1), 0);
    let mut layout = Layout {
        shape: shape.clone(),
        ..layout.expand(&shape.with(axis, 1))
    };
    layout.strides[axis] = 0;
    run_gather(op, src, layout, &[Indexed { axis, index, part }])
}
