//! What layers communicate, and what they leave cut or partial.

use super::*;
use anymesh_core::{
    Error,
    ops::{AvgPool, Conv, Interpolate, LossReduction, MaxPool, NormOptions},
    spmd::{Policy, with_policy},
};

#[test]
fn softmax_over_a_cut_dimension_lets_only_statistics_cross() {
    let x = numbers(&[6, 40]);
    let s = x.to_mesh(&mesh("x=4"), "[_, @x]").unwrap();
    let softmax = |x: &Tensor, axis| x.softmax(axis);
    let log_softmax = |x: &Tensor, axis| x.log_softmax(axis);
    for (op, run) in [
        (
            "softmax",
            softmax as fn(&Tensor, i64) -> anymesh_core::Result<Tensor>,
        ),
        ("log_softmax", log_softmax),
    ] {
        let (y, steps) = traffic(|| run(&s, 1).unwrap());
        // An all-reduce of six maxima and one of six sums: each rank receives 2 * 3/4 of them.
        assert_eq!(steps, [(op, 36), (op, 36)]);
        assert_eq!(y.type_string(), "f32[6, 40@x]");
        assert_same(op, &y, &run(&x, 1).unwrap(), false);
        let (y, steps) = traffic(|| run(&s, 0).unwrap());
        assert_eq!((y.type_string().as_str(), steps), ("f32[6, 40@x]", vec![]));
    }
}

#[test]
fn explicit_programs_are_told_of_statistics_that_would_cross() {
    let s = numbers(&[6, 40]).to_mesh(&mesh("x=4"), "[_, @x]").unwrap();
    with_policy(Policy::Explicit, &[], || {
        assert!(s.softmax(0).is_ok());
        let error = s.softmax(1).unwrap_err();
        assert!(
            matches!(error, Error::ImplicitCommunication { op: "softmax", .. }),
            "{error}"
        );
        assert!(
            error.to_string().contains("layers.rs") && error.to_string().contains("statistics"),
            "{error}"
        );
        let error = s.cosine_similarity(&s, 1, 1e-8).unwrap_err().to_string();
        assert!(error.contains("layers.rs"), "{error}");
    });
}

#[test]
fn norms_over_a_cut_dimension_cut_their_parameters_alike() {
    let (x, w, b) = (numbers(&[6, 40]), numbers(&[40]), numbers(&[40]));
    let mesh = mesh("x=4");
    let s = x.to_mesh(&mesh, "[_, @x]").unwrap();
    let (sw, sb) = (
        w.to_mesh(&mesh, "[@x]").unwrap(),
        b.to_mesh(&mesh, "[@x]").unwrap(),
    );
    let (y, steps) = traffic(|| {
        s.layer_norm(&NormOptions::new().weight(&sw).bias(&sb))
            .unwrap()
    });
    assert_eq!(
        (y.type_string().as_str(), steps),
        ("f32[6, 40@x]", vec![("layer_norm", 36), ("layer_norm", 36)])
    );
    assert_same(
        "layer_norm",
        &y,
        &x.layer_norm(&NormOptions::new().weight(&w).bias(&b))
            .unwrap(),
        false,
    );
    let (y, steps) = traffic(|| s.rms_norm(&NormOptions::new().weight(&sw)).unwrap());
    assert_eq!(steps, [("rms_norm", 36)]);
    assert_same(
        "rms_norm",
        &y,
        &x.rms_norm(&NormOptions::new().weight(&w)).unwrap(),
        false,
    );
}

