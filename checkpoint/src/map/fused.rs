//! The macros for fused projections: cut into heads or blocks, joined in another order.
//!
//! | word | how the fused tensor lies |
//! |---|---|
//! | `fused_qkv` | for each key-value group its query heads, its key, its value |
//! | `fused_qkv_old` | for each rank of tensor parallelism its query heads, its keys, its values |
//! | `fused_ffn` | for each rank of tensor parallelism its block of gate, its block of up |

use super::names::Names;
use super::statement::{Attr, Statement, Var};
use crate::Result;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// More heads or blocks than this are a typing mistake.
const MOST_PARTS: u64 = 1 << 12;

/// Statements, and which of them read and write a name: a search through all of them for each name
/// would take far too long where there are many.
pub(super) struct Uses<'s> {
    statements: &'s [Arc<Statement>],
    read: HashMap<&'s str, Vec<usize>>,
    written: HashMap<&'s str, Vec<usize>>,
}

impl<'s> Uses<'s> {
    pub(super) fn new(statements: &'s [Arc<Statement>]) -> Self {
        let index = |side: fn(&Statement) -> &[Var]| {
            let mut out: HashMap<&str, Vec<usize>> = HashMap::new();
            for (at, statement) in statements.iter().enumerate() {
                side(statement)
                    .iter()
                    .for_each(|var| out.entry(&var.name).or_default().push(at));
            }
            out
        };
        Self {
            statements,
            read: index(|statement| &statement.left),
            written: index(|statement| &statement.right),
        }
    }

    /// The names that a name becomes in the first statement after `at` that reads it.
    fn onwards(&self, name: &str, at: usize) -> Option<(&'s [Var], usize)> {
        let found = *self.read.get(name)?.iter().find(|other| **other > at)?;
        Some((&self.statements[found].right, found))
    }

    /// The names that a name comes from in the last statement before `at` that writes it.
    fn back(&self, name: &str, at: usize) -> Option<(&'s [Var], usize)> {
        let found = *self
            .written
            .get(name)?
            .iter()
            .rev()
            .find(|other| **other < at)?;
        Some((&self.statements[found].left, found))
    }
}

/// The statements that the fused macro of one statement stands for, or the statement itself; `by`
/// is what their traces call the macro.
pub(super) fn expand(
    uses: &Uses<'_>,
    at: usize,
    names: &Names,
    by: &'static str,
) -> Result<Vec<Arc<Statement>>> {
    let statement = &uses.statements[at];
    let words: Vec<usize> = (0..statement.attrs.len())
        .filter(|i| matches!(statement.attrs[*i], Attr::Word(_)))
        .collect();
    let Some(&place) = words.first() else {
        return Ok(vec![statement.clone()]);
    };
    let Attr::Word(word) = statement.attrs[place] else {
        return Ok(vec![statement.clone()]);
    };
    if words.len() > 1 {
        return Err(statement.error("one fused macro per statement"));
    }
    let fusing = Fusing {
        statement,
        word,
        members: if word == "fused_ffn" { 2 } else { 3 },
        axis: axis(statement)?,
    };
    let degrees = Degrees {
        left: fusing.degree(uses, at, names, "src_degree")?,
        right: fusing.degree(uses, at, names, "dst_degree")?,
    };
    let (left, right) = fusing.layouts(degrees)?;

    // Attributes before the word hold for what is read, those after it for what is written.
    let own = |attr: &&Attr| {
        !matches!(
            attr,
            Attr::Word(_)
                | Attr::Set(
                    "axis" | "num_heads" | "num_key_value_groups" | "src_degree" | "dst_degree",
                    _
                )
        )
    };
    let before: Vec<Attr> = statement.attrs[..place]
        .iter()
        .filter(own)
        .cloned()
        .collect();
    let after: Vec<Attr> = statement.attrs[place..]
        .iter()
        .filter(own)
        .cloned()
        .collect();
    let plain = |names: Vec<String>| names.into_iter().map(Var::exact).collect::<Vec<_>>();
    let cut = left.into_iter().zip(&statement.left).map(|(parts, var)| {
        statement.derive(
            by,
            vec![var.clone()],
            plain(parts),
            before
                .iter()
                .cloned()
                .chain([fusing.axis.clone()])
                .collect(),
        )
    });
    let join = right.into_iter().zip(&statement.right).map(|(parts, var)| {
        statement.derive(
            by,
            plain(parts),
            vec![var.clone()],
            [fusing.axis.clone()]
                .into_iter()
                .chain(after.iter().cloned())
                .collect(),
        )
    });
    Ok(cut.chain(join).collect())
}

/// The axis attribute: 1 unless it is given, which is where a weight's output features are; a bias
/// has axis 0.
fn axis(statement: &Statement) -> Result<Attr> {
    let given: Vec<&Attr> = statement
        .attrs
        .iter()
        .filter(|attr| matches!(attr, Attr::Set("axis", _)))
        .collect();
    match given[..] {
        [] => Ok(Attr::int("axis", 1)),
        [attr] => Ok(attr.clone()),
        _ => Err(statement.error("axis= may be given once")),
    }
}

/// The parts of each variable of a side.
type Layout = Vec<Vec<String>>;

#[derive(Clone, Copy)]
struct Degrees {
    left: usize,
    right: usize,
}

struct Fusing<'s> {
    statement: &'s Arc<Statement>,
    word: &'static str,
    members: usize,
    axis: Attr,
}

