//! One test for each defect of other libraries' indexing that this one is held to, named by what
//! went wrong there.

use super::{cpu, ints, iota, tensor};
use anymesh_conformance::indexing::large;
use anymesh_core::{DType, Error, Tensor, i};

/// Paddle #73023 and the limit of INT32_MAX elements in its index kernels: an offset that was cut
/// to 32 bits wrote somewhere else.
#[test]
fn places_past_two_to_the_31_are_read_and_written() {
    // Only Linux tells; elsewhere it is tried.
    let told = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = told
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:"))
        .and_then(|l| l.split_whitespace().next())
        .and_then(|kib| kib.parse::<u64>().ok());
    if let Some(gib) = free.map(|kib| kib >> 20).filter(|gib| *gib < 16) {
        eprintln!(
            "skipped: {gib} GiB of memory are free, a tensor of 2^31 elements needs 14 and some to be worked on; `anymesh doctor --indexing 1 --large` runs it on a GPU"
        );
        return;
    }
    pollster::block_on(large(&cpu())).unwrap();
}

/// The same, where the elements exist but share memory: indices and offsets are that large, the
/// tensor is not.
#[test]
fn places_past_two_to_the_32_of_a_view_are_found() {
    let long = 1usize << 33;
    let x = tensor(&[5i32, 6, 7], [3, 1]).expand([3, long]).unwrap();
    let far = tensor(&[long as i64 - 1, -(long as i64)], [2]);
    let rows = tensor(&[2i32, 1], [2]);
    assert_eq!(ints(&x.get(i![&rows, &far]).unwrap()), [7, 6]);
    assert_eq!(ints(&x.get(i![.., -1]).unwrap()), [5, 6, 7]);
    assert_eq!(
        x.get(i![.., 3..;2]).unwrap().dims(),
        [3, (long - 3).div_ceil(2)]
    );
    assert_eq!(
        ints(&x.get(i![.., long - 2..]).unwrap()),
        [5, 5, 6, 6, 7, 7]
    );
    let past = tensor(&[long as i64], [1]);
    assert!(matches!(
        x.get(i![0, &past]),
        Err(Error::IndexOutOfRange { .. })
    ));
}

/// Paddle #73796: a mask of several dimensions became one index tensor.
#[test]
fn a_mask_of_rank_two_or_three_indexes_as_many_axes() {
    let x = iota(&[2, 3, 4]);
    let mask = tensor(&[true, false, false, false, false, true], [2, 3]);
    let rows = x.get(i![&mask]).unwrap();
    assert_eq!(
        (rows.dims(), ints(&rows)),
        ([2, 4].as_slice(), vec![0, 1, 2, 3, 20, 21, 22, 23])
    );
    assert_eq!(ints(&x.get(i![&mask, 1]).unwrap()), [1, 21]);
    let inner = x.get(i![.., ..;2, 1..]).unwrap().gt(12).unwrap();
    assert_eq!(
        ints(&x.get(i![.., ..;2, 1..]).unwrap().get(i![&inner]).unwrap()),
        [13, 14, 15, 21, 22, 23]
    );
    let all = x.remainder(5).unwrap().eq(0).unwrap();
    assert_eq!(
        ints(
            &x.set(i![&all], &tensor(&[-1i32, -2, -3, -4, -5], [5]))
                .unwrap()
                .get(i![.., 0, 0])
                .unwrap()
        ),
        [-1, 12]
    );
}

/// Paddle #73865: an axis without an index was confused with an index without dimensions, and
/// values of any shape were taken.
#[test]
fn an_index_without_dimensions_is_no_missing_index() {
    let x = iota(&[2, 3, 4]);
    let one = tensor(&[1i32], ());
    assert_eq!(
        ints(&x.get(i![.., &one]).unwrap()),
        ints(&x.get(i![.., 1]).unwrap())
    );
    assert_eq!(ints(&x.get(i![&one, .., &one]).unwrap()), [13, 17, 21]);
    assert_eq!(
        x.get(i![.., &one, &tensor(&[0i32, 0, 0], [3])])
            .unwrap()
            .dims(),
        [2, 3]
    );
    assert_eq!(
        ints(
            &x.set(i![&one, .., &one], 0)
                .unwrap()
                .get(i![1, .., 1])
                .unwrap()
        ),
        [0, 0, 0]
    );
    assert!(matches!(
        x.set(i![.., &one], &tensor(&[1i32; 3], [3])),
        Err(Error::Shape { op: "set", .. })
    ));
}

