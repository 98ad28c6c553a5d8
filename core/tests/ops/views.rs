//! Views against naive definitions, by coordinates.

use crate::support::{counting, device, expect, expect_view, flat};
use anymesh_core::{DType, Error, Tensor, ops::Indexing};

const CUBE: [usize; 3] = [2, 3, 4];

#[test]
fn permutations_move_dimensions_and_no_element() {
    let x = counting(&CUBE);
    expect_view(x.permute(&[2, 0, 1]), &[4, 2, 3], |c| {
        flat(&CUBE, &[c[1], c[2], c[0]])
    });
    expect_view(x.permute(&[-1, -3, 1]), &[4, 2, 3], |c| {
        flat(&CUBE, &[c[1], c[2], c[0]])
    });
    expect_view(x.transpose(0, -1), &[4, 3, 2], |c| {
        flat(&CUBE, &[c[2], c[1], c[0]])
    });
    expect_view(x.t(), &[2, 4, 3], |c| flat(&CUBE, &[c[0], c[2], c[1]]));
    expect_view(x.movedim(&[0], &[-1]), &[3, 4, 2], |c| {
        flat(&CUBE, &[c[2], c[0], c[1]])
    });
    expect_view(x.movedim(&[2, 0], &[0, 1]), &[4, 2, 3], |c| {
        flat(&CUBE, &[c[1], c[2], c[0]])
    });
    expect_view(counting(&[3]).t(), &[3], |c| c[0] as i32);
    expect_view(counting(&[]).permute(&[]), &[], |_| 0);
}

#[test]
fn reshape_keeps_row_major_order_whether_it_views_or_copies() {
    let x = counting(&CUBE);
    expect_view(x.reshape([6, 4]), &[6, 4], |c| flat(&[6, 4], c));
    let turned = x.permute(&[2, 0, 1]).expect("view");
    let old = |c: &[usize]| {
        let i = flat(&[8, 3], c) as usize;
        flat(&CUBE, &[i / 3 % 2, i % 3, i / 6])
    };
    expect(turned.reshape([8, 3]), &[8, 3], old);
    expect(x.reshape_infer(&[-1, 2]), &[12, 2], |c| flat(&[12, 2], c));
    expect(x.flatten(1, -1), &[2, 12], |c| flat(&[2, 12], c));
    expect(counting(&[]).flatten(0, -1), &[1], |_| 0);
    expect(counting(&[1]).reshape(()), &[], |_| 0);
    assert_eq!(
        counting(&[0, 3])
            .reshape([3, 0, 7])
            .expect("no elements either")
            .dims(),
        [3, 0, 7]
    );
}

#[test]
fn dimensions_of_size_one_come_and_go() {
    let x = counting(&[1, 3, 1, 2]);
    assert_eq!(x.squeeze(&[]).expect("all").dims(), [3, 2]);
    assert_eq!(x.squeeze(&[-2]).expect("one").dims(), [1, 3, 2]);
    assert!(matches!(x.squeeze(&[1]), Err(Error::Shape { .. })));
    assert_eq!(x.unsqueeze(-1).expect("last").dims(), [1, 3, 1, 2, 1]);
    assert_eq!(x.unsqueeze(4).expect("last").dims(), [1, 3, 1, 2, 1]);
    assert_eq!(x.unsqueeze(-5).expect("first").dims(), [1, 1, 3, 1, 2]);
    assert!(matches!(x.unsqueeze(5), Err(Error::Axis { .. })));
    assert!(matches!(x.unsqueeze(-6), Err(Error::Axis { .. })));
}

#[test]
fn expanding_repeats_without_memory() {
    let x = counting(&[3, 1]);
    expect_view(x.expand([2, 3, 4]), &[2, 3, 4], |c| c[1] as i32);
    let huge = x
        .expand([1 << 31, 3, 1 << 20])
        .expect("a view costs nothing");
    assert_eq!(huge.numel(), 3 << 51);
    let corner = huge
        .narrow(0, (1 << 31) - 1, 1)
        .and_then(|t| t.narrow(2, 12345, 2))
        .expect("still a view");
    expect(Ok(corner), &[1, 3, 2], |c| c[1] as i32);
    assert!(matches!(
        x.expand([1 << 31, 1 << 31, 3, 1]),
        Err(Error::SizeOverflow { .. })
    ));
    assert!(matches!(x.expand([4, 1]), Err(Error::Shape { .. })));
    assert!(matches!(x.expand([3]), Err(Error::Shape { .. })));
    assert!(matches!(
        counting(&[2]).expand([1]),
        Err(Error::Shape { .. })
    ));
    assert_eq!(x.expand([3, 0]).expect("nothing").dims(), [3, 0]);
}

