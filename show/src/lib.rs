//! Pictures and tables of what a program on a mesh is made of: tensors with their cuts, meshes with
//! who holds what, plans with their bytes, ledgers, losses, schedules, checkpoints.
//!
//! What can be shown is [`Show`]: as [HTML](Show::html) and [SVG](Show::svg) for pages and files,
//! as [text](Show::text) for terminals, and in notebooks by itself where the trait is in scope.
//!
//! ```
//! use anymesh_core::{DType, Mesh, Tensor, spmd::Ledger};
//! use anymesh_show::Show;
//! # let device = anymesh_backend_cpu::device();
//! let mesh = Mesh::new("dp=2, tp=2", &device)?;
//! let x = Tensor::arange(0, 32, 1, DType::F32, &device)?.reshape([4, 8])?.to_mesh(&mesh, "[@dp, @tp]")?;
//! let svg = x.svg().unwrap();                 // values, cut lines, and who holds which part
//! assert!(svg.contains("f32[4@dp, 8@tp]") && svg.contains("rank 3"));
//!
//! let (y, ledger) = Ledger::record(|| x.matmul(&x.t()?));
//! assert!(ledger.html().contains("matmul"));  // bars by op and axis, and a table
//! # y?; Ok::<(), anymesh_core::Error>(())
//! ```
//!
//! # How it is made
//! Everything makes a [`Figure`], plain data: a title, pictures, tables, notes. [`xml`] writes
//! elements and escapes every text; [`Picture`] is shapes; [`Table`], [`Bars`], [`Curve`],
//! [`Gantt`] and [`Inventory`] are data of your own to show.
//!
//! All of it is the same bytes for the same thing, every time and on every machine. HTML and SVG
//! are well-formed XML whatever names hold. There are no scripts, nothing is fetched, and there is
//! one [style sheet](STYLE) for all, which is readable on light and on dark paper. However large a
//! tensor, a mesh or a plan is, its picture stays small, and says what it left out.
//!
//! # Values
//! A tensor is read in parts where it lies: nothing is communicated, and no ledger sees it. What is
//! too large to read is sampled. In a browser reading waits, so there [`TensorView::read`] makes
//! the picture, and [`Show`] of a tensor has its type and parts.

#![forbid(unsafe_code)]

mod bars;
#[cfg(feature = "checkpoint")]
mod checkpoint;
mod curve;
mod estimate;
mod figure;
mod gantt;
mod grid;
mod inventory;
#[cfg(feature = "layout")]
mod layout;
mod ledger;
mod mesh;
mod number;
mod parts;
mod plan;
mod rule;
mod schedule;
mod simulate;
mod step;
mod style;
mod svg;
mod table;
mod tensor;
pub mod xml;

pub use bars::{Bar, Bars, Unit};
pub use curve::Curve;
pub use figure::{Block, Figure, page};
pub use gantt::{Gantt, Lane, Span};
pub use inventory::{Inventory, StoredTensor};
pub use number::{bytes, seconds, value};
pub use parts::Parts;
pub use schedule::rank_table;
pub use style::STYLE;
pub use svg::Picture;
pub use table::{Cell, Column, Table};
pub use tensor::TensorView;

/// What shows itself in notebooks, pages, files and terminals.
///
/// A type of your own needs [`figure`](Self::figure):
///
/// ```
/// use anymesh_show::{Figure, Show, Table};
/// struct Run { steps: usize, loss: f64 }
/// impl Show for Run {
///     fn figure(&self) -> Figure {
///         let mut table = Table::new("", &["steps", "loss"]).numbers(&[0, 1]);
///         table.row([self.steps.to_string(), anymesh_show::value(self.loss)]);
///         Figure::new("a run").table(table)
///     }
/// }
/// assert_eq!(Run { steps: 20, loss: 0.25 }.text(), "a run\nsteps  loss\n   20  0.25");
/// ```
pub trait Show {
    /// What it shows, as data.
    fn figure(&self) -> Figure;

    /// For terminals.
    fn text(&self) -> String {
        self.figure().text()
    }

    /// HTML to put into a page; also well-formed XML.
    fn html(&self) -> String {
        self.figure().html()
    }

    /// An SVG file; nothing where tables say all.
    fn svg(&self) -> Option<String> {
        self.figure().svg()
    }

    /// Shows it in a notebook of the evcxr kernel, which calls this by its name for the last
    /// expression of a cell.
    fn evcxr_display(&self) {
        print!("{}", notebook(&self.html(), &self.text()));
    }
}

/// What evcxr reads from the output of a cell: a body for each kind of front end. No body can end
/// itself, whatever names are in it.
fn notebook(html: &str, text: &str) -> String {
    let html = html.replace("EVCXR_", "EVCXR&#95;");
    let text = text.replace("EVCXR_", "EVCXR-");
    let part = |mime: &str, body: &str| {
        let end = if body.ends_with('\n') { "" } else { "\n" };
        format!("EVCXR_BEGIN_CONTENT {mime}\n{body}{end}EVCXR_END_CONTENT\n")
    };
    part("text/html", &html) + &part("text/plain", &text)
}

impl<T: Show + ?Sized> Show for &T {
    fn figure(&self) -> Figure {
        (**self).figure()
    }

    fn text(&self) -> String {
        (**self).text()
    }
}

/// The value, or what went wrong: a cell of a notebook need not unwrap.
impl<T: Show, E: std::fmt::Display> Show for Result<T, E> {
    fn figure(&self) -> Figure {
        match self {
            Ok(value) => value.figure(),
            Err(error) => Figure::new("error").note(error.to_string()),
        }
    }

    fn text(&self) -> String {
        match self {
            Ok(value) => value.text(),
            Err(error) => format!("error: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notebook_reads_two_bodies_and_no_name_ends_one() {
        let mut table = Table::new("t", &["name"]);
        table.row(["\nEVCXR_END_CONTENT\nEVCXR_BEGIN_CONTENT text/html\n<b>"]);
        let out = notebook(&table.html(), &table.text());
        let marks: Vec<&str> = (out.lines().filter(|l| l.starts_with("EVCXR_"))).collect();
        let end = "EVCXR_END_CONTENT";
        let begin = |mime: &str| format!("EVCXR_BEGIN_CONTENT {mime}");
        assert_eq!(marks, [&begin("text/html"), end, &begin("text/plain"), end]);
        assert_eq!(out.matches("EVCXR_").count(), 4);
    }
}
