//! Proofs of gradients by running them: against finite differences, and on a device against the
//! host.
//!
//! Every sample of every op in the registry is made a function of its float operands, moved a
//! little off round numbers so that no kink or tie is near. Its gradient must be the slope that
//! differences in `f64` show; the gradient of the gradient likewise, along one direction. On a
//! device that computes in `f32` it must be the host's `f64` gradient of the same numbers, but for
//! rounding.

use crate::{
    registry::{self, Attrs, Entry, Fill, Sample},
    sweep::values,
};
use anymesh_core::grad::{GradOptions, grad};
use anymesh_core::{DType, Device, Error, NoGradient, Result, Tensor, ops};
use std::fmt;

/// What was found out about one op.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The op.
    pub op: &'static str,
    /// Samples that have a gradient and were checked.
    pub samples: usize,
    /// The worst relative error of the gradient against finite differences, where that was asked
    /// for.
    pub first: Option<f64>,
    /// The worst relative error of the gradient's gradient.
    pub second: Option<f64>,
    /// The worst relative error on each device against the host.
    pub devices: Vec<Option<f64>>,
    /// Why it has no gradient, where it says so.
    pub none: Option<&'static str>,
    /// What went wrong.
    pub failures: Vec<String>,
}

/// Errors up to this are the rounding of differences in `f64`.
pub const DIFFERENCE: f64 = 1e-6;
/// Errors up to this are the rounding of a few dozen steps in `f32`, relative to the largest
/// gradient of the operand.
pub const ROUNDING: f64 = 5e-6;
/// Where large terms cancel, the host's own `f32` is further off: a device may be this many times
/// as far.
pub const ILL_CONDITIONED: f64 = 4.0;

/// What to check.
#[derive(Clone, Debug)]
pub struct Check<'a> {
    /// Where gradients are compared with finite differences: a device that computes in `f64`.
    pub host: &'a Device,
    /// Whether to do that, or only to compare the device with the host.
    pub differences: bool,
    /// Devices to hold against the host.
    pub devices: &'a [Device],
    /// The most samples of one op.
    pub samples: usize,
}

impl Check<'_> {
    /// Checks every op whose name contains `filter`.
    pub fn run(&self, filter: &str) -> Vec<Row> {
        registry::entries()
            .iter()
            .filter(|e| e.name.contains(filter))
            .map(|e| self.op(e))
            .collect()
    }

    /// Checks one op.
    pub fn op(&self, entry: &'static Entry) -> Row {
        let none = no_gradient(entry.name);
        let mut row = Row {
            op: entry.name,
            none,
            devices: vec![None; self.devices.len()],
            ..Row::default()
        };
        for (i, sample) in entry.samples().iter().enumerate() {
            if row.samples == self.samples {
                break;
            }
            let run = std::panic::AssertUnwindSafe(|| self.sample(entry, sample, &mut row));
            let result = std::panic::catch_unwind(run)
                .unwrap_or_else(|_| Err(Error::argument(entry.name, "inputs", "panicked")));
            match result {
                Ok(()) | Err(Error::Unsupported { .. }) => {}
                Err(error) => row.failures.push(format!(
                    "{} sample {i} {}: {error}",
                    entry.name, sample.attrs
                )),
            }
        }
        if (row.samples > 0) == none.is_some() && row.failures.is_empty() {
            row.failures.push(match none {
                Some(why) => format!(
                    "{}: it says that it has no gradient ({why}), and has one",
                    entry.name
                ),
                None => format!(
                    "{}: no sample has a gradient, and it does not say why",
                    entry.name
                ),
            });
        }
        row
    }

    fn sample(&self, entry: &'static Entry, sample: &Sample, row: &mut Row) -> Result<()> {
        let Some(f) = Function::new(entry, sample, self.host)? else {
            return Ok(());
        };
        row.samples += 1;
        if self.differences {
            let first = f.first_order()?;
            row.first = Some(worse(row.first.unwrap_or(0.0), first));
            if first.is_nan() || first > DIFFERENCE {
                row.failures.push(format!(
                    "{} {}: the gradient is {first:.1e} off the finite differences",
                    entry.name,
                    f.describe()
                ));
            } else if let Some(second) = f.second_order()? {
                row.second = Some(worse(row.second.unwrap_or(0.0), second));
                if second.is_nan() || second > DIFFERENCE * 10.0 {
                    row.failures.push(format!(
                        "{} {}: the second gradient is {second:.1e} off the finite differences",
                        entry.name,
                        f.describe()
                    ));
                }
            }
        }
        for (device, cell) in self.devices.iter().zip(&mut row.devices) {
            let worst = match f.on_device(device) {
                Err(Error::Unsupported { .. }) => continue,
                other => other?,
            };
            *cell = Some(worse(cell.unwrap_or(0.0), worst));
            if worst.is_nan()
                || (worst > ROUNDING && worst > ILL_CONDITIONED * f.on_device(self.host)?)
            {
                row.failures.push(format!(
                    "{} {}: the gradient on {device} is {worst:.1e} off the host's",
                    entry.name,
                    f.describe()
                ));
            }
        }
        Ok(())
    }
}

