//! Views, movement, creation and random ops on meshes: every placement gives what one device gives.

mod create;

use crate::support::{device, hold, same, whole_numbers as numbers};
use anymesh_conformance::sweep::{Precision, reductions, shardings};
use anymesh_core::{
    DType, Error, IntoPlace, Mesh, Place, Result, Sharding, Tensor,
    ops::{Indexing, PadMode, Rng, RopeOptions, RopeStyle},
    spmd::{Ledger, Policy, with_policy},
};

fn meshes() -> Vec<Mesh> {
    ["a=2", "a=3", "a=2, b=2"]
        .map(|axes| Mesh::new(axes, &device()).unwrap())
        .into()
}

/// The op of tensors on every mesh, in many ways, gives what it gives for plain ones, bit by bit.
#[track_caller]
fn sweep(what: &str, inputs: &[Tensor], op: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>) {
    hold(what, Precision::Bits, 700, inputs, op);
}

/// [`sweep`] for an op of one tensor with one result, for several shapes.
fn sweep_one(what: &str, shapes: &[&[usize]], op: impl Fn(&Tensor) -> Result<Tensor>) {
    for shape in shapes {
        sweep(what, &[numbers(shape)], |x| Ok(vec![op(&x[0])?]));
    }
}

/// What an op gives for a tensor on a mesh, without communication.
fn free(
    axes: &str,
    shape: &[usize],
    sharding: &str,
    op: impl Fn(&Tensor) -> Result<Tensor>,
) -> String {
    let mesh = Mesh::new(axes, &device()).unwrap();
    let x = numbers(shape);
    let s = x.to_mesh(&mesh, sharding).unwrap();
    let (y, ledger) = Ledger::record(|| with_policy(Policy::Explicit, &[], || op(&s)).unwrap());
    assert_eq!(
        (ledger.bytes(), ledger.entries),
        (0, vec![]),
        "{}",
        s.type_string()
    );
    assert_eq!(
        y.to_bytes().unwrap(),
        op(&x).unwrap().to_bytes().unwrap(),
        "{}",
        y.type_string()
    );
    y.type_string()
}

#[test]
fn reshapes_of_every_placement_are_right() {
    let pairs: &[(&[usize], &[usize])] = &[
        (&[4, 6], &[24]),
        (&[24], &[4, 6]),
        (&[4, 6], &[2, 2, 6]),
        (&[4, 6], &[6, 4]),
        (&[4, 6], &[8, 3]),
        (&[5, 4], &[20]),
        (&[20], &[5, 4]),
        (&[3, 2, 2], &[3, 4]),
        (&[2, 3, 5], &[3, 2, 5]),
        (&[6], &[1, 6, 1]),
        (&[1, 4, 1], &[4]),
        (&[1, 1], &[1]),
        (&[1], &[]),
        (&[], &[1, 1]),
        (&[0, 4], &[4, 0, 2]),
        (&[1, 2, 9], &[3, 6, 1]),
    ];
    for (from, to) in pairs {
        sweep(
            &format!("reshape {from:?} -> {to:?}"),
            &[numbers(from)],
            |x| Ok(vec![x[0].reshape(*to)?]),
        );
    }
}

#[test]
fn flatten_of_a_sharded_inner_dimension_is_right() {
    sweep_one(
        "flatten",
        &[&[2, 4, 3], &[3, 5, 2], &[2, 1, 7], &[0, 2, 3], &[1, 2, 2]],
        |x| x.flatten(0, -1),
    );
    sweep_one(
        "flatten of the last two",
        &[&[2, 4, 3], &[3, 5, 2], &[2, 2, 7]],
        |x| x.flatten(1, 2),
    );
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let inner = numbers(&[2, 4]).to_mesh(&mesh, "[_, @x]").unwrap();
    assert!(
        with_policy(Policy::Explicit, &[], || inner.flatten(0, 1)).is_err(),
        "it cannot be free"
    );
}

