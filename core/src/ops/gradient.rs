//! Gradients of maps and reductions: they follow from the elementwise program (see
//! `map/derive.rs`).

use super::{
    Map, MapRule,
    reduce::{Reduce, spread, summed},
};
use crate::{
    Dims, MapProgram, Result, Scalar, Shape, Tensor,
    backend::{Affine, ReduceOp},
    grad::{Back, Pulled, constant, is_recording, record, record1},
    map::Derivative,
    observe,
    table::Table,
    tensor::Outputs,
};
use smallvec::SmallVec;
use std::sync::Arc;

/// The derivative of each output by each input, where there is one.
type Derivatives = Vec<Vec<Option<Derivative>>>;

/// The derivatives of a program, worked out on first use. Each thread keeps its own.
fn derivatives(program: &MapProgram) -> Result<Arc<Derivatives>> {
    thread_local! {
        static KNOWN: Table<MapProgram, Arc<Derivatives>> = Table::default();
    }
    if let Some(known) = KNOWN.with(|all| all.get(program)) {
        return Ok(known);
    }
    let of = |output| {
        (0..program.inputs.len())
            .map(|input| program.derivative(output, input))
            .collect::<Result<Vec<_>>>()
    };
    let made: Arc<Derivatives> =
        Arc::new((0..program.outputs.len()).map(of).collect::<Result<_>>()?);
    KNOWN.with(|all| all.insert(program.clone(), made.clone()));
    Ok(made)
}

/// What a map was called with, as far as its derivatives need it.
struct ForBackward {
    op: &'static str,
    derivatives: Arc<Derivatives>,
    shape: Shape,
    indices: SmallVec<[Affine; 1]>,
    params: SmallVec<[Scalar; 4]>,
    /// The operands that a derivative uses.
    inputs: SmallVec<[Option<Tensor>; 3]>,
    /// The shapes of all operands.
    shapes: SmallVec<[Shape; 3]>,
}

impl ForBackward {
    fn new(map: &Map<'_>, tensors: &[&Tensor]) -> Result<Self> {
        let derivatives = derivatives(map.program)?;
        let used = |k: usize| {
            let by = |(i, d): (usize, &Option<Derivative>)| {
                tensors[i].requires_grad()
                    && d.as_ref()
                        .is_some_and(|d| !d.is_identity && d.uses.contains(&k))
            };
            derivatives.iter().any(|of| of.iter().enumerate().any(by))
        };
        let inputs = tensors
            .iter()
            .enumerate()
            .map(|(k, t)| used(k).then(|| t.kept()))
            .collect();
        let shapes = tensors.iter().map(|t| t.shape().clone()).collect();
        Ok(Self {
            op: map.op,
            derivatives,
            shape: map.shape.clone(),
            indices: map.indices.into(),
            params: map.params.into(),
            inputs,
            shapes,
        })
    }

    /// Another program over the same positions.
    fn over<'a>(&'a self, program: &'a MapProgram) -> Map<'a> {
        Map {
            indices: &self.indices,
            params: &self.params,
            ..Map::new(self.op, program, &self.shape)
        }
    }

    /// The gradient of operand `input` from that of result `output`, which broadcasts to the shape
    /// of the map.
    fn pull(&self, output: usize, input: usize, gradient: &Tensor) -> Result<Option<Tensor>> {
        let Some(derivative) = &self.derivatives[output][input] else {
            return Ok(None);
        };
        let shape = &self.shapes[input];
        if derivative.is_identity {
            return sum_to(self.op, &gradient.expand(&self.shape)?, shape).map(Some);
        }
        let kept: SmallVec<[&Tensor; 6]> = derivative
            .uses
            .iter()
            .filter_map(|k| self.inputs[*k].as_ref())
            .collect();
        let program = &derivative.program;
        if derivative.is_slope {
            let slope = self.over(program).recorded(&kept)?.remove(0);
            return sum_to(
                self.op,
                &slope.mul(gradient)?.cast(program.outputs[0].1)?,
                shape,
            )
            .map(Some);
        }
        // Parts that would be rounded one by one must meet first.
        let (from, to) = (program.inputs[0], program.outputs[0].1);
        let linear = from.kind() == to.kind() && from.size() <= to.size();
        if *shape == self.shape || !self.indices.is_empty() {
            let operands: SmallVec<[&Tensor; 6]> = std::iter::once(gradient)
                .chain(kept.iter().copied())
                .collect();
            let rule = if linear {
                MapRule::Linear
            } else {
                MapRule::Unknown
            };
            let out = Map {
                rule,
                ..self.over(program)
            }
            .recorded(&operands)?
            .remove(0);
            return sum_to(self.op, &out, shape).map(Some);
        }
        let whole = gradient.expand(&self.shape)?;
        let operands: SmallVec<[&Tensor; 6]> = std::iter::once(&whole)
            .chain(kept.iter().copied())
            .collect();
        let (op, axes) = (self.op, broadcast_axes(shape, &self.shape));
        let reduce = Reduce {
            op,
            program,
            operands: &operands,
            params: &self.params,
            axes: &axes,
            keepdim: true,
            reduce: ReduceOp::Sum,
            scale: None,
            dtype: to,
            linear,
        };
        reduce.run()?.reshape(shape).map(Some)
    }
}

