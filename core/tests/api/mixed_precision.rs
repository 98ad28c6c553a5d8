//! What dtype results have where operands are small floats, and what that leaves of their digits.

use anymesh_core::{
    DType, Error, Mesh, Result, Tensor, bf16,
    ops::{
        Conv, CrossEntropyOptions, GaussianNll, LossReduction, NormOptions, PoissonNll, Promotion,
        TripletMargin, with_promotion,
    },
};

const SMALL: [DType; 4] = [DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2];

/// Numbers between 0.1 and 0.9 that look random.
fn numbers(shape: &[usize], seed: usize) -> Result<Tensor> {
    Tensor::from_fn(shape, &anymesh_backend_cpu::device(), |at| {
        let hash = at
            .iter()
            .fold(seed * 97 + 13, |h, i| (h * 31 + i * 17 + 7) % 1009);
        0.1 + 0.8 * hash as f32 / 1009.0
    })
}

/// With logits of `bf16` the mean loss of 10.98 came out as 11.
#[test]
fn a_cross_entropy_of_small_logits_has_the_digits_of_f32() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let classes = 50_257;
    let logits = numbers(&[4, classes], 1)?.cast(DType::BF16)?;
    let target = Tensor::from_slice(&[5i32, 77, -100, 49_000], [4], &device)?;
    for reduction in [LossReduction::Mean, LossReduction::Sum, LossReduction::None] {
        for label_smoothing in [0.0, 0.1] {
            let options = CrossEntropyOptions {
                reduction,
                label_smoothing,
                ..Default::default()
            };
            let loss = logits.cross_entropy(&target, &options)?;
            let wide = logits.cast(DType::F32)?.cross_entropy(&target, &options)?;
            assert_eq!(loss.dtype(), DType::F32);
            assert_eq!(loss.to_vec::<f32>()?, wide.to_vec::<f32>()?);
        }
    }
    Ok(())
}

type Loss = fn(&Tensor, &Tensor, LossReduction) -> Result<Tensor>;

#[test]
fn every_loss_of_small_floats_is_f32_and_its_gradients_are_not() -> Result<()> {
    let losses: [(&str, Loss); 13] = [
        ("mse", |x, t, r| x.mse_loss(t, r)),
        ("l1", |x, t, r| x.l1_loss(t, r)),
        ("smooth_l1", |x, t, r| x.smooth_l1_loss(t, 1.0, r)),
        ("huber", |x, t, r| x.huber_loss(t, 0.3, r)),
        ("bce", |x, t, r| x.bce_loss(t, r)),
        ("bce_with_logits", |x, t, r| {
            x.bce_with_logits_loss(t, None, r)
        }),
        ("kl_div", |x, t, r| x.kl_div_loss(t, false, r)),
        ("hinge", |x, t, r| x.hinge_loss(t, 1.0, r)),
        ("hinge_embedding", |x, t, r| {
            x.hinge_embedding_loss(t, 1.0, r)
        }),
        ("margin_ranking", |x, t, r| {
            x.margin_ranking_loss(&t.add(0.25)?, t, 0.5, r)
        }),
        ("triplet_margin", |x, t, r| {
            x.triplet_margin_loss(
                t,
                &t.add(0.5)?,
                &TripletMargin {
                    reduction: r,
                    ..Default::default()
                },
            )
        }),
        ("gaussian_nll", |x, t, r| {
            x.gaussian_nll_loss(
                t,
                t,
                &GaussianNll {
                    full: true,
                    reduction: r,
                    ..Default::default()
                },
            )
        }),
        ("poisson_nll", |x, t, r| {
            x.poisson_nll_loss(
                t,
                &PoissonNll {
                    log_input: false,
                    full: true,
                    reduction: r,
                    ..Default::default()
                },
            )
        }),
    ];
    for dtype in SMALL {
        let t = numbers(&[3, 4], 3)?.cast(dtype)?;
        for (name, loss) in losses {
            let x = numbers(&[3, 4], 2)?.cast(dtype)?.require_grad()?;
            for reduction in [LossReduction::Mean, LossReduction::Sum, LossReduction::None] {
                let got = loss(&x, &t, reduction)?;
                assert_eq!(got.dtype(), DType::F32, "{name} of {dtype}");
                let seed = got.ones_like()?;
                let grads = got.backward_with(&seed)?;
                assert_eq!(grads.of(&x)?.dtype(), dtype, "{name} of {dtype}");
            }
        }
        let x = numbers(&[3, 4], 2)?.cast(dtype)?.require_grad()?;
        let sign = t.narrow(1, 0, 1)?.squeeze(&[1])?.sign()?;
        let got = x.cosine_embedding_loss(&t, &sign, 0.1, LossReduction::Mean)?;
        assert_eq!(got.dtype(), DType::F32);
        assert_eq!(got.backward()?.of(&x)?.dtype(), dtype);
        let classes = t.argmax(Some(1), false)?;
        let got = x.nll_loss(&classes, None, None, LossReduction::Mean)?;
        assert_eq!(got.dtype(), DType::F32);
        assert_eq!(got.backward()?.of(&x)?.dtype(), dtype);
    }
    let x = numbers(&[3, 4], 2)?.cast(DType::F64)?;
    assert_eq!(x.mse_loss(&x, LossReduction::Mean)?.dtype(), DType::F64);
    Ok(())
}

