//! Every op of the library by name: called with tensors and JSON attributes, and with small sample
//! calls.
//!
//! This is how a command line, a table of recorded facts or an exhaustive sweep reaches an op
//! without knowing its method. [`entries`] covers [`ops::catalog`](anymesh_core::ops::catalog) exactly.
//!
//! ```
//! # use anymesh_conformance::registry;
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], &device)?;
//! let sum = registry::call("sum", &[Some(x)], &serde_json::json!({"axes": [0]}), &device)?;
//! assert_eq!(sum[0].to_vec::<f32>()?, [4.0, 6.0]);
//!
//! // An op's own small calls run anywhere.
//! let entry = registry::find("softmax")?;
//! for sample in entry.samples() {
//!     let attrs = registry::Attrs::new(entry, &sample.attrs)?;
//!     entry.call(&sample.make(7, &device)?, &attrs, &device)?;
//! }
//!
//! let error = registry::find("sofmax").unwrap_err().to_string();
//! assert!(error.contains("softmax"));
//! # Ok::<(), anymesh_core::Error>(())
//! ```

mod attention;
mod attr;
mod attrs;
mod conv;
mod create;
mod elementwise;
mod index;
mod indices;
mod loss;
mod matmul;
mod movement;
mod norm;
mod pool;
mod reduce;
mod sample;
mod scatter;
mod shape;
mod slice;
mod sort;

pub use attr::{Attr, AttrKind};
pub use attrs::Attrs;
pub use indices::Shapes;
pub(crate) use sample::SplitMix;
pub use sample::{Fill, Input, Sample};

use anymesh_core::{Error, Place, Result, Tensor};
use serde_json::Value;
use std::sync::LazyLock;

/// An op that can be called by name.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The name of the method or function.
    pub name: &'static str,
    /// The operands in order, such as `x, weight?, bias?`: `?` marks one that may be left out,
    /// `...` one that stands for any number but none.
    pub operands: &'static str,
    /// What it takes beside tensors.
    pub attrs: &'static [Attr],
    run: fn(&Call<'_>) -> Result<Vec<Tensor>>,
    samples: fn(&'static str) -> Vec<Sample>,
}

/// Everything an op is called with.
struct Call<'a> {
    op: &'static str,
    inputs: &'a [Option<Tensor>],
    attrs: &'a Attrs,
    place: &'a Place,
}

impl<'a> Call<'a> {
    /// Operand `at`, which the entry does not mark as optional.
    fn x(&self, at: usize) -> Result<&'a Tensor> {
        self.maybe(at)
            .ok_or_else(|| Error::argument(self.op, "inputs", format!("operand {at} is missing")))
    }

    /// Operand `at`, where it was given.
    fn maybe(&self, at: usize) -> Option<&'a Tensor> {
        self.inputs.get(at).and_then(Option::as_ref)
    }

    /// The operands of a range, which are all there.
    fn all(&self, range: std::ops::Range<usize>) -> Result<Vec<&'a Tensor>> {
        range.map(|at| self.x(at)).collect()
    }
}

/// The only output of an op.
fn one(out: Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![out?])
}

/// Both outputs of an op.
fn two(out: Result<(Tensor, Tensor)>) -> Result<Vec<Tensor>> {
    out.map(|(first, second)| vec![first, second])
}

/// An attribute with a default.
const fn attr(
    name: &'static str,
    kind: AttrKind,
    default: &'static str,
    doc: &'static str,
) -> Attr {
    Attr {
        name,
        kind,
        default: Some(default),
        nullable: matches!(default.as_bytes(), b"null"),
        doc,
    }
}

/// An attribute that must be given.
const fn required(name: &'static str, kind: AttrKind, doc: &'static str) -> Attr {
    Attr {
        name,
        kind,
        default: None,
        nullable: false,
        doc,
    }
}

