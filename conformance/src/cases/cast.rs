//! Conversions between all pairs of dtypes.

use super::{Cases, Fill, View, input};
use anymesh_core::DType;

pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("cast");
    for from in DType::ALL {
        for to in DType::ALL {
            // Past every integer's ends, where conversions wrap or saturate; and what is special
            // about floats.
            for (i, fill) in [Fill::Uniform(-6e9, 6e9), Fill::Special(-300.0, 300.0)]
                .into_iter()
                .enumerate()
            {
                let view = if i == 0 {
                    View::Contiguous
                } else {
                    View::Transposed
                };
                cases.add(
                    "cast",
                    to,
                    format!("{from} to {to} {fill:?}"),
                    move |device| {
                        Ok(vec![
                            input(device, from, &[3, 13], view, fill, 5)?.cast(to)?,
                        ])
                    },
                );
            }
        }
    }
    cases
}