#[test]
fn statistics_of_small_floats_are_f32() -> Result<()> {
    for dtype in SMALL {
        let x = numbers(&[8, 3, 5], 4)?.cast(dtype)?.require_grad()?;
        let norm = x.batch_norm_train(&NormOptions::new())?;
        let dtypes = [&norm.out, &norm.mean, &norm.var].map(|t| t.dtype());
        assert_eq!(dtypes, [dtype, DType::F32, DType::F32]);
        let lse = x.logsumexp(&[1], false)?;
        assert_eq!(lse.dtype(), DType::F32);
        let wide = x.detach().cast(DType::F32)?.logsumexp(&[1], false)?;
        assert_eq!(lse.to_vec::<f32>()?, wide.to_vec::<f32>()?);
        assert_eq!(lse.sum(&[], false)?.backward()?.of(&x)?.dtype(), dtype);
        // What goes back into the computation does not widen it.
        for reduced in [
            x.mean(&[1], true)?,
            x.var(&[1], true, 1)?,
            x.norm(2.0, &[1], true)?,
        ] {
            assert_eq!(reduced.dtype(), dtype);
        }
    }
    Ok(())
}

/// It made `f32` activations of everything behind it.
#[test]
fn a_wide_bias_does_not_widen_and_is_added_before_rounding() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    // 256 is a bf16, 257 is not: a product that were rounded first would lose its last one.
    let x = Tensor::ones([2, 257], DType::BF16, &device)?.require_grad()?;
    let w = Tensor::ones([3, 257], DType::BF16, &device)?.require_grad()?;
    let b = Tensor::full([3], -256.0, DType::F32, &device)?.require_grad()?;
    let y = x.linear(&w, Some(&b))?;
    assert_eq!(y.dtype(), DType::BF16);
    assert_eq!(y.to_vec::<bf16>()?, [bf16::ONE; 6]);
    let narrow = b.detach().cast(DType::BF16)?;
    assert_eq!(
        x.linear(&w, Some(&narrow))?.to_vec::<bf16>()?,
        [bf16::ONE; 6]
    );
    let grads = y.cast(DType::F32)?.sum(&[], false)?.backward()?;
    assert_eq!(
        [&x, &w, &b].map(|t| grads.of(t).map(|g| g.dtype())),
        [Ok(DType::BF16), Ok(DType::BF16), Ok(DType::F32)]
    );

    // The gradient of the bias is a sum over rows, not one that was rounded to 8 bits.
    let rows = Tensor::ones([257, 2], DType::BF16, &device)?;
    let b = Tensor::zeros([1], DType::F32, &device)?.require_grad()?;
    let y = rows.linear(&Tensor::ones([1, 2], DType::BF16, &device)?, Some(&b))?;
    let grads = y.backward_with(&y.ones_like()?)?;
    assert_eq!(grads.of(&b)?.to_vec::<f32>()?, [257.0]);

    // Integers do become floats.
    let counts = Tensor::ones([2, 2], DType::I32, &device)?;
    let half = Tensor::full([2], 0.5, DType::F32, &device)?;
    assert_eq!(
        counts.linear(&counts, Some(&half))?.to_vec::<f32>()?,
        [2.5; 4]
    );

    let image = Tensor::ones([1, 2, 4], DType::BF16, &device)?;
    let window = Tensor::ones([3, 2, 2], DType::BF16, &device)?;
    let bias = Tensor::ones([3], DType::F32, &device)?.require_grad()?;
    let y = image.conv1d(&window, Some(&bias), &Conv::default())?;
    assert_eq!(
        (y.dtype(), y.to_vec::<bf16>()?[0].to_f32()),
        (DType::BF16, 5.0)
    );
    let grads = y.backward_with(&y.ones_like()?)?;
    assert_eq!(grads.of(&bias)?.to_vec::<f32>()?, [3.0; 3]);
    Ok(())
}