#[test]
fn batch_norm_takes_its_statistics_over_the_whole_mesh() {
    let (x, w, b) = (numbers(&[8, 6, 5]), numbers(&[6]), numbers(&[6]));
    let mesh = mesh("dp=2, tp=2");
    let plain = x
        .batch_norm_train(&NormOptions::new().weight(&w).bias(&b))
        .unwrap();
    let run = |x: &Tensor, w: &Tensor, b: &Tensor| {
        traffic(|| {
            x.batch_norm_train(&NormOptions::new().weight(w).bias(b))
                .unwrap()
        })
    };
    let whole = |t: &Tensor| t.to_mesh(&mesh, "[_]").unwrap();
    let (out, steps) = run(
        &x.to_mesh(&mesh, "[@dp, _, _]").unwrap(),
        &whole(&w),
        &whole(&b),
    );
    // Six means and six variances, each all-reduced over two ranks.
    assert_eq!(steps, [("batch_norm_train", 24), ("batch_norm_train", 24)]);
    assert_eq!(
        (
            out.out.type_string().as_str(),
            out.mean.type_string().as_str()
        ),
        ("f32[8@dp, 6, 5]", "f32[6]")
    );
    let channels = |t: &Tensor| t.to_mesh(&mesh, "[@tp]").unwrap();
    let (both, steps) = run(
        &x.to_mesh(&mesh, "[@dp, @tp, _]").unwrap(),
        &channels(&w),
        &channels(&b),
    );
    assert_eq!(
        steps,
        [("batch_norm_train", 12), ("batch_norm_train", 12)],
        "only half of the channels"
    );
    assert_eq!(
        (
            both.out.type_string().as_str(),
            both.var.type_string().as_str()
        ),
        ("f32[8@dp, 6@tp, 5]", "f32[6@tp]")
    );
    for done in [&out, &both] {
        assert_eq!(done.count, plain.count);
        assert_same("out", &done.out, &plain.out, false);
        assert_same("mean", &done.mean, &plain.mean, false);
        assert_same("var", &done.var, &plain.var, false);
    }
    let (mean, var) = plain.update_running(&w, &b, 0.25).unwrap();
    let ((m, v), steps) = traffic(|| {
        both.update_running(&channels(&w), &channels(&b), 0.25)
            .unwrap()
    });
    assert_eq!((m.type_string().as_str(), steps), ("f32[6@tp]", vec![]));
    assert_same("running mean", &m, &mean, false);
    assert_same("running variance", &v, &var, false);
}

#[test]
fn norms_of_cut_channels_need_no_communication() {
    let (x, w, b) = (numbers(&[4, 12, 5]), numbers(&[12]), numbers(&[12]));
    let mesh = mesh("x=4");
    let s = x.to_mesh(&mesh, "[_, @x, _]").unwrap();
    let (sw, sb) = (
        w.to_mesh(&mesh, "[@x]").unwrap(),
        b.to_mesh(&mesh, "[@x]").unwrap(),
    );
    let run = |x: &Tensor, w: &Tensor, b: &Tensor| {
        let var = w.abs().unwrap();
        vec![
            x.instance_norm(&NormOptions::new().weight(w).bias(b))
                .unwrap(),
            x.batch_norm(b, &var, &NormOptions::new().weight(w).bias(b))
                .unwrap(),
            x.batch_norm_train(&NormOptions::new().weight(w).bias(b))
                .unwrap()
                .out,
            // Whole groups stay on a rank: 4 ranks hold one group each, or three.
            x.group_norm(4, &NormOptions::new().weight(w).bias(b))
                .unwrap(),
            x.group_norm(12, &NormOptions::new().weight(w).bias(b))
                .unwrap(),
        ]
    };
    let (out, steps) = traffic(|| run(&s, &sw, &sb));
    assert_eq!(steps, []);
    for (y, plain) in out.iter().zip(run(&x, &w, &b)) {
        assert_eq!(y.type_string(), "f32[4, 12@x, 5]");
        assert_same("norm", y, &plain, false);
    }
}

