//! Who holds what: a type on a mesh, as a grid of parts and as the ranks that hold them.

use crate::{
    Figure, Picture, Show, Table,
    grid::{digits, shown},
    mesh::{self, Look, numbered},
    number::{bytes, count, grouped},
    style::color,
    svg::{fitted, pixels, rect, text},
};
use anymesh_core::{Mesh, Reduction, Sharding, Tensor, TensorType, split};

/// Parts that are drawn across, down, and as panels of their own.
const MOST: (usize, usize, usize) = (8, 8, 4);

/// Which rank holds which part of a tensor of some type.
///
/// ```
/// use anymesh_core::{Mesh, TensorType, meta};
/// use anymesh_show::{Parts, Show};
/// let mesh = Mesh::new("dp=2, tp=4", &meta())?;
/// let ty = TensorType::parse("f32[8@dp, 16]{sum:tp}", &mesh)?;
/// let parts = Parts::new(&ty, &mesh);
/// assert!(parts.svg().unwrap().contains("[0..4, 0..16]: the sum of what ranks 0–3 hold"));
/// assert!(parts.text().contains("the value is the sum over tp"));
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Parts {
    ty: TensorType,
    mesh: Mesh,
}

impl Parts {
    /// Of a type. Axes and dimensions of its sharding that are not there count for nothing.
    pub fn new(ty: &TensorType, mesh: &Mesh) -> Self {
        let mut ty = ty.clone();
        if ty.sharding.check(mesh, ty.shape.rank()).is_err() {
            let (axes, rank) = (mesh.axes().len(), ty.shape.rank());
            let mut valid = Sharding::replicated();
            for (dim, axis) in ty.sharding.cuts() {
                let next = valid.clone().cut(dim, axis);
                if axis < axes && dim < rank && next.check(mesh, rank).is_ok() {
                    valid = next;
                }
            }
            ty.sharding = valid;
        }
        Self {
            ty,
            mesh: mesh.clone(),
        }
    }

    /// Of a tensor.
    pub fn of(x: &Tensor) -> Self {
        Self {
            ty: TensorType {
                dtype: x.dtype(),
                shape: x.shape().clone(),
                sharding: x.sharding().clone(),
            },
            mesh: x.mesh().clone(),
        }
    }

    /// The type as text.
    pub(crate) fn type_string(&self) -> String {
        self.ty.to_string_on(&self.mesh)
    }

    /// How many parts a dimension has.
    pub(crate) fn parts_of(&self, dim: usize) -> usize {
        let axes = self.ty.sharding.axes_of(dim);
        axes.map(|a| self.mesh.size(a)).product()
    }

    /// The elements of a part of a dimension.
    pub(crate) fn range(&self, dim: usize, part: usize) -> std::ops::Range<usize> {
        split(self.ty.shape[dim], part, self.parts_of(dim))
    }

    /// The ranks that hold a part, given by its number along each dimension.
    fn holders(&self, part: &[usize]) -> Vec<usize> {
        let mut rank = 0;
        for (dim, at) in part.iter().enumerate() {
            let axes: Vec<usize> = self.ty.sharding.axes_of(dim).collect();
            let sizes: Vec<usize> = axes.iter().map(|a| self.mesh.size(*a)).collect();
            for (axis, at) in axes.iter().zip(digits(*at, &sizes)) {
                rank = self.mesh.moved(rank, *axis, at);
            }
        }
        let cut: Vec<usize> = self.ty.sharding.cuts().map(|(_, a)| a).collect();
        let free: Vec<usize> = (0..self.mesh.axes().len())
            .filter(|a| !cut.contains(a))
            .collect();
        let mut ranks = self.mesh.group(rank, &free).to_vec();
        ranks.sort_unstable();
        ranks
    }

    /// The number of the part of a dimension that a rank holds.
    fn part_of(&self, rank: usize, dim: usize) -> usize {
        let axes = self.ty.sharding.axes_of(dim);
        axes.fold(0, |part, a| {
            part * self.mesh.size(a) + self.mesh.coordinate(rank, a)
        })
    }

