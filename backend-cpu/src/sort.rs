//! Argsort and binary search. Both turn values into unsigned keys whose order is the order of the
//! values: NaN last, -0 equal to 0.

use crate::{element::Held, grid::dense, memory::Memory, parallel};
use anymesh_kernel::{
    Buffer, Kind, Result,
    backend::{SearchCall, SortCall},
};
use rayon::prelude::*;

/// A value as a number of 32 bits (or 64 for the wide kinds) that sorts the same.
trait Key: Held {
    type Key: Ord + Copy + Send + Sync + std::ops::Not<Output = Self::Key>;
    /// A key with a position: sorting these is stable.
    type Entry: Ord + Copy + Send;
    fn key(self) -> Self::Key;
    fn entry(key: Self::Key, position: u32) -> Self::Entry;
    fn position(entry: Self::Entry) -> u32;
}

macro_rules! key {
    ($($t:ty, $key:ty, $entry:ty, $to_key:expr);*) => {$(
        impl Key for $t {
            type Key = $key;
            type Entry = $entry;
            fn key(self) -> $key {
                $to_key(self)
            }
            fn entry(key: $key, position: u32) -> $entry {
                (<$entry>::from(key) << 32) | <$entry>::from(position)
            }
            fn position(entry: $entry) -> u32 {
                entry as u32
            }
        }
    )*};
}
key!(
    u8, u32, u64, u32::from;
    u32, u32, u64, |v| v;
    i32, u32, u64, |v: i32| v as u32 ^ (1 << 31);
    f32, u32, u64, |v: f32| {
        // Adding 0 turns -0 into 0. Negative numbers sort by their inverted bits, the rest above
        // them.
        let bits = if v.is_nan() { f32::NAN.to_bits() & !(1 << 31) } else { (v + 0.0).to_bits() };
        if bits >> 31 == 1 { !bits } else { bits | (1 << 31) }
    };
    i64, u64, u128, |v: i64| v as u64 ^ (1 << 63);
    f64, u64, u128, |v: f64| {
        let bits = if v.is_nan() { f64::NAN.to_bits() & !(1 << 63) } else { (v + 0.0).to_bits() };
        if bits >> 63 == 1 { !bits } else { bits | (1 << 63) }
    }
);

/// The backend's sort kernel.
pub(crate) fn sort(call: &SortCall) -> Result<Buffer> {
    match call.input.dtype.kind() {
        Kind::Bool => sort_rows::<u8>(call),
        Kind::U32 => sort_rows::<u32>(call),
        Kind::I32 => sort_rows::<i32>(call),
        Kind::I64 => sort_rows::<i64>(call),
        Kind::F32 => sort_rows::<f32>(call),
        Kind::F64 => sort_rows::<f64>(call),
    }
}

fn sort_rows<T: Key>(call: &SortCall) -> Result<Buffer> {
    let shape = &call.input.layout.shape;
    let n = shape[shape.rank() - 1];
    let values = dense::<T>(&call.input)?;
    let mut memory = Memory::elements::<i32>(values.len())?;
    let out = memory.typed_mut::<i32>();
    let few_rows = values.len() / n < rayon::current_num_threads();
    let row = |values: &[T], out: &mut [i32]| {
        let key = |v: &T| if call.descending { !v.key() } else { v.key() };
        let mut entries: Vec<T::Entry> = values
            .iter()
            .enumerate()
            .map(|(i, v)| T::entry(key(v), i as u32))
            .collect();
        // No two entries are equal, so every algorithm gives the same order.
        if few_rows && n >= parallel::THRESHOLD {
            entries.par_sort_unstable();
        } else {
            entries.sort_unstable();
        }
        out.iter_mut()
            .zip(entries)
            .for_each(|(out, entry)| *out = T::position(entry) as i32);
    };
    let rows = out.chunks_mut(n).zip(values.chunks(n));
    parallel::each(values.len(), rows, |_, (out, values)| row(values, out));
    Ok(memory.buffer())
}

/// The backend's search kernel.
pub(crate) fn search(call: &SearchCall) -> Result<Buffer> {
    match call.sorted.dtype.kind() {
        Kind::Bool => search_rows::<u8>(call),
        Kind::U32 => search_rows::<u32>(call),
        Kind::I32 => search_rows::<i32>(call),
        Kind::I64 => search_rows::<i64>(call),
        Kind::F32 => search_rows::<f32>(call),
        Kind::F64 => search_rows::<f64>(call),
    }
}

