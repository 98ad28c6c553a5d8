//! Clusters of real processes: this program starts itself again, once for each process, and each
//! plays the role that it is told.

mod model;
mod mpi;
mod roles;
mod run;
mod sweep;
mod training;

use libtest_mimic::{Arguments, Trial};

fn main() {
    if let Ok(role) = std::env::var(run::ROLE) {
        std::process::exit(roles::play(&role));
    }
    let trials = [2, 3, 4, 8].map(|n| {
        Trial::test(format!("conformance_over_{n}_processes"), move || {
            run::all_succeed("conformance", n)
        })
    });
    let trials = trials
        .into_iter()
        .chain(mpi::trials())
        .chain(sweep::trials())
        .chain(training::trials())
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