/// A sample as a function of its float operands.
struct Function<'a> {
    entry: &'static Entry,
    sample: &'a Sample,
    host: &'a Device,
    /// The operands on the host, floats as `f64`.
    inputs: Vec<Option<Tensor>>,
    /// The values of those that are varied, with their places among the operands.
    varied: Vec<(usize, Vec<f64>)>,
}

/// An operand that only names cases: between them the function has no meaning.
fn is_label(fill: Fill) -> bool {
    matches!(fill, Fill::Pick(list) if list.iter().all(|v| v.abs() <= 1))
        || matches!(fill, Fill::Bool | Fill::Index(_) | Fill::Special)
}

/// A number between 0 and 1 for each count, no two of a few hundred near each other.
fn spread(count: usize) -> f64 {
    (count as f64 * 0.618_033_988_749_894_9).fract()
}

impl<'a> Function<'a> {
    /// `None` where no operand can be varied or nothing of the result has a gradient.
    fn new(entry: &'static Entry, sample: &'a Sample, host: &'a Device) -> Result<Option<Self>> {
        let (mut inputs, mut varied, mut count) = (sample.make(1, host)?, vec![], 0);
        for (i, (input, made)) in inputs.iter_mut().zip(&sample.inputs).enumerate() {
            let (Some(x), Some(made)) = (input.as_mut(), made.as_ref()) else {
                continue;
            };
            if !x.dtype().is_float() {
                continue;
            }
            let mut numbers = values(x)?;
            if !is_label(made.fill) {
                for v in &mut numbers {
                    count += 1;
                    // Exact in f32, so that a device gets the same numbers.
                    *v = f64::from((*v + 0.015 + 0.08 * spread(count)) as f32);
                }
                varied.push((i, numbers.clone()));
            }
            *x = Tensor::from_slice(&numbers, x.shape(), host)?;
        }
        let f = Self {
            entry,
            sample,
            host,
            inputs,
            varied,
        };
        if f.varied.iter().all(|(_, v)| v.is_empty()) {
            return Ok(None);
        }
        let out = f.call(&f.leaves(host, DType::F64)?, host, DType::F64)?;
        // Results of a narrower type are steps, not slopes.
        let has_gradient = out.iter().any(|t| t.requires_grad())
            && out
                .iter()
                .all(|t| !t.dtype().is_float() || t.dtype() == DType::F64);
        let has_slope = out.iter().any(|t| t.dtype() == DType::F64);
        if has_slope && !out.iter().any(|t| t.requires_grad()) {
            return Err(Error::gradient(
                entry.name,
                NoGradient::Untracked,
                "a float result is not tracked",
            ));
        }
        Ok(has_gradient.then_some(f))
    }

    /// Runs the op. Where it is told which floats to give, those are the ones that are being
    /// compared; codes of 8 bits that have no gradient stay what they are.
    fn call(
        &self,
        inputs: &[Option<Tensor>],
        device: &Device,
        dtype: DType,
    ) -> Result<Vec<Tensor>> {
        let mut attrs = self.sample.attrs.clone();
        let coded = no_gradient(self.entry.name).is_some();
        let changes = |name: &str| name.contains('f') && !(coded && name.starts_with("f8"));
        if let Some(given) = attrs
            .get_mut("dtype")
            .filter(|given| given.as_str().is_some_and(changes))
        {
            *given = dtype.name().into();
        }
        self.entry
            .call(inputs, &Attrs::new(self.entry, &attrs)?, device)
    }

    fn describe(&self) -> String {
        let shapes: Vec<String> = self
            .inputs
            .iter()
            .flatten()
            .map(Tensor::type_string)
            .collect();
        format!("({}) {}", shapes.join(", "), self.sample.attrs)
    }

    /// The operands on a device; those that are varied are leaves.
    fn leaves(&self, device: &Device, dtype: DType) -> Result<Vec<Option<Tensor>>> {
        let place = |(i, x): (usize, &Option<Tensor>)| {
            let Some(x) = x else { return Ok(None) };
            let x = if x.dtype().is_float() {
                x.cast(dtype)?
            } else {
                x.clone()
            };
            let x = x.to_device(device)?;
            if self.varied.iter().any(|(v, _)| *v == i) {
                x.require_grad().map(Some)
            } else {
                Ok(Some(x))
            }
        };
        self.inputs.iter().enumerate().map(place).collect()
    }

