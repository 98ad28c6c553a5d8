//! Row programs: what is computed along rows, as data.

use super::{ReduceOp, View};
use crate::{
    DType, Error, MapProgram, Result, Scalar, Shape,
    map::{Builder, Inst, MAX_BUFFERS, MAX_INPUTS, Program, Reg, Val},
};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Reductions of each row of `[rows, n]`, each a map program over the elements and the results of
/// earlier reductions, and then what is made of them: elements, numbers of rows, sums of columns.
/// Softmax, norms, cross-entropy and their gradients are row programs.
///
/// All its map programs have the same inputs. They have the call's parameters, and after these a
/// parameter for the result of each reduction. Their only index, where they have one, is the number
/// of the column. Made by a [`RowBuilder`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RowProgram {
    /// The reductions, in order.
    pub folds: Vec<RowFold>,
    /// Its outputs are of the shape `[rows, n]`.
    pub each: Option<MapProgram>,
    /// Its outputs, `[rows]`, are taken at column 0: it reads what is the same in a whole row.
    pub rows: Option<MapProgram>,
    /// Its outputs are added up over all rows, and are then `[n]`.
    pub columns: Option<MapProgram>,
    /// Values of elements that several parts read, floats as they are computed with: inputs of the
    /// other programs, after those of the call. It reads no results of reductions.
    pub shared: Option<MapProgram>,
    /// How many parameters come before the results of reductions.
    pub params: usize,
}

/// A reduction of each row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RowFold {
    /// What is reduced: its only output, a float.
    pub program: MapProgram,
    /// Sum, Max, Min or LogSumExp.
    pub mode: ReduceOp,
    /// The parameter that the result is multiplied with before it is rounded.
    pub scale: Option<usize>,
}

/// Runs a row program.
///
/// ```
/// use anymesh_kernel::{Buffer, DType, Layout, View, backend::{Kernel, ReduceOp, RowBuilder, RowProgramCall}};
/// // y (g - sum(g y)): the gradient of a softmax `y`.
/// let mut b = RowBuilder::new(&[DType::F32, DType::BF16], 0);
/// let sum = b.fold(ReduceOp::Sum, None, |a| a.x[0] * a.x[1])?;
/// b.each([DType::BF16], |a| [a.x[1] * (a.x[0] - a.r[sum])])?;
/// let view = |dtype: DType| View {
///     buffer: Buffer::new((), 12 * dtype.size()),
///     dtype,
///     layout: Layout::contiguous([3, 4].into()),
/// };
/// let kernel: Kernel = RowProgramCall {
///     op: "softmax",
///     program: b.finish()?,
///     shape: [3, 4].into(),
///     inputs: [view(DType::F32), view(DType::BF16)].into_iter().collect(),
///     params: Default::default(),
///     over: false,
/// }
/// .into();
/// assert_eq!(kernel.outputs()[..], [(DType::BF16, [3, 4].into())]);
/// # Ok::<(), anymesh_kernel::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RowProgramCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// What is computed.
    pub program: Arc<RowProgram>,
    /// `[rows, n]`, or with several dimensions that count rows.
    pub shape: Shape,
    /// The inputs of the programs, each of that shape with any strides: zero along the columns for a
    /// number for each row, zero along the rows for parameters that all rows share.
    pub inputs: SmallVec<[View; 4]>,
    /// One for each of the program's own parameters.
    pub params: SmallVec<[Scalar; 4]>,
    /// Whether nobody reads the first input any more: a device may give its memory to the first
    /// output of elements.
    pub over: bool,
}

impl RowProgram {
    /// All map programs.
    pub fn programs(&self) -> impl Iterator<Item = &MapProgram> {
        let folds = self.folds.iter().map(|fold| &fold.program);
        folds
            .chain(&self.each)
            .chain(&self.rows)
            .chain(&self.columns)
            .chain(&self.shared)
    }

    /// The stored dtypes: of elements, of rows, of columns.
    pub fn dtypes(&self) -> [SmallVec<[DType; 4]>; 3] {
        [&self.each, &self.rows, &self.columns].map(|program| {
            let outputs = program.iter().flat_map(|program| &program.outputs);
            outputs.map(|(_, dtype)| *dtype).collect()
        })
    }

    /// For each reduction the round in which it can run: one more than that of the latest result it
    /// reads.
    pub fn rounds(&self) -> Vec<usize> {
        let mut rounds: Vec<usize> = vec![];
        for fold in &self.folds {
            let read = self.results_of(&fold.program);
            rounds.push(read.map(|k| rounds[k] + 1).max().unwrap_or(0));
        }
        rounds
    }