#[test]
fn a_reshape_keeps_a_sharding_that_needs_no_communication() {
    let to = |dims: &'static [usize]| move |x: &Tensor| x.reshape(dims);
    assert_eq!(free("x=2", &[4, 6], "[@x, _]", to(&[24])), "f32[24@x]");
    assert_eq!(free("x=2", &[24], "[@x]", to(&[4, 6])), "f32[4@x, 6]");
    assert_eq!(
        free("x=2", &[4, 6], "[_, @x]", to(&[4, 2, 3])),
        "f32[4, 2@x, 3]"
    );
    assert_eq!(
        free("x=2", &[4, 2, 3], "[_, @x, _]", to(&[4, 6])),
        "f32[4, 6@x]"
    );
    assert_eq!(
        free("x=2, y=3", &[6], "[@x@y]", to(&[2, 3])),
        "f32[2@x, 3@y]"
    );
    assert_eq!(
        free("x=2, y=3", &[2, 3], "[@x, @y]", to(&[6])),
        "f32[6@x@y]"
    );
    assert_eq!(
        free("x=2, y=2", &[2, 5], "[@x, @y]", to(&[10])),
        "f32[10@x@y]",
        "uneven parts of the last factor"
    );
    assert_eq!(
        free("x=2", &[4, 3], "[@x, _]", to(&[6, 2])),
        "f32[6@x, 2]",
        "half of either"
    );
    assert_eq!(
        free("x=2", &[5, 4], "[@x, _]", to(&[5, 2, 2])),
        "f32[5@x, 2, 2]",
        "uneven, but untouched"
    );
    assert_eq!(
        free("x=4", &[2, 6], "[@x, _]", to(&[2, 3, 2])),
        "f32[2@x, 3, 2]",
        "fewer rows than ranks"
    );
    assert_eq!(
        free("x=2", &[1, 6], "[@x, _]", to(&[1, 2, 3])),
        "f32[1@x, 2, 3]",
        "a single row"
    );
    assert_eq!(
        free("x=2, y=2", &[4, 6], "[@x, _]{sum:y}", to(&[2, 12])),
        "f32[2@x, 12]{sum:y}"
    );
    assert_eq!(
        free("x=2", &[4, 6], "[_, _]{max:x}", to(&[24])),
        "f32[24]{max:x}"
    );
}

#[test]
fn an_uneven_flatten_moves_data_and_is_right() {
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let x = numbers(&[5, 4]);
    let s = x.to_mesh(&mesh, "[@x, _]").unwrap();
    let (y, ledger) = Ledger::record(|| s.flatten(0, 1).unwrap());
    assert!(
        ledger.bytes() > 0
            && ledger
                .entries
                .iter()
                .all(|e| e.op == "flatten" && e.caller.contains(file!())),
        "{ledger}"
    );
    assert_eq!(y.to_bytes().unwrap(), x.to_bytes().unwrap());
}

#[test]
fn views_that_rearrange_dimensions_are_right_and_free() {
    let shapes: &[&[usize]] = &[&[4, 3, 2], &[5, 1, 2], &[0, 3, 1], &[1, 1, 1]];
    sweep_one("permute", shapes, |x| x.permute(&[2, 0, 1]));
    sweep_one("transpose", shapes, |x| x.transpose(0, -1));
    sweep_one("t", shapes, Tensor::t);
    sweep_one("movedim", shapes, |x| x.movedim(&[0, 1], &[2, 0]));
    sweep_one("unsqueeze", shapes, |x| x.unsqueeze(1));
    sweep_one("squeeze", shapes, |x| x.squeeze(&[]));
    sweep_one(
        "squeeze of an axis",
        &[&[4, 1, 2], &[1, 1, 1], &[0, 1, 3]],
        |x| x.squeeze(&[1]),
    );
    assert_eq!(
        free("x=2, y=2", &[4, 3, 2], "[@y, @x, _]", |x| x
            .permute(&[2, 0, 1])),
        "f32[2, 4@y, 3@x]"
    );
    assert_eq!(
        free("x=2, y=2", &[4, 3], "[@y@x, _]", |x| x.unsqueeze(0)?.t()),
        "f32[1, 3, 4@y@x]"
    );
    assert_eq!(
        free("x=2, y=2", &[4, 1, 3], "[@y, _, _]{sum:x}", |x| x
            .squeeze(&[1])),
        "f32[4@y, 3]{sum:x}"
    );
}