    /// The dimensions that are cut, but for axes of one rank.
    fn cut_dims(&self) -> Vec<usize> {
        (0..self.ty.shape.rank())
            .filter(|d| self.parts_of(*d) > 1)
            .collect()
    }

    /// The dimensions drawn down and across, and those that give panels: of what is cut, the last
    /// two are drawn.
    fn drawn(&self) -> (Option<usize>, Option<usize>, Vec<usize>) {
        let rank = self.ty.shape.rank();
        let cut = self.cut_dims();
        match cut[..] {
            [] if rank == 0 => (None, None, vec![]),
            [] if rank == 1 => (None, Some(0), vec![]),
            [] => (Some(rank - 2), Some(rank - 1), vec![]),
            [only] if rank == 1 => (None, Some(only), vec![]),
            [only] if only + 1 == rank => (Some(only - 1), Some(only), vec![]),
            [only] => (Some(only), Some(rank - 1), vec![]),
            [ref outer @ .., down, across] => (Some(down), Some(across), outer.to_vec()),
        }
    }

    /// The number of the part of a dimension in which an element is.
    pub(crate) fn part_at(&self, dim: usize, at: usize) -> usize {
        let (n, parts) = (self.ty.shape[dim].max(1), self.parts_of(dim));
        let mut part = (at as u128 * parts as u128 / n as u128) as usize;
        // Bounds are rounded down, so this is at most one off.
        while part + 1 < parts && self.range(dim, part).end <= at {
            part += 1;
        }
        while part > 0 && self.range(dim, part).start > at {
            part -= 1;
        }
        part
    }

    /// The colour of a part by its number along each dimension.
    pub(crate) fn color_of(&self, part: &[usize]) -> usize {
        (self.cut_dims().iter()).fold(0, |n, d| n * self.parts_of(*d) + part[*d])
    }

    /// What a part is, in words.
    fn tip(&self, part: &[usize], ranks: &[usize]) -> String {
        let spans: Vec<String> = (0..part.len())
            .map(|d| {
                let range = self.range(d, part[d]);
                format!("{}..{}", range.start, range.end)
            })
            .collect();
        let who = numbered(ranks);
        let holds = match (ranks.len(), self.reduction()) {
            (2.., Some(r)) => format!("the {r} of what {who} hold"),
            (1, _) => format!("{who} holds it"),
            _ => format!("{who} hold it"),
        };
        format!("[{}]: {holds}", spans.join(", "))
    }

    fn reduction(&self) -> Option<Reduction> {
        self.ty.sharding.partial().next().map(|(_, r)| r)
    }

    /// What partial values are, in words.
    pub(crate) fn partial_note(&self) -> Option<String> {
        let reduction = self.reduction()?;
        let axes: Vec<&str> = (self.ty.sharding.partial())
            .filter_map(|(a, _)| self.mesh.axes().get(a).map(|(name, _)| name.as_str()))
            .collect();
        Some(format!(
            "Every rank's part is partial: the value is the {reduction} over {}.",
            axes.join(", ")
        ))
    }

    /// The parts as a grid, with ranges at its sides.
    pub(crate) fn picture(&self, cell: (f64, f64)) -> Picture {
        let rank = self.ty.shape.rank();
        let (down, across, outer) = self.drawn();
        let sizes: Vec<usize> = outer.iter().map(|d| self.parts_of(*d)).collect();
        let panels: usize = sizes.iter().product();
        let mut picture = Picture::new(format!("the parts of {}", self.type_string()), 0.0, 0.0);
        let mut y = 0.0;
        for panel in shown(panels, MOST.2) {
            let Some(panel) = panel else {
                picture.draw(text("", 8.0, y + 12.0, "…"));
                y += 24.0;
                continue;
            };
            let mut part = vec![0; rank];
            for (dim, at) in outer.iter().zip(digits(panel, &sizes)) {
                part[*dim] = at;
            }
            let drawn = self.panel(&part, (down, across), &outer, cell);
            let height = drawn.height;
            picture.place(0.0, y, drawn);
            y += height + 10.0;
        }
        picture
    }

