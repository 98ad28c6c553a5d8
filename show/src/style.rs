//! How everything looks, in one style sheet.
//!
//! Lines and letters have the colour of the text around them, and fills are colours of middle
//! brightness that let what is behind shine through: so a figure fits into a light page, a dark
//! page and a notebook whose theme is not that of the system. A picture that is a file of its own
//! has its own paper, light or dark as the system prefers.
//!
//! There are no `style` attributes and no scripts, so that a page with a strict content security
//! policy allows one style sheet, this one, by its hash.

/// How many colours there are; names of classes go from `hold0` to `hold9`.
pub(crate) const COLORS: usize = 10;

/// The style sheet of all pictures and tables, the same in each.
pub const STYLE: &str = "\
svg.anymesh{max-width:100%;height:auto;font-family:ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
svg.anymesh:root{color:#1d2433;background:#fdfdfd}
@media (prefers-color-scheme:dark){svg.anymesh:root{color:#e4e8f0;background:#151922}}
.anymesh text{fill:currentColor;font-size:12px;unicode-bidi:plaintext}
.anymesh .head{font-size:14px;font-weight:600}
.anymesh .soft{font-size:11px;fill-opacity:.72}
.anymesh .tiny{font-size:9.5px;fill-opacity:.8}
.anymesh .mono{font-family:ui-monospace,'Cascadia Mono','DejaVu Sans Mono',Menlo,Consolas,monospace}
.anymesh .mid{text-anchor:middle}
.anymesh .end{text-anchor:end}
.anymesh .grid{stroke:currentColor;stroke-opacity:.16;fill:none}
.anymesh .axis{stroke:currentColor;stroke-opacity:.5;fill:none}
.anymesh .cut{stroke:currentColor;stroke-width:2;stroke-opacity:.9;fill:none}
.anymesh .halo{stroke:#fff;stroke-width:3.5;stroke-opacity:.85;fill:none}
.anymesh .over{stroke:#10131a;stroke-width:1.5;fill:none}
.anymesh .none{fill:currentColor;fill-opacity:.06;stroke:currentColor;stroke-opacity:.25;stroke-dasharray:3 3}
.anymesh .fill{fill-opacity:.3;stroke-opacity:.85}
.anymesh .map{shape-rendering:crispEdges}
.anymesh .full{fill-opacity:.88;stroke:none}
.anymesh .wire{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.anymesh .hold0{fill:#4b7fe0;stroke:#4b7fe0}
.anymesh .hold1{fill:#e98a2e;stroke:#e98a2e}
.anymesh .hold2{fill:#3fa96c;stroke:#3fa96c}
.anymesh .hold3{fill:#d9586a;stroke:#d9586a}
.anymesh .hold4{fill:#8f6fd6;stroke:#8f6fd6}
.anymesh .hold5{fill:#2aa5b5;stroke:#2aa5b5}
.anymesh .hold6{fill:#b8982a;stroke:#b8982a}
.anymesh .hold7{fill:#d36bb0;stroke:#d36bb0}
.anymesh .hold8{fill:#8a9a3b;stroke:#8a9a3b}
.anymesh .hold9{fill:#8b8f99;stroke:#8b8f99}
.anymesh .wire.hold0,.anymesh .wire.hold1,.anymesh .wire.hold2,.anymesh .wire.hold3,.anymesh .wire.hold4,.anymesh .wire.hold5,.anymesh .wire.hold6,.anymesh .wire.hold7,.anymesh .wire.hold8,.anymesh .wire.hold9{fill:none}
figure.anymesh{margin:.5em 0 1.4em;font:13px/1.45 ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
.anymesh figcaption{font-size:14px;font-weight:600;margin:0 0 .4em}
.anymesh .wide{overflow-x:auto;max-width:100%}
.anymesh table{border-collapse:collapse;margin:.4em 0;font-variant-numeric:tabular-nums}
.anymesh caption{text-align:left;font-weight:600;padding:.2em 0}
.anymesh th,.anymesh td{padding:.18em .7em;text-align:left;white-space:nowrap;border:0;border-bottom:1px solid rgba(128,136,152,.28)}
.anymesh thead th{font-weight:600;border-bottom:1.5px solid rgba(128,136,152,.7)}
.anymesh .right{text-align:right}
.anymesh td.mono,.anymesh pre{font-family:ui-monospace,'Cascadia Mono','DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:12px}
.anymesh .note{margin:.3em 0;opacity:.8}
.anymesh pre{margin:.4em 0;overflow-x:auto;background:none;color:inherit}
body.anymesh{margin:1.2em auto;max-width:68em;padding:0 1em;color:#1d2433;background:#fdfdfd}
@media (prefers-color-scheme:dark){body.anymesh{color:#e4e8f0;background:#151922}}
";

/// The class of a colour by its number.
pub(crate) fn color(i: usize) -> String {
    format!("hold{}", i % COLORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Rgb = [f64; 3];

    /// The first colour after some words of a sheet.
    fn rgb(sheet: &str, words: &str) -> Rgb {
        let at = sheet.find(words).unwrap() + words.len();
        let hex = &sheet[at..][..6];
        [0, 2, 4].map(|i| f64::from(u8::from_str_radix(&hex[i..i + 2], 16).unwrap()) / 255.0)
    }

    /// The number after some words of the sheet.
    fn number_after(words: &str) -> f64 {
        let rest = &STYLE[STYLE.find(words).unwrap() + words.len()..];
        rest[..rest.find([';', '}']).unwrap()].parse().unwrap()
    }

    fn over(top: Rgb, opacity: f64, below: Rgb) -> Rgb {
        std::array::from_fn(|i| top[i] * opacity + below[i] * (1.0 - opacity))
    }

    /// The contrast of two colours as WCAG 2 defines it, from 1 to 21.
    fn contrast(a: Rgb, b: Rgb) -> f64 {
        let linear = |c: f64| match c <= 0.04045 {
            true => c / 12.92,
            false => ((c + 0.055) / 1.055).powf(2.4),
        };
        let light = |c: Rgb| {
            let [r, g, b] = c.map(linear);
            0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05
        };
        let (a, b) = (light(a), light(b));
        a.max(b) / a.min(b)
    }

    #[test]
    fn letters_can_be_read_on_every_fill_of_both_papers() {
        let soft = number_after(".soft{font-size:11px;fill-opacity:");
        let tiny = number_after(".tiny{font-size:9.5px;fill-opacity:");
        let fill = number_after(".fill{fill-opacity:");
        let roots: Vec<&str> = STYLE.split("svg.anymesh:root{").skip(1).collect();
        assert_eq!(roots.len(), 2, "light and dark");
        for root in roots {
            let (ink, paper) = (rgb(root, "color:#"), rgb(root, "background:#"));
            assert!(contrast(over(ink, soft, paper), paper) > 4.5);
            for i in 0..COLORS {
                let fill = over(rgb(STYLE, &format!(".{}{{fill:#", color(i))), fill, paper);
                let letters = over(ink, tiny, fill);
                let found = contrast(letters, fill);
                assert!(found > 4.5, "{}: {found} on {fill:?}", color(i));
            }
        }
    }

    #[test]
    fn the_sheet_needs_no_escapes_and_every_color_has_a_rule() {
        assert!(!STYLE.contains(['<', '>', '&']) && !STYLE.contains("]]"));
        for i in 0..COLORS {
            assert!(STYLE.contains(&format!(".{}{{", color(i))));
        }
    }
}
