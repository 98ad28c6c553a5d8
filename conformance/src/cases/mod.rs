//! The conformance suite: every op on a device, held against an oracle device.
//!
//! A [`Case`] is a function of a device that returns tensors. The suite runs it on the device under
//! test and on the oracle (the CPU device) and compares within the tolerance that [`tolerance`]
//! gives for the op and dtype. The same cases run on every backend, so a new backend is held to all
//! of them with one call of [`run`].

mod binary;
mod cast;
mod conv;
mod create;
mod index;
mod input;
mod linalg;
mod movement;
mod reduce;
mod scan;
mod sort;
mod tolerance;
mod unary;

mod attention;
mod loss;
mod nn;
mod rows;

pub use input::{Fill, View, input, random_values};
pub use tolerance::{Tolerance, tolerance};

use anymesh_core::{DType, Device, Error, Kind, Result, Tensor};

/// One comparison between a device and the oracle.
pub struct Case {
    /// The op under test, as in the catalogue.
    pub op: &'static str,
    /// The group that reports are summed by.
    pub family: &'static str,
    /// Dtype, layout and sizes in words.
    pub detail: String,
    /// The dtype that decides the tolerance.
    pub dtype: DType,
    /// How often values are rounded to the dtype on the way: once by most ops, twice where a result
    /// is computed from another.
    pub roundings: u32,
    /// Makes the inputs on the device and runs the op. Expected failures are tested elsewhere: here
    /// an error is a failure, but for `Unsupported`.
    pub run: Box<dyn Fn(&Device) -> Result<Vec<Tensor>> + Send + Sync>,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} {}", self.family, self.op, self.detail)
    }
}

/// Collects cases of one family.
#[derive(Debug)]
pub struct Cases {
    family: &'static str,
    list: Vec<Case>,
}

impl Cases {
    /// An empty collection for `family`.
    pub fn new(family: &'static str) -> Self {
        Self {
            family,
            list: vec![],
        }
    }

    /// Adds a case with any number of results.
    pub fn add(
        &mut self,
        op: &'static str,
        dtype: DType,
        detail: impl Into<String>,
        run: impl Fn(&Device) -> Result<Vec<Tensor>> + Send + Sync + 'static,
    ) {
        self.list.push(Case {
            op,
            family: self.family,
            detail: detail.into(),
            dtype,
            roundings: 1,
            run: Box::new(run),
        });
    }

    /// Says of the case that was added last that its result is computed from a rounded one.
    pub fn rounds_twice(&mut self) {
        if let Some(case) = self.list.last_mut() {
            case.roundings = 2;
        }
    }

    /// The cases.
    pub fn into_vec(self) -> Vec<Case> {
        self.list
    }
}

/// All cases of all families.
pub fn cases() -> Vec<Case> {
    let families: &[fn() -> Cases] = &[
        cast::cases,
        movement::cases,
        create::cases,
        create::random,
        unary::cases,
        binary::cases,
        reduce::cases,
        scan::cases,
        index::cases,
        sort::cases,
        linalg::cases,
        conv::cases,
        nn::softmax,
        nn::norms,
        nn::features,
        nn::dropout,
        attention::forward,
        attention::backward,
        loss::pointwise,
        loss::classes,
        rows::softmax,
        rows::norms,
        rows::classes,
    ];
    families
        .iter()
        .flat_map(|family| family().into_vec())
        .collect()
}

/// What became of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Within tolerance; the worst error in units of the tolerance (0 = exact, 1 = just allowed).
    Pass(f64),
    /// The device says that it cannot do this (a dtype it lacks); the text is its reason.
    Unsupported(String),
    /// Wrong values or an error.
    Fail(String),
}

/// Runs one case on `device` and compares with `oracle`.
pub async fn check(case: &Case, device: &Device, oracle: &Device) -> Outcome {
    let actual = match (case.run)(device) {
        Ok(tensors) => tensors,
        Err(e @ Error::Unsupported { .. }) => return Outcome::Unsupported(e.to_string()),
        Err(e) => return Outcome::Fail(format!("on {device}: {e}")),
    };
    let expected = match (case.run)(oracle) {
        Ok(tensors) => tensors,
        Err(e) => return Outcome::Fail(format!("on the oracle: {e}")),
    };
    let mut worst = 0f64;
    for (i, (a, e)) in actual.iter().zip(&expected).enumerate() {
        let once = tolerance(case.op, e.dtype());
        let allowed = Tolerance {
            ulps: once.ulps * f64::from(case.roundings),
            ..once
        };
        match compare(a, e, allowed).await {
            Ok(error) => worst = worst.max(error),
            Err(message) => return Outcome::Fail(format!("result {i}: {message}")),
        }
    }
    if actual.len() == expected.len() {
        Outcome::Pass(worst)
    } else {
        Outcome::Fail("different numbers of results".into())
    }
}

