//! Gradients at the places where they are easily wrong: duplicates, zeros, ties, rests, edges.

use anymesh_core::{
    DType, Error, Mesh, Result, Tensor,
    backend::ScatterOp,
    grad::{GradOptions, grad, no_grad},
    ops::{AvgPool, Conv, ConvTranspose, Interpolate, MaxPool, Order, Side},
};

fn vector(values: &[f64]) -> Tensor {
    tensor(values, &[values.len()])
}

fn tensor(values: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, &anymesh_backend_cpu::device()).unwrap()
}

fn index(values: &[i32]) -> Tensor {
    Tensor::from_slice(values, [values.len()], &anymesh_backend_cpu::device()).unwrap()
}

/// Different numbers of both signs, none of them near zero.
fn numbers(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n)
        .map(|i| ((i * 37 + 11) % 64) as f64 / 16.0 - 1.97)
        .collect();
    tensor(&values, shape)
}

/// The gradients of the weighted sum of a function's result.
fn gradients(
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
    at: &[&Tensor],
    weights: &[f64],
) -> Vec<Vec<f64>> {
    let leaves: Vec<Tensor> = at.iter().map(|t| t.require_grad().unwrap()).collect();
    let out = f(&leaves).unwrap();
    let options = GradOptions {
        seeds: Some(vec![tensor(weights, out.dims())]),
        ..Default::default()
    };
    grad(&[&out], &leaves.iter().collect::<Vec<_>>(), &options)
        .unwrap()
        .iter()
        .map(|g| g.to_vec().unwrap())
        .collect()
}

fn weight(i: usize) -> f64 {
    (i as f64 * 0.618_033_988_749_894_9).fract() - 0.3
}

/// The gradients of `sum(weights * f)` and, with recording, of `sum(weights * gradients)`.
fn first_and_second(
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
    at: &[Tensor],
) -> Result<[Vec<Tensor>; 2]> {
    let leaves: Vec<Tensor> = at.iter().map(|t| t.require_grad()).collect::<Result<_>>()?;
    let refs: Vec<&Tensor> = leaves.iter().collect();
    let weighted = |t: &Tensor, from: usize| {
        t.mul(&tensor(
            &(0..t.numel()).map(|i| weight(i + from)).collect::<Vec<_>>(),
            t.dims(),
        ))?
        .sum(&[], false)
    };
    let options = GradOptions {
        create_graph: true,
        allow_unused: true,
        ..Default::default()
    };
    let first = grad(&[&weighted(&f(&leaves)?, 3)?], &refs, &options)?;
    let mut sum = weighted(&first[0], 20)?;
    for (i, g) in first.iter().enumerate().skip(1) {
        sum = sum.add(&weighted(g, 20 + 50 * i)?)?;
    }
    let second = if sum.requires_grad() {
        grad(&[&sum], &refs, &options)?
    } else {
        at.iter().map(Tensor::zeros_like).collect::<Result<_>>()?
    };
    Ok([first, second])
}

