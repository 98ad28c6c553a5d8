use super::*;
use crate::testing::random;

/// A matrix of `m` by `n` elements of some memory, in one of the ways that matrices lie.
fn matrix<T: Float>(data: &[T], m: usize, n: usize, way: usize) -> Matrix<'_, T> {
    let whole = Matrix::dense(data, n);
    match way {
        0 => whole,
        1 => Matrix::dense(data, m).t(),
        // Every second element of rows that have some to spare, from the third on.
        2 => Matrix {
            start: 2,
            rows: 2 * n as isize + 3,
            cols: 2,
            ..whole
        },
        // From the last row to the first.
        _ => Matrix {
            start: (m - 1) * n,
            rows: -(n as isize),
            ..whole
        },
    }
}

fn at<T: Float>(m: &Matrix<'_, T>, i: usize, j: usize) -> f64 {
    m.data[(m.start as isize + i as isize * m.rows + j as isize * m.cols) as usize].wide()
}

fn values<T: Float>(len: usize, seed: u64) -> Vec<T> {
    random(len, seed, true).into_iter().map(T::narrow).collect()
}

fn equals_the_plain_loop<T: Float>() {
    let sizes = [
        [1, 1, 1],
        [2, 31, 5],
        [14, 32, 16],
        [15, 33, 17],
        [29, 70, 300],
        [6, 16, 513],
        [64, 64, 64],
        [100, 257, 40],
        [130, 40, 600],
        // More panels of the right operand than go by at once, of wide tiles and of narrow ones.
        [50, 600, 20],
        [300, 270, 20],
        // Turned where the left operand lies column by column.
        [150, 61, 260],
    ];
    for tiles in T::all() {
        for [m, n, k] in sizes {
            for way in 0..16 {
                let (left, right) = (
                    values::<T>(2 * m * k + 5 * m, 1),
                    values::<T>(2 * k * n + 5 * k, 2),
                );
                let (a, b) = (matrix(&left, m, k, way / 4), matrix(&right, k, n, way % 4));
                let (step, add, threads) = (n + way % 3, way % 2 == 1, 1 + way % 2);
                let before = values::<T>((m - 1) * step + n, 3);
                let bias = (way % 8 > 4).then(|| values::<T>(n, 4));
                let mut out = before.clone();
                let onto = (add, bias.as_deref());
                by_tiles(tiles, (&mut out, step), [m, n, k], a, b, onto, threads).expect("runs");
                for (place, (got, before)) in out.iter().zip(&before).enumerate() {
                    let (i, j) = (place / step, place % step);
                    let expected = if j >= n {
                        before.wide()
                    } else {
                        // Sums of whole numbers are exact in any order.
                        let sum: f64 = (0..k).map(|p| at(&a, i, p) * at(&b, p, j)).sum();
                        let bias = bias.as_ref().map_or(0.0, |bias| bias[j].wide());
                        sum + bias + if add { before.wide() } else { 0.0 }
                    };
                    assert_eq!(
                        got.wide(),
                        expected,
                        "({i}, {j}) of {m}x{n}x{k}, way {way}, {} columns a tile",
                        tiles.columns
                    );
                }
            }
        }
    }
}

#[test]
fn products_by_tiles_equal_the_plain_loop_on_every_machine() {
    equals_the_plain_loop::<f32>();
    equals_the_plain_loop::<f64>();
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads() {
    for [m, n, k] in [[61, 90, 700], [170, 60, 700]] {
        same_bits([m, n, k]);
    }
}

fn same_bits([m, n, k]: [usize; 3]) {
    let narrow = |seed, len| -> Vec<f32> {
        let all = random(len, seed, false);
        all.into_iter().map(|x| x as f32).collect()
    };
    let (left, right) = (narrow(1, m * k), narrow(2, k * n));
    for (tiles, by_column) in f32::all().flat_map(|tiles| [(tiles, false), (tiles, true)]) {
        let run = |rows: Range<usize>, threads| {
            let mut out = vec![0f32; rows.len() * n];
            let a = match by_column {
                true => Matrix {
                    start: rows.start,
                    ..Matrix::dense(&left, m).t()
                },
                false => Matrix {
                    start: rows.start * k,
                    ..Matrix::dense(&left, k)
                },
            };
            let sizes = [rows.len(), n, k];
            let b = Matrix::dense(&right, n);
            by_tiles(tiles, (&mut out, n), sizes, a, b, (false, None), threads).expect("runs");
            out
        };
        let whole = run(0..m, 1);
        assert_eq!(whole, run(0..m, 2));
        assert_eq!(whole, run(0..m, 7));
        for rows in [0..2, 13..40, 60..61] {
            let among = &whole[rows.start * n..rows.end * n];
            assert_eq!(among, run(rows, 1));
        }
    }
}