    fn panel(
        &self,
        part: &[usize],
        (down, across): (Option<usize>, Option<usize>),
        outer: &[usize],
        (w, h): (f64, f64),
    ) -> Picture {
        let parts = |d: Option<usize>| d.map_or(1, |d| self.parts_of(d));
        let range = |d: usize, p: usize| {
            let range = self.range(d, p);
            format!("{}..{}", range.start, range.end)
        };
        let (rows, columns) = (shown(parts(down), MOST.1), shown(parts(across), MOST.0));
        let spans = rows
            .iter()
            .flatten()
            .filter_map(|p| down.map(|d| range(d, *p)));
        let left = spans.map(|s| pixels("tiny", &s)).fold(0.0, f64::max) + 8.0;
        let spans = columns
            .iter()
            .flatten()
            .filter_map(|p| across.map(|d| range(d, *p)));
        let w = spans.map(|s| pixels("tiny", &s) + 8.0).fold(w, f64::max);
        let fixed: Vec<String> = (outer.iter())
            .map(|d| format!("dimension {d}: {}", range(*d, part[*d])))
            .collect();
        let sides = [
            down.map(|d| self.side(d, "↓")),
            across.map(|d| self.side(d, "→")),
        ];
        let heads: Vec<String> = [(!fixed.is_empty()).then(|| fixed.join(", "))]
            .into_iter()
            .chain(sides)
            .flatten()
            .collect();
        let top = 14.0 * heads.len() as f64 + 17.0;
        let words = heads.iter().map(|h| pixels("soft", h)).fold(0.0, f64::max);
        let (width, height) = (left + columns.len() as f64 * w, top + rows.len() as f64 * h);
        let mut picture = Picture::new("", width.max(words.min(300.0)) + 2.0, height + 4.0);
        for (i, words) in heads.iter().enumerate() {
            let y = 11.0 + 14.0 * i as f64;
            picture.draw(fitted("soft", 0.0, y, picture.width, words));
        }
        for (i, column) in columns.iter().enumerate() {
            let label = match (column, across) {
                (Some(p), Some(d)) => range(d, *p),
                (None, _) => "…".into(),
                _ => continue,
            };
            let x = left + (i as f64 + 0.5) * w;
            picture.draw(text("tiny mid", x, top - 4.0, &label));
        }
        for (j, row) in rows.iter().enumerate() {
            let y = top + j as f64 * h;
            let label = match (row, down) {
                (Some(p), Some(d)) => range(d, *p),
                (None, _) => "…".into(),
                _ => String::new(),
            };
            picture.draw(text("tiny end", left - 5.0, y + h / 2.0 + 3.5, &label));
            for (i, column) in columns.iter().enumerate() {
                let (Some(r), Some(c)) = (row, column) else {
                    continue;
                };
                let mut part = part.to_vec();
                for (dim, at) in [(down, *r), (across, *c)] {
                    if let Some(dim) = dim {
                        part[dim] = at;
                    }
                }
                let x = left + i as f64 * w;
                self.cell(&mut picture, &part, (x, y), (w, h));
            }
        }
        picture
    }

    fn cell(&self, picture: &mut Picture, part: &[usize], (x, y): (f64, f64), (w, h): (f64, f64)) {
        let ranks = self.holders(part);
        let empty = (0..part.len()).any(|d| self.range(d, part[d]).is_empty());
        let class = match empty {
            true => "none".to_string(),
            false => format!("fill {}", color(self.color_of(part))),
        };
        let tip = self.tip(part, &ranks);
        let cell = rect(&class, x + 1.0, y + 1.0, w - 2.0, h - 2.0).set("rx", 2.0);
        picture.draw(cell.tip(tip.clone()));
        let sign = match (self.reduction(), ranks.len()) {
            (Some(Reduction::Sum), 2..) => "Σ ".to_string(),
            (Some(Reduction::Prod), 2..) => "Π ".to_string(),
            (Some(r), 2..) => format!("{r} "),
            _ => String::new(),
        };
        let long = format!("{sign}{}", numbered(&ranks));
        let words = match pixels("", &long) <= w - 6.0 {
            true => long,
            false => format!("{sign}{}", crate::number::ranges(&ranks)),
        };
        let (x, y) = (x + w / 2.0, y + h / 2.0 + 4.0);
        let label = fitted("mid", x, y, w - 6.0, &words);
        picture.draw(label);
    }