#[test]
fn expanded_dimensions_are_whole_and_the_others_keep_their_cuts() {
    sweep_one("expand", &[&[3, 1], &[1, 1], &[3, 4], &[0, 1]], |x| {
        let rows = x.dims()[0];
        x.expand([2, rows, 4])
    });
    sweep_one("expand of one row", &[&[1, 4], &[1, 1]], |x| {
        x.expand([5, x.dims()[1]])
    });
    sweep_one("expand to nothing", &[&[1, 4]], |x| x.expand([0, 4]));
    assert_eq!(
        free("x=2, y=2", &[3, 1], "[@x, _]{sum:y}", |x| x
            .expand([2, 3, 4])),
        "f32[2, 3@x, 4]{sum:y}"
    );
}

#[test]
fn grids_are_cut_as_their_vectors_are() {
    for indexing in [Indexing::Ij, Indexing::Xy] {
        sweep("meshgrid", &[numbers(&[4]), numbers(&[3])], |x| {
            Tensor::meshgrid(&[&x[0], &x[1]], indexing)
        });
        sweep("meshgrid", &[numbers(&[1]), numbers(&[])], |x| {
            Tensor::meshgrid(&[&x[0], &x[1]], indexing)
        });
        sweep("meshgrid", &[numbers(&[5]), numbers(&[0])], |x| {
            Tensor::meshgrid(&[&x[0], &x[1]], indexing)
        });
    }
    let mesh = Mesh::new("x=2, y=2", &device()).unwrap();
    let (a, b) = (
        numbers(&[4]).to_mesh(&mesh, "[@x]").unwrap(),
        numbers(&[3]).to_mesh(&mesh, "[@y]").unwrap(),
    );
    let grids = Tensor::meshgrid(&[&a, &b], Indexing::Ij).unwrap();
    assert!(
        grids.iter().all(|g| g.type_string() == "f32[4@x, 3@y]"),
        "{grids:?}"
    );
}

#[test]
fn slices_of_every_placement_are_right() {
    let shapes: &[&[usize]] = &[&[6, 4], &[5, 3], &[2, 1], &[1, 2], &[0, 3]];
    for (start, stop, step) in [
        (Some(1), None, 1),
        (None, None, 1),
        (None, Some(-1), 2),
        (None, None, -1),
        (Some(3), Some(1), 1),
        (Some(-2), None, -2),
    ] {
        sweep_one("slice", shapes, |x| x.slice(0, start, stop, step));
    }
    sweep_one("narrow", &[&[6, 4], &[5, 3], &[3, 0]], |x| {
        x.narrow(0, 1, 2)
    });
    sweep_one("flip", shapes, |x| x.flip(&[0]));
    sweep_one("flip of all", shapes, |x| x.flip(&[]));
    sweep_one("unfold", &[&[6, 4], &[5, 3], &[3, 0]], |x| {
        x.unfold(0, 2, 1)
    });
    sweep_one("unfold by two", &[&[4, 6], &[3, 5], &[1, 3]], |x| {
        x.unfold(1, 3, 2)
    });
    assert_eq!(
        free("x=2, y=2", &[4, 6], "[@x, _]{sum:y}", |x| x.narrow(1, 2, 3)),
        "f32[4@x, 3]{sum:y}"
    );
    assert_eq!(
        free("x=2, y=2", &[4, 6], "[@x, @y]", |x| x
            .narrow(1, 0, 6)?
            .slice(0, None, None, 1)),
        "f32[4@x, 6@y]"
    );
    assert_eq!(
        free("x=2", &[4, 6], "[@x, _]", |x| x.flip(&[1])?.unfold(1, 2, 2)),
        "f32[4@x, 3, 2]"
    );
}