    /// The operands with the varied ones at other values.
    fn at(&self, varied: &[Vec<f64>]) -> Result<Vec<Option<Tensor>>> {
        let mut inputs = self.inputs.clone();
        for ((i, _), values) in self.varied.iter().zip(varied) {
            let shape = inputs[*i]
                .as_ref()
                .map(|t| t.shape().clone())
                .unwrap_or_default();
            inputs[*i] = Some(Tensor::from_slice(values, shape, self.host)?);
        }
        Ok(inputs)
    }

    /// Weights for the results, so that one number depends on all of them.
    fn weights(t: &Tensor, dtype: DType) -> Result<Tensor> {
        let weights: Vec<f64> = (0..t.numel())
            .map(|i| f64::from((spread(i + 7) - 0.3) as f32))
            .collect();
        Tensor::from_slice(&weights, t.shape(), t.device())
            .or_else(|_| {
                let narrow: Vec<f32> = weights.iter().map(|w| *w as f32).collect();
                Tensor::from_slice(&narrow, t.shape(), t.device())
            })?
            .cast(dtype)
    }

    /// The weighted sum of all float results.
    fn value(&self, inputs: &[Option<Tensor>]) -> Result<f64> {
        let mut sum = 0.0;
        for t in self
            .call(inputs, self.host, DType::F64)?
            .iter()
            .filter(|t| t.dtype() == DType::F64)
        {
            let terms = values(t)?
                .into_iter()
                .zip(values(&Self::weights(t, DType::F64)?)?);
            sum += terms.map(|(v, w)| v * w).sum::<f64>();
        }
        Ok(sum)
    }

    /// The gradients of the weighted sum at leaves.
    fn gradients(
        &self,
        leaves: &[Option<Tensor>],
        device: &Device,
        dtype: DType,
        create_graph: bool,
    ) -> Result<Vec<Tensor>> {
        let out = self.call(leaves, device, dtype)?;
        let tracked: Vec<&Tensor> = out.iter().filter(|t| t.requires_grad()).collect();
        let seeds = Some(
            tracked
                .iter()
                .map(|t| Self::weights(t, dtype))
                .collect::<Result<Vec<_>>>()?,
        );
        let inputs: Vec<&Tensor> = self
            .varied
            .iter()
            .filter_map(|(i, _)| leaves[*i].as_ref())
            .collect();
        grad(
            &tracked,
            &inputs,
            &GradOptions {
                seeds,
                create_graph,
                allow_unused: true,
                ..Default::default()
            },
        )
    }

    /// The worst error of the gradient, element by element.
    fn first_order(&self) -> Result<f64> {
        let leaves = self.leaves(self.host, DType::F64)?;
        let gradients = self.gradients(&leaves, self.host, DType::F64, false)?;
        let mut at: Vec<Vec<f64>> = self.varied.iter().map(|(_, v)| v.clone()).collect();
        let mut worst: f64 = 0.0;
        for (k, gradient) in gradients.iter().enumerate() {
            let gradient = values(gradient)?;
            let scale = gradient.iter().fold(1.0f64, |s, g| s.max(g.abs()));
            for (i, analytic) in gradient.iter().enumerate() {
                let here = at[k][i];
                let slope = difference(|step| {
                    at[k][i] = here + step;
                    self.value(&self.at(&at)?)
                })?;
                at[k][i] = here;
                worst = worse(worst, (slope - analytic).abs() / scale);
            }
        }
        Ok(worst)
    }

