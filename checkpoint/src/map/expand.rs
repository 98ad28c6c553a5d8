//! Macros: statements to simpler statements, each of which remembers what it was made of.

use super::fused;
use super::names::{Binding, Names, Part, Side, ids, matches, parts, substitute};
use super::statement::{Attr, MOST_NAMES, Statement, Value, Var};
use crate::Result;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Names of all statements are counted: a short text must not ask for more than it can mean.
pub(super) struct Count {
    total: u64,
    most: u64,
}

impl Count {
    /// As many as there are tensors, several times, and what cutting and joining heads takes.
    pub(super) fn new(names: &Names) -> Self {
        Self {
            total: 0,
            most: (1 << 17) + 16 * (names.left.len() + names.right.len()) as u64,
        }
    }

    /// Adds names of a statement; an error where that is too many.
    pub(super) fn add(&mut self, more: u64, statement: &Statement) -> Result<()> {
        self.total = self.total.saturating_add(more);
        if self.total <= self.most {
            Ok(())
        } else {
            Err(statement.error(format!("more than {} names in all statements", self.most)))
        }
    }
}

/// The macros, in the order in which they run over all statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Macro {
    /// `$LAYER_ID`, `$EXPERT_ID`, `$LAYER_ID_OFFSET`: a statement for every combination of numbers
    /// that the names have.
    Ids,
    /// `NAME[2:4]` is `NAME_2, NAME_3`.
    Range,
    /// `*`: all names with a number in its place, counting up.
    Star,
    /// `x^T`: a transposition of its own.
    Transpose,
    /// `fused_qkv`, `fused_qkv_old`, `fused_ffn`: cut into heads or blocks and joined in another
    /// order.
    Fused,
}

impl Macro {
    /// All of them in order.
    pub const ORDER: [Macro; 5] = [
        Macro::Ids,
        Macro::Range,
        Macro::Star,
        Macro::Transpose,
        Macro::Fused,
    ];

    /// What traces call it.
    pub fn name(self) -> &'static str {
        match self {
            Macro::Ids => "ids",
            Macro::Range => "range",
            Macro::Star => "*",
            Macro::Transpose => "^T",
            Macro::Fused => "fused",
        }
    }

    /// Expands this macro alone, in all statements.
    pub fn apply(
        self,
        statements: &[Arc<Statement>],
        names: &Names,
    ) -> Result<Vec<Arc<Statement>>> {
        match self {
            Macro::Ids => expand_ids(statements, names),
            Macro::Range => statements.iter().map(expand_ranges).collect(),
            Macro::Star => expand_stars(statements, names),
            Macro::Transpose => Ok(statements.iter().flat_map(expand_transposes).collect()),
            Macro::Fused => {
                let (mut out, mut count) =
                    (Vec::with_capacity(statements.len()), Count::new(names));
                let uses = fused::Uses::new(statements);
                for at in 0..statements.len() {
                    let made = fused::expand(&uses, at, names, self.name())?;
                    count.add(made.iter().map(|s| s.names()).sum(), &statements[at])?;
                    out.extend(made);
                }
                Ok(out)
            }
        }
    }
}

/// All names of a list of variables, ranges counted out; those that are too long are an error
/// later.
fn spell(vars: &[Var]) -> impl Iterator<Item = String> {
    vars.iter()
        .filter(|var| !var.is_none())
        .flat_map(|var| match var.range {
            None => vec![var.name.clone()],
            Some((first, end)) if end.saturating_sub(first) > MOST_NAMES => vec![],
            Some((first, end)) => (first..end).map(|i| format!("{}_{i}", var.name)).collect(),
        })
}

/// The pattern of a variable; of a range, that of its first name.
fn pattern(statement: &Statement, var: &Var) -> Result<Vec<Part>> {
    let mut out = parts(var).map_err(|detail| statement.error(detail))?;
    if let Some((first, _)) = var.range {
        out.push(Part::Text(format!("_{first}")));
    }
    Ok(out)
}

/// Numbers are looked for in the names on the left, where names that earlier statements write count
/// too, and then in those on the right, with names that others read. What one statement yields may
/// be what another needs, whichever of the two sides is known.
fn expand_ids(statements: &[Arc<Statement>], names: &Names) -> Result<Vec<Arc<Statement>>> {
    let mut count = Count::new(names);
    statements
        .iter()
        .try_for_each(|statement| count.add(statement.names(), statement))?;
    let (mut left, mut right) = (Names::known(&names.left), Names::known(&names.right));
    let mut done: Vec<Option<Vec<Arc<Statement>>>> = vec![None; statements.len()];
    loop {
        let mut progress = false;
        for backwards in [false, true] {
            for step in 0..statements.len() {
                let at = if backwards {
                    statements.len() - 1 - step
                } else {
                    step
                };
                if done[at].is_some() {
                    continue;
                }
                let side = if backwards { Side::Right } else { Side::Left };
                if let Some(made) = id_statement(
                    &statements[at],
                    side,
                    if backwards { &right } else { &left },
                    &mut count,
                )? {
                    for statement in &made {
                        left.extend(spell(&statement.right));
                        right.extend(spell(&statement.left));
                    }
                    done[at] = Some(made);
                    progress = true;
                }
            }
        }
        if !progress {
            break;
        }
    }
    let mut out = Vec::new();
    for (statement, made) in statements.iter().zip(done) {
        let none = || {
            statement.error(
                "no tensor's name fits the pattern, on neither side: \
                 there is no number to put in for the ids",
            )
        };
        out.extend(made.ok_or_else(none)?);
    }
    Ok(out)
}