#[test]
fn parts_of_every_placement_are_right_and_gather_once() {
    for shape in [[6, 4], [5, 2], [1, 1], [0, 3]] {
        let x = numbers(&shape);
        sweep("split", &[x.clone()], |x| {
            x[0].split(&[1.min(shape[0]), shape[0].saturating_sub(1), 0], 0)
        });
        sweep("split in one", &[x.clone()], |x| x[0].split(&[shape[0]], 0));
        sweep("chunk", &[x.clone()], |x| x[0].chunk(4, 0));
        sweep("unbind", &[x], |x| x[0].unbind(0));
    }
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let s = numbers(&[6, 4]).to_mesh(&mesh, "[@x, _]").unwrap();
    let (_, ledger) = Ledger::record(|| s.unbind(0).unwrap());
    assert_eq!(ledger.entries.len(), 1, "{ledger}");
}

#[test]
fn diagonals_of_every_placement_are_right_and_keep_cut_rows() {
    for offset in [-6, -2, -1, 0, 1, 3, 5] {
        sweep_one(
            "diagonal",
            &[&[4, 4], &[5, 3], &[3, 5], &[1, 4], &[0, 2]],
            |x| x.diagonal(offset, 0, 1),
        );
        sweep_one("diagonal of the ends", &[&[3, 2, 4]], |x| {
            x.diagonal(offset, 2, 0)
        });
    }
    assert_eq!(
        free("x=2", &[4, 4], "[@x, _]", |x| x.diagonal(0, 0, 1)),
        "f32[4@x]"
    );
    assert_eq!(
        free("x=2", &[4, 4], "[_, @x]", |x| x.diagonal(0, 0, 1)),
        "f32[4@x]"
    );
    assert_eq!(
        free("x=2", &[3, 5], "[@x, _]", |x| x.diagonal(2, 0, 1)),
        "f32[3@x]"
    );
}

#[test]
fn concat_of_partial_values_is_right() {
    for (a, b) in [
        ([2, 3], [2, 3]),
        ([5, 2], [1, 2]),
        ([0, 2], [3, 2]),
        ([1, 1], [2, 1]),
    ] {
        sweep("concat", &[numbers(&a), numbers(&b)], |x| {
            Ok(vec![Tensor::concat(&[&x[0], &x[1]], 0)?])
        });
    }
    sweep(
        "concat of the last",
        &[numbers(&[3, 2]), numbers(&[3, 1])],
        |x| Ok(vec![Tensor::concat(&[&x[0], &x[1], &x[0]], 1)?]),
    );
    sweep("stack", &[numbers(&[3, 2]), numbers(&[3, 2])], |x| {
        Ok(vec![Tensor::stack(&[&x[0], &x[1]], 1)?])
    });
    let ints = Tensor::from_slice(&[1i32, 2, 3, 4], [2, 2], &device()).unwrap();
    sweep("concat of two types", &[numbers(&[2, 2]), ints], |x| {
        Ok(vec![Tensor::concat(&[&x[0], &x[1]], 0)?])
    });

    let mesh = Mesh::new("x=2", &device()).unwrap();
    let (whole, partial) = (
        numbers(&[2, 3]).to_mesh(&mesh, "[_, _]").unwrap(),
        numbers(&[2, 3]).to_mesh(&mesh, "[_, _]{sum:x}").unwrap(),
    );
    let (both, ledger) = Ledger::record(|| Tensor::concat(&[&partial, &partial], 0).unwrap());
    assert_eq!(
        (both.type_string().as_str(), ledger.bytes()),
        ("f32[4, 3]{sum:x}", 0)
    );
    let (mixed, ledger) = Ledger::record(|| Tensor::concat(&[&whole, &partial], 1).unwrap());
    assert_eq!(
        (mixed.type_string().as_str(), ledger.bytes()),
        ("f32[2, 6]{sum:x}", 0)
    );
    assert_eq!(
        mixed.to_bytes().unwrap(),
        Tensor::concat(&[&numbers(&[2, 3]), &numbers(&[2, 3])], 1)
            .unwrap()
            .to_bytes()
            .unwrap()
    );
    let cut = numbers(&[3, 4]).to_mesh(&mesh, "[_, @x]").unwrap();
    assert_eq!(
        Tensor::concat(&vec![&cut; 40], 0).unwrap().type_string(),
        "f32[120, 4@x]"
    );
    assert_eq!(
        Tensor::stack(&[&cut, &cut], 0).unwrap().type_string(),
        "f32[2, 3, 4@x]"
    );
}

