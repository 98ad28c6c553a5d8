//! Running a map program: on a device, on a mesh, and, by `gradient.rs`, with its gradient
//! remembered.

use super::{OpInfo, affine::shifted, need_float_math, needs_f64_math};
use crate::{
    DType, Device, Dims, Error, MapProgram, Mesh, Result, Scalar, Shape, Tensor, View,
    backend::{Affine, MapCall, MapInput},
    launch::launch,
    spmd::{
        Call,
        built::{MAP, map_data},
        plain,
    },
    tensor::Outputs,
};
use smallvec::SmallVec;

/// The steps of this file: a map of which nothing more is known than its operands.
pub(super) const STEPS: &[OpInfo] = &[MAPPED];

const MAPPED: OpInfo = OpInfo::new("map", MAP);

/// What is known of a map beside its program: how it runs on a mesh.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MapRule {
    /// Nothing: every dimension may be cut and nothing partial passes, because a program says
    /// nothing of what it computes.
    Unknown,
    /// It is linear in its first operand, so that partial sums may pass through that, unless the
    /// program has a pole.
    Linear,
    /// It is this op.
    Op {
        info: &'static OpInfo,
        /// A bit for each operand of the op that is a number.
        numbers: u32,
        /// Whether the clauses of the rule on partial values hold.
        partials: bool,
    },
}

/// An operand of a [`Map`]: a tensor that broadcasts to the iteration shape, or one placed at
/// `window` in it.
pub(crate) struct Operand<'a> {
    tensor: &'a Tensor,
    window: Option<Dims<isize>>,
}

impl<'a> Operand<'a> {
    /// A tensor whose origin lies at `start` of the iteration space.
    pub(crate) fn at(tensor: &'a Tensor, start: Dims<isize>) -> Self {
        Self {
            tensor,
            window: Some(start),
        }
    }
}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self {
            tensor,
            window: None,
        }
    }
}

/// A map program and what it runs over: everything but its operands.
#[derive(Clone, Copy)]
pub(crate) struct Map<'a> {
    /// The op, for error messages and the ledger.
    pub(crate) op: &'static str,
    pub(crate) program: &'a MapProgram,
    /// The iteration space, which is the shape of every result. Operands broadcast to it.
    pub(crate) shape: &'a Shape,
    /// The affine indices, over the whole shape.
    pub(crate) indices: &'a [Affine],
    pub(crate) params: &'a [Scalar],
    pub(crate) rule: MapRule,
}

impl<'a> Map<'a> {
    /// A program without indices and params, of which nothing more is known.
    pub(crate) fn new(op: &'static str, program: &'a MapProgram, shape: &'a Shape) -> Self {
        Self {
            op,
            program,
            shape,
            indices: &[],
            params: &[],
            rule: MapRule::Unknown,
        }
    }

    /// Runs the program and returns its outputs, on `device` where there are no operands. Empty
    /// results launch nothing.
    #[track_caller]
    pub(crate) fn run(&self, operands: &[Operand<'_>], device: &Device) -> Result<Outputs> {
        let tensors: SmallVec<[&Tensor; 3]> = operands.iter().map(|o| o.tensor).collect();
        self.run_at(&tensors, |k| operands[k].window.as_ref(), device)
    }

    /// Runs the program over operands that broadcast to its shape.
    #[track_caller]
    pub(crate) fn run_on(&self, tensors: &[&Tensor]) -> Result<Outputs> {
        self.run_at(tensors, |_| None, tensors[0].device())
    }

    /// [`run`](Self::run) of tensors and where each of them is placed.
    #[track_caller]
    fn run_at<'w>(
        &self,
        tensors: &[&Tensor],
        window: impl Fn(usize) -> Option<&'w Dims<isize>>,
        device: &Device,
    ) -> Result<Outputs> {
        let (op, shape, outputs) = (self.op, self.shape, &self.program.outputs);
        if !plain(op, tensors)? {
            let placed = (0..tensors.len()).any(|k| window(k).is_some());
            return self.run_parts(tensors, placed);
        }
        if shape.checked_numel(op)? == 0 {
            let empty = |(_, dtype): &(_, DType)| match tensors.first() {
                Some(first) => first.no_elements(*dtype, shape.clone()),
                None => {
                    device.check(*dtype, 0)?;
                    Ok(Tensor::nothing(*dtype, shape.clone(), device))
                }
            };
            return outputs.iter().map(empty).collect();
        }
        self.check(device)?;
        // Bound where it is made: a call is large, and every copy of it shows in a small op.
        let mut call = self.unbound();
        self.bind(&mut call.inputs, tensors, window)?;
        match tensors.first() {
            Some(first) => launch(first.mesh(), call),
            None => launch(&Mesh::single(device), call),
        }
    }