impl Fusing<'_> {
    /// For each variable on the left the parts it is cut into, for each on the right those it is
    /// joined of.
    fn layouts(&self, degrees: Degrees) -> Result<(Layout, Layout)> {
        let (l, r) = (self.statement.left.len(), self.statement.right.len());
        let fits = (l == 1 || l == self.members)
            && (r == 1 || r == self.members)
            && (l == 1 || r == 1)
            && (self.word != "fused_qkv" || l != r);
        if !fits {
            let both = if self.word == "fused_qkv" {
                ""
            } else {
                ", or one fused tensor with one"
            };
            let what = if self.members == 2 {
                "gate and up"
            } else {
                "query, key and value"
            };
            return Err(self.statement.error(format!(
                "{} joins {what} ({} names) with one fused tensor{both}; here are {l} -> {r}",
                self.word, self.members
            )));
        }
        let members: Layout = match self.word {
            "fused_ffn" => {
                let blocks = match (l, r) {
                    (1, 1) => lcm(degrees.left, degrees.right),
                    (1, _) => Some(degrees.left),
                    _ => Some(degrees.right),
                };
                let blocks = blocks
                    .filter(|n| *n as u64 <= MOST_PARTS)
                    .ok_or_else(|| self.too_many())?;
                ["GATE", "UP"]
                    .map(|name| {
                        (0..blocks)
                            .map(|i| format!("fused_ffn_tmp.{name}_{i}"))
                            .collect()
                    })
                    .into()
            }
            _ => {
                let (heads, groups) = (
                    self.count("num_heads")?,
                    self.count("num_key_value_groups")?,
                );
                if heads % groups != 0 {
                    return Err(self.statement.error(format!(
                        "num_heads={heads} is no multiple of num_key_value_groups={groups}"
                    )));
                }
                let vars = if l > 1 {
                    &self.statement.left
                } else {
                    &self.statement.right
                };
                let part = |member: usize, i: usize| match self.word {
                    "fused_qkv" => vars
                        .get(member)
                        .map_or(String::new(), |var| format!("{}{i}", var.name)),
                    _ => format!("fused_qkv_old_tmp.{}_{i}", ["Q", "K", "V"][member]),
                };
                [heads, groups, groups]
                    .into_iter()
                    .enumerate()
                    .map(|(member, count)| (0..count).map(|i| part(member, i)).collect())
                    .collect()
            }
        };
        let side = |count: usize, degree: usize| -> Result<Layout> {
            if count > 1 {
                return Ok(members.clone());
            }
            let ranks = if self.word == "fused_qkv" {
                members[1].len()
            } else {
                degree
            };
            if let Some(count) = members
                .iter()
                .map(Vec::len)
                .find(|count| count % ranks != 0)
            {
                return Err(self.statement.error(format!(
                    "{count} parts cannot be dealt to a tensor-parallel degree of {ranks}"
                )));
            }
            // Each rank (or group) has its share of every member, one after the other.
            let share = |rank: usize, member: &[String]| {
                member
                    .chunks(member.len() / ranks)
                    .nth(rank)
                    .unwrap_or_default()
                    .to_vec()
            };
            Ok(vec![
                (0..ranks)
                    .flat_map(|rank| members.iter().flat_map(move |member| share(rank, member)))
                    .collect(),
            ])
        };
        Ok((side(l, degrees.left)?, side(r, degrees.right)?))
    }

    fn too_many(&self) -> crate::Error {
        self.statement
            .error(format!("more than {MOST_PARTS} parts"))
    }

    /// A number from 1 that the macro needs.
    fn count(&self, key: &'static str) -> Result<usize> {
        let value = self
            .statement
            .int(key)
            .ok_or_else(|| self.statement.error(format!("{} needs {key}=", self.word)))?;
        match usize::try_from(value) {
            Ok(value) if value as u64 > MOST_PARTS => Err(self.too_many()),
            Ok(value) if value > 0 => Ok(value),
            _ => Err(self
                .statement
                .error(format!("{key}={value} must be at least 1"))),
        }
    }

    /// The degree of the fused tensor on one side: as the statement says, or as known of the
    /// tensor, or of the one that a temporary name becomes (or comes from).
    fn degree(
        &self,
        uses: &Uses<'_>,
        at: usize,
        names: &Names,
        key: &'static str,
    ) -> Result<usize> {
        if self.statement.int(key).is_some() {
            return self.count(key);
        }
        let onwards = key == "dst_degree";
        let (known, vars) = if onwards {
            (&names.right, &self.statement.right)
        } else {
            (&names.left, &self.statement.left)
        };
        let mut open: Vec<(&str, usize)> = vars
            .first()
            .map(|var| (var.name.as_str(), at))
            .into_iter()
            .collect();
        let mut seen = BTreeSet::new();
        while let Some((name, at)) = open.pop() {
            if let Some(&degree) = known.get(name) {
                return Ok(degree.max(1));
            }
            if !seen.insert(name) {
                continue;
            }
            let next = if onwards {
                uses.onwards(name, at)
            } else {
                uses.back(name, at)
            };
            if let Some((vars, found)) = next {
                open.extend(vars.iter().rev().map(|var| (var.name.as_str(), found)));
            }
        }
        Ok(1)
    }
}

fn lcm(a: usize, b: usize) -> Option<usize> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::super::Mapping;
    use super::*;

    #[test]
    fn the_degree_of_a_temporary_of_thousands_of_names_is_found_in_no_time() {
        let mapping = Mapping::parse(
            "w -> x[0:60000], axis=0\nx[0:60000] -> y, axis=0\ny -> g, u, fused_ffn",
        )
        .expect("reads");
        let start = std::time::Instant::now();
        let program = mapping
            .expand(&Names::default())
            .expect("names need not be known");
        assert_eq!(program.steps.len(), 5);
        // A search through the names for each of the names takes a minute.
        assert!(start.elapsed().as_secs() < 20);
    }
}