fn search_rows<T: Key>(call: &SearchCall) -> Result<Buffer> {
    let (n, m) = (call.sorted.layout.shape[1], call.queries.layout.shape[1]);
    let (sorted, queries) = (dense::<T>(&call.sorted)?, dense::<T>(&call.queries)?);
    let mut memory = Memory::elements::<i32>(queries.len())?;
    parallel::chunks(memory.typed_mut::<i32>(), parallel::CHUNK, |start, out| {
        for (i, out) in out.iter_mut().enumerate() {
            let row = (start + i) / m;
            let (query, sorted) = (queries[start + i].key(), &sorted[row * n..(row + 1) * n]);
            *out = sorted.partition_point(|v| {
                if call.right {
                    v.key() <= query
                } else {
                    v.key() < query
                }
            }) as i32;
        }
    });
    Ok(memory.buffer())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{dense_view, random, read, values, views};
    use anymesh_kernel::DType;

    /// The order of the contract: NaN last, zeros equal.
    fn order(a: f64, b: f64) -> std::cmp::Ordering {
        a.partial_cmp(&b)
            .unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
    }

    #[test]
    fn sorting_is_stable_for_every_dtype_and_layout() {
        for dtype in DType::ALL {
            for shape in [vec![9], vec![3, 20], vec![2, 3, 5]] {
                let n = shape[shape.len() - 1];
                for view in views(&shape, dtype, 41, true) {
                    for descending in [false, true] {
                        let got = read(
                            &sort(&SortCall {
                                op: "test",
                                input: view.clone(),
                                descending,
                            })
                            .expect("runs"),
                            DType::I32,
                        );
                        for (values, got) in values(&view).chunks(n).zip(got.chunks(n)) {
                            let mut expected: Vec<usize> = (0..n).collect();
                            expected.sort_by(|a, b| {
                                if descending {
                                    order(values[*b], values[*a])
                                } else {
                                    order(values[*a], values[*b])
                                }
                            });
                            assert_eq!(
                                got,
                                expected.iter().map(|i| *i as f64).collect::<Vec<_>>(),
                                "{dtype} {values:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn nan_is_largest_and_zeros_are_equal() {
        let special = [
            0.0,
            f64::NAN,
            -0.0,
            f64::INFINITY,
            -1.0,
            -f64::NAN,
            f64::NEG_INFINITY,
        ];
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let view = dense_view(&special, dtype, [7]);
            assert_eq!(
                read(
                    &sort(&SortCall {
                        op: "test",
                        input: view.clone(),
                        descending: false
                    })
                    .expect("runs"),
                    DType::I32
                ),
                [6.0, 4.0, 0.0, 2.0, 3.0, 1.0, 5.0]
            );
            assert_eq!(
                read(
                    &sort(&SortCall {
                        op: "test",
                        input: view.clone(),
                        descending: true
                    })
                    .expect("runs"),
                    DType::I32
                ),
                [1.0, 5.0, 3.0, 0.0, 2.0, 4.0, 6.0]
            );
        }
    }

    #[test]
    fn one_long_row_is_sorted_in_parallel() {
        let values = random(200_000, 6, true);
        let got = read(
            &sort(&SortCall {
                op: "test",
                input: dense_view(&values, DType::I32, [200_000]),
                descending: false,
            })
            .expect("runs"),
            DType::I32,
        );
        let ordered = |pair: &[f64]| {
            let (a, b) = (pair[0] as usize, pair[1] as usize);
            values[a] < values[b] || (values[a] == values[b] && a < b)
        };
        assert!(got.windows(2).all(ordered));
    }

    #[test]
    fn search_finds_both_ends_of_equal_values() {
        for dtype in [
            DType::F32,
            DType::F64,
            DType::I32,
            DType::I64,
            DType::U8,
            DType::F16,
        ] {
            let sorted = dense_view(&[1.0, 2.0, 2.0, 3.0, 0.0, 0.0, 5.0, 7.0], dtype, [2, 4]);
            let queries = dense_view(&[0.0, 2.0, 4.0, 0.0, 5.0, 9.0], dtype, [2, 3]);
            let find = |right| {
                read(
                    &search(&SearchCall {
                        op: "test",
                        sorted: sorted.clone(),
                        queries: queries.clone(),
                        right,
                    })
                    .expect("runs"),
                    DType::I32,
                )
            };
            assert_eq!(find(false), [0.0, 1.0, 4.0, 0.0, 2.0, 4.0], "{dtype}");
            assert_eq!(find(true), [0.0, 3.0, 4.0, 2.0, 3.0, 4.0], "{dtype}");
        }
        let sorted = dense_view(&[-0.0, 0.0, f64::NAN], DType::F32, [1, 3]);
        let queries = dense_view(&[0.0, f64::NAN, f64::INFINITY], DType::F32, [1, 3]);
        let find = |right| {
            read(
                &search(&SearchCall {
                    op: "test",
                    sorted: sorted.clone(),
                    queries: queries.clone(),
                    right,
                })
                .expect("runs"),
                DType::I32,
            )
        };
        assert_eq!(
            (find(false), find(true)),
            (vec![0.0, 2.0, 2.0], vec![2.0, 3.0, 2.0])
        );
    }
}
