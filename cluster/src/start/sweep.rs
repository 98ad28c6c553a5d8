//! Every set of variables with each of them removed, made garbage or out of range: an error or the
//! documented meaning, never a panic.

use super::{tests::*, *};

/// What may be left out of a set without an error, because it has a documented meaning.
const MAY_LACK: [&str; 22] = [
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "ANYMESH_TOKEN",
    "ANYMESH_RUN",
    "ANYMESH_RESTART",
    "ANYMESH_FLIGHT",
    "ANYMESH_TIMEOUT",
    "ANYMESH_START_TIMEOUT",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_RESTART_COUNT",
];

#[test]
fn a_set_without_one_of_its_variables_is_an_error_or_means_the_same() {
    for set in SETS {
        let whole = read(&[set]).unwrap();
        for (name, _) in set {
            let mut vars = map(&[set]);
            vars.remove(*name);
            match Start::read_with(&vars, true) {
                // Without its number a task of SLURM is a shell in its allocation.
                Ok(start) if *name == "SLURM_PROCID" => assert_eq!(start.meeting, Meeting::Alone),
                Ok(start) => {
                    assert!(MAY_LACK.contains(name), "{name}");
                    assert_eq!((start.rank, start.size), (whole.rank, whole.size), "{name}");
                }
                Err(error) => {
                    assert!(!MAY_LACK.contains(name), "{name}: {error}");
                    told(&error, &vars);
                }
            }
        }
    }
}

/// An error lists everything that was found and says what to do, and keeps the token for itself.
fn told(error: &StartError, vars: &BTreeMap<String, String>) {
    let text = error.to_string();
    for (name, value) in vars {
        assert!(text.contains(&format!("{name}=")), "{name} in {text}");
        let short = value.chars().count() <= 120 && name != "ANYMESH_TOKEN";
        assert!(!short || text.contains(&format!("{value:?}")), "{text}");
    }
    assert!(!text.contains("secret"), "{text}");
    assert!(text.contains("set") || text.contains("pass"), "{text}");
}

/// Values that no variable of a number can have.
const GARBAGE: [&str; 15] = [
    "",
    " ",
    "x",
    "-1",
    "+1",
    "1.5",
    " 1",
    "1 ",
    "0x1",
    "1e3",
    "99999999999999999999999",
    "\u{fffd}",
    "1\0",
    "١",
    "4294967296000000000000",
];

/// Variables that are any text.
const TEXTS: [&str; 4] = [
    "TORCHELASTIC_RUN_ID",
    "ANYMESH_RUN",
    "ANYMESH_TOKEN",
    "ANYMESH_FLIGHT",
];

#[test]
fn garbage_in_any_variable_is_an_error_that_names_it() {
    let long = "9".repeat(5000);
    for set in SETS {
        for (name, _) in set {
            for value in GARBAGE.into_iter().chain([long.as_str()]) {
                let mut vars = map(&[set]);
                vars.insert(name.to_string(), value.to_string());
                let result = Start::read_with(&vars, true);
                let fine = match *name {
                    name if TEXTS.contains(&name) => !value.is_empty(),
                    // The other list is used, or it is a host of that name.
                    "SLURM_JOB_NODELIST" => true,
                    "SLURM_STEP_NODELIST" | "MASTER_ADDR" => {
                        ["x", "1.5", "0x1", "1e3"].contains(&value)
                            || (value.len() < 256
                                && !value.is_empty()
                                && value.bytes().all(|b| b.is_ascii_digit()))
                    }
                    "ANYMESH_TIMEOUT" | "ANYMESH_START_TIMEOUT" => {
                        ["+1", "1.5", "1e3"].contains(&value)
                    }
                    _ => false,
                };
                match result {
                    Ok(start) => assert!(fine, "{name}={value:?}: {start:?}"),
                    Err(error) => {
                        assert!(!fine, "{name}={value:?}: {error}");
                        assert!(error.problem.to_string().contains(name), "{error}");
                        told(&error, &vars);
                    }
                }
            }
        }
    }
}

#[test]
fn numbers_out_of_range_are_errors() {
    for (set, name, value) in [
        (TORCHRUN, "RANK", "8"),
        (TORCHRUN, "WORLD_SIZE", "0"),
        (TORCHRUN, "WORLD_SIZE", "5"),
        (TORCHRUN, "LOCAL_RANK", "4"),
        (TORCHRUN, "LOCAL_WORLD_SIZE", "0"),
        (TORCHRUN, "LOCAL_WORLD_SIZE", "9"),
        (TORCHRUN, "MASTER_PORT", "0"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "4"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "0"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "2"),
        (MPICH, "PMI_RANK", "4"),
        (MPICH, "PMI_SIZE", "0"),
        (MPICH, "MPI_LOCALNRANKS", "5"),
        (SLURM, "SLURM_PROCID", "4"),
        (SLURM, "SLURM_STEP_NUM_TASKS", "0"),
        (SLURM, "SLURM_LOCALID", "4"),
    ] {
        let error = with(set, &[(name, value)]).unwrap_err();
        assert!(
            matches!(error.problem, Problem::Range { .. }),
            "{name}={value}: {error}"
        );
    }
    for (name, value) in [
        ("MASTER_PORT", "65536"),
        ("ANYMESH_TIMEOUT", "0"),
        ("ANYMESH_TIMEOUT", "-1"),
        ("ANYMESH_TIMEOUT", "NaN"),
        ("ANYMESH_TIMEOUT", "inf"),
        ("ANYMESH_TIMEOUT", "1e300"),
    ] {
        let error = with(ANYMESH, &[(name, value)]).unwrap_err();
        assert!(
            matches!(error.problem, Problem::Value { .. }),
            "{name}={value}: {error}"
        );
    }
}

#[test]
fn any_two_sets_with_any_value_replaced_never_panic_and_keep_the_rank_in_range() {
    let values = ["0", "1", "7", "", "x", "4294967295", "node[", "False"];
    let mut read_well = 0;
    for one in SETS {
        for two in SETS {
            let both = map(&[one, two]);
            for name in both.keys() {
                for value in values {
                    let mut vars = both.clone();
                    vars.insert(name.clone(), value.to_string());
                    for mpi in [true, false] {
                        match Start::read_with(&vars, mpi) {
                            Ok(start) => {
                                assert!(start.rank < start.size);
                                assert_eq!(start.size == 1, start.meeting == Meeting::Alone);
                                read_well += 1;
                            }
                            Err(error) => told(&error, &vars),
                        }
                    }
                }
            }
        }
    }
    assert!(read_well > 100);
}

#[test]
fn every_variable_of_a_set_is_one_that_errors_list() {
    for (name, _) in SETS.iter().flat_map(|set| set.iter()) {
        assert!(variables::NAMES.contains(name), "{name}");
    }
}
