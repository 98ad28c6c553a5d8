//! Numbers and names as text: the same on every machine, and as long as there is room.

use crate::xml::visible;

/// A length or a place in a picture: at most two digits after the point, never `-0`.
pub(crate) fn coordinate(x: f64) -> String {
    if !x.is_finite() {
        return "0".into();
    }
    let text = format!("{x:.2}");
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    match text {
        "-0" | "" => "0".into(),
        text => text.into(),
    }
}

/// A value with so many significant digits, as short as that is.
///
/// ```
/// use anymesh_show::value;
/// let texts = [0.0, 1.0, -0.12345, 1234567.0, 1e-9, f64::NAN, f64::NEG_INFINITY].map(value);
/// assert_eq!(texts, ["0", "1", "-0.1235", "1.235e6", "1e-9", "NaN", "-inf"]);
/// ```
pub fn value(x: f64) -> String {
    let size = x.abs();
    if !x.is_finite() || x == 0.0 {
        return match x == 0.0 {
            true => "0".into(),
            false => x.to_string(),
        };
    }
    if size < 1e6 && x.fract() == 0.0 {
        return format!("{x}");
    }
    if !(1e-4..1e5).contains(&size) {
        let text = format!("{x:.3e}");
        let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
        return format!("{}e{power}", trimmed(digits));
    }
    let digits = match size {
        s if s >= 1000.0 => 1,
        s if s >= 100.0 => 2,
        s if s >= 10.0 => 3,
        s if s >= 0.1 => 4,
        s if s >= 0.01 => 5,
        _ => 6,
    };
    trimmed(&format!("{x:.digits$}")).into()
}

fn trimmed(digits: &str) -> &str {
    match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.'),
        false => digits,
    }
}

/// A number of bytes in the unit that suits it.
///
/// ```
/// use anymesh_show::bytes;
/// assert_eq!([0.0, 1023.0, 3072.0, 7e9].map(bytes), ["0 B", "1023 B", "3 KiB", "6.52 GiB"]);
/// ```
pub fn bytes(n: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut n, mut unit) = (if n.is_finite() { n.max(0.0) } else { 0.0 }, 0);
    while n >= 1023.5 && unit + 1 < units.len() {
        n /= 1024.0;
        unit += 1;
    }
    let digits = match n {
        n if n >= 1e5 => return format!("{} {}", value(n), units[unit]),
        _ if unit == 0 => 0,
        n if n >= 100.0 => 0,
        n if n >= 10.0 => 1,
        _ => 2,
    };
    format!("{} {}", trimmed(&format!("{n:.digits$}")), units[unit])
}

/// A time in the unit that suits it.
///
/// ```
/// use anymesh_show::seconds;
/// assert_eq!([0.0, 8e-6, 0.0125, 90.0].map(seconds), ["0 s", "8 µs", "12.5 ms", "90 s"]);
/// ```
pub fn seconds(s: f64) -> String {
    let (scale, unit) = match s.abs() {
        _ if s == 0.0 => (1.0, "s"),
        a if a >= 1.0 => (1.0, "s"),
        a if a >= 1e-3 => (1e3, "ms"),
        a if a >= 1e-6 => (1e6, "µs"),
        _ => (1e9, "ns"),
    };
    let n = s * scale;
    let digits = match n.abs() {
        n if !(n < 1e5) => return format!("{} {unit}", value(s)),
        n if n >= 100.0 => 0,
        n if n >= 10.0 => 1,
        _ => 2,
    };
    format!("{} {unit}", trimmed(&format!("{n:.digits$}")))
}

/// A number with marks between thousands: `16,384`.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// `1 rank`, `16,384 ranks`.
pub(crate) fn count(n: usize, what: &str) -> String {
    format!(
        "{} {what}{}",
        grouped(n as u64),
        if n == 1 { "" } else { "s" }
    )
}