    /// The worst error of the gradient's gradient along one direction; `None` where the gradient is
    /// constant.
    fn second_order(&self) -> Result<Option<f64>> {
        let leaves = self.leaves(self.host, DType::F64)?;
        let first = self.gradients(&leaves, self.host, DType::F64, true)?;
        let tracked: Vec<&Tensor> = first.iter().filter(|g| g.requires_grad()).collect();
        if tracked.is_empty() {
            return Ok(None);
        }
        let inputs: Vec<&Tensor> = self
            .varied
            .iter()
            .filter_map(|(i, _)| leaves[*i].as_ref())
            .collect();
        let seeds = tracked
            .iter()
            .map(|g| Self::weights(g, DType::F64))
            .collect::<Result<Vec<_>>>()?;
        let analytic = grad(
            &tracked,
            &inputs,
            &GradOptions {
                seeds: Some(seeds),
                allow_unused: true,
                ..Default::default()
            },
        )?;
        // The weighted sum of the gradients, along one direction of all operands.
        let direction: Vec<Vec<f64>> = self
            .varied
            .iter()
            .enumerate()
            .map(|(k, (_, v))| (0..v.len()).map(|i| spread(13 * k + i + 3) - 0.5).collect())
            .collect();
        let slope = difference(|step| {
            let moved: Vec<Vec<f64>> = self
                .varied
                .iter()
                .zip(&direction)
                .map(|((_, v), d)| v.iter().zip(d).map(|(v, d)| v + step * d).collect())
                .collect();
            let mut leaves = self.at(&moved)?;
            for (i, _) in &self.varied {
                leaves[*i] = leaves[*i].as_ref().map(|x| x.require_grad()).transpose()?;
            }
            let gradients = self.gradients(&leaves, self.host, DType::F64, false)?;
            let mut sum = 0.0;
            for (gradient, first) in gradients
                .iter()
                .zip(&first)
                .filter(|(_, f)| f.requires_grad())
            {
                sum += values(gradient)?
                    .iter()
                    .zip(values(&Self::weights(first, DType::F64)?)?)
                    .map(|(g, w)| g * w)
                    .sum::<f64>();
            }
            Ok(sum)
        })?;
        let mut along = 0.0;
        let mut scale: f64 = 1.0;
        for (gradient, direction) in analytic.iter().zip(&direction) {
            for (g, d) in values(gradient)?.iter().zip(direction) {
                along += g * d;
                scale = scale.max(g.abs());
            }
        }
        Ok(Some((slope - along).abs() / scale))
    }

    /// The worst error of the gradient in `f32` on a device.
    fn on_device(&self, device: &Device) -> Result<f64> {
        let host = self.gradients(
            &self.leaves(self.host, DType::F64)?,
            self.host,
            DType::F64,
            false,
        )?;
        let there = self.gradients(&self.leaves(device, DType::F32)?, device, DType::F32, false)?;
        let mut worst: f64 = 0.0;
        for (host, there) in host.iter().zip(&there) {
            let (host, there) = (values(host)?, values(there)?);
            let scale = host.iter().fold(1.0f64, |s, g| s.max(g.abs()));
            for (h, t) in host.iter().zip(&there) {
                worst = worse(worst, (h - t).abs() / scale);
            }
        }
        Ok(worst)
    }
}

/// The larger error; NaN is worse than any.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        f64::NAN
    } else {
        a.max(b)
    }
}

/// The slope of a function of a step, by five points.
fn difference(mut f: impl FnMut(f64) -> Result<f64>) -> Result<f64> {
    let h = 2e-5;
    let (near, far) = (f(h)? - f(-h)?, f(2.0 * h)? - f(-2.0 * h)?);
    Ok((8.0 * near - far) / (12.0 * h))
}

/// A table, one line for each op. Errors are relative to the largest gradient of the operand.
#[derive(Debug)]
pub struct Table<'a> {
    /// The lines.
    pub rows: &'a [Row],
    /// The devices that were held against the host.
    pub devices: &'a [Device],
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cell = |e: Option<f64>| e.map_or("-".into(), |e| format!("{e:.1e}"));
        write!(
            f,
            "{:28} {:>7} {:>12} {:>12}",
            "op", "samples", "differences", "second order"
        )?;
        self.devices.iter().try_for_each(|d| {
            write!(f, " {:>12}", d.name().chars().take(12).collect::<String>())
        })?;
        writeln!(f)?;
        for row in self.rows {
            if let Some(why) = row.none {
                writeln!(f, "{:28} none: {why}", row.op)?;
                continue;
            }
            write!(
                f,
                "{:28} {:>7} {:>12} {:>12}",
                row.op,
                row.samples,
                cell(row.first),
                cell(row.second)
            )?;
            row.devices
                .iter()
                .try_for_each(|e| write!(f, " {:>12}", cell(*e)))?;
            writeln!(
                f,
                "{}",
                if row.failures.is_empty() {
                    ""
                } else {
                    "  WRONG"
                }
            )?;
        }
        let count = |keep: &dyn Fn(&Row) -> bool| self.rows.iter().filter(|r| keep(r)).count();
        let wrong = count(&|r| !r.failures.is_empty());
        write!(
            f,
            "{} ops with a gradient, {} without, {wrong} wrong",
            count(&|r| r.samples > 0),
            count(&|r| r.none.is_some())
        )?;
        self.rows
            .iter()
            .flat_map(|r| &r.failures)
            .try_for_each(|failure| write!(f, "\n{failure}"))
    }
}

/// Why an op says that it has no gradient, if it does.
fn no_gradient(op: &str) -> Option<&'static str> {
    let infos = ops::catalog();
    let info = infos.iter().find(|info| info.name == op);
    info.and_then(|info| info.no_gradient)
}
