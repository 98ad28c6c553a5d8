//! Meshes: ranks in a grid, with their devices.

use crate::{
    Figure, Picture, Show, Table,
    grid::{digits, hidden, shown},
    number::{count, cut, ranges},
    style::color,
    svg::{fitted, pixels, rect, text},
    xml::Element,
};
use anymesh_core::{Device, Mesh};

/// Ranks that are drawn along the last axis, the one before it, and all others.
const MOST: (usize, usize, usize) = (16, 8, 6);
/// The size of a rank.
const CELL: (f64, f64) = (44.0, 28.0);
/// Where the grid begins in its panel, beside the numbers of rows.
const HEAD: f64 = 30.0;
/// Panels beside each other take at most this.
const WIDTH: f64 = 720.0;

/// How a rank is drawn.
pub(crate) struct Look {
    /// The class of its box.
    pub(crate) class: String,
    /// What a pointer finds.
    pub(crate) tip: String,
}

/// The coordinates of a rank: `dp=1, tp=3`.
pub(crate) fn place(mesh: &Mesh, rank: usize) -> String {
    let axis = |(a, (name, _)): (usize, &(String, usize))| {
        format!("{}={}", cut(name, 24.0), mesh.coordinate(rank, a))
    };
    let axes: Vec<String> = mesh.axes().iter().enumerate().map(axis).collect();
    axes.join(", ")
}

/// The ranks of a mesh as grids of its last two axes, one for each place along the others.
pub(crate) fn ranks(mesh: &Mesh, look: impl Fn(usize) -> Look) -> Picture {
    let sizes: Vec<usize> = mesh.axes().iter().map(|(_, n)| *n).collect();
    let names: Vec<&str> = mesh.axes().iter().map(|(name, _)| name.as_str()).collect();
    let n = sizes.len();
    let columns = sizes.last().copied().unwrap_or(1);
    let rows = if n > 1 { sizes[n - 2] } else { 1 };
    let outer = &sizes[..n.saturating_sub(2)];
    let panels: usize = outer.iter().product();
    let mut picture = Picture::new(format!("the ranks of {mesh}"), 0.0, 0.0);
    let (mut x, mut y, mut tallest) = (0.0, 0.0, 0.0f64);
    for panel in shown(panels, MOST.2) {
        let Some(at) = panel else {
            let gap = Picture::new("", 20.0, 0.0);
            picture.place(x, y, gap);
            picture.draw(text("mid", x + 8.0, y + 30.0 + CELL.1, "…"));
            x += 28.0;
            continue;
        };
        let place: Vec<String> = (digits(at, outer).iter().zip(&names))
            .map(|(i, name)| format!("{}={i}", cut(name, 12.0)))
            .collect();
        let mut drawn = Picture::new("", 0.0, 0.0);
        let (w, h) = panel_of(
            &mut drawn,
            &place.join(", "),
            (rows, columns),
            &names[n.saturating_sub(2)..],
            |r, c| {
                let rank = (at * rows + r) * columns + c;
                (rank, look(rank))
            },
        );
        if x > 0.0 && x + w > WIDTH {
            (x, y) = (0.0, y + tallest + 8.0);
            tallest = 0.0;
        }
        drawn.width = w;
        drawn.height = h;
        picture.place(x, y, drawn);
        x += w + 16.0;
        tallest = tallest.max(h);
    }
    picture
}