    /// [`run`](Self::run) on a mesh, by its rule.
    #[track_caller]
    fn run_parts(&self, tensors: &[&Tensor], placed: bool) -> Result<Outputs> {
        let (op, shape) = (self.op, self.shape);
        if placed {
            return Err(Error::argument(
                op,
                "operands",
                "a window into a tensor on a mesh: the op has no rule",
            )
            .of(tensors.iter().copied()));
        }
        // At a pole nothing is linear (see `spmd::rule`), and what is partial meets first.
        let smooth = || !self.program.has_pole(self.params);
        let linear = matches!(self.rule, MapRule::Linear) && smooth();
        let data = map_data(shape, self.program.outputs.len(), linear);
        let call = match self.rule {
            MapRule::Op {
                info,
                numbers,
                partials,
            } => Call::of(info, tensors)
                .numbers(numbers)
                .partials(partials && smooth()),
            MapRule::Unknown | MapRule::Linear => Call::of(&MAPPED, tensors).data(&data),
        };
        call.on_behalf_of(op).run(|l| {
            let region = l.region(0, shape);
            let parts: SmallVec<[&Tensor; 3]> = l.inputs.iter().collect();
            let indices: SmallVec<[Affine; 2]> = self
                .indices
                .iter()
                .map(|index| shifted(index, &region.start))
                .collect();
            Map {
                shape: &region.shape.into(),
                indices: &indices,
                ..*self
            }
            .run_on(&parts)
        })
    }

    /// The call of a backend with these operands, which hold elements; an error where the device
    /// cannot do what the program asks.
    pub(crate) fn call(&self, operands: &[Operand<'_>], device: &Device) -> Result<MapCall> {
        self.check(device)?;
        let tensors: SmallVec<[&Tensor; 3]> = operands.iter().map(|o| o.tensor).collect();
        self.call_at(&tensors, |k| operands[k].window.as_ref())
    }

    /// Whether a device can do what the program asks.
    pub(crate) fn check(&self, device: &Device) -> Result<()> {
        // A reduction stores no tensor of this shape, so only dtypes are checked here; sizes are
        // where buffers are made.
        let outputs = self.program.outputs.iter().map(|(_, dtype)| *dtype);
        let kinds = self.program.kinds.iter().map(|kind| kind.dtype());
        let mut known = None;
        for dtype in outputs.chain(kinds) {
            // Mostly they are all the same.
            if known.replace(dtype) != Some(dtype) {
                device.check(dtype, 0)?;
            }
        }
        if needs_f64_math(self.program) {
            need_float_math(self.op, device, DType::F64)?;
        }
        Ok(())
    }

    /// [`call`](Self::call) of tensors and where each of them is placed, on a device that was
    /// [asked](Self::check).
    pub(crate) fn call_at<'w>(
        &self,
        tensors: &[&Tensor],
        window: impl Fn(usize) -> Option<&'w Dims<isize>>,
    ) -> Result<MapCall> {
        let mut call = self.unbound();
        self.bind(&mut call.inputs, tensors, window)?;
        Ok(call)
    }

    /// The call without its operands.
    #[inline(always)]
    fn unbound(&self) -> MapCall {
        MapCall {
            op: self.op,
            program: self.program.clone(),
            shape: self.shape.clone(),
            inputs: SmallVec::new(),
            indices: self.indices.into(),
            params: self.params.into(),
            over: Default::default(),
        }
    }

    /// Adds the operands of a call, each where it is placed.
    #[inline(always)]
    fn bind<'w>(
        &self,
        inputs: &mut SmallVec<[MapInput; 2]>,
        tensors: &[&Tensor],
        window: impl Fn(usize) -> Option<&'w Dims<isize>>,
    ) -> Result<()> {
        inputs.reserve(tensors.len());
        for (k, tensor) in tensors.iter().enumerate() {
            inputs.push(self.input(tensor.view()?, window(k)));
        }
        Ok(())
    }

    /// An operand where it is placed.
    #[inline(always)]
    fn input(&self, mut view: View, window: Option<&Dims<isize>>) -> MapInput {
        if window.is_none() && view.layout.shape != *self.shape {
            view.layout = view.layout.expand(self.shape);
        }
        MapInput {
            view,
            window: window.cloned(),
        }
    }

    /// The call of operands that broadcast, on a device that was [asked](Self::check).
    pub(crate) fn call_of(&self, views: impl IntoIterator<Item = View>) -> MapCall {
        let inputs = views.into_iter().map(|view| self.input(view, None));
        MapCall {
            inputs: inputs.collect(),
            ..self.unbound()
        }
    }
}