    /// The parts in small, without words.
    pub(crate) fn mini(&self, (width, height): (f64, f64)) -> Picture {
        const SIDE: usize = 8;
        let (down, across, outer) = self.drawn();
        let count = |d: Option<usize>| d.map_or(1, |d| self.parts_of(d)).min(SIDE);
        let sheets = outer
            .iter()
            .map(|d| self.parts_of(*d))
            .product::<usize>()
            .min(3);
        let mut picture = Picture::new("", width, height);
        let back = 5.0 * (sheets - 1) as f64;
        let (w, h) = (width - back, height - back);
        for sheet in (0..sheets).rev() {
            let shift = 5.0 * sheet as f64;
            for r in 0..count(down) {
                for c in 0..count(across) {
                    let mut part = vec![0; self.ty.shape.rank()];
                    for (dim, at) in [(down, r), (across, c), (outer.last().copied(), sheet)] {
                        if let Some(dim) = dim {
                            part[dim] = at;
                        }
                    }
                    let (cw, ch) = (w / count(across) as f64, h / count(down) as f64);
                    let class = format!("fill {}", color(self.color_of(&part)));
                    let (x, y) = (c as f64 * cw + shift, r as f64 * ch + back - shift);
                    picture.draw(rect(&class, x + 0.5, y + 0.5, cw - 1.0, ch - 1.0));
                }
            }
        }
        if let Some(r) = self.reduction() {
            let sign = if r == Reduction::Sum { "Σ" } else { r.name() };
            picture.draw(text("mid", width / 2.0, height / 2.0 + 4.5, sign));
        }
        picture
    }

    /// A dimension and what cuts it: `0 cut by dp ↓`.
    fn side(&self, dim: usize, arrow: &str) -> String {
        let axes: Vec<&str> = (self.ty.sharding.axes_of(dim))
            .map(|a| self.mesh.axes()[a].0.as_str())
            .collect();
        match axes.is_empty() {
            true => format!("dimension {dim} {arrow}"),
            false => format!("dimension {dim} cut by {} {arrow}", axes.join(", ")),
        }
    }

    /// The mesh, each rank in the colour of what it holds.
    pub(crate) fn ranks(&self) -> Picture {
        let mut picture = mesh::ranks(&self.mesh, |rank| {
            let part: Vec<usize> = (0..self.ty.shape.rank())
                .map(|d| self.part_of(rank, d))
                .collect();
            let empty = (0..part.len()).any(|d| self.range(d, part[d]).is_empty());
            let place = mesh::place(&self.mesh, rank);
            let spans: Vec<String> = (0..part.len())
                .map(|d| {
                    let range = self.range(d, part[d]);
                    format!("{}..{}", range.start, range.end)
                })
                .collect();
            let holds = match (empty, self.reduction()) {
                (true, _) => "holds nothing".to_string(),
                (false, None) => format!("holds [{}]", spans.join(", ")),
                (false, Some(r)) => format!("holds a term of the {r} of [{}]", spans.join(", ")),
            };
            Look {
                class: match empty {
                    true => "none".into(),
                    false => format!("fill {}", color(self.color_of(&part))),
                },
                tip: format!("rank {rank} ({place}) {holds}"),
            }
        });
        picture.label = format!("who holds what on {}", self.mesh);
        picture
    }