/// Paddle #73713 and #74116: a mask that is not for the first axis, or of a view, was filled as if
/// it were for the whole tensor.
#[test]
fn a_mask_of_a_later_axis_or_of_a_view_fills_only_what_it_is_for() {
    let x = iota(&[2, 3]);
    let mask = tensor(&[true, false, true], [3]);
    assert_eq!(
        ints(&x.set(i![.., &mask], -1).unwrap()),
        [-1, 1, -1, -1, 4, -1]
    );
    assert_eq!(
        ints(&x.set(i![1, &mask], -1).unwrap()),
        [0, 1, 2, -1, 4, -1]
    );
    assert_eq!(
        ints(&x.set(i![1.., &mask], &tensor(&[8i32, 9], [2])).unwrap()),
        [0, 1, 2, 8, 4, 9]
    );
    let view = x.get(i![..;-1, ..;-1]).unwrap();
    assert_eq!(
        ints(&view.set(i![1, &mask], -1).unwrap()),
        [5, 4, 3, -1, 1, -1]
    );
    assert_eq!(ints(&x), [0, 1, 2, 3, 4, 5]);
    // A square tensor does not tell which axis was meant.
    let square = iota(&[3, 3]);
    assert_eq!(
        ints(&square.set(i![.., &mask], 0).unwrap()),
        [0, 1, 0, 0, 4, 0, 0, 7, 0]
    );
    assert_eq!(
        ints(&square.add_at(i![.., &mask], 10).unwrap()),
        [10, 1, 12, 13, 4, 15, 16, 7, 18]
    );
}

/// Paddle #72676: tensors without dimensions had internal buffers without length.
#[test]
fn a_tensor_without_dimensions_is_indexed_as_any_other() {
    let x = tensor(&[5i32], ());
    let (yes, no) = (tensor(&[true], ()), tensor(&[false], ()));
    assert!(x.get(i![]).unwrap().is(&x));
    assert_eq!(x.get(i![None, ..., None]).unwrap().dims(), [1, 1]);
    assert_eq!(ints(&x.get(i![&yes]).unwrap()), [5]);
    assert_eq!(x.get(i![&no]).unwrap().dims(), [0]);
    assert_eq!(ints(&x.set(i![], 7).unwrap()), [7]);
    assert_eq!(
        ints(&x.set(i![...], &tensor(&[7i32], [1, 1])).unwrap()),
        [7]
    );
    assert_eq!(ints(&x.set(i![&yes], 7).unwrap()), [7]);
    assert_eq!(ints(&x.set(i![&no], 7).unwrap()), [5]);
    assert_eq!(ints(&x.add_at(i![true], 7).unwrap()), [12]);
    assert!(matches!(x.get(i![0]), Err(Error::Argument { .. })));
    let none = Tensor::zeros([0, 3], DType::I32, &cpu()).unwrap();
    assert_eq!(none.get(i![.., 1]).unwrap().dims(), [0]);
    assert_eq!(none.set(i![.., 1], 5).unwrap().dims(), [0, 3]);
}

