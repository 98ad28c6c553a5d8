//! The pages of the book as doctests: every block of Rust in `docs/` is compiled and run by
//! `cargo test --doc`. `tests/book.rs` sees to it that no page is missing here.

/// A page, and where it is.
macro_rules! pages {
    ($($(#[$when:meta])* $name:ident $path:literal)*) => {$(
        $(#[$when])*
        #[doc = include_str!(concat!("../docs/", $path))]
        struct $name;
    )*};
}

pages! {
    #[cfg(feature = "cpu")] Introduction "introduction.md"
    #[cfg(feature = "cpu")] Meshes "concepts/meshes.md"
    #[cfg(feature = "cpu")] Partial "concepts/partial.md"
    #[cfg(feature = "cpu")] Rules "concepts/rules.md"
    #[cfg(feature = "cpu")] Ledger "concepts/ledger.md"
    #[cfg(feature = "cpu")] Plans "concepts/plans.md"
    #[cfg(feature = "cpu")] Gradients "concepts/gradients.md"
    #[cfg(feature = "cpu")] Tutorial1 "tutorial/1-tensors.md"
    #[cfg(feature = "cpu")] Tutorial2 "tutorial/2-model.md"
    #[cfg(feature = "cpu")] Tutorial3 "tutorial/3-mesh.md"
    #[cfg(feature = "cpu")] Tutorial4 "tutorial/4-costs.md"
    #[cfg(feature = "cpu")] Tutorial5 "tutorial/5-checkpoints.md"
    #[cfg(all(feature = "cpu", feature = "train"))] Tutorial6 "tutorial/6-trainer.md"
    #[cfg(feature = "cpu")] Tutorial7 "tutorial/7-processes.md"
    #[cfg(feature = "cpu")] Programs "programs.md"
    #[cfg(all(feature = "cpu", feature = "train"))] Training "training.md"
    Pipelines "pipelines.md"
    #[cfg(all(feature = "cpu", feature = "train"))] Experts "experts.md"
    #[cfg(all(feature = "cpu", feature = "train"))] LongSequences "long-sequences.md"
    #[cfg(feature = "train")] Simulator "simulator.md"
    #[cfg(all(feature = "cpu", feature = "train"))] Models "models.md"
    #[cfg(feature = "cpu")] Checkpoints "checkpoints.md"
    #[cfg(feature = "cpu")] Clusters "clusters.md"
    #[cfg(feature = "cpu")] DiffRun "diff-run.md"
    #[cfg(feature = "cpu")] Profile "profile.md"
    Bench "bench.md"
    #[cfg(feature = "cpu")] Browser "browser.md"
    #[cfg(feature = "cpu")] OwnOp "own-op.md"
    #[cfg(feature = "conformance")] OwnBackend "own-backend.md"
    Command "cli.md"
    JsonLines "json-lines.md"
    Compare "compare.md"
    Limits "limits.md"
}
