//! The lists of values that moments of 8 bits are rounded to: dense near zero, as wide as the block.

/// So many values share a scale.
pub(super) const BLOCK: usize = 256;

/// Both signs, from -0.993 to 1: seven powers of ten, each cut into twice as many steps as the one
/// below it, and zero and one.
pub(super) fn signed() -> [f32; 256] {
    list(0, true)
}

/// From 0 to 1, in twice as many steps.
pub(super) fn unsigned() -> [f32; 256] {
    list(1, false)
}

fn list(more: u32, both: bool) -> [f32; 256] {
    let mut values = vec![0.0f32, 1.0];
    for power in 0..7u32 {
        let steps = 1usize << (power + more);
        let size = 10f64.powi(power as i32 - 6) as f32;
        for k in 0..steps {
            let middle = (bound(k, steps) + bound(k + 1, steps)) / 2.0;
            values.push(size * middle);
            if both {
                values.push(-size * middle);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    let mut list = [0.0; 256];
    list.copy_from_slice(&values);
    list
}

/// Bound `k` of `steps` even steps from 0.1 to 1, counted from the nearer end and rounded once.
fn bound(k: usize, steps: usize) -> f32 {
    let step = (1.0f32 - 0.1) / steps as f32;
    match k < steps.div_ceil(2) {
        true => step.mul_add(k as f32, 0.1),
        false => (-step).mul_add((steps - k) as f32, 1.0),
    }
}

/// The least numbers that are rounded to each value of a list but the first: the upper of two that
/// are equally near.
pub(super) fn bounds(list: &[f32; 256]) -> [f32; 255] {
    let mut bounds = [0.0; 255];
    for (bound, pair) in bounds.iter_mut().zip(list.windows(2)) {
        let (low, half) = (pair[0], (pair[1] - pair[0]) * 0.5);
        let up = |x: f32| x - low >= half;
        // Near the middle, to the last bit: what is nearer is a question of rounded differences.
        let mut x = low + half;
        while up(x.next_down()) {
            x = x.next_down();
        }
        while !up(x) {
            x = x.next_up();
        }
        *bound = x;
    }
    bounds
}

/// Where zero is in a list.
pub(super) fn code_of_zero(list: &[f32]) -> i64 {
    list.iter().position(|x| *x == 0.0).unwrap_or(0) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_torchaos() {
        let facts = include_str!("../../tests/facts/optimizers.json");
        let facts: serde_json::Value = serde_json::from_str(facts).expect("JSON");
        for (key, list) in [("signed_map", signed()), ("unsigned_map", unsigned())] {
            let theirs = facts["adamw_8bit"][key].as_array().expect("a list");
            // Theirs were written down with nine decimals: numbers near 1 to the last bit.
            for (own, theirs) in list.iter().zip(theirs) {
                let theirs = theirs.as_f64().expect("a number");
                assert!(
                    (f64::from(*own) - theirs).abs() < 5.01e-10,
                    "{key}: {own}, {theirs}"
                );
            }
            assert_eq!(theirs.len(), list.len());
        }
    }

    #[test]
    fn bounds_round_as_differences_do() {
        for list in [signed(), unsigned()] {
            let bounds = bounds(&list);
            assert!(bounds.is_sorted());
            let code = |x: f32| bounds.partition_point(|b| *b <= x);
            for i in -100_000..=100_000i32 {
                let x = i as f32 / 100_000.0;
                let low = list.partition_point(|v| *v <= x).max(1) - 1;
                let expected = match list.get(low + 1) {
                    Some(high) if x - list[low] >= (high - list[low]) * 0.5 => low + 1,
                    _ => low,
                };
                assert_eq!(code(x), expected, "{x}");
            }
            assert!((0..256).all(|c| code(list[c]) == c));
        }
    }
}