/// Holds first and second gradients of a function against finite differences.
#[track_caller]
fn check(f: impl Fn(&[Tensor]) -> Result<Tensor>, at: &[&Tensor]) {
    let at: Vec<Tensor> = at.iter().map(|t| (*t).clone()).collect();
    let exact = first_and_second(&f, &at).unwrap();
    let value = |at: &[Tensor]| {
        no_grad(|| f(at).unwrap())
            .to_vec::<f64>()
            .unwrap()
            .iter()
            .enumerate()
            .map(|(i, v)| v * weight(i + 3))
            .sum::<f64>()
    };
    let slope = |at: &[Tensor]| {
        let [first, _] = first_and_second(&f, at).unwrap();
        let sum = |(k, g): (usize, &Tensor)| {
            g.to_vec::<f64>()
                .unwrap()
                .iter()
                .enumerate()
                .map(|(i, v)| v * weight(i + 20 + 50 * k))
                .sum::<f64>()
        };
        first.iter().enumerate().map(sum).sum::<f64>()
    };
    let functions: [&dyn Fn(&[Tensor]) -> f64; 2] = [&value, &slope];
    for (order, (function, exact)) in functions.iter().zip(&exact).enumerate() {
        for (k, x) in at.iter().enumerate() {
            let (numbers, exact) = (
                x.to_vec::<f64>().unwrap(),
                exact[k].to_vec::<f64>().unwrap(),
            );
            for i in 0..numbers.len() {
                let moved = |step: f64| {
                    let mut numbers = numbers.clone();
                    numbers[i] += step;
                    let mut at = at.clone();
                    at[k] = tensor(&numbers, x.dims());
                    function(&at)
                };
                let h = 1e-4;
                let difference = (8.0 * (moved(h) - moved(-h))
                    - (moved(2.0 * h) - moved(-2.0 * h)))
                    / (12.0 * h);
                let error = (difference - exact[i]).abs() / exact[i].abs().max(1.0);
                assert!(
                    error < 1e-6,
                    "order {}, operand {k}, element {i}: {} against differences of {difference}",
                    order + 1,
                    exact[i]
                );
            }
        }
    }
}

#[test]
fn of_values_set_at_one_place_only_the_last_has_a_gradient() {
    let (x, v) = (vector(&[1., 2., 3., 4.]), vector(&[5., 6., 7., 8., 9.]));
    let at = index(&[1, 3, 1, -1, 1]);
    let weights = [10., 20., 30., 40.];
    let found = gradients(
        |t| t[0].scatter(0, &at, &t[1], ScatterOp::Set),
        &[&x, &v],
        &weights,
    );
    assert_eq!(found, [vec![10., 0., 30., 0.], vec![0., 0., 0., 40., 20.]]);
    let found = gradients(
        |t| t[0].put_along_axis(0, &at, &t[1], ScatterOp::Set),
        &[&x, &v],
        &weights,
    );
    assert_eq!(found, [vec![10., 0., 30., 0.], vec![0., 0., 0., 40., 20.]]);
    let found = gradients(
        |t| t[0].index_put(&[&at], &t[1], ScatterOp::Set),
        &[&x, &v],
        &weights,
    );
    assert_eq!(found, [vec![10., 0., 30., 0.], vec![0., 0., 0., 40., 20.]]);
}

#[test]
fn values_that_broadcast_get_the_sum_over_the_places_they_won() {
    let (x, row) = (numbers(&[3, 2]), vector(&[5., 6.]));
    let weights = [1., 2., 4., 8., 16., 32.];
    let at = index(&[2, 0, 2]);
    let set = gradients(
        |t| t[0].index_put(&[&at], &t[1], ScatterOp::Set),
        &[&x, &row],
        &weights,
    );
    assert_eq!(set, [vec![0., 0., 4., 8., 0., 0.], vec![17., 34.]]);
    let added = gradients(
        |t| t[0].index_put(&[&at], &t[1], ScatterOp::Add),
        &[&x, &row],
        &weights,
    );
    assert_eq!(added, [weights.to_vec(), vec![33., 66.]]);
    let scalar = tensor(&[7.], &[]);
    let one = gradients(
        |t| t[0].index_put(&[&at, &index(&[1, 0, 1])], &t[1], ScatterOp::Set),
        &[&x, &scalar],
        &weights,
    );
    assert_eq!(one, [vec![0., 2., 4., 8., 16., 0.], vec![33.]]);
    let put = gradients(
        |t| t[0].put_along_axis(0, &at.unsqueeze(1)?, &t[1], ScatterOp::Set),
        &[&x, &row],
        &weights,
    );
    assert_eq!(put, [vec![0., 0., 4., 8., 0., 0.], vec![17., 34.]]);
}

#[test]
fn values_that_a_scatter_does_not_use_have_no_gradient() {
    let (x, v) = (numbers(&[2, 3]), numbers(&[3, 4]).add(0.031).unwrap());
    let at = Tensor::from_slice(&[2i32, 0, 1, 1], [2, 2], x.device()).unwrap();
    for mode in [
        ScatterOp::Set,
        ScatterOp::Add,
        ScatterOp::Mul,
        ScatterOp::Min,
        ScatterOp::Max,
    ] {
        check(|t| t[0].scatter(1, &at, &t[1], mode), &[&x, &v]);
    }
}

