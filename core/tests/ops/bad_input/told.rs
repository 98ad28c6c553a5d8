//! What errors say of operands, arguments, meshes and gradients.

use super::*;

#[test]
fn errors_tell_the_types_of_the_operands() {
    let (x, y) = (floats(&[2, 3]), floats(&[2, 4]));
    let (i, image) = (ints(&[5]), floats(&[1, 3, 8, 8]));
    let kernel = floats(&[4, 2, 3, 3]);
    let (q, k) = (floats(&[1, 2, 3, 4]), floats(&[1, 2, 3, 5]));
    let options = CrossEntropyOptions::default();
    for (found, expected) in [
        (types_of(x.matmul(&y)), vec!["f32[2, 3]", "f32[2, 4]"]),
        (types_of(x.linear(&y, None)), vec!["f32[2, 3]", "f32[2, 4]"]),
        (types_of(x.add(&y)), vec!["[2, 3]", "[2, 4]"]),
        (types_of(x.reshape([7])), vec!["f32[2, 3]", "[7]"]),
        (types_of(x.expand([3, 3])), vec!["[2, 3]", "[3, 3]"]),
        (
            types_of(x.index_select(0, &ints(&[1, 1]))),
            vec!["f32[2, 3]", "i32[1, 1]"],
        ),
        (
            types_of(x.index_add(0, &i, &y)),
            vec!["f32[2, 3]", "i32[5]", "f32[2, 4]"],
        ),
        (
            types_of(image.conv2d(&kernel, None, &Conv::default())),
            vec!["f32[1, 3, 8, 8]", "f32[4, 2, 3, 3]"],
        ),
        (
            types_of(floats(&[1, 2, 2, 2]).conv2d(&kernel, None, &Conv::default())),
            vec!["f32[1, 2, 2, 2]", "f32[4, 2, 3, 3]"],
        ),
        (
            types_of(x.cross_entropy(&i, &options)),
            vec!["f32[2, 3]", "i32[5]"],
        ),
        (
            types_of(q.attention(&k, &k, &AttentionOptions::default())),
            vec!["f32[1, 2, 3, 4]", "f32[1, 2, 3, 5]", "f32[1, 2, 3, 5]"],
        ),
        (
            types_of(Tensor::einsum("ab,bc->ac", &[&x, &y])),
            vec!["f32[2, 3]", "f32[2, 4]"],
        ),
        (
            types_of(Tensor::concat(&[&x, &y], 0)),
            vec!["f32[2, 3]", "f32[2, 4]"],
        ),
        (types_of(x.topk(9, 1, Order::Descending)), vec!["f32[2, 3]"]),
        (types_of(x.narrow(1, 2, 2)), vec!["f32[2, 3]"]),
        (types_of(x.item()), vec!["f32[2, 3]"]),
        (types_of(x.backward()), vec!["f32[2, 3]"]),
    ] {
        assert_eq!(found, expected);
    }
}

#[test]
fn errors_name_the_argument_that_is_wrong() {
    let x = floats(&[2, 3]);
    let image = floats(&[1, 3, 8, 8]);
    let kernel = floats(&[3, 3, 3, 3]);
    let conv = |stride, dilation, groups| {
        let options = Conv {
            stride,
            dilation,
            groups,
            ..Conv::default()
        };
        argument_of(image.conv2d(&kernel, None, &options))
    };
    assert_eq!(conv([0, 1], [1, 1], 1), "stride");
    assert_eq!(conv([1, 1], [1, 0], 1), "dilation");
    assert_eq!(conv([1, 1], [1, usize::MAX], 1), "dilation");
    assert_eq!(conv([1, 1], [1, 1], 2), "groups");
    let arange = |step: f64, dtype| argument_of(Tensor::arange(0.0, 300.0, step, dtype, &device()));
    assert_eq!(arange(0.0, DType::F32), "step");
    assert_eq!(arange(1.0, DType::U8), "dtype");
    assert_eq!(argument_of(x.topk(9, 1, Order::Descending)), "k");
    assert_eq!(argument_of(x.permute(&[0])), "axes");
    assert_eq!(argument_of(x.split(&[1, 1], 1)), "sizes");
    assert_eq!(argument_of(x.dropout(1.5, Rng::new(1))), "p");
    assert_eq!(argument_of(x.pad(&[(1, 1)], PadMode::Reflect)), "pairs");
    assert_eq!(argument_of(x.group_norm(2, &NormOptions::new())), "groups");
    assert_eq!(
        argument_of(Tensor::full([1], 300, DType::U8, &device())),
        "value"
    );
}

#[test]
fn errors_on_a_mesh_tell_shardings_axes_and_ranks() -> Result<()> {
    let mesh = Mesh::new("dp=2, tp_=2", &device())?;
    let on = |shape: &[usize], sharding: &str| Tensor::ones(shape, DType::F32, (&mesh, sharding));
    let x = on(&[4, 6], "[@dp@tp_, _]")?;
    let y = on(&[4, 6], "[_, @dp]{sum:tp_}")?;
    assert_eq!(types_of(x.matmul(&y)), [x.type_string(), y.type_string()]);
    let Err(Error::Shape { operands, .. }) = x.reshape([5]) else {
        panic!("reshaped")
    };
    assert_eq!(operands[0].sharding, "[@dp@tp_, _]");

    let parts = [
        floats(&[2, 3]),
        floats(&[1, 3]),
        floats(&[2, 3]),
        floats(&[2, 3]),
    ];
    let ty = TensorType::parse("f32[4@dp, 6@tp_]", &mesh)?;
    let Err(Error::Shape { operands, .. }) = Tensor::from_shards(&ty, &mesh, &parts) else {
        panic!("put together")
    };
    assert_eq!(operands[1].mesh_rank, Some(1));
    assert_eq!(operands[1].to_string(), "f32[1, 3]");

    let twice = Sharding::replicated().cut(0, 0).cut(1, 0).check(&mesh, 2);
    assert!(
        matches!(&twice, Err(Error::Sharding { sharding, .. }) if sharding == "[@dp, @dp]"),
        "{twice:?}"
    );
    let away = mesh.addressing(&[1])?.addressing(&[2]);
    assert!(
        matches!(&away, Err(Error::Mesh { ranks, axes, .. }) if **ranks == [2] && axes.len() == 2),
        "{away:?}"
    );
    let refused = with_policy(Policy::Explicit, &["dp"], || x.cumsum(0));
    assert!(
        matches!(&refused, Err(Error::ImplicitCommunication { choices, .. }) if choices.iter().any(|c| c.bytes > 0)),
        "{refused:?}"
    );
    Ok(())
}

#[test]
fn errors_say_why_there_is_no_gradient() -> Result<()> {
    let reason = |result: Result<()>| match result {
        Err(Error::Gradient { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let x = floats(&[1]).require_grad()?;
    assert_eq!(
        reason(floats(&[1]).backward().map(drop)),
        NoGradient::Untracked
    );
    let loss = x.mul(&x)?;
    loss.backward()?;
    assert_eq!(reason(loss.backward().map(drop)), NoGradient::Released);
    let unused = floats(&[1]).require_grad()?;
    let found = grad(&[&x.mul(&x)?], &[&unused], &GradOptions::default());
    assert_eq!(reason(found.map(drop)), NoGradient::Unused);
    Ok(())
}
