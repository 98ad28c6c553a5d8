//! Which of many things are drawn: all, or the first ones, a gap and the last.

/// The numbers of the things that are drawn; `None` is a gap.
pub(crate) fn shown(n: usize, most: usize) -> Vec<Option<usize>> {
    if n <= most {
        return (0..n).map(Some).collect();
    }
    let first = most.saturating_sub(2).max(1);
    (0..first).map(Some).chain([None, Some(n - 1)]).collect()
}

/// How many things are not drawn.
pub(crate) fn hidden(n: usize, most: usize) -> usize {
    n - shown(n, most).iter().flatten().count()
}

/// The digits of a number where place `i` counts to `sizes[i]`, major first.
pub(crate) fn digits(mut n: usize, sizes: &[usize]) -> Vec<usize> {
    let mut out = vec![0; sizes.len()];
    for (digit, size) in out.iter_mut().zip(sizes).rev() {
        *digit = n % size.max(&1);
        n /= size.max(&1);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_last_are_drawn() {
        assert_eq!(shown(3, 4), [Some(0), Some(1), Some(2)]);
        assert_eq!(shown(100, 4), [Some(0), Some(1), None, Some(99)]);
        assert_eq!((hidden(100, 4), hidden(4, 4)), (97, 0));
        assert_eq!(digits(7, &[2, 2, 3]), [1, 0, 1]);
    }
}
