//! What was measured, as text.

use super::{KernelRow, Report, StepRow};
use anymesh_bench::step::Measured;
use std::fmt::Write as _;

/// The columns of a table, each as wide as its widest cell; the first is flush left.
fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        let cell = |row: &Vec<String>| row.get(c).map_or(0, |cell| cell.chars().count());
        rows.iter().map(cell).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let width = widths[c];
            let _ = match c {
                0 => write!(line, "{cell:width$}"),
                _ => write!(line, "  {cell:>width$}"),
            };
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

fn us(time: f64) -> String {
    match time < 100.0 {
        true => format!("{time:.2}"),
        false => format!("{time:.0}"),
    }
}

fn kernels(rows: &[KernelRow], copy_rate: f64, peers: &[&str]) -> String {
    let mut cells = vec![vec![
        "kernel".to_string(),
        "us".into(),
        "rate".into(),
        "of copy".into(),
    ]];
    for peer in peers {
        cells[0].extend([format!("{peer} us"), "ratio".into()]);
    }
    for KernelRow { row, peers: times } in rows {
        let of_copy = match row.bytes {
            0 => String::new(),
            bytes => format!("{:.0} %", bytes as f64 / row.us / 10.0 / copy_rate),
        };
        let rate = row.rate().unwrap_or_default();
        let mut line = vec![row.name.clone(), us(row.us), rate, of_copy];
        for peer in peers {
            match times.get(*peer) {
                Some(time) => line.extend([us(*time), format!("{:.2}", time / row.us)]),
                None => line.extend([String::new(), String::new()]),
            }
        }
        cells.push(line);
    }
    columns(&cells)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn step(row: &StepRow) -> String {
    let head = ["", "ms", "host ms", "peak GiB", "ratio", "losses apart"];
    let mut cells = vec![head.map(String::from).to_vec()];
    cells[0][0] = row.title.clone();
    let numbers = |name: &str, of: &Measured| {
        let host = match of.host_ms.is_empty() {
            true => String::new(),
            false => format!("{:.2}", median(&of.host_ms)),
        };
        let peak = match of.peak {
            0 => String::new(),
            bytes => format!("{:.3}", bytes as f64 / (1u64 << 30) as f64),
        };
        vec![
            name.to_string(),
            format!("{:.2}", median(&of.ms)),
            host,
            peak,
        ]
    };
    cells.push(numbers("anymesh", &row.ours));
    let mut failed = String::new();
    for (name, of) in &row.peers {
        match of {
            Ok(of) => {
                let mut line = numbers(name, of);
                line.push(format!("{:.2}", median(&of.ms) / median(&row.ours.ms)));
                let pairs = of.losses.iter().zip(&row.ours.losses);
                let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                line.push(format!("{apart:.1e}"));
                cells.push(line);
            }
            Err(error) => {
                let _ = writeln!(failed, "{name} failed: {error}");
            }
        }
    }
    columns(&cells) + &failed
}

/// The tables, and what they are.
pub(super) fn text(report: &Report) -> String {
    let mut out = format!("{}: {}\n", report.device, report.description);
    for line in report.installed.lines(&report.device) {
        let _ = writeln!(out, "{line}");
    }
    let _ = writeln!(
        out,
        "a copy reads and writes {:.1} GB/s; a ratio is the time of the peer over that of anymesh: above 1 anymesh is faster",
        report.copy_rate
    );
    if !report.kernels.is_empty() {
        let mut peers: Vec<&str> = vec![];
        for name in report.kernels.iter().flat_map(|row| row.peers.keys()) {
            if !peers.contains(&name.as_str()) {
                peers.push(name);
            }
        }
        peers.sort_unstable();
        let _ = write!(
            out,
            "\n{}",
            kernels(&report.kernels, report.copy_rate, &peers)
        );
    }
    for row in &report.steps {
        let _ = write!(out, "\n{}", step(row));
    }
    out
}