/// A grid with its heads; its size.
fn panel_of(
    picture: &mut Picture,
    title: &str,
    (rows, columns): (usize, usize),
    names: &[&str],
    rank: impl Fn(usize, usize) -> (usize, Look),
) -> (f64, f64) {
    let (across, down) = (shown(columns, MOST.0), shown(rows, MOST.1));
    let (right, left) = match names {
        [down, right] => (*right, *down),
        [right] => (*right, ""),
        _ => ("", ""),
    };
    let mut axes = cut(right, 20.0);
    if !axes.is_empty() {
        axes.push_str(" →");
    }
    if !left.is_empty() {
        axes = format!("{} ↓  {axes}", cut(left, 20.0));
    }
    // The place along the other axes, below it the names of these, below them numbers.
    let heads: Vec<&str> = [title, &axes]
        .into_iter()
        .filter(|h| !h.is_empty())
        .collect();
    let words = heads.iter().map(|h| pixels("soft", h)).fold(0.0, f64::max);
    let width = (HEAD + across.len() as f64 * CELL.0).max(words.min(260.0));
    for (i, head) in heads.iter().enumerate() {
        picture.draw(fitted("soft", 0.0, 10.0 + 13.0 * i as f64, width, head));
    }
    let top = 13.0 * heads.len() as f64 + 13.0;
    for (i, column) in across.iter().enumerate() {
        let at = HEAD + (i as f64 + 0.5) * CELL.0;
        let label = column.map_or("…".into(), |c| c.to_string());
        if columns > 1 {
            picture.draw(text("tiny mid", at, top - 3.0, &label));
        }
    }
    for (j, row) in down.iter().enumerate() {
        let y = top + j as f64 * CELL.1;
        let label = row.map_or("…".into(), |r| r.to_string());
        if rows > 1 {
            picture.draw(text("tiny end", HEAD - 5.0, y + CELL.1 * 0.62, &label));
        }
        for (i, column) in across.iter().enumerate() {
            let x = HEAD + i as f64 * CELL.0;
            let (Some(r), Some(c)) = (row, column) else {
                continue;
            };
            let (rank, look) = rank(*r, *c);
            let cell = rect(&look.class, x + 1.5, y + 1.5, CELL.0 - 3.0, CELL.1 - 3.0);
            picture.draw(cell.set("rx", 3.0).tip(look.tip.clone()));
            let label: Element = fitted(
                "mid mono",
                x + CELL.0 / 2.0,
                y + CELL.1 * 0.65,
                CELL.0 - 4.0,
                &rank.to_string(),
            );
            picture.draw(label);
        }
    }
    (width + 2.0, top + down.len() as f64 * CELL.1 + 4.0)
}

/// What is not drawn, in words; nothing where all is.
pub(crate) fn left_out(mesh: &Mesh) -> Option<String> {
    let sizes: Vec<usize> = mesh.axes().iter().map(|(_, n)| *n).collect();
    let n = sizes.len();
    let columns = sizes.last().copied().unwrap_or(1);
    let rows = if n > 1 { sizes[n - 2] } else { 1 };
    let panels: usize = sizes[..n.saturating_sub(2)].iter().product();
    let drawn = (columns - hidden(columns, MOST.0))
        * (rows - hidden(rows, MOST.1))
        * (panels - hidden(panels, MOST.2));
    (drawn < mesh.ranks()).then(|| {
        format!(
            "Drawn are {} of {}: the first ones and the last along each axis.",
            drawn,
            count(mesh.ranks(), "rank")
        )
    })
}

/// Devices with the ranks that are on them, in order, and the ranks of other processes.
fn devices(mesh: &Mesh) -> (Vec<(Device, Vec<usize>)>, usize) {
    let mut found: Vec<(Device, Vec<usize>)> = vec![];
    let mut last = 0;
    for (i, rank) in mesh.addressable().enumerate() {
        let device = mesh.device(i);
        // Neighbours mostly share one.
        if found.get(last).is_none_or(|(d, _)| d != device) {
            last = match found.iter().position(|(d, _)| d == device) {
                Some(at) => at,
                None => {
                    found.push((device.clone(), vec![]));
                    found.len() - 1
                }
            };
        }
        found[last].1.push(rank);
    }
    let here: usize = found.iter().map(|(_, ranks)| ranks.len()).sum();
    (found, mesh.ranks() - here)
}