/// Paddle 3.3.1: an index tensor outside its axis read whatever was in memory.
#[test]
fn index_tensors_outside_their_axis_are_errors_in_both_directions_and_for_empty_axes() {
    let out_of_range = |result: anymesh_core::Result<Tensor>| {
        matches!(
            result.and_then(|t| t.to_bytes()),
            Err(Error::IndexOutOfRange { .. })
        )
    };
    let x = iota(&[3, 4]);
    for wrong in [3, -4, i32::MAX, i32::MIN] {
        let index = tensor(&[0, wrong], [2]);
        assert!(
            out_of_range(x.get(i![&index]))
                && out_of_range(x.set(i![&index], 0))
                && out_of_range(x.add_at(i![&index], 0)),
            "{wrong}"
        );
    }
    let zero = tensor(&[0i32], [1]);
    for shape in [[0, 4], [0, 0]] {
        let empty = Tensor::zeros(shape, DType::I32, &cpu()).unwrap();
        assert!(
            out_of_range(empty.get(i![&zero])) && out_of_range(empty.set(i![&zero], 0)),
            "{shape:?}"
        );
    }
    // Nothing is selected, but the place does not exist.
    let narrow = Tensor::zeros([3, 0], DType::I32, &cpu()).unwrap();
    assert!(narrow.get(i![&tensor(&[2i32], [1])]).is_ok());
    assert!(
        out_of_range(narrow.get(i![&tensor(&[3i32], [1])]))
            && out_of_range(narrow.set(i![&tensor(&[-4i32], [1])], 0))
    );
}

/// Paddle 3.3.1: integers went through floats, so that 16777217 was stored as 16777216 and 2^53 + 1
/// as 2^53.
#[test]
fn integers_are_stored_as_they_are() {
    let x = Tensor::zeros([2, 2], DType::I32, &cpu()).unwrap();
    let mask = tensor(&[true, false], [2]);
    let place = tensor(&[0i32], [1]);
    for index in [
        i![0, 0].to_vec(),
        i![0].to_vec(),
        i![&mask].to_vec(),
        i![&place].to_vec(),
    ] {
        assert_eq!(ints(&x.set(&index, 16_777_217).unwrap())[0], 16_777_217);
        let wide = x.cast(DType::I64).unwrap();
        for value in [(1i64 << 53) + 1, i64::MAX, i64::MIN] {
            assert_eq!(
                wide.set(&index, value).unwrap().to_vec::<i64>().unwrap()[0],
                value
            );
        }
        assert_eq!(
            wide.add_at(&index, (1i64 << 53) + 1)
                .unwrap()
                .to_vec::<i64>()
                .unwrap()[0],
            (1 << 53) + 1
        );
    }
}

/// Paddle 3.3.1: `x[0, :, [1, 2]]` of (2, 3, 4) had shape (3, 2), and `x[[0, 1], None, [1, 2]]` had
/// (2, 3, 4).
#[test]
fn dimensions_of_index_tensors_come_first_where_something_is_between_them() {
    let x = iota(&[2, 3, 4]);
    let (pair, last) = (tensor(&[0i32, 1], [2]), tensor(&[1i32, 2], [2]));
    let y = x.get(i![0, .., &last]).unwrap();
    assert_eq!(
        (y.dims(), ints(&y)),
        ([2, 3].as_slice(), vec![1, 5, 9, 2, 6, 10])
    );
    assert_eq!(x.get(i![&pair, None, &last]).unwrap().dims(), [2, 1, 4]);
    assert_eq!(x.get(i![0, &last]).unwrap().dims(), [2, 4]);
    assert_eq!(x.get(i![.., 0, &last]).unwrap().dims(), [2, 2]);
    let set = x
        .set(i![0, .., &last], &tensor(&[-1i32, -2, -3], [3]))
        .unwrap();
    assert_eq!(
        ints(&set.get(i![0]).unwrap()),
        [0, -1, -1, 3, 4, -2, -2, 7, 8, -3, -3, 11]
    );
}

/// The values half of Paddle's duplicates: the last one stays, every time.
#[test]
fn of_several_values_for_one_place_the_last_stays() {
    let x = Tensor::zeros([3], DType::I32, &cpu()).unwrap();
    let many: Vec<i32> = (0..5000).map(|i| i % 3).collect();
    let values: Vec<i32> = (0..5000).collect();
    let (index, value) = (tensor(&many, [50, 100]), tensor(&values, [50, 100]));
    for _ in 0..5 {
        assert_eq!(
            ints(&x.set(i![&index], &value).unwrap()),
            [4998, 4999, 4997]
        );
    }
}