#[test]
fn a_bias_on_a_mesh_is_as_on_one_device() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("tp=2", &device)?;
    let x = numbers(&[4, 6], 5)?.cast(DType::BF16)?;
    let w = numbers(&[8, 6], 6)?.cast(DType::BF16)?;
    let b = numbers(&[8], 7)?;
    let expected = x.linear(&w, Some(&b))?;
    let sharded = x.to_mesh(&mesh, "[_, _]")?.linear(
        &w.to_mesh(&mesh, "[@tp, _]")?,
        Some(&b.to_mesh(&mesh, "[@tp]")?),
    )?;
    assert_eq!(sharded.type_string(), "bf16[4, 8@tp]");
    assert_eq!(sharded.to_vec::<bf16>()?, expected.to_vec::<bf16>()?);
    Ok(())
}

#[test]
fn products_of_bf16_stay_so_in_the_backward_pass() -> Result<()> {
    let x = numbers(&[4, 6], 5)?.cast(DType::BF16)?.require_grad()?;
    let w = numbers(&[6, 3], 6)?.cast(DType::BF16)?.require_grad()?;
    let y = x.matmul_as(&w, DType::F32)?;
    let narrow = y.detach().cast(DType::BF16)?;
    let grads = y.backward_with(&y.detach())?;
    assert_eq!(
        grads.of(&x)?.to_vec::<bf16>()?,
        narrow.matmul(&w.detach().t()?)?.to_vec::<bf16>()?
    );
    assert_eq!(
        grads.of(&w)?.to_vec::<bf16>()?,
        x.detach().t()?.matmul(&narrow)?.to_vec::<bf16>()?
    );
    Ok(())
}

#[test]
fn a_product_of_different_floats_can_be_made_an_error() -> Result<()> {
    let w = numbers(&[4, 4], 8)?;
    let x = w.cast(DType::BF16)?.require_grad()?;
    let refused = |result: Result<Tensor>| {
        let error = result.expect_err("explicit");
        assert!(matches!(error, Error::Promotion { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("bf16") && text.contains("f32") && text.contains("cast"),
            "{text}"
        );
    };
    let whole = Tensor::ones([4, 4], DType::I32, w.device())?;
    with_promotion(Promotion::Explicit, || {
        refused(x.matmul(&w));
        refused(x.linear(&w, None));
        refused(x.reshape([1, 4, 4])?.bmm(&w.reshape([1, 4, 4])?));
        refused(Tensor::einsum("ij,jk->ik", &[&w, &x]));
        refused(
            x.reshape([1, 4, 4])?
                .conv1d(&w.reshape([4, 4, 1])?, None, &Conv::default()),
        );
        refused(x.reshape([16])?.outer(&w.reshape([16])?));
        x.add(&w)?;
        x.matmul(&whole)?;
        x.linear(&x, Some(&w.narrow(0, 0, 1)?.reshape([4])?))?;
        with_promotion(Promotion::Auto, || x.matmul(&w))?;
        // The gradient of a wide result meets narrow factors; that is not the program's doing.
        let half = x.detach().cast(DType::F16)?.require_grad()?;
        let y = half.matmul_as(&half, DType::F32)?;
        y.sum(&[], false)?.backward()?.of(&half)?;
        Ok(())
    })
}
