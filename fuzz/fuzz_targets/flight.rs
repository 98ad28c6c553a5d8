//! Flight records as `anymesh trace` reads them: one, and two of one run.

#![no_main]
#![allow(dead_code)]

#[path = "../../cli/src/trace/compare.rs"]
mod compare;
#[path = "../../cli/src/trace/record.rs"]
mod record;

use libfuzzer_sys::fuzz_target;
use record::Records;

fuzz_target!(|data: &[u8]| {
    // The text of the second begins after the first line.
    let end = data.iter().position(|b| *b == b'\n').unwrap_or(data.len());
    let (first, second) = data.split_at(end);
    let mut records = Records::new();
    for (number, text) in [first, second].into_iter().enumerate() {
        if let Ok(record) = record::parse(text, number) {
            let fits = records.values().all(|r| r.size == record.size);
            if fits {
                records.insert(number, record);
            }
        }
    }
    if !records.is_empty() {
        let comparison = compare::compare(&records);
        assert!(comparison.missing.iter().all(|p| *p < comparison.size));
        assert!(comparison.roots.iter().all(|p| *p < comparison.size));
    }
});