#[test]
fn equal_extremes_of_a_scatter_share_the_gradient() {
    let (x, v) = (vector(&[3., 0.]), vector(&[3., 1., 2., 3.]));
    let at = index(&[0, 1, 0, 0]);
    let found = gradients(
        |t| t[0].scatter(0, &at, &t[1], ScatterOp::Max),
        &[&x, &v],
        &[9., 5.],
    );
    assert_eq!(found, [vec![3., 0.], vec![3., 5., 0., 3.]]);
    let found = gradients(
        |t| t[0].neg()?.scatter(0, &at, &t[1].neg()?, ScatterOp::Min),
        &[&x, &v],
        &[9., 5.],
    );
    assert_eq!(found, [vec![-3., -0.], vec![-3., -5., -0., -3.]]);
}

#[test]
fn products_with_one_two_or_three_zeros_have_right_first_and_second_gradients() {
    // Places 0 to 4 get no zero, one, two, three, and the zero of the destination.
    let x = vector(&[1.5, -2., 0.5, 3., 0.]);
    let v = vector(&[2., 0., -1.5, 0., 3., 0., 0.7, 0., 0., 0., 1.2, -0.4, 0.9]);
    let at = index(&[0, 1, 1, 2, 2, 2, 0, 3, 3, 3, 4, 4, 1]);
    check(|t| t[0].scatter(0, &at, &t[1], ScatterOp::Mul), &[&x, &v]);
    check(
        |t| t[0].put_along_axis(0, &at, &t[1], ScatterOp::Mul),
        &[&x, &v],
    );
}

#[test]
fn running_products_with_zeros_have_right_first_and_second_gradients() {
    for zeros in [
        &[][..],
        &[2],
        &[0],
        &[5],
        &[1, 3],
        &[0, 1],
        &[0, 2, 4],
        &[0, 1, 2, 3, 4, 5],
    ] {
        let mut values = vec![1.5, -2., 0.7, 3., -0.4, 1.2];
        zeros.iter().for_each(|i| values[*i] = 0.0);
        check(|t| t[0].cumprod(0), &[&vector(&values)]);
        check(|t| t[0].cumprod(-1), &[&tensor(&values, &[2, 3])]);
    }
}

#[test]
fn the_gradient_of_a_running_log_sum_does_not_overflow() {
    let x = vector(&[-2000., 1000., -1000., 999.5, 1000.5]);
    let found = gradients(|t| t[0].logcumsumexp(0), &[&x], &[1., -2., 3., 0.5, -4.]).remove(0);
    // Element 0 is alone in the first sum and vanishes in the others.
    let shares = |g: &[f64], x: &[f64]| {
        let y: Vec<f64> = (0..x.len())
            .map(|i| x[..=i].iter().map(|v| (v - 1000.).exp()).sum::<f64>().ln() + 1000.)
            .collect();
        (0..x.len())
            .map(|k| (k..x.len()).map(|i| g[i] * (x[k] - y[i]).exp()).sum())
            .collect::<Vec<f64>>()
    };
    let mut expected = shares(&[-2., 3., 0.5, -4.], &[1000., -1000., 999.5, 1000.5]);
    expected.insert(0, 1.0);
    assert!(
        found
            .iter()
            .zip(&expected)
            .all(|(a, b)| (a - b).abs() < 1e-10),
        "{found:?} {expected:?}"
    );
    let empty_start = vector(&[f64::NEG_INFINITY, f64::NEG_INFINITY, 0., 0.]);
    let found = gradients(|t| t[0].logcumsumexp(0), &[&empty_start], &[1., 1., 2., 4.]).remove(0);
    assert!(
        found
            .iter()
            .zip([0., 0., 4., 2.])
            .all(|(a, b)| (a - b).abs() < 1e-12),
        "{found:?}"
    );
}

