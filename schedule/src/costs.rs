//! How long passes and transfers take.

use crate::{Action, Error, Kind, Result};
use std::str::FromStr;

/// How long the passes of a stage take, in any unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// A forward pass.
    pub f: f64,
    /// Gradients of inputs.
    pub i: f64,
    /// Gradients of weights.
    pub w: f64,
    /// A whole backward pass.
    pub b: f64,
}

impl Cost {
    /// The shorter way to do a whole backward pass.
    pub(crate) fn whole(self) -> f64 {
        self.b.min(self.i + self.w)
    }

    /// The shorter way to the gradients of inputs.
    pub(crate) fn first(self) -> f64 {
        self.b.min(self.i)
    }
}

/// How long everything takes.
///
/// Written as `f=1,i=1,w=1,b=2,transfer=0`; what is left out is 1 for passes, `i + w` for `b`, 0 for
/// the rest. A pass that differs by stage has a number for each, `f=1/1/1/2`.
///
/// ```
/// use anymesh_schedule::Costs;
/// let costs: Costs = "f=1/1/2, i=1, w=0.5, transfer=0.1".parse()?;
/// assert_eq!((costs.stage(2).f, costs.stage(2).b, costs.transfer), (2.0, 1.5, 0.1));
/// assert!("g=1".parse::<Costs>().unwrap_err().to_string().contains("transfer"));
/// # Ok::<(), anymesh_schedule::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// For each stage, or one for all.
    pub stages: Vec<Cost>,
    /// From the end of a pass until another rank has its result. Ranks compute meanwhile.
    pub transfer: f64,
    /// How much of the shorter one of two joined passes vanishes behind the longer one: 0 is one after
    /// the other, 1 all of it. Joined passes begin together and both results are there at the end.
    pub overlap: f64,
}

impl Default for Costs {
    /// F = I = W = 1, B = 2, nothing for transfers.
    fn default() -> Costs {
        Costs::uniform(1.0, 1.0, 1.0, 0.0)
    }
}

impl Costs {
    /// The same for all stages, with `B = I + W`.
    pub fn uniform(f: f64, i: f64, w: f64, transfer: f64) -> Costs {
        let b = i + w;
        Costs {
            stages: vec![Cost { f, i, w, b }],
            transfer,
            overlap: 0.0,
        }
    }

    /// The costs of a stage.
    pub fn stage(&self, stage: usize) -> Cost {
        let unit = Cost {
            f: 1.0,
            i: 1.0,
            w: 1.0,
            b: 2.0,
        };
        *self
            .stages
            .get(stage)
            .or(self.stages.first())
            .unwrap_or(&unit)
    }

    /// How long an action keeps its rank.
    pub fn of(&self, action: Action) -> f64 {
        let cost = self.stage(action.stage);
        match action.kind {
            Kind::F => cost.f,
            Kind::B => cost.b,
            Kind::I => cost.i,
            Kind::W => cost.w,
            _ => 0.0,
        }
    }

    pub(crate) fn check(&self, stages: usize) -> Result<()> {
        if self.stages.len() > 1 && self.stages.len() != stages {
            return Err(Error::Number {
                what: "the number of stages with a cost",
                got: self.stages.len().to_string(),
                valid: format!("give one cost for all, or one for each of {stages} stages"),
            });
        }
        let passes = self.stages.iter().flat_map(|c| [c.f, c.i, c.w, c.b]);
        let bad = |x: &f64| !(x.is_finite() && *x >= 0.0);
        if let Some(bad) = passes.chain([self.transfer]).find(bad) {
            return Err(Error::Number {
                what: "a cost",
                got: bad.to_string(),
                valid: "costs are finite and not negative".into(),
            });
        }
        match (0.0..=1.0).contains(&self.overlap) {
            true => Ok(()),
            false => Err(Error::Number {
                what: "the overlap of joined passes",
                got: self.overlap.to_string(),
                valid: "it is between 0 and 1".into(),
            }),
        }
    }
}

impl FromStr for Costs {
    type Err = Error;

    fn from_str(text: &str) -> Result<Costs> {
        let bad = |text: &str| {
            Error::Parse {
            what: "list of costs",
            text: text.into(),
            expected: "f, i, w, b (a number, or one for each stage as in 1/1/2), transfer and overlap, such as f=1,i=1,w=1,transfer=0.1".into(),
        }
        };
        let mut passes: [Option<Vec<f64>>; 4] = [const { None }; 4];
        let (mut transfer, mut overlap) = (0.0, 0.0);
        for part in text.split(',').filter(|p| !p.trim().is_empty()) {
            let (name, values) = part.split_once('=').ok_or_else(|| bad(part))?;
            let values: Option<Vec<f64>> = values
                .split('/')
                .map(|v| v.trim().parse().ok().filter(|v: &f64| v.is_finite()))
                .collect();
            let values = values.ok_or_else(|| bad(part))?;
            match (name.trim(), values.as_slice()) {
                ("transfer", [one]) => transfer = *one,
                ("overlap", [one]) => overlap = *one,
                (name, _) => {
                    let at = ["f", "i", "w", "b"].iter().position(|n| *n == name);
                    passes[at.ok_or_else(|| bad(part))?] = Some(values);
                }
            }
        }
        let stages = passes.iter().flatten().map(Vec::len).max().unwrap_or(1);
        if let Some(odd) = passes
            .iter()
            .flatten()
            .find(|v| v.len() > 1 && v.len() != stages)
        {
            return Err(Error::Number {
                what: "the number of stages with a cost",
                got: odd.len().to_string(),
                valid: format!("another pass has {stages}: give one for all or as many"),
            });
        }
        let get = |pass: usize, stage: usize| {
            let values = passes[pass].as_ref()?;
            values.get(stage).or(values.first()).copied()
        };
        let stages = (0..stages).map(|s| {
            let (i, w) = (get(1, s).unwrap_or(1.0), get(2, s).unwrap_or(1.0));
            Cost {
                f: get(0, s).unwrap_or(1.0),
                i,
                w,
                b: get(3, s).unwrap_or(i + w),
            }
        });
        let costs = Costs {
            stages: stages.collect(),
            transfer,
            overlap,
        };
        costs.check(costs.stages.len())?;
        Ok(costs)
    }
}
