//! Names with dots in them as a tree, in which what is alike is shown once.

use super::{count, human};
use std::collections::BTreeMap;

/// What is shown of a tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Row {
    /// Dtype, shape and sharding.
    pub(crate) layout: String,
    pub(crate) bytes: usize,
    /// How it is stored, and its sum: more columns.
    pub(crate) more: Vec<String>,
}

/// A part of a name between dots; numbers are in the order of numbers.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part<'n> {
    Number(u64),
    Text(&'n str),
}

impl<'n> Part<'n> {
    fn new(text: &'n str) -> Self {
        match text.parse::<u64>() {
            // Otherwise it would be written back as another name.
            Ok(number) if number.to_string() == text => Part::Number(number),
            _ => Part::Text(text),
        }
    }
}

#[derive(Default)]
struct Node<'n> {
    row: Option<Row>,
    children: BTreeMap<Part<'n>, Node<'n>>,
}

/// A line of the tree with those below it. It stands for `times` equal ones.
#[derive(Debug, PartialEq)]
struct Item {
    label: String,
    times: usize,
    row: Option<Row>,
    children: Vec<Item>,
}

impl Item {
    /// The tensors and bytes of all that it stands for.
    fn total(&self) -> (usize, usize) {
        let own = self.row.as_ref().map_or((0, 0), |row| (1, row.bytes));
        let (n, bytes) = self
            .children
            .iter()
            .map(Item::total)
            .fold(own, |a, b| (a.0 + b.0, a.1 + b.1));
        (n * self.times, bytes * self.times)
    }
}

/// Draws the tensors as a tree. With `fold`, numbered parts that are alike are one, such as
/// `layers.{0..31}`.
pub(crate) fn draw<'n>(rows: impl IntoIterator<Item = (&'n str, Row)>, fold: bool) -> String {
    let mut root = Node::default();
    for (name, row) in rows {
        let node = name.split('.').fold(&mut root, |node, part| {
            node.children.entry(Part::new(part)).or_default()
        });
        node.row = Some(row);
    }
    let mut lines = vec![];
    for item in items(root.children, fold) {
        lines_of(&item, "", "", 1, &mut lines);
    }
    table(&lines)
}

/// The items of children, each with its label.
fn items(children: BTreeMap<Part<'_>, Node<'_>>, fold: bool) -> Vec<Item> {
    // Numbers with what they have in common.
    let mut out: Vec<(Vec<u64>, Item)> = vec![];
    for (part, node) in children {
        let item = item(node, fold);
        match part {
            Part::Text(text) => out.push((
                vec![],
                Item {
                    label: format!("{text}{}", item.label),
                    ..item
                },
            )),
            Part::Number(number) => match out
                .iter_mut()
                .find(|(numbers, other)| fold && !numbers.is_empty() && *other == item)
            {
                Some((numbers, _)) => numbers.push(number),
                None => out.push((vec![number], item)),
            },
        }
    }
    let label = |(numbers, item): (Vec<u64>, Item)| match numbers.len() {
        0 => item,
        n => Item {
            label: format!("{}{}", ranges(&numbers), item.label),
            times: item.times * n,
            ..item
        },
    };
    out.into_iter().map(label).collect()
}

/// What is at a node; the label is what comes after the node's own part.
fn item(node: Node<'_>, fold: bool) -> Item {
    let mut children = items(node.children, fold);
    match (&node.row, children.len()) {
        // A chain is one line.
        (None, 1) => {
            let only = children.swap_remove(0);
            Item {
                label: format!(".{}", only.label),
                ..only
            }
        }
        _ => Item {
            label: String::new(),
            times: 1,
            row: node.row,
            children,
        },
    }
}

/// `7`, `{0..31}`, `{0..3,8}`.
fn ranges(numbers: &[u64]) -> String {
    let mut runs: Vec<(u64, u64)> = vec![];
    for &n in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => runs.push((n, n)),
        }
    }
    let run = |&(first, last): &(u64, u64)| match last - first {
        0 => first.to_string(),
        1 => format!("{first},{last}"),
        _ => format!("{first}..{last}"),
    };
    let text = runs.iter().map(run).collect::<Vec<_>>().join(",");
    if numbers.len() == 1 {
        text
    } else {
        format!("{{{text}}}")
    }
}

