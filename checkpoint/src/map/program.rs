//! Statements without macros, checked.

use super::statement::{Attr, Statement, Value, Var};
use crate::Result;
use anymesh_core::DType;
use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::sync::Arc;

/// What a statement does, in the order in which it is written. Operations before [`Op::Axis`] hold
/// for every input, those after it for every output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// New order of the dimensions; none means all reversed.
    Permute(Vec<usize>),
    /// Another element type. Every type can become every other, by the rules of
    /// [`Tensor::cast`](anymesh_core::Tensor::cast): floats round to nearest even, on the way to
    /// integers they are cut off towards zero, end at the largest and the smallest integer, and NaN
    /// becomes 0; integers wrap around in narrower ones; anything but zero is true.
    Cast {
        /// What it must be before, where the statement says so.
        from: Option<DType>,
        /// What it becomes.
        to: DType,
    },
    /// Another shape of the same elements; one size may be -1.
    Reshape {
        /// What it must be before, where the statement says so.
        from: Option<Vec<i64>>,
        /// What it becomes.
        to: Vec<i64>,
    },
    /// Several to one: joined. One to several: cut.
    Axis {
        /// Along which dimension; negative counts from the end.
        axis: i64,
        /// How long each part is; none means equal parts.
        sizes: Option<Vec<usize>>,
    },
}

/// A checked statement.
#[derive(Clone, Debug)]
pub struct Step {
    /// The names it reads; none: its output is only added.
    pub inputs: Vec<String>,
    /// The names it writes; none: its inputs are removed.
    pub outputs: Vec<String>,
    /// What happens between.
    pub ops: Vec<Op>,
    /// The statement.
    pub statement: Arc<Statement>,
}

/// A mapping with all its macros expanded: steps that are carried out one after the other.
///
/// It prints as statements, so that a mapping and its inverse can be kept as text.
#[derive(Clone, Debug)]
pub struct Program {
    /// The steps.
    pub steps: Vec<Step>,
}

impl Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps
            .iter()
            .try_for_each(|step| writeln!(f, "{}", step.statement))
    }
}

impl Program {
    /// Checks statements that have no macros any more.
    pub(super) fn new(statements: &[Arc<Statement>]) -> Result<Self> {
        Ok(Self {
            steps: statements.iter().map(Step::new).collect::<Result<_>>()?,
        })
    }
}

