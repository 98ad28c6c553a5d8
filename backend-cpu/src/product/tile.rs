//! The innermost loop of matrix products: a tile of the result stays in registers while the inner
//! dimension goes by.
//!
//! Every element is one chain of fused multiplications and additions in the order of the inner
//! dimension, whatever the sizes of the tile and of the matrices around it.

/// A tile of at most `rows` by `columns` elements: packed operands, and where the result goes.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Tile<T> {
    /// Steps of the inner dimension.
    pub(crate) k: usize,
    /// `rows` elements for each step: from one row to the next are `a_row`, from one step to the
    /// next `a_step`.
    pub(crate) a: *const T,
    pub(crate) a_row: usize,
    pub(crate) a_step: usize,
    /// `columns` elements for each step; from one step to the next are `b_step`.
    pub(crate) b: *const T,
    pub(crate) b_step: usize,
    /// Rows of `columns` elements; from one row to the next are `out_step`.
    pub(crate) out: *mut T,
    pub(crate) out_step: usize,
    /// Adds to what is there.
    pub(crate) add: bool,
    /// `columns` elements that are added to every row of the sum; null where there are none.
    pub(crate) bias: *const T,
}

/// How this machine computes tiles.
pub(crate) struct Tiles<T> {
    /// Of the tallest tile.
    pub(crate) rows: usize,
    /// Of every tile.
    pub(crate) columns: usize,
    /// Computes a tile of that many rows, at most the tallest.
    ///
    /// The operands must be readable and the result writable as [`Tile`] says, and the machine
    /// must be one for which [`HasTiles::tiles`] gave this.
    pub(crate) run: unsafe fn(usize, &Tile<T>),
}

impl<T> Tiles<T> {
    /// Brings the first `columns` elements of some rows, which begin `step` apart, nearer.
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    pub(crate) fn fetch(&self, data: &[T], step: usize, [rows, columns]: [usize; 2]) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let line = 64 / size_of::<T>();
        for row in 0..rows {
            for at in (0..columns).step_by(line) {
                if let Some(element) = data.get(row * step + at) {
                    // SAFETY: every machine of this kind has the instruction, and it changes
                    // nothing.
                    unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(element).cast()) };
                }
            }
        }
    }

    /// Nothing: other machines have no tiles.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn fetch(&self, _data: &[T], _step: usize, _sizes: [usize; 2]) {}
}