/// The columns of a line and those below it. What stands above is there `outer` times.
fn lines_of(item: &Item, front: &str, below: &str, outer: usize, out: &mut Vec<Vec<String>>) {
    let times = |n: usize| {
        if n > 1 {
            format!("× {n}")
        } else {
            String::new()
        }
    };
    let mut line = vec![format!("{front}{}", item.label)];
    match &item.row {
        Some(row) => {
            line.extend([
                row.layout.clone(),
                human(row.bytes),
                times(outer * item.times),
            ]);
            line.extend(row.more.iter().cloned());
        }
        None => {
            let (n, bytes) = item.total();
            line.extend([count(n, "tensor"), human(bytes), times(outer)]);
        }
    }
    out.push(line);
    for (i, child) in item.children.iter().enumerate() {
        let (front, next) = if i + 1 == item.children.len() {
            ("└─ ", "   ")
        } else {
            ("├─ ", "│  ")
        };
        lines_of(
            child,
            &format!("{below}{front}"),
            &format!("{below}{next}"),
            outer * item.times,
            out,
        );
    }
}

/// Lines whose columns are aligned; the third, sizes, to the right.
pub(crate) fn table(lines: &[Vec<String>]) -> String {
    let width = |column: usize| {
        lines
            .iter()
            .filter_map(|line| line.get(column))
            .map(|text| text.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..lines.iter().map(Vec::len).max().unwrap_or(0))
        .map(width)
        .collect();
    let mut out = String::new();
    for line in lines {
        let cells = line
            .iter()
            .zip(&widths)
            .enumerate()
            .filter(|(_, (_, width))| **width > 0);
        let text: Vec<String> = cells
            .map(|(i, (text, &width))| {
                if i == 2 {
                    format!("{text:>width$}")
                } else {
                    format!("{text:width$}")
                }
            })
            .collect();
        out.push_str(text.join("  ").trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(layout: &str) -> Row {
        Row {
            layout: layout.into(),
            bytes: 1024,
            more: vec![],
        }
    }

    #[test]
    fn layers_that_are_alike_are_one_and_chains_are_one_line() {
        let mut rows = vec![("embed.weight".to_string(), row("f32[256]"))];
        for layer in 0..12 {
            rows.push((format!("model.layers.{layer}.up.weight"), row("f32[256]")));
            rows.push((
                format!("model.layers.{layer}.down.weight"),
                row(if layer == 3 {
                    "f32[16, 16]"
                } else {
                    "f32[256]"
                }),
            ));
            (0..4).for_each(|e| {
                rows.push((
                    format!("model.layers.{layer}.experts.{e}.w"),
                    row("f32[256]"),
                ))
            });
        }
        let named = || rows.iter().map(|(name, row)| (name.as_str(), row.clone()));
        let expected = "\
embed.weight             f32[256]      1.0 KiB
model.layers             72 tensors   72.0 KiB
├─ {0..2,4..11}          66 tensors   66.0 KiB
│  ├─ down.weight        f32[256]      1.0 KiB  × 11
│  ├─ experts.{0..3}.w   f32[256]      1.0 KiB  × 44
│  └─ up.weight          f32[256]      1.0 KiB  × 11
└─ 3                     6 tensors     6.0 KiB
   ├─ down.weight        f32[16, 16]   1.0 KiB
   ├─ experts.{0..3}.w   f32[256]      1.0 KiB  × 4
   └─ up.weight          f32[256]      1.0 KiB
";
        let squeeze = |text: &str| {
            text.lines()
                .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect::<Vec<_>>()
        };
        assert_eq!(squeeze(&draw(named(), true)), squeeze(expected));
        let all = draw(named(), false);
        assert!(
            !all.contains('{') && all.lines().count() == 1 + 1 + 12 * 4 + 12 * 4,
            "{all}"
        );
    }

    #[test]
    fn a_tensor_may_have_others_below_it_and_numbers_may_have_zeros_in_front() {
        let out = draw(
            [
                ("a", row("x")),
                ("a.b", row("y")),
                ("n.01", row("z")),
                ("n.1", row("z")),
            ],
            true,
        );
        let labels: Vec<&str> = out
            .lines()
            .map(|l| l.split("  ").next().unwrap_or(""))
            .collect();
        assert_eq!(labels, ["a", "└─ b", "n", "├─ 1", "└─ 01"]);
        assert_eq!(
            (ranges(&[5]), ranges(&[0, 1]), ranges(&[0, 1, 2, 7])),
            ("5".into(), "{0,1}".into(), "{0..2,7}".into())
        );
    }
}