    /// The largest part in bytes, and on how many ranks an element is.
    fn share(&self) -> String {
        let shape = &self.ty.shape;
        let size = self.ty.dtype.size() as f64;
        let whole = shape.dims().iter().fold(size, |n, d| n * *d as f64);
        let parts = |d: usize| self.parts_of(d);
        let part = (0..shape.rank()).fold(size, |n, d| n * shape[d].div_ceil(parts(d)) as f64);
        let copies = self.mesh.ranks() / (0..shape.rank()).map(parts).product::<usize>().max(1);
        let each = match self.reduction() {
            Some(_) => "has a term on",
            None => "lies on",
        };
        format!(
            "A rank holds at most {} of {}; each element {each} {}.",
            bytes(part),
            bytes(whole),
            count(copies, "rank")
        )
    }

    /// Parts with the ranks that hold them, in order.
    fn table(&self) -> Table {
        let cut = self.cut_dims();
        let sizes: Vec<usize> = cut.iter().map(|d| self.parts_of(*d)).collect();
        let mut table = Table::new("", &["part", "elements", "ranks"])
            .numbers(&[1])
            .code(&[0]);
        let parts: usize = sizes.iter().product();
        for at in shown(parts, 64) {
            let Some(at) = at else {
                table.row(["…", "…", "…"]);
                continue;
            };
            let mut part = vec![0; self.ty.shape.rank()];
            for (dim, at) in cut.iter().zip(digits(at, &sizes)) {
                part[*dim] = at;
            }
            let ranges: Vec<_> = (0..part.len()).map(|d| self.range(d, part[d])).collect();
            let spans: Vec<String> = ranges
                .iter()
                .map(|r| format!("{}..{}", r.start, r.end))
                .collect();
            let elements: u64 = ranges.iter().map(|r| r.len() as u64).product();
            table.row([
                format!("[{}]", spans.join(", ")),
                grouped(elements),
                crate::number::ranges(&self.holders(&part)),
            ]);
        }
        table
    }
}

impl Show for Parts {
    fn figure(&self) -> Figure {
        let mut both = self.picture((72.0, 40.0));
        if !self.mesh.axes().is_empty() {
            let ranks = self.ranks();
            let (x, y) = match both.width + 28.0 + ranks.width <= 760.0 {
                true => (both.width + 28.0, 0.0),
                false => (0.0, both.height + 12.0),
            };
            both.place(x, y, ranks);
        }
        both.label = format!("who holds what of {} on {}", self.type_string(), self.mesh);
        let mut figure = Figure::new(format!("{} on {}", self.type_string(), self.mesh));
        figure = figure.picture(both);
        figure = self.partial_note().into_iter().fold(figure, Figure::note);
        figure = mesh::left_out(&self.mesh)
            .into_iter()
            .fold(figure, Figure::note);
        figure.note(self.share())
    }

    fn text(&self) -> String {
        let mut out = vec![format!("{} on {}", self.type_string(), self.mesh)];
        out.extend(self.table().lines());
        out.extend(self.partial_note());
        out.push(self.share());
        out.join("\n")
    }
}

/// What a sharding does, axis by axis. Without a mesh axes have no names: [`Parts`] has more to
/// show.
impl Show for Sharding {
    fn figure(&self) -> Figure {
        let mut table = Table::new("", &["mesh axis", "does"]).numbers(&[0]);
        for (dim, axis) in self.cuts() {
            table.row([axis.to_string(), format!("cuts dimension {dim}")]);
        }
        for (axis, reduction) in self.partial() {
            table.row([axis.to_string(), format!("holds terms of a {reduction}")]);
        }
        match self.is_replicated() {
            true => Figure::new("sharding").note("Every rank holds everything."),
            false => Figure::new("sharding").table(table),
        }
    }
}

/// The type without a mesh: its sharding by the numbers of axes.
impl Show for TensorType {
    fn figure(&self) -> Figure {
        let sharding = self.sharding.figure();
        Figure {
            title: format!("{}{:?}", self.dtype, self.shape.dims()),
            blocks: sharding.blocks,
        }
    }
}