/// The dimensions of `to` along which a tensor of `shape` repeats.
pub(crate) fn broadcast_axes(shape: &Shape, to: &Shape) -> Dims {
    let lead = to.rank() - shape.rank();
    (0..to.rank())
        .filter(|d| *d < lead || shape[d - lead] != to[*d])
        .collect()
}

/// A gradient summed over the dimensions along which the operand was repeated.
#[track_caller]
pub(crate) fn sum_to(op: &'static str, gradient: &Tensor, shape: &Shape) -> Result<Tensor> {
    if gradient.shape() == shape {
        return Ok(gradient.clone());
    }
    let axes = broadcast_axes(shape, gradient.shape());
    let sum = if axes.is_empty() {
        gradient.clone()
    } else {
        summed(op, gradient, &axes)?
    };
    sum.reshape(shape)
}

impl Map<'_> {
    /// Runs the program over operands that broadcast to its shape, and remembers how to compute its
    /// gradient. There is at least one operand.
    #[track_caller]
    pub(crate) fn recorded(&self, tensors: &[&Tensor]) -> Result<Outputs> {
        if !is_recording(tensors) {
            return observe::op(self.op, tensors, || self.run_on(tensors));
        }
        let run = || self.run_on(tensors);
        if self
            .program
            .outputs
            .iter()
            .all(|(_, dtype)| !dtype.is_float())
        {
            return constant(self.op, tensors, run);
        }
        record(self.op, tensors, run, |_| {
            let kept = ForBackward::new(self, tensors)?;
            Ok(move |back: &Back<'_>| {
                let mut pulled = Pulled::new();
                for input in 0..kept.shapes.len() {
                    let mut sum: Option<Tensor> = None;
                    for output in (0..kept.derivatives.len()).filter(|_| back.needs(input)) {
                        let part = match back.grad_of(output) {
                            Some(gradient) => kept.pull(output, input, gradient)?,
                            None => None,
                        };
                        sum = match (sum, part) {
                            (Some(a), Some(b)) => Some(a.add(&b)?),
                            (a, b) => a.or(b),
                        };
                    }
                    pulled.push(sum);
                }
                Ok(pulled)
            })
        })
    }
}

impl Reduce<'_> {
    /// Runs it, and remembers how to compute its gradient, which follows from the program and the
    /// reduction.
    #[track_caller]
    pub(crate) fn run(&self) -> Result<Tensor> {
        observe::tell(|| serde_json::json!({ "axes": self.axes, "keepdim": self.keepdim }));
        if !is_recording(self.operands) {
            return observe::op(self.op, self.operands, || self.compute());
        }
        if !self.dtype.is_float() {
            return constant(self.op, self.operands, || self.compute());
        }
        let Reduce {
            op,
            program,
            operands,
            params,
            reduce,
            scale,
            ..
        } = *self;
        let shape = operands[0].shape();
        let axes: Dims = self.axes.into();
        record1(
            op,
            operands,
            || self.compute(),
            |out| {
                let kept = ForBackward::new(
                    &Map {
                        params,
                        ..Map::new(op, program, shape)
                    },
                    operands,
                )?;
                // All but sums look at the values again.
                let linear = reduce == ReduceOp::Sum;
                let values: Option<(MapProgram, Vec<Tensor>, Tensor)> = (!linear).then(|| {
                    (
                        program.clone(),
                        operands.iter().map(|t| t.kept()).collect(),
                        out.clone(),
                    )
                });
                let keepdim: Shape = (0..shape.rank())
                    .map(|d| if axes.contains(&d) { 1 } else { shape[d] })
                    .collect();
                Ok(move |back: &Back<'_>| {
                    let gradient = back.grad()?.reshape(&keepdim)?;
                    let gradient = match scale {
                        Some(scale) => gradient.mul(scale)?,
                        None => gradient,
                    };
                    // The gradient of what the program gives, before the reduction.
                    let gradient = match &values {
                        None => gradient,
                        Some((program, operands, out)) => {
                            let operands: SmallVec<[&Tensor; 4]> = operands.iter().collect();
                            let values = kept.over(program).recorded(&operands)?.remove(0);
                            let out = back.out(0, out).reshape(&keepdim)?;
                            spread(op, reduce, &values, &out, &axes, &gradient)?
                                .cast(values.dtype())?
                        }
                    };
                    (0..kept.shapes.len())
                        .map(|input| {
                            if back.needs(input) {
                                kept.pull(0, input, &gradient)
                            } else {
                                Ok(None)
                            }
                        })
                        .collect()
                })
            },
        )
    }
}