impl Step {
    fn new(statement: &Arc<Statement>) -> Result<Self> {
        let names = |vars: &[Var]| -> Result<Vec<String>> {
            if vars.len() > 1 && vars.iter().any(Var::is_none) {
                return Err(statement
                    .error("'_' stands alone on its side: `a -> _` removes, `_ -> b` adds"));
            }
            Ok(vars
                .iter()
                .filter(|var| !var.is_none())
                .map(|var| var.name.clone())
                .collect())
        };
        let (inputs, outputs) = (names(&statement.left)?, names(&statement.right)?);
        let ops = ops(statement)?;
        let error = |detail: String| Err(statement.error(detail));
        if inputs.is_empty() || outputs.is_empty() {
            if inputs.is_empty() && outputs.is_empty() {
                return error("'_ -> _' says nothing".into());
            }
            if !ops.is_empty() {
                return error("a statement with '_' takes no attributes".into());
            }
            return Ok(Self {
                inputs,
                outputs,
                ops,
                statement: statement.clone(),
            });
        }
        let (n, m) = (inputs.len(), outputs.len());
        if n > 1 && m > 1 {
            return error(format!(
                "{n} names to {m}: one side must be a single tensor; join them under a name of its own and cut that"
            ));
        }
        let axes: Vec<_> = ops
            .iter()
            .filter_map(|op| {
                if let Op::Axis { sizes, .. } = op {
                    Some(sizes)
                } else {
                    None
                }
            })
            .collect();
        match axes[..] {
            [] if n > 1 => {
                return error(format!(
                    "to join {n} tensors, say along which dimension: axis="
                ));
            }
            [] if m > 1 => {
                return error(format!(
                    "to cut into {m} tensors, say along which dimension: axis= (to copy, write a statement for each)"
                ));
            }
            [] => {}
            [sizes] => {
                if let Some(sizes) = sizes.as_ref().filter(|sizes| sizes.len() != n.max(m)) {
                    return error(format!(
                        "sizes= has {} numbers for {} parts",
                        sizes.len(),
                        n.max(m)
                    ));
                }
            }
            _ => return error("axis= may be given once".into()),
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = outputs.iter().find(|name| !seen.insert(*name)) {
            return error(format!("'{twice}' is written twice"));
        }
        Ok(Self {
            inputs,
            outputs,
            ops,
            statement: statement.clone(),
        })
    }

    /// The statement that says what the step does, made by `by` of the one it has.
    pub(super) fn restated(mut self, by: &'static str) -> Self {
        let vars = |names: &[String]| match names {
            [] => vec![Var::plain("_")],
            names => names.iter().map(Var::exact).collect(),
        };
        let list = |sizes: &[usize]| Value::List(sizes.iter().map(|n| *n as i64).collect());
        let attrs = self.ops.iter().flat_map(|op| match op {
            Op::Permute(order) => vec![Attr::Set("permute", list(order))],
            Op::Cast { from: None, to } => vec![Attr::Set("dtype", Value::DType(*to))],
            Op::Cast {
                from: Some(from),
                to,
            } => vec![
                Attr::Set("src_dtype", Value::DType(*from)),
                Attr::Set("dst_dtype", Value::DType(*to)),
            ],
            Op::Reshape { from: None, to } => vec![Attr::Set("reshape", Value::List(to.clone()))],
            Op::Reshape {
                from: Some(from),
                to,
            } => vec![
                Attr::Set("src_shape", Value::List(from.clone())),
                Attr::Set("dst_shape", Value::List(to.clone())),
            ],
            Op::Axis { axis, sizes } => {
                let sizes = sizes.as_ref().map(|sizes| Attr::Set("sizes", list(sizes)));
                [Attr::Set("axis", Value::Int(*axis))]
                    .into_iter()
                    .chain(sizes)
                    .collect()
            }
        });
        self.statement =
            self.statement
                .derive(by, vars(&self.inputs), vars(&self.outputs), attrs.collect());
        self
    }
}

/// The operations that the attributes say.
fn ops(statement: &Statement) -> Result<Vec<Op>> {
    let error = |detail: String| statement.error(detail);
    let mut out = Vec::new();
    let (mut dtypes, mut shapes) = ([None; 2], [const { None::<Vec<i64>> }; 2]);
    let mut sizes: Option<Vec<usize>> = None;
    for attr in &statement.attrs {
        let (key, value) = match attr {
            Attr::Set(key, value) => (*key, value),
            Attr::Word(word) => {
                return Err(error(format!(
                    "'{word}' is a macro, which must be expanded first"
                )));
            }
        };
        let sizes_of = |list: &[i64]| {
            list.iter()
                .map(|n| usize::try_from(*n))
                .collect::<Result<Vec<_>, _>>()
        };
        match (key, value) {
            ("axis", Value::Int(axis)) => out.push(Op::Axis {
                axis: *axis,
                sizes: None,
            }),
            ("sizes", Value::List(list)) => {
                sizes = Some(
                    sizes_of(list)
                        .map_err(|_| error(format!("sizes={value}: a size is not negative")))?,
                );
            }
            ("permute", Value::List(list)) => {
                let order = sizes_of(list).ok().filter(|order| {
                    order
                        .iter()
                        .copied()
                        .collect::<BTreeSet<_>>()
                        .into_iter()
                        .eq(0..order.len())
                });
                out.push(Op::Permute(order.ok_or_else(|| {
                    error(format!(
                        "permute={value} is no order of the dimensions 0 to {}",
                        list.len().saturating_sub(1)
                    ))
                })?));
            }
            ("dtype", Value::DType(to)) => out.push(Op::Cast {
                from: None,
                to: *to,
            }),
            ("reshape", Value::List(to)) => out.push(Op::Reshape {
                from: None,
                to: to.clone(),
            }),
            ("src_dtype", Value::DType(dtype)) => dtypes[0] = Some(*dtype),
            ("dst_dtype", Value::DType(dtype)) => dtypes[1] = Some(*dtype),
            ("src_shape", Value::List(shape)) => shapes[0] = Some(shape.clone()),
            ("dst_shape", Value::List(shape)) => shapes[1] = Some(shape.clone()),
            _ => {
                return Err(error(format!(
                    "{key}= is for fused_qkv, fused_qkv_old and fused_ffn only"
                )));
            }
        }
        if let [Some(from), Some(to)] = dtypes {
            out.push(Op::Cast {
                from: Some(from),
                to,
            });
            dtypes = [None; 2];
        }
        if let [Some(from), Some(to)] = &shapes {
            out.push(Op::Reshape {
                from: Some(from.clone()),
                to: to.clone(),
            });
            shapes = [None, None];
        }
    }
    if dtypes != [None; 2] {
        return Err(error(
            "src_dtype= and dst_dtype= come together; dtype= alone says what to cast to".into(),
        ));
    }
    if shapes != [None, None] {
        return Err(error(
            "src_shape= and dst_shape= come together; reshape= alone says the new shape".into(),
        ));
    }
    if let Some(given) = sizes {
        match out.iter_mut().find_map(|op| {
            if let Op::Axis { sizes, .. } = op {
                Some(sizes)
            } else {
                None
            }
        }) {
            Some(sizes) => *sizes = Some(given),
            None => return Err(error("sizes= belongs to axis=".into())),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::{Mapping, Names};

    /// A program, and what its text is read as.
    fn again(text: &str, back: bool) -> (Vec<Vec<String>>, Vec<Vec<String>>) {
        let names = Names {
            left: ["a", "b", "c"].map(|name| (name.to_string(), 1)).into(),
            ..Names::default()
        };
        let expand = |text: &str| {
            Mapping::parse(text)
                .and_then(|mapping| mapping.expand(&names))
                .unwrap_or_else(|error| panic!("{error}"))
        };
        let mut program = expand(text);
        if back {
            program = program.reverse().unwrap_or_else(|error| panic!("{error}"));
        }
        let sides = |program: &super::Program| {
            program
                .steps
                .iter()
                .flat_map(|s| [s.inputs.clone(), s.outputs.clone()])
                .collect()
        };
        (sides(&program), sides(&expand(&program.to_string())))
    }

    #[test]
    fn names_that_look_like_macros_keep_their_quotes() {
        for back in [false, true] {
            let (program, read) = again(
                "a -> 'x$', '*', \"_\", fused_qkv, num_heads=2, num_key_value_groups=1\n",
                back,
            );
            assert_eq!(program, read);
            let (program, read) = again("'b', \"fused_ffn\", 'fused_qkv' -> c, axis=0", back);
            assert_eq!(program, read);
        }
    }
}
