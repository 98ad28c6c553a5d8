//! What a file of tensors holds, as plain data: any format can become one.

use crate::{Bar, Bars, Cell, Figure, Show, Table, Unit, bytes, number::count};
use std::collections::BTreeMap;

/// The tensors of a checkpoint, a file or a model.
///
/// ```
/// use anymesh_show::{Inventory, Show, StoredTensor};
/// let tensor = |name: &str, shape: &[usize]| StoredTensor {
///     name: name.into(),
///     dtype: "f32".into(),
///     shape: shape.into(),
///     bytes: 4 * shape.iter().product::<usize>() as u64,
///     ..StoredTensor::default()
/// };
/// let held = Inventory {
///     title: "model.safetensors".into(),
///     tensors: vec![tensor("h.0.mlp.weight", &[64, 16]), tensor("h.1.mlp.weight", &[64, 16])],
///     ..Inventory::default()
/// };
/// assert!(held.svg().unwrap().contains(">h.0</text>"));
/// assert!(held.html().contains("<td>[64, 16]</td>"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// What holds them.
    pub title: String,
    /// In the order in which they are listed.
    pub tensors: Vec<StoredTensor>,
    /// Files with their bytes.
    pub files: Vec<(String, u64)>,
    /// Whatever else there is to tell: names and values.
    pub facts: Vec<(String, String)>,
}

/// A tensor in a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// Its element type, as the file calls it.
    pub dtype: String,
    /// Its sizes.
    pub shape: Vec<usize>,
    /// How it lay when it was saved; may be empty.
    pub layout: String,
    /// How many bytes it has.
    pub bytes: u64,
    /// In how many pieces it is stored; 0 where nobody counts.
    pub pieces: usize,
}

/// The beginning of a name that tensors of one layer share: up to the first number in it.
fn group(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    let digits = |p: &&str| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit());
    match parts.iter().position(|p| digits(&p)) {
        Some(at) => parts[..=at].join("."),
        // No number: what the tensor is in.
        None => parts[..parts.len().saturating_sub(1).max(1)].join("."),
    }
}

/// Bars of bytes by layer, and tables of tensors, files and facts.
impl Show for Inventory {
    fn figure(&self) -> Figure {
        let total: f64 = self.tensors.iter().map(|t| t.bytes as f64).sum();
        let title = format!(
            "{}: {}, {}",
            self.title,
            count(self.tensors.len(), "tensor"),
            bytes(total)
        );
        let pieces = self.tensors.iter().any(|t| t.pieces > 0);
        let layouts = self.tensors.iter().any(|t| !t.layout.is_empty());
        let mut heads = vec!["tensor", "dtype", "shape", "bytes"];
        heads.extend(layouts.then_some("layout when saved"));
        heads.extend(pieces.then_some("pieces"));
        let numbers = [3, if layouts { 5 } else { 4 }];
        let mut tensors = Table::new("tensors", &heads).code(&[0]);
        tensors = tensors.numbers(if pieces { &numbers } else { &numbers[..1] });
        let mut groups: BTreeMap<String, f64> = BTreeMap::new();
        for t in &self.tensors {
            let group = group(&t.name);
            *groups.entry(group).or_default() += t.bytes as f64;
            let mut row: Vec<Cell> = vec![
                t.name.clone().into(),
                t.dtype.clone().into(),
                format!("{:?}", t.shape).into(),
                Cell::bytes(t.bytes),
            ];
            row.extend(layouts.then(|| t.layout.clone().into()));
            row.extend(pieces.then(|| t.pieces.to_string().into()));
            tensors.row(row);
        }
        let mut groups: Vec<Bar> = groups
            .into_iter()
            .map(|(name, n)| Bar::new(name, [n]))
            .collect();
        groups.sort_by(|a, b| b.total().total_cmp(&a.total()));
        let bars = Bars {
            title: "bytes, by the beginning of names, most first".into(),
            unit: Unit::Bytes,
            parts: vec![],
            totals: false,
            bars: groups,
        };
        let mut figure = Figure::new(title).picture(bars.picture()).table(tensors);
        let mut files = Table::new("files", &["file", "bytes"])
            .numbers(&[1])
            .code(&[0]);
        for (name, n) in &self.files {
            files.row::<Cell>([name.clone().into(), Cell::bytes(*n)]);
        }
        let mut facts = Table::new("besides", &["name", "value"]).code(&[1]);
        for (name, value) in &self.facts {
            facts.row([name.clone(), value.clone()]);
        }
        for table in [files, facts] {
            if !table.rows.is_empty() {
                figure = figure.table(table);
            }
        }
        figure
    }
}