#[test]
fn pads_of_every_placement_are_right() {
    let shapes: &[&[usize]] = &[&[4, 3], &[5, 2], &[2, 2]];
    for mode in [PadMode::Reflect, PadMode::Replicate, PadMode::Circular] {
        sweep_one("pad", shapes, |x| x.pad(&[(1, 0), (0, 1)], mode));
        sweep_one("pad of the last", shapes, |x| {
            x.pad(&[(0, 0), (1, 1)], mode)
        });
    }
    for value in [0.0, 1.0, -7.0] {
        let mode = PadMode::Constant(value.into());
        sweep_one("pad", &[&[4, 3], &[5, 1], &[0, 2]], |x| {
            x.pad(&[(2, 0), (0, 1)], mode)
        });
        sweep_one("pad of the last", &[&[4, 3], &[5, 0], &[0, 2]], |x| {
            x.pad(&[(0, 0), (1, 1)], mode)
        });
        sweep_one("pad of none", shapes, |x| x.pad(&[(0, 0), (0, 0)], mode));
    }
    let pad =
        |value: f64| move |x: &Tensor| x.pad(&[(0, 0), (1, 0)], PadMode::Constant(value.into()));
    assert_eq!(
        free("x=2, y=2", &[4, 3], "[@x, _]{sum:y}", pad(0.0)),
        "f32[4@x, 4]{sum:y}"
    );
    assert_eq!(
        free("x=2, y=2", &[4, 3], "[@x, _]{max:y}", pad(3.0)),
        "f32[4@x, 4]{max:y}"
    );
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let partial = numbers(&[4, 3]).to_mesh(&mesh, "[_, _]{sum:x}").unwrap();
    assert!(
        with_policy(Policy::Explicit, &[], || pad(3.0)(&partial)).is_err(),
        "every part would add the constant"
    );
}

#[test]
fn rolls_and_repetitions_of_every_placement_are_right() {
    let shapes: &[&[usize]] = &[&[4, 3], &[5, 2], &[1, 2], &[0, 2]];
    sweep_one("roll", shapes, |x| x.roll(&[1], &[0]));
    sweep_one("roll of both", shapes, |x| x.roll(&[-2, 4], &[0, 1]));
    sweep_one("roll of all", shapes, |x| x.roll(&[3], &[]));
    sweep_one("tile", shapes, |x| x.tile(&[2, 1]));
    sweep_one("tile in front", shapes, |x| x.tile(&[2, 1, 3]));
    sweep_one("tile of the last", shapes, |x| x.tile(&[2]));
    sweep_one("tile of none", shapes, |x| x.tile(&[0, 1]));
    for n in [0, 1, 3] {
        sweep_one("repeat_interleave", shapes, |x| x.repeat_interleave(n, 0));
    }
    assert_eq!(
        free("x=2", &[4, 3], "[@x, _]", |x| x.repeat_interleave(3, 0)),
        "f32[12@x, 3]"
    );
    assert_eq!(
        free("x=2, y=2", &[4, 3], "[@x, _]{sum:y}", |x| x
            .tile(&[2, 1, 2])?
            .roll(&[1], &[0])),
        "f32[2, 4@x, 6]{sum:y}"
    );
}

