//! Programs from notebooks.

use serde_json::Value;

/// Notebooks and their programs, from the folder of the repository.
pub(crate) const NOTEBOOKS: [(&str, &str); 5] = [
    (
        "examples/notebooks/1-tensors.ipynb",
        "tests/notebooks/n1_tensors.rs",
    ),
    (
        "examples/notebooks/2-meshes.ipynb",
        "tests/notebooks/n2_meshes.rs",
    ),
    (
        "examples/notebooks/3-checkpoints.ipynb",
        "tests/notebooks/n3_checkpoints.rs",
    ),
    (
        "examples/notebooks/4-training.ipynb",
        "tests/notebooks/n4_training.rs",
    ),
    (
        "examples/notebooks/5-real-model.ipynb",
        "tests/notebooks/n5_real_model.rs",
    ),
];

/// A text that a notebook has in one piece or in lines.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::Array(lines) => lines.iter().filter_map(Value::as_str).collect(),
        other => other.as_str().unwrap_or_default().into(),
    }
}

/// The cells with code.
pub(crate) fn cells(notebook: &str) -> Vec<Value> {
    let path = format!("{}/{notebook}", env!("CARGO_MANIFEST_DIR"));
    let json = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let json: Value = serde_json::from_str(&json).unwrap_or_else(|e| panic!("{path}: {e}"));
    let cells = json["cells"].as_array().cloned().unwrap_or_default();
    let code = |cell: &Value| cell["cell_type"] == "code";
    cells.into_iter().filter(code).collect()
}

/// Whether a cell ends in a value that is shown, by what the notebook has kept of it.
fn shows(cell: &Value) -> bool {
    let outputs = cell["outputs"].as_array().into_iter().flatten();
    outputs.filter_map(|o| o["data"].get("text/html")).count() > 0
}

/// The program of a notebook: its cells in one function, so that each sees what those before it made.
pub(crate) fn program(notebook: &str) -> String {
    let mut out = format!(
        "//! Written from {notebook}: `ANYMESH_UPDATE=1 cargo test --test notebook_programs` writes it again.\n\n#![allow(unused, unreachable_pub, clippy::all)]\n\nuse crate::shown::{{Outcome, begin, line, show}};\n\nmacro_rules! println {{\n    ($($t:tt)*) => {{ line(format_args!($($t)*)) }};\n}}\n\npub(crate) fn run() -> Outcome {{\n"
    );
    for (number, cell) in cells(notebook).iter().enumerate() {
        let source = text(&cell["source"]);
        // What is said to the kernel.
        let lines: Vec<&str> = source.lines().filter(|l| !l.starts_with(':')).collect();
        let begins = |line: &str| !line.is_empty() && !line.starts_with([' ', '}', ')', ']', '/']);
        let last = lines.iter().rposition(|line| begins(line)).unwrap_or(0);
        out += &format!("    begin({number});\n");
        for (i, line) in lines.iter().enumerate() {
            if shows(cell) && i == last {
                out += "    show(&(\n";
            }
            out += match line.is_empty() {
                true => "\n".into(),
                false => format!("    {line}\n"),
            }
            .as_str();
        }
        if shows(cell) {
            out += "    ));\n";
        }
    }
    out += "    Ok(())\n}\n";
    out
}
