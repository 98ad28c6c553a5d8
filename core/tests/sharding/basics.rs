//! Sharded ops against unsharded ones: the named wrong results of other systems, and what users
//! meet first.

use crate::support::{device, same, whole_numbers as numbers};
use anymesh_core::{
    DType, Error, MAX_RANK, Mesh, Shape, Sharding, Tensor, TensorType, meta,
    reshard::{Objective, plan},
    spmd::{self, Ledger},
};

#[test]
fn a_tensor_comes_back_from_every_sharding() {
    let mesh = Mesh::new("dp=2, tp=3", &device()).unwrap();
    let x = numbers(&[5, 7]);
    for sharding in [
        "[_, _]",
        "[@dp, _]",
        "[@dp@tp, _]",
        "[@tp, @dp]",
        "[_, @tp@dp]",
        "[@dp, _]{sum:tp}",
        "[_, _]{max:dp, max:tp}",
    ] {
        same(&x.to_mesh(&mesh, sharding).unwrap(), &x);
    }
}

#[test]
fn a_product_over_a_cut_dimension_is_partial_and_right() {
    let mesh = Mesh::new("dp=2, tp=2", &device()).unwrap();
    let (x, w) = (numbers(&[4, 6]), numbers(&[6, 8]));
    let (a, b) = (
        x.to_mesh(&mesh, "[@dp, @tp]").unwrap(),
        w.to_mesh(&mesh, "[@tp, _]").unwrap(),
    );
    let (y, ledger) = Ledger::record(|| a.matmul(&b).unwrap());
    assert_eq!(y.type_string(), "f32[4@dp, 8]{sum:tp}");
    assert_eq!(ledger.entries, []);
    same(&y, &x.matmul(&w).unwrap());
}

#[test]
fn positions_of_maxima_over_a_cut_dimension_of_a_mesh_are_right() {
    let mesh = Mesh::new("a=2, b=3", &device()).unwrap();
    for shape in [[4, 6], [5, 2], [1, 7], [2, 1]] {
        let x = numbers(&shape);
        for sharding in ["[@a, _]", "[_, @b]", "[@a, @b]", "[@b@a, _]", "[@a@b, _]"] {
            let s = x.to_mesh(&mesh, sharding).unwrap();
            for axis in [None, Some(0), Some(1)] {
                same(
                    &s.argmax(axis, false).unwrap(),
                    &x.argmax(axis, false).unwrap(),
                );
                same(
                    &s.argmin(axis, true).unwrap(),
                    &x.argmin(axis, true).unwrap(),
                );
            }
        }
    }
}

#[test]
fn a_partial_maximum_times_a_negative_number_is_reduced_first() {
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let x = numbers(&[4, 6]);
    let max = x
        .to_mesh(&mesh, "[_, @x]")
        .unwrap()
        .amax(&[1], false)
        .unwrap();
    assert_eq!(max.type_string(), "f32[4]{max:x}");
    same(
        &max.mul(-1.0).unwrap(),
        &x.amax(&[1], false).unwrap().mul(-1.0).unwrap(),
    );
    same(
        &max.relu().unwrap(),
        &x.amax(&[1], false).unwrap().relu().unwrap(),
    );
}

#[test]
fn a_number_is_added_once_to_a_partial_sum() {
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let x = numbers(&[4, 6]);
    let sum = x
        .to_mesh(&mesh, "[_, @x]")
        .unwrap()
        .sum(&[1], false)
        .unwrap();
    assert_eq!(sum.mul(3.0).unwrap().type_string(), "f32[4]{sum:x}");
    same(
        &sum.add(3.0).unwrap(),
        &x.sum(&[1], false).unwrap().add(3.0).unwrap(),
    );
    assert_eq!(
        sum.mul(3.0).unwrap().type_string(),
        "f32[4@x]",
        "the addition had it added up"
    );
}

