//! Whether the programs in tests/notebooks are those of the notebooks. It is apart from them, so that
//! it can write them where they do not compile.

#[path = "notebooks/written.rs"]
mod written;

#[test]
fn programs_are_those_of_the_notebooks() {
    for (notebook, program) in written::NOTEBOOKS {
        let text = written::program(notebook);
        if std::env::var_os("ANYMESH_UPDATE").is_some() {
            std::fs::write(program, &text).expect("written");
        }
        let kept = std::fs::read_to_string(program).unwrap_or_default();
        assert!(
            kept == text,
            "{program} is not {notebook}: ANYMESH_UPDATE=1 cargo test --test notebook_programs writes it again"
        );
    }
}
