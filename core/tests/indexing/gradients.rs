//! Defects of other libraries' gradients of indexing.

use super::tensor;
use anymesh_core::{DType, Result, Tensor, i};

/// The gradients of `x` and of the value, for the gradient 1, 2, 3, ... of the result.
fn gradients(
    x: &Tensor,
    value: &Tensor,
    f: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> (Vec<f64>, Vec<f64>) {
    let (x, value) = (x.require_grad().unwrap(), value.require_grad().unwrap());
    let y = f(&x, &value).unwrap();
    let seed = Tensor::arange(1, y.numel() as i64 + 1, 1, y.dtype(), y.mesh())
        .unwrap()
        .reshape(y.shape())
        .unwrap();
    let grads = y.backward_with(&seed).unwrap();
    let read = |x: &Tensor| {
        let gradient = grads.of(x).unwrap();
        assert_eq!((gradient.dtype(), gradient.shape()), (x.dtype(), x.shape()));
        gradient.cast(DType::F64).unwrap().to_vec::<f64>().unwrap()
    };
    (read(&x), read(&value))
}

fn zeros(shape: &[usize]) -> Tensor {
    tensor(&vec![0f32; shape.iter().product()], shape)
}

/// Paddle #75903: the gradient of a value was laid out as if every element had four bytes.
#[test]
fn the_gradient_of_a_value_is_right_for_elements_of_two_and_eight_bytes() {
    let index = tensor(&[2i32, 0], [2]);
    for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
        let (x, value) = (
            zeros(&[4, 2]).cast(dtype).unwrap(),
            zeros(&[2, 2]).cast(dtype).unwrap(),
        );
        let (of_x, of_value) = gradients(&x, &value, |x, v| x.set(i![&index], v));
        assert_eq!(
            (of_x, of_value),
            (vec![0., 0., 3., 4., 0., 0., 7., 8.], vec![5., 6., 1., 2.]),
            "{dtype}"
        );
        let (of_x, of_value) = gradients(&x, &value, |x, v| x.set(i![1..3], v));
        assert_eq!(
            (of_x, of_value),
            (vec![1., 2., 0., 0., 0., 0., 7., 8.], vec![3., 4., 5., 6.]),
            "{dtype}"
        );
    }
}

/// Paddle #75988: the gradient of a fill value was summed over axis 1 alone. And in 3.3.1 that of a
/// value which a mask sets was zero.
#[test]
fn the_gradient_of_a_fill_value_is_the_sum_over_the_mask() {
    let mask = tensor(
        &[true, false, true, false, false, false, false, true],
        [2, 2, 2],
    );
    let (of_x, of_value) = gradients(&zeros(&[2, 2, 2]), &zeros(&[]), |x, v| x.set(i![&mask], v));
    assert_eq!(
        (of_x, of_value),
        (vec![0., 2., 0., 4., 5., 6., 7., 0.], vec![12.])
    );
    let (_, filled) = gradients(&zeros(&[2, 2, 2]), &zeros(&[]), |x, v| {
        x.masked_fill(&mask, v)
    });
    assert_eq!(filled, [12.]);
    // The rows (0, 0) and (1, 1), and a value for each column.
    let rows = tensor(&[true, false, false, true], [2, 2]);
    let (of_x, of_value) = gradients(&zeros(&[2, 2, 2]), &zeros(&[2]), |x, v| x.set(i![&rows], v));
    assert_eq!(
        (of_x, of_value),
        (vec![0., 0., 3., 4., 5., 6., 0., 0.], vec![8., 10.])
    );
    let (_, of_value) = gradients(&zeros(&[2, 2, 2]), &zeros(&[2, 1]), |x, v| {
        x.set(i![&rows], v)
    });
    assert_eq!(of_value, [3., 15.]);
}

/// Paddle 3.3.1: of several values for one place the last stayed, but the first got the gradient.
#[test]
fn the_gradient_goes_to_the_value_that_won() {
    let index = tensor(&[1i32, 0, 1, -1, 1], [5]);
    let (of_x, of_value) = gradients(&zeros(&[4]), &zeros(&[5]), |x, v| x.set(i![&index], v));
    assert_eq!(
        (of_x, of_value),
        (vec![0., 0., 3., 0.], vec![0., 1., 0., 4., 2.])
    );
    let (of_x, of_value) = gradients(&zeros(&[4]), &zeros(&[5]), |x, v| x.add_at(i![&index], v));
    assert_eq!(
        (of_x, of_value),
        (vec![1., 2., 3., 4.], vec![2., 1., 2., 4., 2.])
    );
    // A value that is repeated over the index wins with all of it.
    let (_, of_value) = gradients(&zeros(&[4]), &zeros(&[1]), |x, v| x.set(i![&index], v));
    assert_eq!(of_value, [7.]);
}

#[test]
fn what_is_read_twice_gets_both_gradients() {
    let x = zeros(&[3]).require_grad().unwrap();
    let y = x.get(i![&tensor(&[2i32, 0, 2, -1], [4])]).unwrap();
    let grads = y
        .backward_with(&tensor(&[1f32, 2.0, 4.0, 8.0], [4]))
        .unwrap();
    assert_eq!(
        grads.of(&x).unwrap().to_vec::<f32>().unwrap(),
        [2.0, 0.0, 13.0]
    );
}