/// Division is linear in the dividend only where the divisor is not zero: `2 / 0 + -1 / 0` is NaN
/// where `1 / 0` is infinite.
#[test]
fn a_partial_sum_is_added_up_before_what_may_be_zero_divides_it() {
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let terms = Tensor::from_slice(&[2f32, -1.0, 3.0, -3.0, 1.0, 1.0], [3, 2], &device()).unwrap();
    let divisor = Tensor::from_slice(&[0f32, 0.0, 4.0], [3], &device()).unwrap();
    let whole = terms.sum(&[1], false).unwrap();
    // A new one each time, which nobody has had added up.
    let sum = || {
        let columns = terms.to_mesh(&mesh, "[_, @x]").unwrap();
        columns.sum(&[1], false).unwrap()
    };
    assert_eq!(sum().type_string(), "f32[3]{sum:x}");
    // What cannot be zero divides the terms one by one.
    let (halves, ledger) = Ledger::record(|| sum().div(2.0).unwrap());
    assert_eq!(halves.type_string(), "f32[3]{sum:x}");
    assert_eq!(ledger.entries, []);
    same(&halves, &whole.div(2.0).unwrap());
    same(
        &sum().div(&divisor.to_mesh(&mesh, "[_]").unwrap()).unwrap(),
        &whole.div(&divisor).unwrap(),
    );
    same(&sum().div(0.0).unwrap(), &whole.div(0.0).unwrap());
    // Nothing of f32 but zero.
    same(&sum().div(1e-60).unwrap(), &whole.div(1e-60).unwrap());
    same(
        &sum().mul(f64::INFINITY).unwrap(),
        &whole.mul(f64::INFINITY).unwrap(),
    );
}

/// The gradient of a division by zero is a division by zero.
#[test]
fn a_partial_gradient_is_added_up_before_an_infinite_slope_multiplies_it() {
    type Function = fn(&Tensor) -> anymesh_core::Result<Tensor>;
    let functions: [(&str, Function); 5] = [
        ("sqrt", |x| x.sqrt()),
        ("reciprocal", |x| x.reciprocal()),
        ("log", |x| x.log()),
        ("x / x", |x| x.detach().sub(x)?.div(&x.detach())),
        // The same slope for a whole row: the gradient is summed in the same step.
        ("row", |x| {
            let zeros = Tensor::zeros([3, 2], DType::F32, x.mesh())?;
            zeros.add(x)?.detach().sub(x)?.div(&x.detach())
        }),
    ];
    let mesh = Mesh::new("x=2", &device()).unwrap();
    // The gradient of the function's value is the sum of the columns, whose parts are 2 and -1.
    let columns = Tensor::from_slice(&[2f32, -1.0, 1.0, 1.0], [2, 2], &device()).unwrap();
    let x = Tensor::from_slice(&[0f32, 4.0], [1, 2], &device()).unwrap();
    for (name, function) in functions {
        let gradient = |x: &Tensor, columns: &Tensor| {
            let x = x.require_grad()?;
            let out = function(&x)?.matmul(columns)?.sum(&[], false)?;
            let gradient = out.backward()?.get(&x)?;
            gradient.expect("used").full_tensor()?.to_vec::<f32>()
        };
        let whole = gradient(&x, &columns).unwrap();
        let sharded = gradient(
            &x.to_mesh(&mesh, "[_, _]").unwrap(),
            &columns.to_mesh(&mesh, "[_, @x]").unwrap(),
        )
        .unwrap();
        assert!(whole[0].is_infinite(), "{name}: {whole:?}");
        assert_eq!(sharded, whole, "{name}");
    }
}

