//! What a step did, call by call.

use crate::{
    DType, Mesh, Shape, Sharding, Tensor, TensorType,
    spmd::{Choice, Rule, cache::Solved, solve::Operand},
};
use smallvec::SmallVec;
use std::{panic::Location, rc::Rc};

/// One call of an op, or a reshard that sent something.
pub(super) struct Record {
    /// A digest of the op, its rule and its operands.
    pub(super) key: u64,
    /// A digest of the key and the caller's line.
    pub(super) class: u64,
    pub(super) op: &'static str,
    pub(super) caller: &'static Location<'static>,
    pub(super) mesh: Mesh,
    pub(super) operands: SmallVec<[Seen; 3]>,
    /// The number of each result's value, and its type.
    pub(super) results: SmallVec<[(u32, TensorType); 1]>,
    pub(super) did: Did,
    /// Received by the worst rank.
    pub(super) bytes: u64,
    /// Under the cost model.
    pub(super) seconds: f64,
    /// What the tensors that the step made hold after it, on all ranks of this process.
    pub(super) memory: u64,
}

/// An operand as a call found it.
pub(super) struct Seen {
    /// The number of its value.
    pub(super) value: u32,
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    pub(super) sharding: Sharding,
    pub(super) held: Vec<Sharding>,
    /// Whether it was computed, and is no parameter.
    pub(super) computed: bool,
    /// What bringing it took.
    pub(super) bytes: u64,
}

/// What was done.
pub(super) enum Did {
    Call {
        rule: String,
        solved: Rc<Solved>,
        again: u32,
    },
    Reshard {
        target: String,
        source: Option<Sharding>,
        to: Sharding,
        /// Whether it goes to another mesh.
        across: bool,
    },
}

/// The type of a tensor.
pub(super) fn value_of(x: &Tensor) -> TensorType {
    TensorType {
        dtype: x.dtype(),
        shape: x.shape().clone(),
        sharding: x.sharding().clone(),
    }
}

impl Seen {
    /// As the solver sees it.
    pub(super) fn operand(&self) -> Operand<'_> {
        Operand {
            shape: &self.shape,
            dtype: self.dtype,
            sharding: &self.sharding,
            held: &self.held,
        }
    }

    pub(super) fn type_string(&self, sharding: &Sharding, mesh: &Mesh) -> String {
        sharding.type_string(self.dtype, &self.shape, mesh)
    }
}

impl Record {
    /// From which of its forms operand `i` was taken, where that was not its own.
    pub(super) fn source(&self, i: usize) -> Option<&Sharding> {
        match &self.did {
            Did::Call { solved, .. } => match usize::from(solved.solution.sources[i]) {
                0 => None,
                form => self.operands[i].held.get(form - 1),
            },
            Did::Reshard { source, .. } => source.as_ref(),
        }
    }

    /// Where operand `i` went.
    pub(super) fn target(&self, i: usize) -> &Sharding {
        match &self.did {
            Did::Call { solved, .. } => &solved.solution.inputs[i],
            Did::Reshard { to, .. } => to,
        }
    }

    /// Whether operand `i` was at hand in a form when the call was done.
    pub(super) fn shows(&self, i: usize, form: &Sharding) -> bool {
        self.operands[i].sharding == *form || self.source(i) == Some(form) || self.target(i) == form
    }

    /// The rule with the sizes of its operands.
    pub(super) fn rule(&self) -> Option<Rule> {
        match &self.did {
            Did::Call { solved, .. } => Some(solved.rule_of(|i| &self.operands[i].shape)),
            Did::Reshard { .. } => None,
        }
    }
}

/// What each mesh axis does, in words.
pub(super) fn in_words(mesh: &Mesh, rule: &Rule, choices: &[Choice]) -> String {
    let letters = rule.letters();
    let axis = |((name, _), choice): (&(String, usize), &Choice)| match choice {
        Choice::Whole => format!("{name}: whole"),
        Choice::Cut(f) => format!("{name}: cuts {}", letters.get(*f).unwrap_or(&'?')),
        Choice::Through(_, reduction) => format!("{name}: partial {reduction}"),
    };
    let axes: Vec<String> = mesh.axes().iter().zip(choices).map(axis).collect();
    axes.join(", ")
}