#[test]
fn triangles_and_diagonal_matrices_know_where_a_part_lies() {
    for k in [-5, -1, 0, 2, i64::MAX, i64::MIN] {
        sweep_one(
            "triu",
            &[&[4, 4], &[5, 3], &[2, 3, 2], &[1, 1], &[0, 2]],
            |x| x.triu(k),
        );
        sweep_one("tril", &[&[4, 4], &[3, 5], &[2, 1, 3], &[2, 0]], |x| {
            x.tril(k)
        });
    }
    for k in [-2, 0, 1] {
        sweep_one("diag", &[&[4], &[5], &[1], &[0]], |x| x.diag(k));
        sweep_one("diag of a matrix", &[&[4, 4], &[3, 2]], |x| x.diag(k));
    }
    assert_eq!(
        free("x=2, y=2", &[5, 4], "[@x, @y]", |x| x.triu(1)),
        "f32[5@x, 4@y]"
    );
    assert_eq!(
        free("x=2, y=2", &[5, 4], "[@x, _]{sum:y}", |x| x.tril(-1)),
        "f32[5@x, 4]{sum:y}"
    );
    assert_eq!(free("x=2, y=2", &[5], "[@x]", |x| x.diag(0)), "f32[5@x, 5]");
}

/// [`sweep`] for ops that round.
#[track_caller]
fn sweep_close(
    what: &str,
    inputs: &[Tensor],
    tolerance: f64,
    op: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) {
    hold(what, Precision::Rounded(tolerance), 700, inputs, op);
}

#[test]
fn rotations_keep_cut_positions() {
    for (style, shape) in [
        (RopeStyle::Half, [2, 4, 6]),
        (RopeStyle::Interleaved, [1, 5, 4]),
        (RopeStyle::Half, [3, 1, 2]),
        (RopeStyle::Half, [2, 0, 4]),
    ] {
        let (cos, sin) = Tensor::rope_tables(
            shape[1],
            shape[2],
            &RopeOptions {
                base: 100.0,
                offset: 3,
            },
            &device(),
        )
        .unwrap();
        sweep_close("rope", &[numbers(&shape)], 1e-6, |x| {
            let place: Place = x[0].mesh().into();
            let (cos, sin) = if x[0].is_plain() {
                (cos.clone(), sin.clone())
            } else {
                Tensor::rope_tables(
                    shape[1],
                    shape[2],
                    &RopeOptions {
                        base: 100.0,
                        offset: 3,
                    },
                    place,
                )?
            };
            Ok(vec![x[0].rope(&cos, &sin, style)?])
        });
        let (cos, sin) = (cos.unsqueeze(0).unwrap(), sin.unsqueeze(0).unwrap());
        sweep_close("rope with cut tables", &[numbers(&shape), cos], 1e-6, |x| {
            let sin = if x[0].is_plain() {
                sin.clone()
            } else {
                sin.to_mesh(x[0].mesh(), x[1].sharding())?
            };
            Ok(vec![x[0].rope(&x[1], &sin, style)?])
        });
    }
    let mesh = Mesh::new("sp=2", &device()).unwrap();
    let x = numbers(&[2, 5, 4]).to_mesh(&mesh, "[_, @sp, _]").unwrap();
    let (cos, sin) = Tensor::rope_tables(
        5,
        4,
        &RopeOptions {
            base: 100.0,
            ..Default::default()
        },
        (&mesh, &Sharding::replicated().cut(0, 0)),
    )
    .unwrap();
    let (y, ledger) = Ledger::record(|| x.rope(&cos, &sin, RopeStyle::Half).unwrap());
    assert_eq!(
        (y.type_string().as_str(), ledger.bytes()),
        ("f32[2, 5@sp, 4]", 0)
    );
}

#[test]
fn gates_of_every_placement_are_right() {
    for shape in [[4, 6], [5, 2], [1, 4], [0, 2]] {
        let x = numbers(&shape);
        sweep_close("glu", &[x.clone()], 1e-6, |x| Ok(vec![x[0].glu()?]));
        sweep_close("swiglu", &[x.clone()], 1e-6, |x| Ok(vec![x[0].swiglu()?]));
        sweep_close("geglu", &[x.clone()], 1e-6, |x| Ok(vec![x[0].geglu()?]));
        sweep_close("swiglu2", &[x.clone(), numbers(&shape)], 1e-6, |x| {
            Ok(vec![x[0].swiglu2(&x[1])?])
        });
        sweep_close("geglu2", &[x.clone(), x], 1e-6, |x| {
            Ok(vec![x[0].geglu2(&x[1])?])
        });
    }
    let mesh = Mesh::new("x=2, y=2", &device()).unwrap();
    let (gate, value) = (
        numbers(&[4, 6]).to_mesh(&mesh, "[@x, _]").unwrap(),
        numbers(&[4, 6]).to_mesh(&mesh, "[@x, _]{sum:y}").unwrap(),
    );
    assert_eq!(
        gate.swiglu2(&value).unwrap().type_string(),
        "f32[4@x, 6]{sum:y}"
    );
}

