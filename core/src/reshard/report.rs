//! Plans for people and for programs.

use super::{Plan, Step, Transfer};
use crate::{Mesh, Sharding};
use serde_json::{Value, json};
use std::fmt::{Display, Formatter, Result};

/// A table: a line for each step, then what the whole costs.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Shape, TensorType, reshard::{Objective, plan}};
/// # let mesh = Mesh::new("dp=2, tp=4", &anymesh_backend_cpu::device())?;
/// let from = TensorType::parse("f32[64@tp, 64]", &mesh)?;
/// let to = TensorType::parse("f32[64, 64@tp]", &mesh)?;
/// let plan = plan(&mesh, &from.shape, from.dtype, &from.sharding, &to.sharding, Objective::Bytes)?;
/// assert_eq!(plan.to_string(), "\
/// f32[64@tp, 64] -> f32[64, 64@tp] on mesh(dp=2, tp=4)
///   1  all_to_all  tp  f32[64@tp, 64] -> f32[64, 64@tp]  3072 B  peak 8192 B  8.0 us
/// receives 3072 B (lower bound 3072 B), peak 8192 B, 8.0 us");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let ty = |s: &Sharding| s.type_string(self.dtype, &self.shape, &self.mesh);
        writeln!(f, "{} -> {} on {}", ty(&self.from), ty(&self.to), self.mesh)?;
        write_rows(&rows(self), f)?;
        let bound = self.lower_bound.map_or_else(
            || "combines partial values".into(),
            |b| format!("lower bound {b} B"),
        );
        write!(
            f,
            "receives {} B ({bound}), peak {} B, {}",
            self.recv_bytes,
            self.peak_bytes,
            time(self.seconds)
        )
    }
}

/// Number, kind, axes, types, bytes, peak and time of each step.
fn rows(plan: &Plan) -> Vec<[String; 7]> {
    let ty = |s: &Sharding| s.type_string(plan.dtype, &plan.shape, &plan.mesh);
    let row = |(i, s): (usize, &Step)| {
        let axes = if s.axes.is_empty() {
            "-".into()
        } else {
            names(&plan.mesh, &s.axes).join(",")
        };
        let (bytes, peak) = (
            format!("{} B", s.recv_bytes),
            format!("peak {} B", s.peak_bytes),
        );
        [
            (i + 1).to_string(),
            s.kind.to_string(),
            axes,
            format!("{} -> {}", ty(&s.from), ty(&s.to)),
            bytes,
            peak,
            time(s.seconds),
        ]
    };
    plan.steps.iter().enumerate().map(row).collect()
}

fn write_rows(rows: &[[String; 7]], f: &mut Formatter<'_>) -> Result {
    let widths: [usize; 7] =
        std::array::from_fn(|column| rows.iter().map(|r| r[column].len()).max().unwrap_or(0));
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            // Numbers to the right, words to the left.
            match column {
                0 | 4..=6 => write!(f, "  {cell:>0$}", widths[column])?,
                _ => write!(f, "  {cell:<0$}", widths[column])?,
            }
        }
        writeln!(f)?;
    }
    Ok(())
}

impl Display for Transfer {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (source, plan) = (&self.source.mesh, &self.source);
        let to = self.to.type_string(plan.dtype, &plan.shape, &self.mesh);
        writeln!(
            f,
            "{} on {source} -> {to} on {}",
            plan.from.type_string(plan.dtype, &plan.shape, source),
            self.mesh
        )?;
        let mut rows = rows(plan);
        let types = format!(
            "{} -> {to}",
            plan.to.type_string(plan.dtype, &plan.shape, source)
        );
        let (bytes, peak) = (
            format!("{} B", self.moved_bytes),
            format!("peak {} B", self.moved_peak_bytes),
        );
        rows.push([
            (rows.len() + 1).to_string(),
            "transfer".into(),
            "-".into(),
            types,
            bytes,
            peak,
            time(self.seconds - plan.seconds),
        ]);
        write_rows(&rows, f)?;
        let bound = self.lower_bound.map_or_else(
            || "combines partial values".into(),
            |b| format!("lower bound {b} B"),
        );
        write!(
            f,
            "receives {} B ({bound}), peak {} B, {}",
            self.recv_bytes,
            self.peak_bytes,
            time(self.seconds)
        )
    }
}

/// A time in the unit that suits it.
fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

fn names<'a>(mesh: &'a Mesh, axes: &[usize]) -> Vec<&'a str> {
    axes.iter()
        .map(|a| mesh.axes().get(*a).map_or("?", |(name, _)| name.as_str()))
        .collect()
}

impl Transfer {
    /// Everything the table says, for programs; the steps are those on the source mesh.
    pub fn to_json(&self) -> Value {
        let plan = &self.source;
        json!({
            "source": plan.to_json(), "mesh": self.mesh.to_string(), "to": self.to.type_string(plan.dtype, &plan.shape, &self.mesh),
            "moved_bytes": self.moved_bytes, "moved_peak_bytes": self.moved_peak_bytes, "recv_bytes": self.recv_bytes, "lower_bound": self.lower_bound, "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
        })
    }
}

impl Plan {
    /// Everything the table says, for programs. Each step also lists the mesh axes of every
    /// dimension and the partial axes after it, by index.
    pub fn to_json(&self) -> Value {
        let ty = |s: &Sharding| s.type_string(self.dtype, &self.shape, &self.mesh);
        let steps: Vec<Value> = self
            .steps
            .iter()
            .map(|s| {
                let dims: Vec<Vec<usize>> = (0..self.shape.rank()).map(|d| s.to.axes_of(d).collect()).collect();
                let partial: Vec<Value> = s.to.partial().map(|(a, r)| json!([a, r.name()])).collect();
                json!({
                    "kind": s.kind.name(), "axes": names(&self.mesh, &s.axes), "from": ty(&s.from), "to": ty(&s.to), "dims": dims, "partial": partial,
                    "recv_bytes": s.recv_bytes, "peak_bytes": s.peak_bytes, "seconds": s.seconds,
                })
            })
            .collect();
        json!({
            "mesh": self.mesh.to_string(), "from": ty(&self.from), "to": ty(&self.to), "steps": steps, "recv_bytes": self.recv_bytes,
            "lower_bound": self.lower_bound, "peak_bytes": self.peak_bytes, "seconds": self.seconds,
        })
    }
}