#[test]
fn a_group_that_spans_ranks_exchanges_statistics() {
    let (x, w) = (numbers(&[2, 12, 50]), numbers(&[12]));
    let mesh = mesh("x=2");
    let plain = x.group_norm(3, &NormOptions::new().weight(&w)).unwrap();
    let space = x.to_mesh(&mesh, "[_, _, @x]").unwrap();
    let (y, steps) = traffic(|| {
        space
            .group_norm(
                3,
                &NormOptions::new().weight(&w.to_mesh(&mesh, "[_]").unwrap()),
            )
            .unwrap()
    });
    assert_eq!(
        (y.type_string().as_str(), steps),
        (
            "f32[2, 12, 50@x]",
            vec![("group_norm", 24), ("group_norm", 24)]
        )
    );
    assert_same("cut space", &y, &plain, false);
    // One group over all channels: the channels are cut inside it.
    let channels = x.to_mesh(&mesh, "[_, @x, _]").unwrap();
    let (y, steps) = traffic(|| {
        channels
            .group_norm(
                1,
                &NormOptions::new().weight(&w.to_mesh(&mesh, "[@x]").unwrap()),
            )
            .unwrap()
    });
    assert_eq!(
        (y.type_string().as_str(), steps),
        (
            "f32[2, 12@x, 50]",
            vec![("group_norm", 8), ("group_norm", 8)]
        )
    );
    assert_same(
        "cut group",
        &y,
        &x.group_norm(1, &NormOptions::new().weight(&w)).unwrap(),
        false,
    );
}

#[test]
fn a_row_parallel_linear_adds_its_bias_once() {
    let (x, w, b) = (numbers(&[4, 6]), numbers(&[8, 6]), numbers(&[8]));
    let mesh = mesh("tp=3");
    let (sx, sw, sb) = (
        x.to_mesh(&mesh, "[_, @tp]").unwrap(),
        w.to_mesh(&mesh, "[_, @tp]").unwrap(),
        b.to_mesh(&mesh, "[_]").unwrap(),
    );
    let (y, steps) = traffic(|| sx.linear(&sw, Some(&sb)).unwrap());
    assert_eq!(
        (y.type_string().as_str(), steps),
        ("f32[4, 8]{sum:tp}", vec![])
    );
    assert_same("linear", &y, &x.linear(&w, Some(&b)).unwrap(), true);
}

#[test]
fn integers_meet_before_a_float_bias_is_added() {
    let whole = |t: Tensor| t.cast(DType::I32).unwrap();
    let (x, w, b) = (
        whole(numbers(&[4, 6])),
        whole(numbers(&[8, 6])),
        numbers(&[8]),
    );
    let mesh = mesh("tp=3");
    let (sx, sw, sb) = (
        x.to_mesh(&mesh, "[_, @tp]").unwrap(),
        w.to_mesh(&mesh, "[_, @tp]").unwrap(),
        b.to_mesh(&mesh, "[_]").unwrap(),
    );
    assert_same(
        "linear",
        &sx.linear(&sw, Some(&sb)).unwrap(),
        &x.linear(&w, Some(&b)).unwrap(),
        true,
    );
}

#[test]
fn a_column_then_row_parallel_network_communicates_once() {
    let (x, w1, b1, w2, b2) = (
        numbers(&[5, 6]),
        numbers(&[8, 6]),
        numbers(&[8]),
        numbers(&[6, 8]),
        numbers(&[6]),
    );
    let run = |x: &Tensor, w1: &Tensor, b1: &Tensor, w2: &Tensor, b2: &Tensor| {
        let hidden = x.linear(w1, Some(b1)).unwrap().relu().unwrap();
        hidden
            .linear(w2, Some(b2))
            .unwrap()
            .add(x)
            .unwrap()
            .relu()
            .unwrap()
    };
    let plain = run(&x, &w1, &b1, &w2, &b2);
    let mesh = mesh("tp=4");
    let on = |t: &Tensor, sharding: &str| t.to_mesh(&mesh, sharding).unwrap();
    let operands = [
        on(&x, "[_, _]"),
        on(&w1, "[@tp, _]"),
        on(&b1, "[@tp]"),
        on(&w2, "[_, @tp]"),
        on(&b2, "[_]"),
    ];
    let (y, steps) = traffic(|| {
        run(
            &operands[0],
            &operands[1],
            &operands[2],
            &operands[3],
            &operands[4],
        )
    });
    assert_eq!(steps.len(), 1, "{steps:?}");
    assert_eq!(steps[0].0, "relu");
    assert_same("network", &y, &plain, true);
}