    /// The reductions whose results a program reads.
    pub fn results_of<'p>(&'p self, program: &'p MapProgram) -> impl Iterator<Item = usize> + 'p {
        program.insts.iter().filter_map(|inst| match *inst {
            Inst::Param(k) => usize::from(k).checked_sub(self.params),
            _ => None,
        })
    }
}

impl RowProgram {
    /// The same program of an input that is read as another float dtype, of the same kind.
    pub fn with_input(&self, input: usize, dtype: DType) -> Self {
        let read = |program: &MapProgram| -> MapProgram {
            let mut program = Program::clone(program);
            if let Some(known) = program.inputs.get_mut(input) {
                *known = dtype;
            }
            program.into()
        };
        let fold = |fold: &RowFold| RowFold {
            program: read(&fold.program),
            ..fold.clone()
        };
        Self {
            folds: self.folds.iter().map(fold).collect(),
            each: self.each.as_ref().map(read),
            rows: self.rows.as_ref().map(read),
            columns: self.columns.as_ref().map(read),
            shared: self.shared.as_ref().map(read),
            params: self.params,
        }
    }

    /// The same program, in which every part computes what is shared for itself.
    pub fn without_shared(&self) -> Self {
        let Some(shared) = &self.shared else {
            return self.clone();
        };
        let inputs = shared.inputs.len();
        let own = |program: &MapProgram| -> MapProgram {
            let mut insts = shared.insts.clone();
            let mut places: Vec<Reg> = Vec::with_capacity(program.insts.len());
            for inst in &program.insts {
                let value = match *inst {
                    Inst::Load(k) => usize::from(k).checked_sub(inputs),
                    _ => None,
                };
                places.push(match value {
                    Some(value) => shared.outputs[value].0,
                    None => {
                        insts.push(inst.renumbered(|r| places[usize::from(r)], |k| k));
                        (insts.len() - 1) as Reg
                    }
                });
            }
            let kept = (program.insts.iter().zip(&program.kinds))
                .filter(|(inst, _)| !matches!(inst, Inst::Load(k) if usize::from(*k) >= inputs));
            let kinds = shared.kinds.iter().copied();
            let program: MapProgram = Program {
                kinds: kinds.chain(kept.map(|(_, kind)| *kind)).collect(),
                insts,
                inputs: shared.inputs.clone(),
                outputs: (program.outputs.iter())
                    .map(|(reg, dtype)| (places[usize::from(*reg)], *dtype))
                    .collect(),
                ..Program::clone(program)
            }
            .into();
            program.without_unused()
        };
        let fold = |fold: &RowFold| RowFold {
            program: own(&fold.program),
            ..fold.clone()
        };
        Self {
            folds: self.folds.iter().map(fold).collect(),
            each: self.each.as_ref().map(own),
            rows: self.rows.as_ref().map(own),
            columns: self.columns.as_ref().map(own),
            shared: None,
            params: self.params,
        }
    }

    /// The same program, with output `k` of elements rounded to a smaller float before it is stored:
    /// to the bits of a conversion of what it stored before.
    pub fn with_rounded(&self, k: usize, dtype: DType) -> Self {
        let mut rounded = self.clone();
        if let Some(each) = &self.each {
            let mut program = Program::clone(each);
            let (reg, stored) = program.outputs[k];
            // What is stored as a small float may be computed coarsely: not so what was larger.
            program.insts.push(Inst::Cast(reg, stored));
            program.kinds.push(stored.kind());
            program.outputs[k] = ((program.insts.len() - 1) as Reg, dtype);
            rounded.each = Some(program.into());
        }
        rounded
    }
}