/// A statement for each combination that one side's names have; `None` where they have none.
fn id_statement(
    statement: &Arc<Statement>,
    side: Side,
    names: &BTreeSet<String>,
    count: &mut Count,
) -> Result<Option<Vec<Arc<Statement>>>> {
    let patterns = |vars: &[Var]| {
        vars.iter()
            .map(|var| pattern(statement, var))
            .collect::<Result<Vec<_>>>()
    };
    let (left, right) = (patterns(&statement.left)?, patterns(&statement.right)?);
    let wanted: BTreeSet<_> = left.iter().chain(&right).flat_map(|p| ids(p)).collect();
    if wanted.is_empty() {
        return Ok(Some(vec![statement.clone()]));
    }
    if !left.iter().chain(&right).any(|p| ids(p) == wanted) {
        return Err(statement.error(
            "no name of the statement has all of its ids, \
             so that it is not said which numbers belong together",
        ));
    }
    let here = if side == Side::Left { &left } else { &right };
    let bindings: BTreeSet<Binding> = here
        .iter()
        .filter(|p| ids(p) == wanted)
        .flat_map(|p| matches(p, side, names))
        .map(|(b, _)| b)
        .collect();
    if bindings.is_empty() {
        return Ok(None);
    }
    count.add(
        statement.names().saturating_mul(bindings.len() as u64),
        statement,
    )?;
    let fill = |vars: &[Var], side, binding: &Binding| -> Result<Vec<Var>> {
        let fill_one = |var: &Var| {
            parts(var)
                .and_then(|p| substitute(&p, side, binding))
                .map(|name| var.named(name))
                .map_err(|detail| statement.error(detail))
        };
        vars.iter().map(fill_one).collect()
    };
    let make = |binding: &Binding| {
        let (left, right) = (
            fill(&statement.left, Side::Left, binding)?,
            fill(&statement.right, Side::Right, binding)?,
        );
        Ok(statement.derive(Macro::Ids.name(), left, right, statement.attrs.clone()))
    };
    bindings
        .iter()
        .map(make)
        .collect::<Result<Vec<_>>>()
        .map(Some)
}

fn expand_ranges(statement: &Arc<Statement>) -> Result<Arc<Statement>> {
    let ranges = || {
        statement
            .left
            .iter()
            .chain(&statement.right)
            .filter_map(|var| var.range)
    };
    if ranges().next().is_none() {
        return Ok(statement.clone());
    }
    if let Some((first, end)) = ranges().find(|(first, end)| first >= end) {
        return Err(statement.error(format!("the range [{first}:{end}] is empty")));
    }
    if ranges().any(|(first, end)| end - first > MOST_NAMES) {
        return Err(statement.error(format!("a range of more than {MOST_NAMES} names")));
    }
    let expand = |vars: &[Var]| -> Vec<Var> {
        let one = |var: &Var| {
            spell(std::slice::from_ref(var))
                .map(|name| Var {
                    range: None,
                    ..var.named(name)
                })
                .collect()
        };
        vars.iter()
            .flat_map(|var| {
                if var.range.is_some() {
                    one(var)
                } else {
                    vec![var.clone()]
                }
            })
            .collect()
    };
    Ok(statement.derive(
        Macro::Range.name(),
        expand(&statement.left),
        expand(&statement.right),
        statement.attrs.clone(),
    ))
}