#[test]
fn a_convolution_of_cut_channels_gives_partial_sums_or_cut_channels() {
    let (x, w, b) = (numbers(&[2, 4, 6]), numbers(&[6, 4, 3]), numbers(&[6]));
    let options = Conv {
        padding: [1],
        ..Conv::default()
    };
    let plain = x.conv1d(&w, Some(&b), &options).unwrap();
    let mesh = mesh("x=2");
    let on = |t: &Tensor, sharding: &str| t.to_mesh(&mesh, sharding).unwrap();
    for (xs, ws, bs, ys) in [
        ("[_, @x, _]", "[_, @x, _]", "[_]", "f32[2, 6, 6]{sum:x}"),
        ("[_, _, _]", "[@x, _, _]", "[@x]", "f32[2, 6@x, 6]"),
        ("[@x, _, _]", "[_, _, _]", "[_]", "f32[2@x, 6, 6]"),
    ] {
        let (y, steps) = traffic(|| {
            on(&x, xs)
                .conv1d(&on(&w, ws), Some(&on(&b, bs)), &options)
                .unwrap()
        });
        assert_eq!((y.type_string().as_str(), steps), (ys, vec![]));
        assert_same("conv1d", &y, &plain, true);
    }
    let (w, options) = (
        numbers(&[6, 2, 3]),
        Conv {
            groups: 2,
            ..Conv::default()
        },
    );
    let (y, steps) = traffic(|| {
        on(&x, "[_, @x, _]")
            .conv1d(&on(&w, "[@x, _, _]"), Some(&on(&b, "[@x]")), &options)
            .unwrap()
    });
    assert_eq!(
        (y.type_string().as_str(), steps),
        ("f32[2, 6@x, 4]", vec![]),
        "a group on each rank"
    );
    assert_same(
        "grouped",
        &y,
        &x.conv1d(&w, Some(&b), &options).unwrap(),
        true,
    );
}

#[test]
fn pools_let_partial_values_through() {
    let x = numbers(&[2, 3, 8]);
    let mesh = mesh("x=2");
    let on = |reduction| {
        let partial = Sharding::replicated().partial_over(0, reduction);
        sweep::lay_out(&x, &sweep::values(&x).unwrap(), &mesh, partial).unwrap()
    };
    let (y, steps) = traffic(|| on(Reduction::Max).max_pool1d(&MaxPool::new([2])).unwrap());
    assert_eq!(
        (y.type_string().as_str(), steps),
        ("f32[2, 3, 4]{max:x}", vec![])
    );
    assert_same("max", &y, &x.max_pool1d(&MaxPool::new([2])).unwrap(), true);
    let (y, steps) = traffic(|| on(Reduction::Sum).avg_pool1d(&AvgPool::new([2])).unwrap());
    assert_eq!(
        (y.type_string().as_str(), steps),
        ("f32[2, 3, 4]{sum:x}", vec![])
    );
    assert_same(
        "average",
        &y,
        &x.avg_pool1d(&AvgPool::new([2])).unwrap(),
        true,
    );
    let (y, steps) = traffic(|| on(Reduction::Sum).max_pool1d(&MaxPool::new([2])).unwrap());
    assert_eq!(
        steps.len(),
        1,
        "a sum must be whole before its largest values are taken"
    );
    assert_same(
        "max of sums",
        &y,
        &x.max_pool1d(&MaxPool::new([2])).unwrap(),
        true,
    );
}

#[test]
fn the_mean_loss_of_a_cut_batch_counts_all_of_it() {
    let (x, t) = (numbers(&[7, 4]), numbers(&[4, 7]).t().unwrap());
    let mesh = mesh("dp=3");
    let on = |t: &Tensor| t.to_mesh(&mesh, "[@dp, _]").unwrap();
    let (loss, steps) = traffic(|| on(&x).mse_loss(&on(&t), LossReduction::Mean).unwrap());
    assert_eq!(
        (loss.type_string().as_str(), steps),
        ("f32[]{sum:dp}", vec![])
    );
    assert_same(
        "mse",
        &loss,
        &x.mse_loss(&t, LossReduction::Mean).unwrap(),
        false,
    );
    let (each, steps) = traffic(|| on(&x).mse_loss(&on(&t), LossReduction::None).unwrap());
    assert_eq!(
        (each.type_string().as_str(), steps),
        ("f32[7@dp, 4]", vec![])
    );
}