#[test]
fn a_gradient_of_zero_has_a_gradient_itself() {
    // The weight of the second result is zero, but the gradient depends on it.
    check(
        |t| t[0].logcumsumexp(0)?.mul(&t[1]),
        &[&vector(&[0.3, -1., 0.5, 2.]), &vector(&[1., 0., -2., 0.])],
    );
}

#[test]
fn running_sums_and_extremes_have_the_gradient_of_what_they_cover() {
    let x = vector(&[1., 3., 2., 3., 5.]);
    assert_eq!(
        gradients(|t| t[0].cumsum(0), &[&x], &[1., 2., 4., 8., 16.]),
        [[31., 30., 28., 24., 16.]]
    );
    // Of equals the latest is the maximum.
    assert_eq!(
        gradients(|t| Ok(t[0].cummax(0)?.0), &[&x], &[1., 2., 4., 8., 16.]),
        [[1., 6., 0., 8., 16.]]
    );
    assert_eq!(
        gradients(|t| Ok(t[0].cummin(0)?.0), &[&x], &[1., 2., 4., 8., 16.]),
        [[31., 0., 0., 0., 0.]]
    );
}

#[test]
fn a_convolution_whose_steps_leave_a_rest_has_right_gradients() {
    // (size, kernel, stride, padding, dilation): rests of 1 and 2, a rest that is as large as the
    // dilation, a step that is never taken.
    for (size, kernel, stride, padding, dilation) in [
        (6, 2, 3, 0, 1),
        (8, 3, 4, 1, 1),
        (8, 2, 4, 0, 2),
        (5, 2, 9, 1, 2),
        (4, 1, 3, 0, 7),
        (3, 3, 2, 2, 1),
    ] {
        for groups in [1, 2] {
            let (x, w, b) = (
                numbers(&[2, 2, size]),
                numbers(&[4, 2 / groups, kernel]),
                numbers(&[4]),
            );
            let options = Conv {
                stride: [stride],
                padding: [padding],
                dilation: [dilation],
                groups,
            };
            check(|t| t[0].conv1d(&t[1], Some(&t[2]), &options), &[&x, &w, &b]);
        }
    }
    let (x, w) = (numbers(&[1, 2, 4, 6]), numbers(&[2, 1, 2, 3]));
    let options = Conv {
        stride: [3, 2],
        padding: [1, 0],
        dilation: [1, 2],
        groups: 2,
    };
    check(|t| t[0].conv2d(&t[1], None, &options), &[&x, &w]);
}

#[test]
fn a_transposed_convolution_with_output_padding_has_right_gradients() {
    // (size, kernel, stride, padding, output padding, dilation); in the third the output is
    // extended by more than a step, in the fourth by more than a dilation.
    for (size, kernel, stride, padding, extra, dilation) in [
        (3, 2, 3, 0, 2, 1),
        (3, 3, 2, 1, 1, 1),
        (3, 2, 1, 0, 2, 3),
        (2, 2, 4, 1, 3, 1),
        (1, 3, 5, 0, 4, 2),
    ] {
        for groups in [1, 2] {
            let (x, w, b) = (
                numbers(&[2, 4, size]),
                numbers(&[4, 4 / groups, kernel]),
                numbers(&[4]),
            );
            let options = ConvTranspose {
                stride: [stride],
                padding: [padding],
                output_padding: [extra],
                dilation: [dilation],
                groups,
            };
            check(
                |t| t[0].conv_transpose1d(&t[1], Some(&t[2]), &options),
                &[&x, &w, &b],
            );
        }
    }
}