#[test]
fn slices_mean_what_they_mean_in_python() {
    // Every combination of bounds and steps on small sizes, against Python's definition spelled
    // out.
    for size in [0usize, 1, 2, 5] {
        let x = counting(&[size]);
        let n = size as i64;
        let bounds: Vec<Option<i64>> = [None]
            .into_iter()
            .chain((-n - 2..=n + 2).map(Some))
            .collect();
        for &start in &bounds {
            for &stop in &bounds {
                for step in [-7, -3, -2, -1, 1, 2, 3, 7] {
                    let wrap = |i: i64| if i < 0 { i + n } else { i };
                    let mut expected = vec![];
                    let mut i = match start {
                        None => {
                            if step > 0 {
                                0
                            } else {
                                n - 1
                            }
                        }
                        Some(i) if step > 0 => wrap(i).max(0),
                        Some(i) => wrap(i).min(n - 1),
                    };
                    while (0..n).contains(&i)
                        && stop.is_none_or(|stop| {
                            if step > 0 {
                                i < wrap(stop)
                            } else {
                                i > wrap(stop).max(-1)
                            }
                        })
                    {
                        expected.push(i as i32);
                        i += step;
                    }
                    let actual = x
                        .slice(0, start, stop, step)
                        .expect("any bounds")
                        .to_vec::<i32>()
                        .expect("values");
                    assert_eq!(
                        actual, expected,
                        "{size} elements [{start:?}:{stop:?}:{step}]"
                    );
                }
            }
        }
    }
}