#[test]
fn empty_batches_stay_empty_on_a_mesh() {
    let mesh = mesh("x=2");
    let (w, c) = (numbers(&[3]), numbers(&[2, 3, 2]));
    let run = |x: &Tensor, w: &Tensor, c: &Tensor| {
        vec![
            x.softmax(0).unwrap(),
            x.softmax(2).unwrap(),
            x.layer_norm(&NormOptions::new()).unwrap(),
            x.group_norm(3, &NormOptions::new().weight(w)).unwrap(),
            x.instance_norm(&NormOptions::new().weight(w).bias(w))
                .unwrap(),
            x.batch_norm(w, w, &NormOptions::new()).unwrap(),
            x.conv1d(c, None, &Conv::default()).unwrap(),
            x.max_pool1d(&MaxPool::new([2])).unwrap(),
            x.avg_pool1d(&AvgPool::new([2])).unwrap(),
            x.interpolate(&[7], Interpolate::Nearest).unwrap(),
            x.normalize(2.0, 2, 1e-12).unwrap(),
            x.cosine_similarity(x, 2, 1e-8).unwrap(),
            x.mse_loss(x, LossReduction::None).unwrap(),
            x.mse_loss(x, LossReduction::Sum).unwrap(),
            x.mse_loss(x, LossReduction::Mean).unwrap(),
        ]
    };
    let x = numbers(&[0, 3, 4]);
    let plain = run(&x, &w, &c);
    for sharding in ["[@x, _, _]", "[_, @x, _]", "[_, _, @x]", "[_, _, _]{sum:x}"] {
        let on = |t: &Tensor, sharding: &str| t.to_mesh(&mesh, sharding).unwrap();
        let out = run(&on(&x, sharding), &on(&w, "[_]"), &on(&c, "[_, _, _]"));
        for (y, plain) in out.iter().zip(&plain) {
            assert_same(sharding, y, plain, true);
        }
    }
}

#[test]
fn errors_on_a_mesh_speak_of_the_whole_tensors() {
    let mesh = mesh("x=2");
    let on = |shape: &[usize]| {
        numbers(shape)
            .to_mesh(&mesh, Sharding::replicated().cut(0, 0))
            .unwrap()
    };
    // A call that fits comes first: what was solved for it must not hide that the next one does
    // not.
    on(&[4, 6]).linear(&on(&[8, 6]), Some(&on(&[8]))).unwrap();
    on(&[4, 6]).matmul(&on(&[6, 8])).unwrap();
    let cases = [
        on(&[4, 6]).linear(&on(&[8, 5]), None).unwrap_err(),
        on(&[4, 6])
            .linear(&on(&[8, 6]), Some(&on(&[7])))
            .unwrap_err(),
        on(&[4, 6]).matmul(&on(&[5, 8])).unwrap_err(),
        on(&[4, 6])
            .layer_norm(&NormOptions::new().weight(&on(&[5])))
            .unwrap_err(),
        on(&[2, 3, 4])
            .conv1d(&on(&[5, 2, 1]), None, &Conv::default())
            .unwrap_err(),
        on(&[2, 3, 4]).bmm(&on(&[3, 4, 5])).unwrap_err(),
    ];
    for error in cases {
        assert!(matches!(error, Error::Shape { .. }), "{error}");
        assert!(!error.to_string().contains("rule"), "{error}");
    }
    let plain = numbers(&[8, 6]);
    assert!(matches!(
        on(&[4, 6]).linear(&plain, None),
        Err(Error::MeshMismatch { op: "linear", .. })
    ));
    assert!(matches!(
        on(&[4, 6]).layer_norm(&NormOptions::new().weight(&numbers(&[6]))),
        Err(Error::MeshMismatch {
            op: "layer_norm",
            ..
        })
    ));
}