#[test]
fn a_convolution_keeps_what_its_gradients_need_and_their_dtypes() {
    let device = anymesh_backend_cpu::device();
    let x = numbers(&[1, 2, 4])
        .cast(DType::BF16)
        .unwrap()
        .require_grad()
        .unwrap();
    let w = numbers(&[3, 2, 2]).cast(DType::F32).unwrap();
    let b = Tensor::ones([3], DType::F64, &device)
        .unwrap()
        .require_grad()
        .unwrap();
    let y = x.conv1d(&w, Some(&b), &Conv::default()).unwrap();
    assert_eq!(y.dtype(), DType::F32, "a bias does not widen");
    let grads = y.sum(&[], false).unwrap().backward().unwrap();
    assert_eq!(grads.of(&x).unwrap().dtype(), DType::BF16);
    assert_eq!(grads.of(&b).unwrap().to_vec::<f64>().unwrap(), [3., 3., 3.]);
    let empty = Tensor::zeros([0, 2, 4], DType::F64, &device).unwrap();
    let found = gradients(
        |t| t[0].conv1d(&t[1], None, &Conv::default()),
        &[&empty, &numbers(&[3, 2, 2])],
        &[],
    );
    assert_eq!(found, [vec![], vec![0.0; 12]]);
}

#[test]
fn pools_whose_windows_leave_a_rest_overlap_or_reach_over_the_edge_have_right_gradients() {
    let x = numbers(&[2, 3, 7]);
    for (kernel, stride, padding) in [
        (2, 3, 0),
        (3, 2, 1),
        (2, 5, 1),
        (4, 1, 2),
        (7, 9, 0),
        (2, 2, 1),
    ] {
        for ceil_mode in [false, true] {
            for count_include_pad in [false, true] {
                let options = AvgPool {
                    kernel: [kernel],
                    stride: [stride],
                    padding: [padding],
                    ceil_mode,
                    count_include_pad,
                };
                check(|t| t[0].avg_pool1d(&options), &[&x]);
            }
            let options = MaxPool {
                kernel: [kernel],
                stride: [stride],
                padding: [padding],
                ceil_mode,
                dilation: [1],
            };
            check(|t| t[0].max_pool1d(&options), &[&x]);
            check(|t| Ok(t[0].max_pool1d_with_indices(&options)?.0), &[&x]);
        }
    }
    // Without dimensions in front, and over two of them with a dilation.
    check(|t| t[0].avg_pool1d(&AvgPool::new([2])), &[&numbers(&[5])]);
    let options = MaxPool {
        kernel: [2, 2],
        stride: [1, 2],
        padding: [1, 0],
        dilation: [2, 1],
        ceil_mode: true,
    };
    check(|t| t[0].max_pool2d(&options), &[&x]);
    for out in [1, 3, 5, 7, 9] {
        check(|t| t[0].adaptive_avg_pool2d([2, out]), &[&x]);
        check(|t| t[0].adaptive_max_pool2d([2, out]), &[&x]);
        for mode in [
            Interpolate::Nearest,
            Interpolate::Linear {
                align_corners: true,
            },
            Interpolate::Linear {
                align_corners: false,
            },
        ] {
            check(|t| t[0].interpolate(&[2, out], mode), &[&x]);
        }
    }
}

#[test]
fn the_first_of_equal_maxima_of_a_window_has_the_gradient() {
    let x = vector(&[2., 2., 1., 1.]);
    let options = MaxPool {
        stride: [1],
        ..MaxPool::new([2])
    };
    assert_eq!(
        gradients(|t| t[0].max_pool1d(&options), &[&x], &[1., 2., 4.]),
        [[1., 2., 4., 0.]]
    );
    assert_eq!(
        gradients(|t| Ok(t[0].max_with_indices(0, false)?.0), &[&x], &[5.]),
        [[5., 0., 0., 0.]]
    );
    assert_eq!(
        gradients(|t| Ok(t[0].median(None, false)?.0), &[&x], &[5.]),
        [[0., 0., 0., 5.]]
    );
    assert_eq!(
        gradients(
            |t| Ok(t[0].topk(2, 0, Order::Ascending)?.0),
            &[&x],
            &[5., 6.]
        ),
        [[0., 0., 5., 6.]]
    );
    assert_eq!(
        gradients(|t| Ok(t[0].unique()?.values), &[&x], &[5., 6.]),
        [[6., 0., 5., 0.]]
    );
}

