//! The mapping language: text, statements, programs, what they yield, and back.
//!
//! The input is a byte of options and the text.

#![no_main]

use anymesh_checkpoint::Source;
use anymesh_checkpoint::map::{
    Derivation, Expr, Mapped, Mapping, Names, Op, Program, Recipe, Statement,
};
use anymesh_fuzz::expected::{self, Fixed};
use anymesh_fuzz::{SMALL, assert_regions_agree, region};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;

fuzz_target!(|data: &[u8]| {
    let Some((options, text)) = data.split_first() else {
        return;
    };
    let Ok(text) = std::str::from_utf8(text) else {
        return;
    };
    let Ok(mapping) = Mapping::parse(text) else {
        return;
    };
    for statement in &mapping.statements {
        let again = Mapping::parse(&statement.to_string()).expect("a statement that prints itself");
        assert_eq!(again.statements.len(), 1, "{statement}");
        assert_eq!(plain(statement), plain(&again.statements[0]));
    }
    let source = Fixed::get();
    let degree = usize::from(options >> 4).max(1);
    let here: BTreeMap<String, usize> = source
        .tensors()
        .keys()
        .map(|name| (name.clone(), degree))
        .collect();
    let (only_mapped, reverse) = (options & 1 != 0, options & 2 != 0);
    let names = if reverse {
        Names {
            left: BTreeMap::new(),
            right: here,
        }
    } else {
        Names {
            left: here,
            right: BTreeMap::new(),
        }
    };
    let Ok(mut program) = mapping.expand(&names) else {
        return;
    };
    assert_prints_itself(&program, &names);
    if reverse {
        let Ok(back) = program.reverse() else { return };
        program = back;
    }
    let Ok(recipe) = Recipe::new(&program, source.tensors(), None, only_mapped) else {
        return;
    };
    let mapped = Mapped::with_recipe(source, recipe);
    assert_read(&mapped);
    if let Ok(back) = program
        .complete(source.tensors())
        .and_then(|program| program.reverse())
    {
        lead_back(mapped, &back);
    }
});

/// A statement without its history.
fn plain(statement: &Statement) -> impl PartialEq + std::fmt::Debug {
    (
        statement.left.clone(),
        statement.right.clone(),
        statement.attrs.clone(),
    )
}

/// A program is kept as text and read again.
fn assert_prints_itself(program: &Program, names: &Names) {
    // Of a very long one a part was printed as statements already.
    if program
        .steps
        .iter()
        .map(|step| step.inputs.len() + step.outputs.len())
        .sum::<usize>()
        > 1 << 12
    {
        return;
    }
    let text = program.to_string();
    let again = Mapping::parse(&text)
        .and_then(|mapping| mapping.expand(names))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let steps = |program: &Program| {
        program
            .steps
            .iter()
            .map(|s| (s.inputs.clone(), s.outputs.clone(), s.ops.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(steps(&again), steps(program), "{text}");
}

/// Every tensor has the elements that its expression names, read whole and read region by region.
fn assert_read<S: Source>(mapped: &Mapped<S>) {
    let mut steps = 1 << 18;
    for (name, info) in mapped.tensors() {
        let expr = mapped.recipe().expr(name).expect("it is there");
        // What no statement touched is only passed on.
        if matches!(&expr.derivation, Derivation::Source(of) if of == name) {
            continue;
        }
        if info.numel() <= SMALL {
            let whole = mapped.read_all(name).expect("what is mapped can be read");
            if let Some(expected) = expected::bytes(expr, &info.whole(), &mut steps) {
                assert_eq!(whole, expected, "'{name}' {info:?}");
            }
            assert_regions_agree(mapped, name, info, &whole);
        } else {
            let mut budget = SMALL;
            let middle: Vec<usize> = info.shape.iter().map(|n| n / 2).collect();
            let mut few = |n: &usize| {
                let size = (n - n / 2).min(3).min(budget);
                budget /= size;
                size
            };
            let shape: Vec<usize> = info.shape.iter().map(&mut few).collect();
            let part = region(&middle, &shape);
            let mut found = vec![0xaa; part.numel() * info.dtype.size()];
            mapped
                .read(name, &part, &mut found)
                .expect("what is mapped can be read");
            if let Some(expected) = expected::bytes(expr, &part, &mut steps) {
                assert_eq!(found, expected, "'{name}' {info:?} {part:?}");
            }
        }
    }
}

/// Through the inverse, every tensor that is there again is what it was.
fn lead_back(mapped: Mapped<Fixed>, back: &Program) {
    // A cast to an integer drops what it has no place for.
    let loses = |op: &Op| matches!(op, Op::Cast { from, to } if !to.is_float() || from.is_some_and(|from| !from.is_float()));
    if back.steps.iter().any(|step| step.ops.iter().any(loses)) {
        return;
    }
    let names = Names {
        left: mapped
            .tensors()
            .keys()
            .map(|name| (name.clone(), 1))
            .collect(),
        right: BTreeMap::new(),
    };
    assert_prints_itself(back, &names);
    let Ok(recipe) = Recipe::new(back, mapped.tensors(), None, false) else {
        return;
    };
    let back = Mapped::with_recipe(mapped, recipe);
    let source = Fixed::get();
    for (name, info) in back.tensors() {
        let touched =
            |expr: &Expr| !matches!(&expr.derivation, Derivation::Source(of) if of == name);
        if source.tensors().contains_key(name)
            && info.numel() <= SMALL
            && back.recipe().expr(name).is_some_and(touched)
        {
            assert_eq!(source.tensors()[name], *info, "'{name}'");
            assert_eq!(
                back.read_all(name),
                source.read_all(name),
                "'{name}' {info:?}"
            );
        }
    }
}