/// A type that some machines have tiles for.
pub(crate) trait HasTiles: Sized + 'static {
    /// The best that this machine has; none where the portable way is all there is.
    fn tiles() -> Option<&'static Tiles<Self>> {
        Self::all().next()
    }

    /// All that this machine can run, the best first.
    fn all() -> impl Iterator<Item = &'static Tiles<Self>>;

    /// Writes 8 rows of 8 elements, `from_step` apart, as columns, `to_step` apart. False, and
    /// nothing is done, where this machine has no way that is faster than one by one.
    fn turn(_from: &[Self], _from_step: usize, _to: &mut [Self], _to_step: usize) -> bool {
        false
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    use super::{HasTiles, Tiles};

    impl HasTiles for f32 {
        fn all() -> impl Iterator<Item = &'static Tiles<f32>> {
            std::iter::empty()
        }
    }

    impl HasTiles for f64 {
        fn all() -> impl Iterator<Item = &'static Tiles<f64>> {
            std::iter::empty()
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod machine {
    use super::{HasTiles, Tile, Tiles};
    use crate::simd::{Level, level};
    use std::arch::x86_64::*;

    /// So many steps of the inner dimension before it is needed, the right operand is on its way from
    /// the second-level cache.
    const AHEAD: usize = 8;

    /// A register of several elements.
    trait Register: Copy {
        type Element: Copy;
        const LANES: usize;
        unsafe fn zero() -> Self;
        unsafe fn load(at: *const Self::Element) -> Self;
        unsafe fn spread(value: Self::Element) -> Self;
        unsafe fn store(self, at: *mut Self::Element);
        unsafe fn plus(self, other: Self) -> Self;
        /// `self * factor + sum`, rounded once.
        unsafe fn fused(self, factor: Self, sum: Self) -> Self;
    }

    macro_rules! register {
        ($($t:ty, $element:ty, $lanes:expr, $zero:ident, $load:ident, $spread:ident, $store:ident, $plus:ident, $fused:ident);*) => {$(
            impl Register for $t {
                type Element = $element;
                const LANES: usize = $lanes;
                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: only `tile` calls this, on a machine that has the instruction.
                    unsafe { $zero() }
                }
                #[inline(always)]
                unsafe fn load(at: *const $element) -> Self {
                    // SAFETY: as above, and the caller vouches for the address.
                    unsafe { $load(at) }
                }
                #[inline(always)]
                unsafe fn spread(value: $element) -> Self {
                    // SAFETY: as above.
                    unsafe { $spread(value) }
                }
                #[inline(always)]
                unsafe fn store(self, at: *mut $element) {
                    // SAFETY: as above, and the caller vouches for the address.
                    unsafe { $store(at, self) }
                }
                #[inline(always)]
                unsafe fn plus(self, other: Self) -> Self {
                    // SAFETY: as above.
                    unsafe { $plus(self, other) }
                }
                #[inline(always)]
                unsafe fn fused(self, factor: Self, sum: Self) -> Self {
                    // SAFETY: as above.
                    unsafe { $fused(self, factor, sum) }
                }
            }
        )*};
    }
    register!(
        __m512, f32, 16, _mm512_setzero_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_fmadd_ps;
        __m512d, f64, 8, _mm512_setzero_pd, _mm512_loadu_pd, _mm512_set1_pd, _mm512_storeu_pd, _mm512_add_pd, _mm512_fmadd_pd;
        __m256, f32, 8, _mm256_setzero_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_fmadd_ps;
        __m256d, f64, 4, _mm256_setzero_pd, _mm256_loadu_pd, _mm256_set1_pd, _mm256_storeu_pd, _mm256_add_pd, _mm256_fmadd_pd
    );

    /// A tile of `R` rows and two registers of columns.
    ///
    /// # Safety
    /// The machine has the instructions of `V`, and the tile is as [`Tile`] says.
    #[inline(always)]
    unsafe fn tile<V: Register, const R: usize>(t: &Tile<V::Element>) {
        // A loop of its own for neighbours, which need no addresses of their own.
        // SAFETY: as the caller vouches.
        unsafe {
            match t.a_row {
                1 => rows::<V, R>(t, 1),
                row => rows::<V, R>(t, row),
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<V: Register, const R: usize>(t: &Tile<V::Element>, row: usize) {
        // SAFETY: `a` has R and `b` two registers of elements for each of the k steps, `out` has R
        // rows of two registers, and `bias` two registers unless it is null.
        unsafe {
            let mut sums = [[V::zero(); 2]; R];
            let (mut a, mut b) = (t.a, t.b);
            // Where the result goes is on its way while the inner dimension goes by.
            for i in 0..R {
                let out = t.out.add(i * t.out_step);
                _mm_prefetch::<_MM_HINT_ET0>(out.cast());
                _mm_prefetch::<_MM_HINT_ET0>(out.add(2 * V::LANES - 1).cast());
            }
            for _ in 0..t.k {
                let ahead = b.wrapping_add(AHEAD * t.b_step);
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(V::LANES).cast());
                let (left, right) = (V::load(b), V::load(b.add(V::LANES)));
                for (i, sum) in sums.iter_mut().enumerate() {
                    let factor = V::spread(*a.add(i * row));
                    sum[0] = factor.fused(left, sum[0]);
                    sum[1] = factor.fused(right, sum[1]);
                }
                a = a.add(t.a_step);
                b = b.add(t.b_step);
            }
            for (i, [left, right]) in sums.into_iter().enumerate() {
                let out = t.out.add(i * t.out_step);
                let (left, right) = if t.add {
                    (
                        left.plus(V::load(out)),
                        right.plus(V::load(out.add(V::LANES))),
                    )
                } else {
                    (left, right)
                };
                let (left, right) = if t.bias.is_null() {
                    (left, right)
                } else {
                    (
                        left.plus(V::load(t.bias)),
                        right.plus(V::load(t.bias.add(V::LANES))),
                    )
                };
                left.store(out);
                right.store(out.add(V::LANES));
            }
        }
    }

    /// One function for all heights of tiles.
    macro_rules! tiles {
        ($($name:ident, $features:literal, $register:ty, $element:ty, [$($rows:literal)*]);*) => {$(
            #[target_feature(enable = $features)]
            unsafe fn $name(rows: usize, t: &Tile<$element>) {
                match rows {
                    // SAFETY: the caller vouches for the machine and for the tile.
                    $($rows => unsafe { tile::<$register, $rows>(t) },)*
                    _ => unreachable!("a tile taller than the tallest"),
                }
            }
        )*};
    }
    tiles!(
        avx512_f32, "avx512f", __m512, f32, [1 2 3 4 5 6 7 8 9 10 11 12 13 14];
        avx512_f64, "avx512f", __m512d, f64, [1 2 3 4 5 6 7 8 9 10 11 12 13 14];
        avx2_f32, "avx2,fma", __m256, f32, [1 2 3 4 5 6];
        avx2_f64, "avx2,fma", __m256d, f64, [1 2 3 4 5 6]
    );

    /// Eight rows as columns.
    ///
    /// # Safety
    /// 8 elements from each of the 8 rows can be read, and as many written.
    #[target_feature(enable = "avx2")]
    unsafe fn turn(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller vouches for all rows of both sides.
        unsafe {
            let row = |i: usize| _mm256_loadu_ps(from.add(i * from_step));
            // Pairs of rows, then of pairs, then of halves.
            let pairs = |i: usize| {
                let (a, b) = (row(i), row(i + 1));
                (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b))
            };
            let fours = |i: usize| {
                let ((a, b), (c, d)) = (pairs(i), pairs(i + 2));
                [
                    _mm256_shuffle_ps::<0x44>(a, c),
                    _mm256_shuffle_ps::<0xee>(a, c),
                    _mm256_shuffle_ps::<0x44>(b, d),
                    _mm256_shuffle_ps::<0xee>(b, d),
                ]
            };
            let (upper, lower) = (fours(0), fours(4));
            for (i, (a, b)) in upper.into_iter().zip(lower).enumerate() {
                let (low, high) = (
                    _mm256_permute2f128_ps::<0x20>(a, b),
                    _mm256_permute2f128_ps::<0x31>(a, b),
                );
                _mm256_storeu_ps(to.add(i * to_step), low);
                _mm256_storeu_ps(to.add((i + 4) * to_step), high);
            }
        }
    }

    fn turn_f32(from: &[f32], from_step: usize, to: &mut [f32], to_step: usize) -> bool {
        let fits = |len: usize, step: usize| step >= 8 && len >= 7 * step + 8;
        if matches!(level(), Level::Least)
            || !fits(from.len(), from_step)
            || !fits(to.len(), to_step)
        {
            return false;
        }
        // SAFETY: the machine has the instructions, and all rows are inside of their slices.
        unsafe { turn(from.as_ptr(), from_step, to.as_mut_ptr(), to_step) };
        true
    }

    macro_rules! has_tiles {
        ($($t:ty, $avx512:ident, $avx2:ident, $wide:ty, $narrow:ty, [$($turn:ident)?]);*) => {$(
            impl HasTiles for $t {
                $(fn turn(from: &[$t], from_step: usize, to: &mut [$t], to_step: usize) -> bool {
                    $turn(from, from_step, to, to_step)
                })?

                fn all() -> impl Iterator<Item = &'static Tiles<$t>> {
                    static AVX512: Tiles<$t> = Tiles { rows: 14, columns: 2 * <$wide>::LANES, run: $avx512 };
                    static AVX2: Tiles<$t> = Tiles { rows: 6, columns: 2 * <$narrow>::LANES, run: $avx2 };
                    static ALL: [&Tiles<$t>; 2] = [&AVX512, &AVX2];
                    let ours = match level() {
                        Level::Avx512 => &ALL[..],
                        Level::Avx2 => &ALL[1..],
                        Level::Least => &[],
                    };
                    ours.iter().copied()
                }
            }
        )*};
    }
    has_tiles!(f32, avx512_f32, avx2_f32, __m512, __m256, [turn_f32]; f64, avx512_f64, avx2_f64, __m512d, __m256d, []);
}