/// `0–3, 6` for 0, 1, 2, 3, 6.
pub(crate) fn ranges(numbers: &[usize]) -> String {
    let mut out: Vec<(usize, usize)> = vec![];
    for &n in numbers {
        match out.last_mut() {
            Some((_, end)) if *end + 1 == n => *end = n,
            _ => out.push((n, n)),
        }
    }
    // Numbers in equal steps, as ranks along a major axis are.
    let step = match &out[..] {
        [(a, b), (c, d), (e, f), ..] if (a, c, e) == (b, d, f) => e - c,
        _ => 0,
    };
    let stepped = step > 1
        && out
            .windows(2)
            .all(|w| w[0].0 + step == w[1].0 && w[1].0 == w[1].1);
    if let (true, Some(first), Some(last)) = (stepped && out.len() > 3, out.first(), out.last()) {
        return format!("{}, {}, … {}", first.0, first.0 + step, last.0);
    }
    let text = |(a, b): &(usize, usize)| match b - a {
        0 => a.to_string(),
        1 => format!("{a}, {b}"),
        _ => format!("{a}–{b}"),
    };
    match out.len() {
        0..=6 => out.iter().map(text).collect::<Vec<_>>().join(", "),
        _ => {
            let first: Vec<String> = out[..4].iter().map(text).collect();
            format!("{}, … {}", first.join(", "), text(&out[out.len() - 1]))
        }
    }
}

/// How wide a text is, in letters of a font in which all are equally wide. Wide characters and
/// pictures count for more than two.
pub(crate) fn width(text: &str) -> f64 {
    text.chars().map(letter).sum()
}

fn letter(c: char) -> f64 {
    match visible(c) as u32 {
        // Marks on other letters, joiners and variants take no room.
        0x300..=0x36f | 0x200b..=0x200f | 0x20d0..=0x20ff | 0xfe00..=0xfe0f => 0.0,
        0xfffd | 0x1100..=0x115f | 0x2e80..=0xa4cf | 0xac00..=0xd7a3 | 0xf900..=0xfaff => 2.0,
        0xfe30..=0xfe6f | 0xff00..=0xff60 => 2.0,
        0x2190..=0x2bff | 0x1f000..=0x1faff | 0x20000..=0x3fffd => 2.4,
        0..=0x24f | 0x2010..=0x2027 | 0x370..=0x3ff => 1.0,
        _ => 1.4,
    }
}

/// As much of a text as has room for so many letters, and an ellipsis where that is not all.
pub(crate) fn cut(text: &str, room: f64) -> String {
    if width(text) <= room {
        return text.into();
    }
    let mut out = String::new();
    let mut used = 1.0;
    for c in text.chars() {
        used += letter(c);
        if used > room {
            break;
        }
        out.push(c);
    }
    out.push('…');
    out
}

/// Round numbers between two, about so many: where an axis has its marks.
pub(crate) fn ticks(low: f64, high: f64, about: usize) -> Vec<f64> {
    let span = high - low;
    if !(span.is_finite() && span > 0.0) {
        return vec![low];
    }
    let rough = span / about.max(1) as f64;
    let power = 10f64.powi(rough.log10().floor() as i32);
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|m| m * power)
        .find(|s| *s >= rough * 0.999)
        .unwrap_or(10.0 * power);
    if !(step.is_finite() && step > 0.0) {
        return vec![low];
    }
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    let count = (last - first).clamp(0.0, 50.0) as usize;
    (0..=count).map(|i| (first + i as f64) * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_have_one_text() {
        let texts = [0.0, -0.001, 1.005, 2.5, 10.0, 100.0, f64::NAN].map(coordinate);
        assert_eq!(texts, ["0", "0", "1", "2.5", "10", "100", "0"]);
    }

    #[test]
    fn lists_of_ranks_are_short() {
        let check = |ranks: &[usize], text: &str| assert_eq!(ranges(ranks), text);
        check(&[], "");
        check(&[0, 1, 2, 3, 6], "0–3, 6");
        check(&[0, 4], "0, 4");
        check(&[0, 8, 16, 24, 32], "0, 8, … 32");
        check(&(0..16384).collect::<Vec<_>>(), "0–16383");
        let pairs: Vec<usize> = (0..100).filter(|r| r % 4 < 2).collect();
        check(&pairs, "0, 1, 4, 5, 8, 9, 12, 13, … 96, 97");
    }

    #[test]
    fn long_texts_are_cut_to_their_room() {
        assert_eq!(cut("attention", 9.0), "attention");
        assert_eq!(cut("attention", 5.0), "atte…");
        assert_eq!(cut("😀😀😀😀", 6.0), "😀😀…");
        assert!(width(&cut(&"漢".repeat(100), 10.0)) <= 10.0);
    }

    #[test]
    fn axes_have_round_marks() {
        assert_eq!(ticks(0.0, 10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.0, 97.0, 4), [0.0, 25.0, 50.0, 75.0]);
        assert_eq!(ticks(3.0, 3.0, 4), [3.0]);
        assert!(ticks(-1e300, 1e300, 4).len() < 60);
        assert!(ticks(0.0, f64::INFINITY, 4).len() == 1);
    }
}