fn expand_stars(statements: &[Arc<Statement>], names: &Names) -> Result<Vec<Arc<Statement>>> {
    let starred = |var: &Var| !var.quoted && var.name.contains('*');
    let (mut left, mut right) = (Names::known(&names.left), Names::known(&names.right));
    right.extend(
        statements
            .iter()
            .flat_map(|s| &s.left)
            .filter(|var| !starred(var))
            .map(|var| var.name.clone()),
    );
    let mut out = Vec::with_capacity(statements.len());
    let mut count = Count::new(names);
    for statement in statements {
        let made = if statement.left.iter().chain(&statement.right).any(starred) {
            let mut expand = |vars: &[Var], side, known: &BTreeSet<String>| -> Result<Vec<Var>> {
                let mut out = Vec::new();
                for var in vars {
                    match starred(var) {
                        true => {
                            let found = star(statement, var, side, known)?;
                            count.add(found.len() as u64, statement)?;
                            out.extend(found);
                        }
                        false => out.push(var.clone()),
                    }
                }
                Ok(out)
            };
            let (l, r) = (
                expand(&statement.left, Side::Left, &left)?,
                expand(&statement.right, Side::Right, &right)?,
            );
            statement.derive(Macro::Star.name(), l, r, statement.attrs.clone())
        } else {
            statement.clone()
        };
        left.extend(spell(&made.right));
        out.push(made);
    }
    Ok(out)
}

/// The names that a `*` stands for, by their numbers.
fn star(
    statement: &Statement,
    var: &Var,
    side: Side,
    known: &BTreeSet<String>,
) -> Result<Vec<Var>> {
    let pattern = parts(var).map_err(|detail| statement.error(detail))?;
    if pattern.iter().filter(|part| **part == Part::Star).count() > 1 {
        return Err(statement.error(format!(
            "'{}': one * per name; numbers that belong together are $LAYER_ID and $EXPERT_ID",
            var.name
        )));
    }
    let found: BTreeSet<u64> = matches(&pattern, side, known)
        .into_iter()
        .filter_map(|(_, number)| number)
        .collect();
    if found.is_empty() {
        let whose = if side == Side::Left {
            "the source has and no statement before writes"
        } else {
            "is known of the destination"
        };
        return Err(statement.error(format!(
            "'{}': no name with a number for * {whose}",
            var.name
        )));
    }
    Ok(found
        .into_iter()
        .map(|number| var.named(var.name.replacen('*', &number.to_string(), 1)))
        .collect())
}

/// A transposition before the statement for what it reads, after it for what it writes.
fn expand_transposes(statement: &Arc<Statement>) -> Vec<Arc<Statement>> {
    if !statement
        .left
        .iter()
        .chain(&statement.right)
        .any(|var| var.transpose)
    {
        return vec![statement.clone()];
    }
    let plain = |var: &Var| Var {
        transpose: false,
        ..var.clone()
    };
    let temporary = |var: &Var| {
        if var.transpose {
            plain(&var.named(format!("{}_transpose_tmp", var.name)))
        } else {
            var.clone()
        }
    };
    let reversed = || vec![Attr::Set("permute", Value::List(vec![]))];
    let by = Macro::Transpose.name();
    let mut out: Vec<Arc<Statement>> = Vec::new();
    let mut seen = BTreeSet::new();
    for var in statement.left.iter().filter(|var| var.transpose) {
        if seen.insert(&var.name) {
            out.push(statement.derive(by, vec![plain(var)], vec![temporary(var)], reversed()));
        }
    }
    let rename = |vars: &[Var]| vars.iter().map(temporary).collect();
    out.push(statement.derive(
        by,
        rename(&statement.left),
        rename(&statement.right),
        statement.attrs.clone(),
    ));
    for var in statement.right.iter().filter(|var| var.transpose) {
        out.push(statement.derive(by, vec![temporary(var)], vec![plain(var)], reversed()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::Mapping;
    use super::*;

    fn expand(text: &str) -> String {
        let names = Names {
            left: (0..300).map(|i| (format!("a.{i}"), 1)).collect(),
            ..Names::default()
        };
        let program = Mapping::parse(text).and_then(|mapping| mapping.expand(&names));
        program.map_or_else(
            |error| error.to_string(),
            |program| format!("{} steps", program.steps.len()),
        )
    }

    #[test]
    fn a_short_text_cannot_ask_for_millions_of_names() {
        let ranges = vec!["x[0:65536]"; 3].join(", ");
        let stars = vec!["a.*"; 500].join(", ");
        let heads = "num_heads=4096, num_key_value_groups=4096";
        let fused = (0..6)
            .map(|i| format!("a.{i} -> q{i}, k{i}, v{i}, fused_qkv, {heads}\n"))
            .collect::<String>();
        for text in [
            &format!("{ranges} -> y, axis=0"),
            "a.$LAYER_ID -> x.$LAYER_ID[0:500], axis=0",
            &format!("{stars} -> y, axis=0"),
            &fused,
        ] {
            let error = expand(text);
            assert!(
                error.contains("more than 135872 names in all statements"),
                "{}",
                &error[..error.len().min(300)]
            );
            assert!(
                error.len() < 20_000,
                "a trace of {} bytes helps nobody",
                error.len()
            );
        }
        assert_eq!(
            expand("a.$LAYER_ID -> x.$LAYER_ID[0:400], axis=0"),
            "300 steps"
        );
    }
}