/// A row of a family's table.
const fn entry(
    name: &'static str,
    operands: &'static str,
    attrs: &'static [Attr],
    run: fn(&Call<'_>) -> Result<Vec<Tensor>>,
    samples: fn(&'static str) -> Vec<Sample>,
) -> Entry {
    Entry {
        name,
        operands,
        attrs,
        run,
        samples,
    }
}

impl Entry {
    /// The names of the operands, and whether each may be left out or stands for several.
    fn operands(&self) -> impl Iterator<Item = (&'static str, bool, bool)> {
        let names = self
            .operands
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        names.map(|name| {
            (
                name.trim_end_matches(['?', '.']),
                name.ends_with('?'),
                name.ends_with("..."),
            )
        })
    }

    /// Refuses too few and too many operands.
    fn check(&self, inputs: &[Option<Tensor>]) -> Result<()> {
        let wrong = |what: String| {
            Err(Error::argument(
                self.name,
                "inputs",
                format!("{what}: the operands are ({})", self.operands),
            ))
        };
        let named = self.operands().count();
        let several = self.operands().any(|(_, _, several)| several);
        if inputs.len() > named && !several {
            return wrong(format!("{} operands were given", inputs.len()));
        }
        // One that stands for several takes what the others leave.
        let more = inputs.len().saturating_sub(named);
        let mut at = 0;
        for (name, optional, several) in self.operands() {
            let count = if several { 1 + more } else { 1 };
            if !optional && (at..at + count).any(|i| inputs.get(i).is_none_or(Option::is_none)) {
                return wrong(format!("operand '{name}' is missing"));
            }
            at += count;
        }
        Ok(())
    }

    /// Runs the op. Operands at the end that may be left out need not be there. `place` is where an
    /// op without operands puts its result.
    pub fn call(
        &self,
        inputs: &[Option<Tensor>],
        attrs: &Attrs,
        place: impl Into<Place>,
    ) -> Result<Vec<Tensor>> {
        self.check(inputs)?;
        (self.run)(&Call {
            op: self.name,
            inputs,
            attrs,
            place: &place.into(),
        })
    }

    /// Small calls of the op (at least one) that cover its attributes, broadcasting, and sizes that
    /// divide evenly over a mesh as well as those that do not.
    pub fn samples(&self) -> Vec<Sample> {
        (self.samples)(self.name)
    }
}

/// Every op of the library.
pub fn entries() -> &'static [Entry] {
    static ENTRIES: LazyLock<Vec<Entry>> = LazyLock::new(|| {
        [
            &elementwise::entries()[..],
            reduce::ENTRIES,
            sort::ENTRIES,
            shape::ENTRIES,
            slice::ENTRIES,
            movement::ENTRIES,
            create::ENTRIES,
            index::ENTRIES,
            scatter::ENTRIES,
            matmul::ENTRIES,
            norm::ENTRIES,
            loss::ENTRIES,
            attention::ENTRIES,
            conv::ENTRIES,
            pool::ENTRIES,
        ]
        .concat()
    });
    &ENTRIES
}

/// The op of this name; the error for an unknown one suggests similar names.
pub fn find(name: &str) -> Result<&'static Entry> {
    if let Some(entry) = entries().iter().find(|e| e.name == name) {
        return Ok(entry);
    }
    let mut near: Vec<(usize, &str)> = entries()
        .iter()
        .map(|e| (distance(name, e.name), e.name))
        .collect();
    near.sort_unstable();
    let limit = (name.len() / 3).max(2);
    let near: Vec<&str> = near
        .iter()
        .take(4)
        .filter(|(d, _)| *d <= limit)
        .map(|(_, name)| *name)
        .collect();
    let hint = if near.is_empty() {
        "`ops::catalog` lists all of them".into()
    } else {
        format!("did you mean {}?", near.join(" or "))
    };
    Err(Error::argument(
        "registry",
        "name",
        format!("there is no op '{name}': {hint}"),
    ))
}

/// Runs the op of this name with attributes from a JSON object.
pub fn call(
    name: &str,
    inputs: &[Option<Tensor>],
    attrs: &Value,
    place: impl Into<Place>,
) -> Result<Vec<Tensor>> {
    let entry = find(name)?;
    entry.call(inputs, &Attrs::new(entry, attrs)?, place)
}

/// How many letters must be added, removed or replaced to make one word of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