/// Ranks in a grid: the last axis to the right, the one before it down, the others as grids beside
/// each other. A colour is a device.
///
/// ```
/// use anymesh_core::{Mesh, meta};
/// use anymesh_show::Show;
/// let mesh = Mesh::new("dp=2, tp=4", &meta())?;
/// let svg = mesh.svg().unwrap();
/// assert!(svg.contains("<title>rank 6: dp=1, tp=2, on meta</title>"));
/// // A mesh of any size has a picture that one can look at.
/// assert!(Mesh::new("dp=2048, tp=8", &meta())?.svg().unwrap().len() < 40_000);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
impl Show for Mesh {
    fn figure(&self) -> Figure {
        let (devices, elsewhere) = devices(self);
        let title = match self.is_single() {
            true => format!("one device: {self}"),
            false => format!("{self}: {}", count(self.ranks(), "rank")),
        };
        let picture = ranks(self, |rank| {
            let held = devices
                .iter()
                .position(|(_, r)| r.binary_search(&rank).is_ok());
            let place = match place(self, rank) {
                place if place.is_empty() => format!("rank {rank}"),
                place => format!("rank {rank}: {place}"),
            };
            match held {
                Some(i) => Look {
                    class: format!("fill {}", color(i)),
                    tip: format!("{place}, on {}", devices[i].0),
                },
                None => Look {
                    class: "none".into(),
                    tip: format!("{place}, in another process"),
                },
            }
        });
        let mut figure = Figure::new(title).picture(legend(picture, &devices, elsewhere));
        figure = left_out(self).into_iter().fold(figure, Figure::note);
        let mut table = Table::new("", &["axis", "size", "neighbours apart"]).numbers(&[1, 2]);
        let mut apart = self.ranks();
        for (name, size) in self.axes() {
            apart /= size.max(&1);
            table.row([name.clone(), size.to_string(), apart.to_string()]);
        }
        match self.axes().is_empty() {
            true => figure,
            false => figure.table(table),
        }
    }

    fn text(&self) -> String {
        let (devices, elsewhere) = devices(self);
        let mut out = match self.is_single() {
            true => return format!("one device: {self}"),
            false => format!("{self}: {}", count(self.ranks(), "rank")),
        };
        for (device, ranks) in devices.iter().take(LEGEND) {
            out += &format!("\n{device}: {}", numbered(ranks));
        }
        if elsewhere > 0 {
            out += &format!("\nin other processes: {}", count(elsewhere, "rank"));
        }
        out
    }
}

/// Devices that a legend names.
const LEGEND: usize = 8;

/// `rank 3`, `ranks 0–7`.
pub(crate) fn numbered(ranks: &[usize]) -> String {
    match ranks {
        [one] => format!("rank {one}"),
        ranks => format!("ranks {}", ranges(ranks)),
    }
}

/// Below a picture, which colour is which device.
fn legend(mut picture: Picture, devices: &[(Device, Vec<usize>)], elsewhere: usize) -> Picture {
    let mut entries: Vec<(String, String)> = (devices.iter().enumerate().take(LEGEND))
        .map(|(i, (device, ranks))| {
            let class = format!("fill {}", color(i));
            (class, format!("{device}: {}", numbered(ranks)))
        })
        .collect();
    if devices.len() > LEGEND {
        let more = devices.len() - LEGEND;
        entries.push(("none".into(), format!("and {}", count(more, "more device"))));
    }
    if elsewhere > 0 {
        let ranks = count(elsewhere, "rank");
        entries.push(("none".into(), format!("in other processes: {ranks}")));
    }
    picture.width = picture.width.max(320.0);
    for (class, words) in entries {
        let y = picture.height + 6.0;
        picture.draw(rect(&class, 1.0, y, 12.0, 12.0).set("rx", 2.0));
        picture.draw(fitted("", 20.0, y + 10.5, picture.width - 20.0, &words));
        picture.height = y + 14.0;
    }
    picture
}