#[test]
fn logsumexp_and_norms_over_a_cut_dimension_are_right() {
    let mesh = Mesh::new("x=4", &device()).unwrap();
    let x = numbers(&[3, 6]);
    let s = x.to_mesh(&mesh, "[_, @x]").unwrap();
    let close = |a: Tensor, b: Tensor| {
        let (a, b) = (a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap());
        assert!(
            a.iter()
                .zip(&b)
                .all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs()),
            "{a:?} {b:?}"
        );
    };
    close(
        s.logsumexp(&[1], false).unwrap(),
        x.logsumexp(&[1], false).unwrap(),
    );
    close(
        s.logsumexp(&[], false).unwrap(),
        x.logsumexp(&[], false).unwrap(),
    );
    for p in [0.0, 1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY] {
        close(
            s.norm(p, &[1], true).unwrap(),
            x.norm(p, &[1], true).unwrap(),
        );
    }
}

#[test]
fn five_and_six_rows_over_four_ranks_work() {
    let mesh = Mesh::new("x=4", &device()).unwrap();
    for rows in [0, 1, 2, 3, 5, 6] {
        let x = numbers(&[rows, 3]);
        let s = x.to_mesh(&mesh, "[@x, _]").unwrap();
        same(&s.exp().unwrap(), &x.exp().unwrap());
        same(&s.sum(&[0], false).unwrap(), &x.sum(&[0], false).unwrap());
        same(&s.reshard("[_, @x]").unwrap(), &x);
    }
}

#[test]
fn types_print_and_parse() {
    let mesh = Mesh::new("dp=2, tp=4, sp=2", &device()).unwrap();
    for text in [
        "f32[1024@dp, 4096@tp]{sum:sp}",
        "bf16[]",
        "i64[7@tp@dp]",
        "bool[3, 0@sp]{or:dp, or:tp}",
    ] {
        let t = TensorType::parse(text, &mesh).unwrap();
        assert_eq!(t.sharding.type_string(t.dtype, &t.shape, &mesh), text);
    }
    for bad in [
        "f32",
        "f32[2",
        "f33[2]",
        "f32[2@xx]",
        "f32[2@dp, 3@dp]",
        "f32[2@dp]{sum:dp}",
        "f32[2]{mean:dp}",
        "f32[-1]",
        "f32[2]{sum:dp, max:tp}",
    ] {
        assert!(TensorType::parse(bad, &mesh).is_err(), "{bad}");
    }
}

#[test]
fn tensors_of_different_meshes_do_not_mix() {
    let (a, b) = (
        Mesh::new("x=2", &device()).unwrap(),
        Mesh::new("x=3", &device()).unwrap(),
    );
    let x = numbers(&[6]);
    let error = x
        .to_mesh(&a, "[@x]")
        .unwrap()
        .add(&x.to_mesh(&b, "[@x]").unwrap())
        .unwrap_err();
    assert!(
        matches!(error, Error::MeshMismatch { .. }) && error.to_string().contains("to_mesh"),
        "{error}"
    );
    assert!(
        x.to_mesh(&a, "[@x]")
            .unwrap()
            .cast(DType::I32)
            .unwrap()
            .add(&x.cast(DType::I32).unwrap())
            .is_err()
    );
}

#[test]
fn an_explicit_policy_refuses_what_would_communicate_and_lists_the_choices() {
    use anymesh_core::spmd::{Policy, with_policy};
    let mesh = Mesh::new("dp=2, tp=2", &device()).unwrap();
    let (x, w) = (
        numbers(&[4, 6]).to_mesh(&mesh, "[@dp, _]").unwrap(),
        numbers(&[6, 8]).to_mesh(&mesh, "[_, @dp]").unwrap(),
    );
    let run = || x.matmul(&w);
    let error = with_policy(Policy::Explicit, &[], run).unwrap_err();
    assert!(
        matches!(error, Error::ImplicitCommunication { op: "matmul", .. }),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains("reshard operand 0 from f32[4@dp, 6]")
            && text.contains("bytes")
            && text.contains(file!()),
        "{text}"
    );
    assert!(
        with_policy(Policy::Explicit, &["tp"], run).is_ok(),
        "only dp moves"
    );
    assert!(
        with_policy(Policy::Explicit, &[], || with_policy(
            Policy::Auto,
            &["dp"],
            run
        ))
        .is_ok(),
        "the inner policy counts"
    );
    assert!(
        with_policy(Policy::Explicit, &[], || x.reshard("[_, _]")).is_ok(),
        "the program says it"
    );
}