/// The values that the parts of a row program are written over.
#[derive(Debug)]
pub struct RowArgs<'b> {
    /// The element of each input: floats as the kind that is computed in, others as they are.
    pub x: SmallVec<[Val<'b>; 6]>,
    /// The parameters.
    pub p: SmallVec<[Val<'b>; 4]>,
    /// The results of the reductions so far.
    pub r: SmallVec<[Val<'b>; 4]>,
    builder: &'b Builder,
}

impl<'b> RowArgs<'b> {
    /// The number of the column, an `i32`.
    pub fn column(&self) -> Val<'b> {
        self.builder.index(DType::I32)
    }
}

/// Builds a [`RowProgram`]. Floats are computed in `f32`, or in `f64` where an input is.
#[derive(Debug)]
pub struct RowBuilder {
    inputs: SmallVec<[DType; 6]>,
    kind: DType,
    program: RowProgram,
}

impl RowBuilder {
    /// A program over inputs of these dtypes and so many parameters.
    pub fn new(inputs: &[DType], params: usize) -> Self {
        let wide = inputs.contains(&DType::F64);
        Self {
            inputs: inputs.into(),
            kind: if wide { DType::F64 } else { DType::F32 },
            program: RowProgram {
                folds: vec![],
                each: None,
                rows: None,
                columns: None,
                shared: None,
                params,
            },
        }
    }

    /// What floats are computed in.
    pub fn kind(&self) -> DType {
        self.kind
    }

    fn part<const N: usize>(
        &self,
        dtypes: [DType; N],
        f: impl for<'b> FnOnce(&RowArgs<'b>) -> [Val<'b>; N],
    ) -> Result<MapProgram> {
        let builder = Builder::new();
        let load = |dtype: &DType| match dtype.is_float() {
            true => builder.load(*dtype).cast(self.kind),
            false => builder.load(*dtype),
        };
        let param = |_| builder.param(self.kind);
        let args = RowArgs {
            x: self.inputs.iter().map(load).collect(),
            p: (0..self.program.params).map(param).collect(),
            r: (0..self.program.folds.len()).map(param).collect(),
            builder: &builder,
        };
        let outputs: SmallVec<[_; 4]> = f(&args).into_iter().zip(dtypes).collect();
        let program = builder.finish(&outputs)?.without_unused();
        if program.can_fault() {
            return Err(wrong("a row program divides no integers"));
        }
        Ok(program)
    }

    /// Adds a reduction; its result is `r[k]` of later parts, where `k` is what this returns. The
    /// result is multiplied with parameter `scale`.
    pub fn fold(
        &mut self,
        mode: ReduceOp,
        scale: Option<usize>,
        f: impl for<'b> FnOnce(&RowArgs<'b>) -> Val<'b>,
    ) -> Result<usize> {
        if matches!(mode, ReduceOp::Prod | ReduceOp::ArgMax | ReduceOp::ArgMin) {
            return Err(wrong("rows are reduced by Sum, Max, Min or LogSumExp"));
        }
        if scale.is_some_and(|scale| scale >= self.program.params) {
            return Err(wrong("the scale of a reduction is one of the parameters"));
        }
        let program = self.part([self.kind], |a| [f(a)])?;
        self.program.folds.push(RowFold {
            program,
            mode,
            scale,
        });
        Ok(self.program.folds.len() - 1)
    }

    /// Sets the outputs `[rows, n]`.
    pub fn each<const N: usize>(
        &mut self,
        dtypes: [DType; N],
        f: impl for<'b> FnOnce(&RowArgs<'b>) -> [Val<'b>; N],
    ) -> Result<()> {
        self.program.each = Some(self.part(dtypes, f)?);
        Ok(())
    }

    /// Sets the outputs `[rows]`, of the dtype that is computed in.
    pub fn rows<const N: usize>(
        &mut self,
        f: impl for<'b> FnOnce(&RowArgs<'b>) -> [Val<'b>; N],
    ) -> Result<()> {
        self.program.rows = Some(self.part([self.kind; N], f)?);
        Ok(())
    }

    /// Sets the outputs that are sums over all rows, `[n]`.
    pub fn columns<const N: usize>(
        &mut self,
        dtypes: [DType; N],
        f: impl for<'b> FnOnce(&RowArgs<'b>) -> [Val<'b>; N],
    ) -> Result<()> {
        if let Some(dtype) = dtypes.iter().find(|dtype| !dtype.is_float()) {
            return Err(Error::DType {
                op: "row program",
                dtype: *dtype,
                expected: "a float dtype for sums of columns",
            });
        }
        self.program.columns = Some(self.part(dtypes, f)?);
        Ok(())
    }

    /// The program.
    pub fn finish(self) -> Result<Arc<RowProgram>> {
        let outputs: usize = self.program.dtypes().iter().map(SmallVec::len).sum();
        let inputs = self.inputs.len();
        if outputs == 0 {
            return Err(wrong("a row program has an output"));
        }
        if inputs > MAX_INPUTS || inputs + outputs > MAX_BUFFERS {
            return Err(Error::argument(
                "row program",
                "inputs",
                format!(
                    "{inputs} inputs and {outputs} outputs: at most {MAX_INPUTS} inputs, and {MAX_BUFFERS} of both; split it in two"
                ),
            ));
        }
        Ok(Arc::new(self.program))
    }
}

