//! Tables, bars, curves and schedules of any data.

use crate::{inspect::check, svg};
use anymesh_show::{Bar, Bars, Curve, Gantt, Lane, Show, Span, Table, Unit};

#[test]
fn bars_of_any_number_and_size() {
    let values = [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-300, 1.0, 1e18];
    for count in [0, 1, 3, 20, 21, 5000] {
        for unit in [Unit::Bytes, Unit::Seconds, Unit::Count] {
            let bars =
                (0..count).map(|i| Bar::new(format!("op {i}"), [values[i % 7], values[i % 5]]));
            svg(&Bars {
                title: "bars".into(),
                unit,
                parts: vec!["one".into(), "two".into()],
                totals: false,
                bars: bars.collect(),
            });
        }
    }
    let many = Bars {
        title: "parts".into(),
        unit: Unit::Bytes,
        parts: (0..40).map(|i| format!("part {i}")).collect(),
        totals: false,
        bars: vec![Bar::new("all", (0..40).map(f64::from))],
    };
    svg(&many);
}

#[test]
fn what_the_other_bars_come_to_is_not_lost() {
    let bars = Bars {
        title: "many".into(),
        unit: Unit::Count,
        parts: vec![],
        totals: false,
        bars: (0..100)
            .map(|i| Bar::new(format!("op {i}"), [1.0]))
            .collect(),
    };
    assert!(svg(&bars).contains("<title>81 others: 81</title>"));
}

#[test]
fn curves_of_any_points() {
    let curve = |points: Vec<(f64, f64)>| Curve::new("loss", "nats").line("train", points);
    let wave = |n: usize| {
        (0..n)
            .map(|i| (i as f64, 2.0 + (i as f64 / 50.0).sin()))
            .collect::<Vec<_>>()
    };
    let cases = [
        vec![],
        vec![(0.0, 1.0)],
        vec![(0.0, f64::NAN), (1.0, f64::INFINITY)],
        vec![(0.0, 3.0), (1.0, 3.0)],
        vec![(5.0, 1.0), (5.0, 2.0)],
        vec![(0.0, 1e-12), (1.0, 1e12), (2.0, -5.0), (3.0, 0.0)],
        vec![(f64::NAN, 1.0), (f64::NEG_INFINITY, 2.0)],
        vec![(-1e300, -1e300), (1e300, 1e300)],
        vec![(0.0, f64::MAX), (1.0, f64::MIN)],
        vec![(0.0, 1.0000000000000002), (1.0, 1.0)],
        wave(100_000),
    ];
    for points in cases {
        let picture = svg(&curve(points.clone()));
        assert!(picture.len() < 40_000, "{}", picture.len());
        svg(&curve(points).log());
    }
    let many = (0..40).fold(Curve::new("many", ""), |c, i| {
        c.line(format!("line {i}"), wave(300))
    });
    svg(&many);
}

#[test]
fn a_gap_ends_a_line_and_is_counted() {
    let mut points: Vec<(f64, f64)> = (0..10).map(|i| (f64::from(i), f64::from(i))).collect();
    points[4].1 = f64::NAN;
    let picture = svg(&Curve::new("loss", "").line("a", points));
    assert_eq!(picture.matches("<path class=\"wire").count(), 2);
    assert!(picture.contains("One value is no number"));
}

#[test]
fn a_spike_survives_thinning() {
    let mut points: Vec<(f64, f64)> = (0..200_000).map(|i| (f64::from(i), 1.0)).collect();
    points[123_457].1 = 100.0;
    let picture = svg(&Curve::new("loss", "").line("a", points));
    // The highest point is at the top of the picture: one place above all others.
    let path = picture
        .split(" d=\"")
        .nth(1)
        .unwrap()
        .split('"')
        .next()
        .unwrap();
    let ys: Vec<f64> = (path.split(['M', 'L']).skip(1))
        .map(|p| p.split(' ').nth(1).unwrap().parse().unwrap())
        .collect();
    assert_eq!(ys.iter().filter(|y| **y < ys[0] - 100.0).count(), 1);
}