/// The elements as `f64` (exact for all but large 64-bit integers, which are compared as bytes
/// first).
pub async fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(match tensor.dtype().kind() {
        Kind::F64 => tensor.to_vec_async::<f64>().await?,
        Kind::I64 => tensor
            .to_vec_async::<i64>()
            .await?
            .into_iter()
            .map(|v| v as f64)
            .collect(),
        Kind::I32 => tensor
            .to_vec_async::<i32>()
            .await?
            .into_iter()
            .map(f64::from)
            .collect(),
        Kind::Bool => tensor
            .to_vec_async::<bool>()
            .await?
            .into_iter()
            .map(|v| f64::from(u8::from(v)))
            .collect(),
        Kind::U32 => tensor
            .cast(DType::U32)?
            .to_vec_async::<u32>()
            .await?
            .into_iter()
            .map(f64::from)
            .collect(),
        Kind::F32 => tensor
            .cast(DType::F32)?
            .to_vec_async::<f32>()
            .await?
            .into_iter()
            .map(f64::from)
            .collect(),
    })
}

/// The worst error in units of `tolerance`, or what is wrong.
pub async fn compare(
    actual: &Tensor,
    expected: &Tensor,
    tolerance: Tolerance,
) -> Result<f64, String> {
    if actual.dtype() != expected.dtype() || actual.shape() != expected.shape() {
        return Err(format!(
            "type is {}, expected {}",
            actual.type_string(),
            expected.type_string()
        ));
    }
    let bytes = |e: Error| e.to_string();
    let (a, b) = (
        actual.to_bytes_async().await.map_err(bytes)?,
        expected.to_bytes_async().await.map_err(bytes)?,
    );
    if a == b {
        return Ok(0.0);
    }
    let (a, e) = (
        values(actual).await.map_err(bytes)?,
        values(expected).await.map_err(bytes)?,
    );
    // Statistics of the whole result bound what cancellation may leave in one element.
    let scale = e
        .iter()
        .filter(|v| v.is_finite())
        .fold(0f64, |m, v| m.max(v.abs()));
    let mut worst = (0f64, 0usize);
    for (i, (&a, &e)) in a.iter().zip(&e).enumerate() {
        if a == e || (a.is_nan() && e.is_nan()) {
            continue;
        }
        let allowed = tolerance.allowed(e, scale, expected.dtype());
        let error = if (a - e).is_finite() && allowed > 0.0 {
            (a - e).abs() / allowed
        } else {
            f64::INFINITY
        };
        if error > worst.0 {
            worst = (error, i);
        }
    }
    let (error, at) = worst;
    // Equal values in other bits (-0 and 0, payloads of NaN) are equal.
    if error <= 1.0 {
        Ok(error)
    } else {
        Err(format!(
            "element {at} of {}: got {}, expected {} ({error:.2} times the tolerance)",
            expected.type_string(),
            a[at],
            e[at]
        ))
    }
}

/// Sum over a family.
#[derive(Clone, Debug, Default)]
pub struct FamilyReport {
    /// Cases that passed.
    pub passed: usize,
    /// Cases the device cannot do.
    pub unsupported: usize,
    /// The worst error in units of the tolerance, and the case it came from.
    pub worst: (f64, String),
}

/// What a whole run showed.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// By family, in order.
    pub families: Vec<(&'static str, FamilyReport)>,
    /// By op: worst error in units of the tolerance, `None` where every case was unsupported.
    pub ops: std::collections::BTreeMap<&'static str, Option<f64>>,
    /// Every failure, in words.
    pub failures: Vec<String>,
}

impl Report {
    /// Cases that passed.
    pub fn passed(&self) -> usize {
        self.families.iter().map(|(_, f)| f.passed).sum()
    }

    /// Cases the device cannot do.
    pub fn unsupported(&self) -> usize {
        self.families.iter().map(|(_, f)| f.unsupported).sum()
    }

    fn record(&mut self, case: &Case, outcome: Outcome) {
        if self
            .families
            .last()
            .is_none_or(|(name, _)| *name != case.family)
        {
            self.families.push((case.family, FamilyReport::default()));
        }
        let last = self.families.len() - 1;
        let family = &mut self.families[last].1;
        let op = self.ops.entry(case.op).or_default();
        match outcome {
            Outcome::Pass(error) => {
                family.passed += 1;
                *op = Some(op.unwrap_or(0.0).max(error));
                if error > family.worst.0 || family.worst.1.is_empty() {
                    family.worst = (error, format!("{} {}", case.op, case.detail));
                }
            }
            Outcome::Unsupported(_) => family.unsupported += 1,
            Outcome::Fail(message) => {
                *op = Some(f64::INFINITY);
                self.failures.push(format!("{case:?}: {message}"));
            }
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{:<12} {:>7} {:>12}  worst error (1 = tolerance)",
            "family", "passed", "unsupported"
        )?;
        for (name, family) in &self.families {
            writeln!(
                f,
                "{name:<12} {:>7} {:>12}  {:.3} {}",
                family.passed, family.unsupported, family.worst.0, family.worst.1
            )?;
        }
        for failure in &self.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        write!(
            f,
            "{} passed, {} failed, {} unsupported",
            self.passed(),
            self.failures.len(),
            self.unsupported()
        )
    }
}

/// Runs all cases for which `filter` holds; `seen` is told of each as it ends.
pub async fn run(
    device: &Device,
    oracle: &Device,
    filter: impl Fn(&Case) -> bool,
    mut seen: impl FnMut(&Case, &Outcome),
) -> Report {
    let mut report = Report::default();
    for case in cases().iter().filter(|case| filter(case)) {
        let outcome = check(case, device, oracle).await;
        seen(case, &outcome);
        report.record(case, outcome);
    }
    report
}