#[test]
fn extreme_slice_bounds_and_steps_do_not_overflow() {
    let x = counting(&[3, 4]);
    expect(
        x.slice(1, Some(i64::MIN), Some(i64::MAX), i64::MAX),
        &[3, 1],
        |c| 4 * c[0] as i32,
    );
    expect(
        x.slice(1, Some(i64::MAX), Some(i64::MIN), i64::MIN),
        &[3, 1],
        |c| 4 * c[0] as i32 + 3,
    );
    expect(x.slice(0, Some(i64::MAX), None, 1), &[0, 4], |_| 0);
    assert!(matches!(
        x.slice(0, None, None, 0),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(x.slice(2, None, None, 1), Err(Error::Axis { .. })));
    let wide = Tensor::zeros([usize::MAX, 0], DType::F32, &device()).expect("no elements");
    assert_eq!(
        wide.slice(0, Some(-1), None, 1).expect("clamped").dims(),
        [1, 0]
    );
    assert_eq!(
        wide.flip(&[]).expect("nothing to turn").dims(),
        [usize::MAX, 0]
    );
    assert_eq!(
        wide.t().and_then(|t| t.unsqueeze(1)).expect("views").dims(),
        [0, 1, usize::MAX]
    );
}

#[test]
fn narrow_is_strict_where_slice_clamps() {
    let x = counting(&[5]);
    expect_view(x.narrow(0, 1, 3), &[3], |c| 1 + c[0] as i32);
    expect(x.narrow(0, 5, 0), &[0], |_| 0);
    assert!(matches!(x.narrow(0, 3, 3), Err(Error::Argument { .. })));
    assert!(matches!(
        x.narrow(0, usize::MAX, 2),
        Err(Error::Argument { .. })
    ));
}

#[test]
fn parts_of_a_dimension_cover_it_in_order() {
    let x = counting(&[2, 7]);
    let parts = x.split(&[3, 0, 4], 1).expect("adds up");
    assert_eq!(
        parts.iter().map(|p| p.dims()[1]).collect::<Vec<_>>(),
        [3, 0, 4]
    );
    expect_view(Ok(parts[2].clone()), &[2, 4], |c| {
        flat(&[2, 7], &[c[0], c[1] + 3])
    });
    assert!(matches!(x.split(&[3, 3], 1), Err(Error::Argument { .. })));
    assert!(matches!(
        x.split(&[usize::MAX, 8], 1),
        Err(Error::Argument { .. })
    ));

    let sizes = |n| {
        x.chunk(n, 1)
            .expect("parts")
            .iter()
            .map(|p| p.dims()[1])
            .collect::<Vec<_>>()
    };
    assert_eq!(sizes(3), [2, 2, 3]);
    assert_eq!(sizes(7), [1; 7]);
    assert_eq!(sizes(9), [0, 1, 1, 1, 0, 1, 1, 1, 1]);
    assert!(matches!(x.chunk(0, 1), Err(Error::Argument { .. })));
    assert!(matches!(
        x.chunk(usize::MAX, 1),
        Err(Error::Argument { .. })
    ));

    let columns = x.unbind(1).expect("columns");
    assert_eq!(columns.len(), 7);
    expect_view(Ok(columns[5].clone()), &[2], |c| flat(&[2, 7], &[c[0], 5]));
    let endless = counting(&[1]).expand([1 << 40]).expect("view");
    assert!(matches!(endless.unbind(0), Err(Error::Argument { .. })));
}

#[test]
fn flipping_reverses_the_named_dimensions() {
    let x = counting(&CUBE);
    expect_view(x.flip(&[0, -1]), &CUBE, |c| {
        flat(&CUBE, &[1 - c[0], c[1], 3 - c[2]])
    });
    expect_view(x.flip(&[]), &CUBE, |c| 23 - flat(&CUBE, c));
    assert!(
        matches!(x.flip(&[1, -2]), Err(Error::Axis { .. })),
        "the same axis twice"
    );
}

#[test]
fn diagonals_count_from_the_main_one() {
    let x = counting(&[3, 4]);
    expect_view(x.diagonal(0, 0, 1), &[3], |c| flat(&[3, 4], &[c[0], c[0]]));
    expect_view(x.diagonal(2, 0, 1), &[2], |c| {
        flat(&[3, 4], &[c[0], c[0] + 2])
    });
    expect_view(x.diagonal(-1, 0, 1), &[2], |c| {
        flat(&[3, 4], &[c[0] + 1, c[0]])
    });
    expect_view(x.diagonal(-1, 1, 0), &[3], |c| {
        flat(&[3, 4], &[c[0], c[0] + 1])
    });
    expect(x.diagonal(9, 0, 1), &[0], |_| 0);
    expect(x.diagonal(i64::MIN, 0, 1), &[0], |_| 0);
    expect_view(counting(&CUBE).diagonal(1, 0, 2), &[3, 2], |c| {
        flat(&CUBE, &[c[1], c[0], c[1] + 1])
    });
    assert!(matches!(x.diagonal(0, 1, -1), Err(Error::Axis { .. })));
}

#[test]
fn windows_slide_along_an_axis() {
    let x = counting(&[2, 7]);
    expect_view(x.unfold(1, 3, 2), &[2, 3, 3], |c| {
        flat(&[2, 7], &[c[0], 2 * c[1] + c[2]])
    });
    expect_view(x.unfold(1, 7, usize::MAX), &[2, 1, 7], |c| {
        flat(&[2, 7], &[c[0], c[2]])
    });
    expect_view(x.unfold(0, 1, 1), &[2, 7, 1], |c| {
        flat(&[2, 7], &[c[0], c[1]])
    });
    assert_eq!(x.unfold(1, 0, 3).expect("empty windows").dims(), [2, 3, 0]);
    assert!(matches!(x.unfold(1, 8, 1), Err(Error::Argument { .. })));
    assert!(matches!(x.unfold(1, 2, 0), Err(Error::Argument { .. })));
}

#[test]
fn grids_follow_matrix_or_cartesian_order() {
    let (x, y, z) = (counting(&[3]), counting(&[2]), counting(&[4]));
    let ij = Tensor::meshgrid(&[&x, &y, &z], Indexing::Ij).expect("grids");
    for (k, grid) in ij.into_iter().enumerate() {
        expect_view(Ok(grid), &[3, 2, 4], move |c| c[k] as i32);
    }
    let xy = Tensor::meshgrid(&[&x, &y, &z], Indexing::Xy).expect("grids");
    for (grid, k) in xy.into_iter().zip([1, 0, 2]) {
        expect_view(Ok(grid), &[2, 3, 4], move |c| c[k] as i32);
    }
    assert!(
        Tensor::meshgrid(&[], Indexing::Xy)
            .expect("nothing")
            .is_empty()
    );
    expect(
        Tensor::meshgrid(&[&x], Indexing::Xy).map(|g| g[0].clone()),
        &[3],
        |c| c[0] as i32,
    );
    assert!(matches!(
        Tensor::meshgrid(&[&counting(&[2, 2])], Indexing::Ij),
        Err(Error::Shape { .. })
    ));
}

#[test]
fn views_of_views_read_the_right_elements() {
    let x = counting(&[4, 5, 6]);
    let y = x
        .slice(1, None, None, -2)
        .and_then(|t| t.t())
        .and_then(|t| t.slice(1, Some(1), None, 4))
        .and_then(|t| t.flip(&[1]))
        .expect("views");
    expect_view(Ok(y), &[4, 2, 3], |c| {
        flat(&[4, 5, 6], &[c[0], 4 - 2 * c[2], [5, 1][c[1]]])
    });
}

#[test]
fn wrong_shapes_and_axes_are_typed_errors() {
    let x = counting(&CUBE);
    assert!(matches!(x.reshape([5, 5]), Err(Error::Shape { .. })));
    assert!(matches!(
        x.reshape([usize::MAX, 2]),
        Err(Error::SizeOverflow { .. })
    ));
    assert!(matches!(
        x.reshape_infer(&[-1, -1]),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        x.reshape_infer(&[-2, 12]),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        x.reshape_infer(&[-1, 5]),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        counting(&[0]).reshape_infer(&[-1, 0]),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(x.permute(&[0, 1]), Err(Error::Argument { .. })));
    assert!(matches!(x.permute(&[0, 1, 1]), Err(Error::Axis { .. })));
    assert!(matches!(x.permute(&[0, 1, 3]), Err(Error::Axis { .. })));
    assert!(matches!(
        x.movedim(&[0, 1], &[0]),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        x.movedim(&[0, -3], &[0, 1]),
        Err(Error::Axis { .. })
    ));
    assert!(matches!(x.flatten(2, 1), Err(Error::Argument { .. })));
    assert!(matches!(x.transpose(0, i64::MIN), Err(Error::Axis { .. })));
}