#[test]
fn the_ledger_has_the_bytes_that_plans_promise_and_the_line_that_asked() {
    use anymesh_core::reshard::{Objective, plan};
    let mesh = Mesh::new("dp=2, tp=3", &device()).unwrap();
    let x = numbers(&[5, 7]).to_mesh(&mesh, "[@dp, @tp]").unwrap();
    let to = TensorType::parse("f32[5@tp, 7]", &mesh).unwrap().sharding;
    let promised = plan(
        &mesh,
        x.shape(),
        x.dtype(),
        x.sharding(),
        &to,
        Objective::Time,
    )
    .unwrap()
    .recv_bytes;
    let (_, ledger) = Ledger::record(|| x.reshard(&to).unwrap());
    assert_eq!(ledger.bytes(), promised);
    assert!(
        ledger.entries[0].caller.contains(file!()) && ledger.to_string().contains("bytes/rank"),
        "{ledger}"
    );
    assert_eq!(
        ledger.to_json()[0]["recv_bytes"].as_u64(),
        Some(ledger.entries[0].bytes)
    );
}

#[test]
fn maxima_over_dimensions_of_2d_meshes_are_right() {
    let mesh = Mesh::new("a=2, b=2", &device()).unwrap();
    let x = numbers(&[6, 5]);
    for sharding in ["[@a, @b]", "[@a@b, _]", "[_, @b@a]"] {
        let s = x.to_mesh(&mesh, sharding).unwrap();
        for axes in [&[0][..], &[1], &[]] {
            same(&s.amax(axes, false).unwrap(), &x.amax(axes, false).unwrap());
            same(&s.amin(axes, true).unwrap(), &x.amin(axes, true).unwrap());
        }
    }
}

#[test]
fn merged_gathers_and_moves_of_uneven_dimensions_lose_nothing() {
    let mesh = Mesh::new("a=2, b=2", &device()).unwrap();
    let x = numbers(&[5, 3]);
    for from in ["[@a@b, _]", "[@a, @b]", "[_, @b@a]", "[@b, _]"] {
        for to in ["[_, _]", "[_, @a@b]", "[@b@a, _]", "[@b, @a]"] {
            same(&x.to_mesh(&mesh, from).unwrap().reshard(to).unwrap(), &x);
        }
    }
}

#[test]
fn as_many_dimensions_as_a_mesh_takes_are_all_told_apart() {
    let mesh = Mesh::new("a=2, b=2", &device()).unwrap();
    // Letters A to Z are not enough for these.
    let shape = |rank: usize| {
        let mut dims = vec![1; rank];
        (dims[0], dims[rank - 2], dims[rank - 1]) = (3, 2, 4);
        dims
    };
    for rank in [26, 27, 28, MAX_RANK] {
        let x = numbers(&shape(rank));
        let sharding = Sharding::replicated().cut(rank - 1, 0).cut(0, 1);
        let s = x.to_mesh(&mesh, &sharding).unwrap();
        let row = numbers(&[4]);
        same(
            &s.add(&row.to_mesh(&mesh, "[@b]").unwrap()).unwrap(),
            &x.add(&row).unwrap(),
        );
        let square = numbers(&[4, 4]);
        same(
            &s.matmul(&square.to_mesh(&mesh, "[_, @b]").unwrap())
                .unwrap(),
            &x.matmul(&square).unwrap(),
        );
        for axes in [vec![0], vec![-1, 0], (0..rank as i64).collect()] {
            same(&s.sum(&axes, true).unwrap(), &x.sum(&axes, true).unwrap());
        }
        same(&s.softmax(-1).unwrap(), &x.softmax(-1).unwrap());
        same(
            &s.reshape([3, 8]).unwrap().t().unwrap(),
            &x.reshape([3, 8]).unwrap().t().unwrap(),
        );
    }
}

