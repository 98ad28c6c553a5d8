//! Indexing on a device, held against a model of NumPy's semantics on plain lists: random
//! expressions, read, set and accumulated, and the gradients of all three.

mod gradients;
mod large;
pub mod model;
mod sample;

pub use large::large;

use crate::registry::SplitMix;
use anymesh_core::{
    DType, Device, Error, Index, Mesh, Placement, Reduction, Result, Sharding, Tensor,
};
use model::{Entry, Selection, select, sources};
use sample::{Dice, expression, narrower, shape};
use std::ops::Bound;

/// What a run showed.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Expressions that were run.
    pub expressions: usize,
    /// Those among them that do not fit their tensor, and were refused.
    pub refused: usize,
    /// Everything that went wrong, in words.
    pub failures: Vec<String>,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for failure in &self.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        write!(
            f,
            "{} index expressions ({} of them to be refused), {} failures",
            self.expressions,
            self.refused,
            self.failures.len()
        )
    }
}

/// Runs `count` random expressions on a device. The same seed gives the same ones.
pub async fn run(device: &Device, count: usize, seed: u64) -> Report {
    run_at(&Mesh::single(device), count, seed).await
}

/// [`run`] on a mesh, with every tensor in a random sharding.
pub async fn run_at(mesh: &Mesh, count: usize, seed: u64) -> Report {
    let mut report = Report::default();
    for i in 0..count as u64 {
        let mut dice = Dice(SplitMix(seed ^ i.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let mut case = Case::new(&mut dice, mesh.clone());
        let outcome = case.check(&mut dice).await;
        report.expressions += 1;
        report.refused += usize::from(case.selection.is_err());
        if let Err(message) = outcome {
            let listed: Vec<String> = case.entries.iter().map(Entry::to_string).collect();
            report.failures.push(format!(
                "expression {i}: {}{:?}[{}]: {message}",
                case.dtype,
                case.shape,
                listed.join(", ")
            ));
        }
    }
    report
}

/// A tensor and an expression for it.
struct Case {
    mesh: Mesh,
    dtype: DType,
    shape: Vec<usize>,
    entries: Vec<Entry>,
    selection: Result<Selection, model::Refusal>,
}

/// Numbers as a plain tensor.
pub fn tensor(numbers: &[i64], shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    match dtype {
        DType::Bool => Tensor::from_slice(
            &numbers.iter().map(|n| *n != 0).collect::<Vec<bool>>(),
            shape,
            device,
        ),
        DType::I64 => Tensor::from_slice(numbers, shape, device),
        DType::U32 => Tensor::from_slice(
            &numbers.iter().map(|n| *n as u32).collect::<Vec<u32>>(),
            shape,
            device,
        ),
        DType::I32 => Tensor::from_slice(
            &numbers.iter().map(|n| *n as i32).collect::<Vec<i32>>(),
            shape,
            device,
        ),
        _ => Tensor::from_slice(
            &numbers.iter().map(|n| *n as f32).collect::<Vec<f32>>(),
            shape,
            device,
        )?
        .cast(dtype),
    }
}

/// The elements of a tensor, which are whole numbers.
pub async fn numbers(tensor: &Tensor) -> Result<Vec<i64>> {
    Ok(match tensor.dtype() {
        DType::I64 => tensor.to_vec_async::<i64>().await?,
        DType::Bool => tensor
            .to_vec_async::<bool>()
            .await?
            .into_iter()
            .map(i64::from)
            .collect(),
        DType::I32 => tensor
            .to_vec_async::<i32>()
            .await?
            .into_iter()
            .map(i64::from)
            .collect(),
        _ => tensor
            .cast(DType::F32)?
            .to_vec_async::<f32>()
            .await?
            .into_iter()
            .map(|v| v as i64)
            .collect(),
    })
}

fn compare(
    what: &str,
    shape: &[usize],
    expected: &[i64],
    got: (&[usize], Vec<i64>),
) -> Result<(), String> {
    if got.0 != shape {
        return Err(format!("{what} has shape {:?}, expected {shape:?}", got.0));
    }
    if got.1 != expected {
        return Err(format!("{what} is {:?}, expected {expected:?}", got.1));
    }
    Ok(())
}

impl Case {
    fn new(dice: &mut Dice, mesh: Mesh) -> Self {
        let dtypes: Vec<DType> = [DType::F32, DType::F32, DType::I32, DType::I64, DType::Bool]
            .into_iter()
            .filter(|dtype| mesh.device(0).supports(*dtype))
            .collect();
        let (dtype, shape) = (dtypes[dice.below(dtypes.len())], shape(dice));
        let entries = expression(dice, &shape);
        let selection = select(&shape, &entries);
        Self {
            mesh,
            dtype,
            shape,
            entries,
            selection,
        }
    }

    /// Numbers that the dtype holds, all different where it has so many.
    fn values(&self, dice: &mut Dice, n: usize, from: i64) -> Vec<i64> {
        let start = if self.dtype == DType::I64 {
            from + (1 << 53)
        } else {
            from
        };
        (0..n as i64)
            .map(|i| {
                if self.dtype == DType::Bool {
                    dice.below(2) as i64
                } else {
                    start + i
                }
            })
            .collect()
    }

    /// Puts a tensor in some sharding, with the strides of some view.
    fn place(&self, dice: &mut Dice, tensor: Tensor) -> Result<Tensor> {
        let all: Vec<i64> = (0..tensor.rank() as i64).rev().collect();
        let tensor = match dice.below(6) {
            0 => tensor.permute(&all)?.contiguous()?.permute(&all)?,
            1 if tensor.rank() > 0 => tensor.flip(&[])?.contiguous()?.flip(&[])?,
            _ => tensor,
        };
        if self.mesh.is_single() {
            return Ok(tensor);
        }
        let placement = |dice: &mut Dice| match dice.below(tensor.rank() + 2) {
            0 => Placement::Replicate,
            1 if tensor.dtype() == DType::Bool => Placement::Replicate,
            1 => Placement::Partial(Reduction::Sum),
            d => Placement::Shard(d - 2),
        };
        let placements: Vec<Placement> = self.mesh.axes().iter().map(|_| placement(dice)).collect();
        tensor.to_mesh(&self.mesh, Sharding::from_placements(&placements))
    }

    fn index(&self, dice: &mut Dice) -> Result<Vec<Index>> {
        let device = self.mesh.device(0).clone();
        let one = |entry: &Entry| {
            Ok(match entry {
                Entry::At(at) => Index::At(*at),
                Entry::Slice(start, stop, step) => Index::Slice {
                    start: *start,
                    end: stop.map_or(Bound::Unbounded, Bound::Excluded),
                    step: *step,
                },
                Entry::Ellipsis => Index::Ellipsis,
                Entry::NewAxis => Index::NewAxis,
                Entry::Flag(flag) => Index::Flag(*flag),
                Entry::Mask(mask) => {
                    let numbers: Vec<i64> = mask.data.iter().map(|b| i64::from(*b)).collect();
                    let mask = tensor(&numbers, &mask.shape, DType::Bool, &device)?;
                    self.place(dice, mask)?.into()
                }
                Entry::Places(places) => {
                    let negative = places.data.iter().any(|n| *n < 0);
                    let dtype = match dice.below(3) {
                        0 if device.supports(DType::I64) => DType::I64,
                        1 if !negative => DType::U32,
                        _ => DType::I32,
                    };
                    let places = tensor(&places.data, &places.shape, dtype, &device)?;
                    self.place(dice, places)?.into()
                }
            })
        };
        self.entries.iter().map(one).collect()
    }

    async fn check(&mut self, dice: &mut Dice) -> Result<(), String> {
        let words = |e: Error| e.to_string();
        let n = self.shape.iter().product();
        let before = self.values(dice, n, 0);
        let plain = tensor(&before, &self.shape, self.dtype, self.mesh.device(0)).map_err(words)?;
        let x = self.place(dice, plain).map_err(words)?;
        let index = self.index(dice).map_err(words)?;
        match &self.selection {
            Ok(selection) => {
                self.check_get(&x, &index, &before, selection).await?;
                if self.dtype == DType::F32 {
                    self.gradient_of_get(dice, &x, &index, selection).await?;
                }
                self.check_set(dice, &x, &index, &before, selection).await
            }
            Err(refusal) => {
                let read = async |result: Result<Tensor>| numbers(&result?).await;
                if let Ok(values) = read(x.get_async(&index).await).await {
                    return Err(format!(
                        "get gives {values:?}, expected an error: {refusal:?}"
                    ));
                }
                match read(x.set_async(&index, 1).await).await {
                    Ok(values) => Err(format!(
                        "set gives {values:?}, expected an error: {refusal:?}"
                    )),
                    Err(_) => Ok(()),
                }
            }
        }
    }

    async fn check_get(
        &self,
        x: &Tensor,
        index: &[Index],
        before: &[i64],
        selection: &Selection,
    ) -> Result<(), String> {
        let expected: Vec<i64> = selection
            .places
            .iter()
            .map(|place| before[*place])
            .collect();
        let got = x.get_async(index).await.map_err(|e| format!("get: {e}"))?;
        let read = numbers(&got).await.map_err(|e| format!("get: {e}"))?;
        compare("get", &selection.shape, &expected, (got.dims(), read))
    }

    async fn check_set(
        &self,
        dice: &mut Dice,
        x: &Tensor,
        index: &[Index],
        before: &[i64],
        selection: &Selection,
    ) -> Result<(), String> {
        let words = |e: Error| e.to_string();
        let mut shape = narrower(dice, &selection.shape);
        // NumPy allows further dimensions of size 1 in front.
        if shape.len() == selection.shape.len() && dice.once_in(8) {
            shape.insert(0, 1);
        }
        let data = self.values(dice, shape.iter().product(), 1000);
        let plain = tensor(&data, &shape, self.dtype, self.mesh.device(0)).map_err(words)?;
        let value = self.place(dice, plain).map_err(words)?;
        let from = sources(selection, &shape);
        let (mut set, mut added, mut filled) = (before.to_vec(), before.to_vec(), before.to_vec());
        let one = if self.dtype == DType::I64 {
            (1 << 53) + 1
        } else {
            1
        };
        for (place, source) in selection.places.iter().zip(&from) {
            set[*place] = data[*source];
            added[*place] = added[*place].wrapping_add(data[*source]);
            filled[*place] = one;
        }
        let mut runs = vec![
            ("set", set, x.set_async(index, &value).await),
            ("set to a number", filled, x.set_async(index, one).await),
        ];
        if self.dtype != DType::Bool {
            runs.push(("add_at", added, x.add_at_async(index, &value).await));
        }
        for (what, expected, result) in runs {
            let told = |e: Error| format!("{what} with a value of shape {shape:?}: {e}");
            let got = result.map_err(told)?;
            let read = numbers(&got).await.map_err(told)?;
            compare(
                &format!("{what} with a value of shape {shape:?}"),
                &self.shape,
                &expected,
                (got.dims(), read),
            )?;
        }
        if self.dtype == DType::F32 {
            self.gradient_of_set(dice, (x, &value), index, (&selection.places, &from), false)
                .await?;
            self.gradient_of_set(dice, (x, &value), index, (&selection.places, &from), true)
                .await?;
        }
        Ok(())
    }
}