#[test]
fn results_whose_size_the_data_decides_are_found_on_every_mesh() {
    for shape in [&[4, 3][..], &[5], &[2, 0], &[]] {
        let x = numbers(shape);
        sweep("nonzero", &[x.clone()], |x| Ok(vec![x[0].nonzero()?]));
        sweep("unique", &[x.clone()], |x| {
            let found = x[0].unique()?;
            Ok(vec![found.values, found.inverse, found.counts])
        });
        sweep("masked_select", &[x.clone()], |x| {
            Ok(vec![x[0].masked_select(&x[0].gt(0.0)?)?])
        });
    }
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let s = numbers(&[4, 3]).to_mesh(&mesh, "[@x, _]").unwrap();
    let (found, ledger) = Ledger::record(|| s.nonzero().unwrap());
    assert!(found.sharding().is_replicated());
    assert_eq!(ledger.entries.len(), 2, "counts, and then everything");
    for entry in &ledger.entries {
        assert!(
            entry.op == "nonzero" && entry.caller.contains(file!()),
            "{ledger}"
        );
    }
    assert!(matches!(
        with_policy(Policy::Explicit, &[], || s.nonzero()),
        Err(Error::ImplicitCommunication { .. })
    ));
}

/// Heads that do not divide over ranks: what lies between the bounds of columns and heads crosses,
/// and nothing else.
#[test]
fn groups_that_do_not_divide_over_ranks_keep_their_cut() {
    for (axes, cut) in [
        ("a=4", "[_, @a]"),
        ("a=2, b=2", "[_, @a@b]"),
        ("b=2, a=3", "[@b, @a]"),
    ] {
        let mesh = Mesh::new(axes, &device()).unwrap();
        for (heads, size) in [(9, 4), (5, 3), (7, 1), (4, 2)] {
            let x = numbers(&[4, heads * size]);
            let cut = x.to_mesh(&mesh, cut).unwrap();
            let parts: usize = axes_of(&cut, 1);
            if heads < parts {
                continue;
            }
            let (apart, ledger) = Ledger::record(|| cut.reshape([4, heads, size]).unwrap());
            same(&apart, &x.reshape([4, heads, size]).unwrap());
            assert_eq!(axes_of(&apart, 1), parts, "{}", apart.type_string());
            // Columns of its heads that a rank does not have.
            let lacks = |part: usize| {
                let heads = part * heads / parts * size..(part + 1) * heads / parts * size;
                let n = x.dims()[1];
                let own = part * n / parts..(part + 1) * n / parts;
                heads.filter(|c| !own.contains(c)).count()
            };
            let rows = 4 / axes_of(&cut, 0);
            let worst = (0..parts).map(lacks).max().unwrap() * rows * 4;
            assert_eq!(ledger.bytes(), worst as u64, "{ledger}");
            same(&apart.reshape([4, heads * size]).unwrap(), &x);
            let partial = apart.require_grad().unwrap();
            let grads = partial
                .reshape([4, heads * size])
                .unwrap()
                .square()
                .unwrap();
            let grads = grads.sum(&[], false).unwrap().backward().unwrap();
            same(
                &grads.of(&partial).unwrap(),
                &x.reshape([4, heads, size]).unwrap().mul(2.0).unwrap(),
            );
        }
    }
}

/// Into how many parts a dimension is cut.
fn axes_of(x: &Tensor, dim: usize) -> usize {
    x.sharding()
        .axes_of(dim)
        .map(|a| x.mesh().size(a))
        .product()
}