#[test]
fn schedules_of_any_lanes() {
    let lane = |i: usize, spans: usize| Lane {
        name: format!("stage {i}"),
        spans: (0..spans)
            .map(|s| Span {
                start: s as f64,
                end: s as f64 + 0.8,
                label: s.to_string(),
                kind: s % 3,
            })
            .collect(),
    };
    let gantt = |lanes: Vec<Lane>| Gantt {
        title: "schedule".into(),
        unit: Unit::Seconds,
        kinds: vec!["forward".into(), "backward".into(), "send".into()],
        lanes,
    };
    svg(&gantt(vec![]));
    svg(&gantt(vec![lane(0, 0)]));
    svg(&gantt((0..8).map(|i| lane(i, 12)).collect()));
    svg(&gantt((0..300).map(|i| lane(i, 10)).collect()));
    assert!(check(&gantt(vec![lane(0, 20_000)])).is_some());
    let odd = [
        (f64::NAN, 1.0),
        (2.0, 1.0),
        (0.0, f64::INFINITY),
        (3.0, 3.0),
    ];
    let spans = odd.map(|(start, end)| Span {
        start,
        end,
        ..Span::default()
    });
    svg(&gantt(vec![Lane {
        name: "odd".into(),
        spans: spans.into(),
    }]));
}

#[test]
fn lines_of_the_grid_do_not_cross_the_lanes() {
    let span = Span {
        start: 0.0,
        end: 4.0,
        label: "a label".into(),
        kind: 0,
    };
    let lane = |name: &str| Lane {
        name: name.into(),
        spans: vec![span.clone()],
    };
    let picture = svg(&Gantt {
        title: "schedule".into(),
        unit: Unit::Seconds,
        kinds: vec![],
        lanes: vec![lane("one"), lane("two")],
    });
    let document = roxmltree::Document::parse(&picture).unwrap();
    let of = |class: &str| -> Vec<roxmltree::Node> {
        let all = document.descendants();
        all.filter(|n| n.attribute("class").is_some_and(|c| c.starts_with(class)))
            .collect()
    };
    let number = |node: &roxmltree::Node, name: &str| -> f64 {
        node.attribute(name).unwrap().parse().unwrap()
    };
    let (lines, boxes) = (of("grid"), of("fill"));
    assert!(lines.len() > 2 && boxes.len() == 2);
    for line in &lines {
        let dashes = line.attribute("stroke-dasharray").unwrap();
        let (on, off) = dashes.split_once(' ').unwrap();
        let (on, off): (f64, f64) = (on.parse().unwrap(), off.parse().unwrap());
        for shape in &boxes {
            // The middle of each box is where its label is.
            let middle = number(shape, "y") + number(shape, "height") / 2.0;
            let along = middle - number(line, "y1") + number(line, "stroke-dashoffset");
            assert!(
                along % (on + off) > on + 5.0,
                "a line at {along} of {dashes}"
            );
        }
    }
}

#[test]
fn a_table_of_any_rows() {
    let mut table = Table::new("rows", &["a", "b"]);
    assert!(check(&table).is_none());
    for i in 0..10_000 {
        table.row([i.to_string(), "x".repeat(i % 300)]);
    }
    table.row(["only one"]);
    table.row(["one", "two", "three too many"]);
    check(&table);
    assert!(table.text().ends_with("… and 9,602 more"));
}

#[test]
fn schedules_and_steps_of_any_kind() {
    use anymesh_schedule::{Costs, NAMES, build};
    use anymesh_simulate::{Layout, compare, estimate, machine, preset};
    let mut shown = 0;
    for name in NAMES {
        let chunks = if ["zbv", "dualpipev"].contains(&name) {
            2
        } else {
            1
        };
        // One that is searched for needs a limit.
        let Ok(schedule) = build(name, 4, chunks, 8) else {
            continue;
        };
        shown += 1;
        let timing = schedule.timing(&Costs::default()).unwrap();
        let picture = svg(&timing);
        assert!(picture.contains("8 micro-batches"), "{name}");
        assert_eq!(picture, svg(&schedule));
        assert!(timing.text().contains("makespan"));
    }
    assert!(shown >= 8, "{shown}");
    let (model, machine) = (
        preset("llama-3-8b").unwrap().model,
        machine("h100").unwrap(),
    );
    let layout = |pp, zero| Layout {
        pp,
        zero,
        dp: 2,
        batch: 32,
        ..Layout::default()
    };
    let one = estimate(&model, &machine, &layout(1, 1)).unwrap();
    let four = estimate(&model, &machine, &layout(4, 1)).unwrap();
    svg(&one);
    let page = four.html();
    check(&four);
    for text in [
        "pipeline rank 3",
        "what a rank of the pipeline holds",
        "stages, with one micro-batch",
    ] {
        assert!(page.contains(text), "{text}");
    }
    let table = compare(&four, &estimate(&model, &machine, &layout(4, 3)).unwrap());
    assert!(table.html().contains("dp bytes") && table.text().contains("closed forms"));
}
