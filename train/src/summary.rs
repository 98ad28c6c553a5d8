//! A model as a table.

use crate::Module;
use std::fmt;

/// What a model is made of: a row for each parameter, and what a rank holds of it.
///
/// ```
/// # use anymesh_core::{Mesh, meta};
/// # use anymesh_train::{Build, Init, Policy, Summary, nn::Linear};
/// let mesh = Mesh::new("tp=4", &meta())?;
/// let b = Build::new(&mesh, Policy::bf16(), 0);
/// let summary = Summary::of(&Linear::new(&b, [8192, 28672], "[@tp?, _]", Init::Zeros)?);
/// assert_eq!(summary.rows[0].ty, "f32[28672@tp, 8192]");
/// assert_eq!(summary.bytes, 28672 * 8192 * 4 / 4);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The parameters in the order of the model.
    pub rows: Vec<Row>,
    /// Values in all of them.
    pub values: usize,
    /// Values in those that are trained.
    pub trained: usize,
    /// Bytes that the fullest rank stores.
    pub bytes: usize,
}

/// A parameter in a [`Summary`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its type as it is stored, such as `f32[28672@tp, 8192@dp]`.
    pub ty: String,
    /// How it lies where it is computed with, and in which dtype.
    pub compute: String,
    /// How many values it has.
    pub values: usize,
    /// Bytes of it that the fullest rank stores.
    pub bytes: usize,
    /// Whether training changes it.
    pub trained: bool,
}

impl Summary {
    /// That of a model.
    pub fn of<M: Module + ?Sized>(model: &M) -> Self {
        let mut summary = Self::default();
        model.visit("", &mut |name, p| {
            let value = p.value();
            let (mesh, shape) = (value.mesh(), value.shape());
            let of = |rank| value.sharding().region(mesh, rank, shape).numel();
            // Parts differ by one element for each dimension at most; the last rank's are largest.
            let largest = match mesh.is_single() {
                true => value.numel(),
                false => of(mesh.ranks() - 1),
            };
            let (bytes, trained) = (largest * value.dtype().size(), p.is_trainable());
            summary.values += value.numel();
            summary.trained += if trained { value.numel() } else { 0 };
            summary.bytes += bytes;
            summary.rows.push(Row {
                name: name.into(),
                ty: value.type_string(),
                compute: (p.compute_sharding()).type_string(p.policy().compute, shape, mesh),
                values: value.numel(),
                bytes,
                trained,
            });
        });
        summary
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells: Vec<[String; 5]> = [[
            "parameter".to_string(),
            "stored".into(),
            "computed with".into(),
            "values".into(),
            "bytes per rank".into(),
        ]]
        .into_iter()
        .chain(self.rows.iter().map(|r| {
            [
                format!("{}{}", r.name, if r.trained { "" } else { " (frozen)" }),
                r.ty.clone(),
                r.compute.clone(),
                r.values.to_string(),
                r.bytes.to_string(),
            ]
        }))
        .collect();
        let width = |c: usize| cells.iter().map(|row| row[c].chars().count()).max();
        let widths: [usize; 5] = std::array::from_fn(|c| width(c).unwrap_or(0));
        for row in &cells {
            let [a, b, c, d, e] = row;
            let [wa, wb, wc, wd, we] = widths;
            writeln!(f, "{a:<wa$}  {b:<wb$}  {c:<wc$}  {d:>wd$}  {e:>we$}")?;
        }
        write!(
            f,
            "{} values, {} of them trained; {} bytes on the fullest rank",
            self.values, self.trained, self.bytes
        )
    }
}
