//! Convolutions. Values are small integers, so every order of summation gives the same.

use super::{Attr, AttrKind, Call, Entry, Sample, attr, entry, one, sample::small};
use anymesh_core::{
    Result, Tensor,
    ops::{Conv, ConvTranspose},
};
use serde_json::{Value, json};

const STRIDE: Attr = attr("stride", AttrKind::Sizes, "1", "the step of the window");
const PADDING: Attr = attr(
    "padding",
    AttrKind::Sizes,
    "0",
    "zeros before and after each dimension",
);
const OUTPUT_PADDING: Attr = attr(
    "output_padding",
    AttrKind::Sizes,
    "0",
    "elements more at the end of each dimension",
);
const DILATION: Attr = attr(
    "dilation",
    AttrKind::Sizes,
    "1",
    "the step between the elements of the window",
);
const GROUPS: Attr = attr(
    "groups",
    AttrKind::Size,
    "1",
    "groups of channels that do not see each other",
);
const CONV: &[Attr] = &[STRIDE, PADDING, DILATION, GROUPS];
const TRANSPOSED: &[Attr] = &[STRIDE, PADDING, OUTPUT_PADDING, DILATION, GROUPS];
const OPERANDS: &str = "x, weight, bias?";

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "conv1d",
        OPERANDS,
        CONV,
        |c| conv(c, |x, w, b, o| x.conv1d(w, b, o)),
        |_| convs(1),
    ),
    entry(
        "conv2d",
        OPERANDS,
        CONV,
        |c| conv(c, |x, w, b, o| x.conv2d(w, b, o)),
        |_| convs(2),
    ),
    entry(
        "conv3d",
        OPERANDS,
        CONV,
        |c| conv(c, |x, w, b, o| x.conv3d(w, b, o)),
        |_| convs(3),
    ),
    entry(
        "conv_transpose1d",
        OPERANDS,
        TRANSPOSED,
        |c| transposed(c, |x, w, b, o| x.conv_transpose1d(w, b, o)),
        |_| transposes(1),
    ),
    entry(
        "conv_transpose2d",
        OPERANDS,
        TRANSPOSED,
        |c| transposed(c, |x, w, b, o| x.conv_transpose2d(w, b, o)),
        |_| transposes(2),
    ),
    entry(
        "conv_transpose3d",
        OPERANDS,
        TRANSPOSED,
        |c| transposed(c, |x, w, b, o| x.conv_transpose3d(w, b, o)),
        |_| transposes(3),
    ),
];

/// A closure, not the method by its name: that would not know where it was called.
type Method<O> = fn(&Tensor, &Tensor, Option<&Tensor>, &O) -> Result<Tensor>;

fn conv<const N: usize>(c: &Call<'_>, f: Method<Conv<N>>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    let options = Conv {
        stride: a.array("stride")?,
        padding: a.array("padding")?,
        dilation: a.array("dilation")?,
        groups: a.size("groups")?,
    };
    one(f(c.x(0)?, c.x(1)?, c.maybe(2), &options))
}

fn transposed<const N: usize>(c: &Call<'_>, f: Method<ConvTranspose<N>>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    let options = ConvTranspose {
        stride: a.array("stride")?,
        padding: a.array("padding")?,
        output_padding: a.array("output_padding")?,
        dilation: a.array("dilation")?,
        groups: a.size("groups")?,
    };
    one(f(c.x(0)?, c.x(1)?, c.maybe(2), &options))
}

/// Sizes in front, and those of `n` spatial dimensions behind.
fn dims(lead: [usize; 2], space: [usize; 3], n: usize) -> Vec<usize> {
    lead.iter().chain(&space[..n]).copied().collect()
}

/// A call over `n` dimensions: sizes of input and weight, and the length of a bias.
fn call(
    n: usize,
    x: ([usize; 2], [usize; 3]),
    weight: ([usize; 2], [usize; 3]),
    bias: Option<usize>,
    attrs: Value,
) -> Sample {
    let inputs = [
        small(&dims(x.0, x.1, n)),
        small(&dims(weight.0, weight.1, n)),
    ];
    Sample::new(inputs.into_iter().chain(bias.map(|n| small(&[n]))), attrs)
}

fn convs(n: usize) -> Vec<Sample> {
    vec![
        call(
            n,
            ([3, 2], [5, 2, 1]),
            ([4, 2], [3, 2, 1]),
            Some(4),
            json!({}),
        ),
        call(
            n,
            ([2, 4], [4, 1, 1]),
            ([5, 4], [2, 1, 1]),
            None,
            json!({"padding": 1, "stride": 2}),
        ),
        // Two groups, and one for each channel.
        call(
            n,
            ([1, 4], [5, 2, 1]),
            ([6, 2], [2, 1, 1]),
            Some(6),
            json!({"groups": 2, "dilation": 2}),
        ),
        call(
            n,
            ([4, 3], [4, 1, 1]),
            ([3, 1], [2, 1, 1]),
            None,
            json!({"groups": 3}),
        ),
        // Steps that leave a rest of the input, which is as large as the dilation.
        call(
            n,
            ([1, 2], [8, 3, 1]),
            ([2, 1], [2, 1, 1]),
            Some(2),
            json!({"groups": 2, "stride": 4, "dilation": 2}),
        ),
    ]
}

fn transposes(n: usize) -> Vec<Sample> {
    vec![
        call(
            n,
            ([3, 2], [5, 2, 1]),
            ([2, 4], [3, 2, 1]),
            Some(4),
            json!({}),
        ),
        call(
            n,
            ([2, 4], [3, 2, 1]),
            ([4, 5], [2, 1, 1]),
            None,
            json!({"stride": 2, "output_padding": 1}),
        ),
        call(
            n,
            ([1, 4], [4, 2, 1]),
            ([4, 3], [2, 2, 1]),
            Some(6),
            json!({"groups": 2, "dilation": 2}),
        ),
        call(
            n,
            ([4, 2], [3, 2, 1]),
            ([2, 1], [3, 3, 3]),
            None,
            json!({"groups": 2, "padding": 1}),
        ),
        // An output that is extended by more than a step.
        call(
            n,
            ([2, 2], [3, 1, 1]),
            ([2, 3], [2, 1, 1]),
            None,
            json!({"dilation": 3, "output_padding": 2}),
        ),
    ]
}