fn wrong(detail: &'static str) -> Error {
    Error::argument("row program", "program", detail)
}

impl RowProgramCall {
    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.shape.numel() / self.length()
    }

    /// How long they are.
    pub fn length(&self) -> usize {
        self.shape[self.shape.rank() - 1]
    }

    /// The dtype and shape of each output: of elements, then of rows, then of columns.
    pub(super) fn outputs(&self) -> super::OutputTypes {
        let [each, rows, columns] = self.program.dtypes();
        let (count, n) = (self.rows(), self.length());
        let mut outputs: super::OutputTypes = smallvec![];
        outputs.extend(each.into_iter().map(|d| (d, self.shape.clone())));
        outputs.extend(rows.into_iter().map(|d| (d, [count].into())));
        outputs.extend(columns.into_iter().map(|d| (d, [n].into())));
        outputs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reduction_runs_after_those_whose_results_it_reads() {
        let mut b = RowBuilder::new(&[DType::BF16, DType::F32], 1);
        let mean = b.fold(ReduceOp::Sum, Some(0), |a| a.x[0]).expect("valid");
        let top = b.fold(ReduceOp::Max, None, |a| a.x[1]).expect("valid");
        let spread = |a: &RowArgs<'_>| (a.x[0] - a.r[mean]).kind();
        assert_eq!((mean, top), (0, 1));
        b.fold(ReduceOp::Sum, Some(0), |a| {
            assert_eq!(spread(a), crate::Kind::F32);
            a.x[0] - a.r[mean]
        })
        .expect("valid");
        b.rows(|a| [a.r[2] + a.r[1]]).expect("valid");
        let program = b.finish().expect("valid");
        assert_eq!(program.rounds(), [0, 0, 1]);
        // What a part does not read is not loaded for it.
        assert_eq!(program.folds[1].program.insts.len(), 1);
        assert_eq!(program.folds[1].program.inputs.len(), 2);
    }

    #[test]
    fn what_parts_share_each_can_compute_for_itself() {
        let mut b = RowBuilder::new(&[DType::BF16], 1);
        let sum = b
            .fold(ReduceOp::Sum, None, |a| a.x[0].exp())
            .expect("valid");
        b.each([DType::F32], |a| [a.x[0].exp() / a.r[sum]])
            .expect("valid");
        let plain = b.finish().expect("valid");
        // The same with the exponential as an input of both parts.
        let shared = plain.folds[0].program.clone();
        let part = |program: &MapProgram| -> MapProgram {
            let mut program = Program::clone(program);
            let exp = program
                .insts
                .iter()
                .position(|inst| matches!(inst, Inst::Unary(..)));
            program.insts[exp.expect("an exponential")] = Inst::Load(1);
            program.inputs.push(DType::F32);
            MapProgram::from(program).without_unused()
        };
        let sharing = RowProgram {
            folds: vec![RowFold {
                program: part(&plain.folds[0].program),
                ..plain.folds[0].clone()
            }],
            each: plain.each.as_ref().map(part),
            shared: Some(shared),
            ..RowProgram::clone(&plain)
        };
        assert_eq!(sharing.programs().count(), 3);
        let alone = sharing.without_shared();
        assert_eq!(alone.folds, plain.folds);
        assert_eq!(alone.shared, None);
        let insts = |program: &RowProgram| program.each.as_ref().map(|each| each.insts.len());
        assert_eq!(insts(&alone), insts(&plain));
    }

    #[test]
    fn what_no_kernel_could_run_is_refused() {
        let none = RowBuilder::new(&[DType::F32], 0).finish();
        assert!(matches!(none, Err(Error::Argument { .. })), "{none:?}");
        let mut b = RowBuilder::new(&[DType::F32, DType::I32], 1);
        assert!(b.fold(ReduceOp::Prod, None, |a| a.x[0]).is_err());
        assert!(b.fold(ReduceOp::Sum, Some(1), |a| a.x[0]).is_err());
        let divided = b.each([DType::I32], |a| [a.column().rem(a.x[1])]);
        assert!(matches!(divided, Err(Error::Argument { .. })));
        assert!(b.columns([DType::I32], |a| [a.x[1]]).is_err());
        let mut b = RowBuilder::new(&[DType::F32; 6], 0);
        b.each([DType::F32; 2], |a| [a.x[0], a.x[1]])
            .expect("valid");
        b.columns([DType::F32], |a| [a.x[2]]).expect("valid");
        assert!(b.finish().is_err());
    }
}
