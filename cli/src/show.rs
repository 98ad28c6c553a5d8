//! `anymesh show`: which rank holds which part of a tensor.

use crate::picture::PictureArgs;
use anymesh::{
    Mesh, Region, Result, TensorType, meta,
    show::{Parts, Show as _},
};
use clap::Args;
use serde_json::{Value, json};
use std::{collections::BTreeMap, fmt::Write};

/// Arguments of `anymesh show`.
#[derive(Args)]
pub(crate) struct Show {
    /// The type, such as "f32[8@dp, 16@tp]".
    ty: String,
    /// Axes and sizes, such as dp=2,tp=4.
    #[arg(long)]
    mesh: String,
    #[command(flatten)]
    picture: PictureArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A box and the ranks that hold it.
struct Cell {
    region: Region,
    ranks: Vec<usize>,
}

/// The distinct boxes, in order of their position.
fn cells(ty: &TensorType, mesh: &Mesh) -> Vec<Cell> {
    let mut by_start: BTreeMap<(Vec<usize>, Vec<usize>), Vec<usize>> = BTreeMap::new();
    for rank in 0..mesh.ranks() {
        let region = ty.sharding.region(mesh, rank, &ty.shape);
        by_start
            .entry((region.start.to_vec(), region.shape.to_vec()))
            .or_default()
            .push(rank);
    }
    by_start
        .into_iter()
        .map(|((start, shape), ranks)| Cell {
            region: Region {
                start: start.into(),
                shape: shape.into(),
            },
            ranks,
        })
        .collect()
}

/// `0-3, 6` for [0, 1, 2, 3, 6].
fn ranges(ranks: &[usize]) -> String {
    let mut out: Vec<(usize, usize)> = vec![];
    for &rank in ranks {
        match out.last_mut() {
            Some((_, end)) if *end + 1 == rank => *end = rank,
            _ => out.push((rank, rank)),
        }
    }
    out.iter()
        .map(|(a, b)| {
            if a == b {
                a.to_string()
            } else {
                format!("{a}-{b}")
            }
        })
        .collect::<Vec<_>>()
        .join(",")
}

/// `0..4, 8..16`.
fn span(region: &Region) -> String {
    region
        .start
        .iter()
        .zip(&region.shape)
        .map(|(s, n)| format!("{s}..{}", s + n))
        .collect::<Vec<_>>()
        .join(", ")
}

/// A grid of boxes for tensors of up to two dimensions, a list for others.
fn text(ty: &TensorType, mesh: &Mesh) -> String {
    let cells = cells(ty, mesh);
    let mut out = String::new();
    if ty.shape.rank() > 2 || ty.shape.numel() == 0 || cells.iter().any(|c| c.region.numel() == 0) {
        for cell in &cells {
            let _ = writeln!(
                out,
                "[{}]  ranks {}",
                span(&cell.region),
                ranges(&cell.ranks)
            );
        }
        return out;
    }
    let at = |cell: &Cell, d: usize| {
        if d < ty.shape.rank() {
            (cell.region.start[d], cell.region.shape[d])
        } else {
            (0, 1)
        }
    };
    // A vector is one row.
    let (rows, columns) = if ty.shape.rank() == 2 { (0, 1) } else { (1, 0) };
    let distinct = |d: usize| {
        cells
            .iter()
            .map(|c| at(c, d))
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .collect::<Vec<_>>()
    };
    let (row_list, column_list) = (distinct(rows), distinct(columns));
    let label = |(s, n): (usize, usize)| format!("{s}..{}", s + n);
    let name = |r: (usize, usize), c: (usize, usize)| {
        cells
            .iter()
            .find(|x| at(x, rows) == r && at(x, columns) == c)
            .map_or(String::new(), |x| ranges(&x.ranks))
    };
    let width = column_list
        .iter()
        .flat_map(|c| {
            row_list
                .iter()
                .map(|r| name(*r, *c).len())
                .chain([label(*c).len()])
        })
        .max()
        .unwrap_or(1)
        + 2;
    let margin = if ty.shape.rank() == 2 {
        row_list.iter().map(|r| label(*r).len()).max().unwrap_or(0)
    } else {
        0
    };
    let line = |left: &str, middle: &str, right: &str| {
        format!(
            "{:margin$} {left}{}{right}\n",
            "",
            vec!["─".repeat(width); column_list.len()].join(middle)
        )
    };
    let _ = writeln!(
        out,
        "{:margin$}  {}",
        "",
        column_list
            .iter()
            .map(|c| format!("{:^width$}", label(*c)))
            .collect::<Vec<_>>()
            .join(" ")
    );
    out += &line("┌", "┬", "┐");
    for (i, r) in row_list.iter().enumerate() {
        let head = if ty.shape.rank() == 2 {
            label(*r)
        } else {
            String::new()
        };
        let row: Vec<String> = column_list
            .iter()
            .map(|c| format!("{:^width$}", name(*r, *c)))
            .collect();
        let _ = writeln!(out, "{head:>margin$} │{}│", row.join("│"));
        out += &if i + 1 == row_list.len() {
            line("└", "┴", "┘")
        } else {
            line("├", "┼", "┤")
        };
    }
    out
}

impl Show {
    pub(crate) fn run(&self) -> Result<()> {
        let mesh = Mesh::new(&self.mesh, &meta())?;
        let ty = TensorType::parse(&self.ty, &mesh)?;
        let title = format!(
            "{} on {mesh}",
            ty.sharding.type_string(ty.dtype, &ty.shape, &mesh)
        );
        let figures = || vec![Parts::new(&ty, &mesh).figure()];
        if self.picture.write(figures)? {
            return Ok(());
        }
        if self.json {
            let cells: Vec<Value> =
                cells(&ty, &mesh).iter().map(|c| json!({ "start": c.region.start.to_vec(), "shape": c.region.shape.to_vec(), "ranks": c.ranks })).collect();
            println!("{}", json!({ "ok": true, "type": title, "boxes": cells }));
            return Ok(());
        }
        println!("{title}\n\n{}", text(&ty, &mesh));
        if let Some((_, reduction)) = ty.sharding.partial().next() {
            let axes: Vec<&str> = ty
                .sharding
                .partial()
                .map(|(a, _)| mesh.axes()[a].0.as_str())
                .collect();
            println!(
                "Every rank's part is partial: the value is the {reduction} over {}.",
                axes.join(", ")
            );
        }
        Ok(())
    }
}