#[test]
fn more_dimensions_than_a_mesh_takes_are_refused_wherever_they_come_from() {
    let mesh = Mesh::new("a=2", &device()).unwrap();
    let refused = |result: anymesh_core::Result<Tensor>, rank: usize| {
        let error = result.unwrap_err();
        let expected = format!(
            "sharding: a tensor of rank {rank} on a mesh: at most 32 dimensions, join some of them with `reshape`"
        );
        assert_eq!(error.to_string(), expected);
        assert!(matches!(error, Error::Sharding { .. }));
    };
    for rank in [33, 129, 135, 257, 1000] {
        let ones = vec![1; rank];
        let x = Tensor::zeros(ones.clone(), DType::F32, &device()).unwrap();
        refused(x.to_mesh(&mesh, Sharding::replicated()), rank);
        refused(
            x.to_mesh(&mesh, Sharding::replicated().cut(rank - 1, 0)),
            rank,
        );
        let s = numbers(&[1]).to_mesh(&mesh, "[@a]").unwrap();
        refused(s.reshape(ones.clone()), rank);
        refused(s.expand(ones), rank);
    }
    // Plain tensors are not concerned.
    let x = numbers(&[2]).reshape(vec![1; 40].into_iter().chain([2]).collect::<Shape>());
    assert_eq!(x.unwrap().neg().unwrap().rank(), 41);
    let error = Sharding::replicated().cut(300, 0).check(&mesh, 4);
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("cuts dimension 255"),
        "there is no dimension 300 % 256"
    );
    let x = numbers(&[2]).to_mesh(&mesh, "[@a]").unwrap();
    let many = spmd::apply("many", "a -> a", &[&x; 32], |l| Ok(l.to_vec()));
    assert!(matches!(many, Err(Error::Argument { op: "many", .. })));
}

/// A square tensor that all axes of the mesh cut, in another order for each `turn`.
fn cut_by_all(mesh: &Mesh, turn: usize) -> Tensor {
    let axes = mesh.axes().len();
    let sharding = (0..axes).fold(Sharding::replicated(), |s, axis| {
        let axis = (axis * 7 + turn) % axes;
        s.cut((axis + turn) % 2, axis)
    });
    Tensor::zeros([1 << 14, 1 << 14], DType::F32, (mesh, &sharding)).unwrap()
}

#[test]
fn on_many_axes_an_op_moves_no_more_than_bringing_one_operand_to_the_other() {
    for axes in [6, 10, 12] {
        let text: Vec<String> = (0..axes).map(|a| format!("x{a}=2")).collect();
        let mesh = Mesh::new(&text.join(", "), &meta()).unwrap();
        let (x, y) = (cut_by_all(&mesh, 0), cut_by_all(&mesh, 1));
        let (sum, ledger) = Ledger::record(|| x.add(&y));
        assert_eq!(sum.unwrap().dims(), x.dims());
        let way = |from: &Tensor, to: &Tensor| {
            let (from, to) = (from.sharding(), to.sharding());
            let plan = plan(&mesh, x.shape(), DType::F32, from, to, Objective::Bytes);
            plan.unwrap().recv_bytes
        };
        let least = way(&x, &y).min(way(&y, &x));
        assert!(ledger.bytes() <= least, "{} > {least}", ledger.bytes());
    }
}

#[test]
fn a_mesh_of_a_hundred_thousand_ranks_is_explained_in_seconds() {
    let mesh = Mesh::new("a=131072", &meta()).unwrap();
    let x = Tensor::zeros(
        [1 << 17],
        DType::F32,
        (&mesh, &Sharding::replicated().cut(0, 0)),
    );
    let x = x.unwrap();
    let start = std::time::Instant::now();
    assert_eq!(x.add(&x).unwrap().type_string(), "f32[131072@a]");
    // It took minutes when every rank was compared with all before it.
    assert!(start.elapsed().as_secs() < 60);
}