#[test]
fn lookups_add_up_where_an_element_is_read_twice() {
    let x = numbers(&[3, 2]);
    let at = index(&[2, 0, 2]);
    assert_eq!(
        gradients(
            |t| t[0].index_select(0, &at),
            &[&x],
            &[1., 2., 4., 8., 16., 32.]
        ),
        [[4., 8., 0., 0., 17., 34.]]
    );
    let column = index(&[1, 0, 1]);
    assert_eq!(
        gradients(|t| t[0].index_get(&[&at, &column]), &[&x], &[1., 2., 4.]),
        [[2., 0., 0., 0., 0., 5.]]
    );
    // Coordinates of no dimension name the whole tensor.
    let none = Tensor::zeros([2, 0], DType::I32, x.device()).unwrap();
    assert_eq!(
        gradients(
            |t| t[0].gather_nd(&none),
            &[&x],
            &(0..12).map(f64::from).collect::<Vec<_>>()
        ),
        [[6., 8., 10., 12., 14., 16.]]
    );
    let nothing = Tensor::zeros([0], DType::I32, x.device()).unwrap();
    assert_eq!(
        gradients(|t| t[0].index_select(0, &nothing), &[&x], &[]),
        [[0.0; 6]]
    );
    // An index without dimensions.
    assert_eq!(
        gradients(
            |t| t[0].gather_axes(&[(1, &index(&[1]).reshape(())?)]),
            &[&x],
            &[1., 2., 4.]
        ),
        [[0., 1., 0., 2., 0., 4.]]
    );
}

#[test]
fn what_a_mask_selects_on_a_mesh_has_its_gradient_there() {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("a=2", &device).unwrap();
    let x = numbers(&[4, 3])
        .to_mesh(&mesh, "[@a, _]")
        .unwrap()
        .require_grad()
        .unwrap();
    let mask = x.gt(0).unwrap();
    let loss = x
        .masked_select(&mask)
        .unwrap()
        .square()
        .unwrap()
        .sum(&[], false)
        .unwrap();
    let gradient = loss.backward().unwrap().of(&x).unwrap();
    assert_eq!(gradient.type_string(), x.type_string());
    let expected: Vec<f64> = x
        .to_vec::<f64>()
        .unwrap()
        .iter()
        .map(|v| if *v > 0.0 { 2.0 * v } else { 0.0 })
        .collect();
    assert_eq!(gradient.to_vec::<f64>().unwrap(), expected);
    // Called without recording, awaited with it.
    let selecting = no_grad(|| x.masked_select_async(&mask));
    assert!(!pollster::block_on(selecting).unwrap().requires_grad());
}

#[test]
fn positions_and_draws_of_tracked_tensors_are_constants() {
    let x = numbers(&[2, 4]).require_grad().unwrap();
    let positive = x.abs().unwrap();
    let results = [
        x.argsort(-1, Order::Ascending),
        x.argmax(Some(1), false),
        x.sort(1, Order::Ascending).map(|s| s.1),
        x.searchsorted(&x, Side::Right),
        x.nonzero(),
        x.count_nonzero(&[], false),
        x.any(&[0], false),
        positive.multinomial(3, true, anymesh_core::ops::Rng::new(1)),
        positive.multinomial(3, false, anymesh_core::ops::Rng::new(1)),
    ];
    for result in results {
        assert!(!result.unwrap().requires_grad());
    }
    let error = index(&[1])
        .one_hot(3)
        .unwrap()
        .cast(DType::F64)
        .unwrap()
        .sum(&[], false)
        .unwrap()
        .backward()
        .unwrap_err();
    assert!(matches!(error, Error::Gradient { .. }), "{error}");
}

#[test]
fn weights_of_a_count_read_their_gradient_from_their_bin() {
    let found = gradients(
        |t| index(&[2, 0, 2]).bincount(Some(&t[0]), 4),
        &[&vector(&[1., 2., 3.])],
        &[5., 6., 7., 8.],
    );
    assert_eq!(found, [[7., 5., 7.]]);
}
