//! Names that nobody should have chosen.

use crate::{inspect::check, svg};
use anymesh_core::spmd::Ledger;
use anymesh_show::{
    Bar, Bars, Cell, Curve, Figure, Gantt, Inventory, Lane, Show, Span, StoredTensor, Table, Unit,
};

pub(crate) fn names() -> Vec<String> {
    let mut names: Vec<String> = [
        "",
        " ",
        "<script>alert(1)</script>",
        "</text></svg><b onload=x>",
        "\"'><img src=x onerror=alert(1)>",
        "]]>&amp;&#0;<!--",
        "a\u{0}b\u{1}c\u{8}d\u{b}e\u{1f}f\u{7f}g\u{ffff}",
        "line\nbreak\r\nand\ttab",
        "😀👩‍👩‍👧‍👦 emoji 🇩🇪",
        "שלום עולם مرحبا",
        "\u{202e}reversed\u{2066}\u{202d}",
        "漢字とかな",
        "e\u{301}\u{301}\u{301}\u{301}",
        "EVCXR_END_CONTENT",
        "{{template}} ${x} %s",
        "javascript:alert(1)",
    ]
    .iter()
    .map(|s| s.to_string())
    .collect();
    names.push("long.".repeat(400));
    names.push("漢".repeat(500));
    names.push("W".repeat(300));
    names
}

#[test]
fn every_chart_with_every_name() {
    let all = names();
    for name in &all {
        let bar = Bar::new(&**name, [1.0, 2.0]);
        svg(&Bars {
            title: name.clone(),
            unit: Unit::Bytes,
            parts: vec![name.clone(), name.clone()],
            totals: true,
            bars: vec![bar.clone(), bar],
        });
        let points = vec![(0.0, 1.0), (1.0, 2.0)];
        let mut curve = Curve::new(&**name, &**name)
            .line(&**name, points.clone())
            .line(&**name, points);
        curve.x = name.clone();
        svg(&curve);
        let span = |start: f64| Span {
            start,
            end: start + 1.0,
            label: name.clone(),
            kind: 0,
        };
        svg(&Gantt {
            title: name.clone(),
            unit: Unit::Seconds,
            kinds: vec![name.clone(), "other".into()],
            lanes: vec![Lane {
                name: name.clone(),
                spans: vec![span(0.0), span(1.0)],
            }],
        });
        let mut table = Table::new(&**name, &[name, "other"]);
        table.row([
            Cell {
                text: name.clone(),
                tip: name.clone(),
            },
            name.clone().into(),
        ]);
        check(&table);
        check(&Figure::new(&**name).note(&**name).table(table));
        let tensor = StoredTensor {
            name: name.clone(),
            dtype: name.clone(),
            shape: vec![usize::MAX, 2],
            layout: name.clone(),
            bytes: u64::MAX,
            pieces: 3,
        };
        svg(&Inventory {
            title: name.clone(),
            tensors: vec![tensor.clone(), tensor],
            files: vec![(name.clone(), 7)],
            facts: vec![(name.clone(), name.clone())],
        });
    }
    // All at once.
    let mut table = Table::new("names", &["name"]);
    all.iter().for_each(|name| table.row([&**name]));
    check(&table);
}

#[test]
fn types_and_notes_of_a_ledger_may_hold_anything() {
    let mesh = crate::mesh("a=2");
    let x =
        anymesh_core::Tensor::zeros([4, 4], anymesh_core::DType::F32, (&mesh, "[@a, _]")).unwrap();
    let (_, ledger) = Ledger::record(|| x.reshard("[_, @a]"));
    for name in names() {
        let mut ledger = ledger.clone();
        ledger.notes = vec![name.clone()];
        for entry in &mut ledger.entries {
            (entry.from, entry.to, entry.caller) = (name.clone(), name.clone(), name.clone());
            entry.axes = vec![name.clone(), name.clone()];
        }
        svg(&ledger);
    }
}

#[test]
fn a_name_that_is_cut_is_whole_where_a_pointer_rests() {
    let name = "a.very.long.name.".repeat(8);
    let bars = Bars {
        title: "t".into(),
        unit: Unit::Count,
        parts: vec![],
        totals: false,
        bars: vec![Bar::new(&*name, [1.0])],
    };
    let picture = svg(&bars);
    assert!(
        picture.contains(&format!("…<title>{name}</title></text>")),
        "{picture}"
    );
}

#[test]
fn errors_show_themselves() {
    for name in names() {
        let failed: Result<Table, String> = Err(name);
        check(&failed);
    }
    let fine: Result<Table, String> = Ok(Table::new("t", &["a"]));
    assert_eq!(fine.text(), "t\na");
}
