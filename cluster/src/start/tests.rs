//! What each launcher's variables mean.

use super::*;

pub(super) type Set = &'static [(&'static str, &'static str)];

pub(super) const TORCHRUN: Set = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("GROUP_RANK", "1"),
    ("MASTER_ADDR", "node1"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "job-7"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];
pub(super) const ANYMESH: Set = &[
    ("RANK", "1"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "127.0.0.1"),
    ("MASTER_PORT", "4000"),
    ("ANYMESH_TOKEN", "secret"),
    ("ANYMESH_RUN", "abc"),
    ("ANYMESH_RESTART", "1"),
    ("ANYMESH_FLIGHT", "flight"),
    ("ANYMESH_TIMEOUT", "20"),
    ("ANYMESH_START_TIMEOUT", "2.5"),
];
pub(super) const BY_HAND: Set = &[
    ("RANK", "0"),
    ("WORLD_SIZE", "2"),
    ("MASTER_ADDR", "[::1]"),
    ("MASTER_PORT", "65535"),
];
pub(super) const OPEN_MPI: Set = &[
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
];
pub(super) const MPICH: Set = &[
    ("PMI_RANK", "3"),
    ("PMI_SIZE", "4"),
    ("MPI_LOCALRANKID", "1"),
    ("MPI_LOCALNRANKS", "2"),
];
pub(super) const SLURM: Set = &[
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_JOB_ID", "1234"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "node[003-004]"),
    ("SLURM_JOB_NODELIST", "node[001-004]"),
    ("SLURM_RESTART_COUNT", "1"),
];
pub(super) const SETS: [Set; 6] = [TORCHRUN, ANYMESH, BY_HAND, OPEN_MPI, MPICH, SLURM];

pub(super) fn map(sets: &[&[(&str, &str)]]) -> BTreeMap<String, String> {
    let all = sets.iter().flat_map(|set| set.iter());
    all.map(|(k, v)| (k.to_string(), v.to_string())).collect()
}

pub(super) fn read(sets: &[&[(&str, &str)]]) -> Result<Start, StartError> {
    Start::read_with(&map(sets), true)
}

fn bind(host: &str, port: u16) -> Meeting {
    let host = host.to_string();
    Meeting::Bind { host, port }
}

/// Rank, size, local rank, local size and launcher.
type Who = (usize, usize, Option<usize>, Option<usize>, Launcher);

fn who(start: &Start) -> Who {
    let Start {
        rank,
        size,
        local_rank,
        local_size,
        launcher,
        ..
    } = start;
    (*rank, *size, *local_rank, *local_size, *launcher)
}

/// What is read with more variables set; earlier ones are replaced.
pub(super) fn with(set: Set, more: &[(&str, &str)]) -> Result<Start, StartError> {
    read(&[set, more])
}

#[test]
fn every_launcher_is_read() {
    let start = read(&[TORCHRUN]).unwrap();
    assert_eq!(who(&start), (5, 8, Some(1), Some(4), Launcher::Torchrun));
    let (host, port) = ("node1".to_string(), 29500);
    assert_eq!(start.meeting, Meeting::TorchStore { host, port });
    assert_eq!((start.restart, start.run.as_deref()), (2, Some("job-7")));
    assert_eq!(start.timeout, Duration::from_secs(300));
    assert_eq!(start.start_timeout, Duration::from_secs(120));

    let start = read(&[ANYMESH]).unwrap();
    assert_eq!(who(&start), (1, 4, Some(1), Some(4), Launcher::Anymesh));
    assert_eq!(start.meeting, bind("127.0.0.1", 4000));
    assert_eq!((start.restart, start.run.as_deref()), (1, Some("abc")));
    assert_eq!(start.token.as_deref(), Some("secret"));
    assert_eq!(start.flight, Some("flight".into()));
    assert_eq!(start.timeout, Duration::from_secs(20));
    assert_eq!(start.start_timeout, Duration::from_millis(2500));
    assert!(!format!("{start:?}").contains("secret"));

    let start = read(&[BY_HAND]).unwrap();
    assert_eq!(who(&start), (0, 2, None, None, Launcher::ByHand));
    assert_eq!(start.meeting, bind("::1", 65535));

    for (set, launcher) in [(OPEN_MPI, Launcher::OpenMpi), (MPICH, Launcher::Mpich)] {
        let start = read(&[set]).unwrap();
        assert_eq!(who(&start), (3, 4, Some(1), Some(2), launcher));
        assert_eq!(start.meeting, Meeting::ThroughMpi);
        let start = with(set, &BY_HAND[2..]).unwrap();
        assert_eq!(start.meeting, bind("::1", 65535));
    }

    let start = read(&[SLURM]).unwrap();
    assert_eq!(who(&start), (3, 4, Some(1), None, Launcher::Slurm));
    let Meeting::Bind { host, port } = &start.meeting else {
        panic!("{start:?}")
    };
    assert_eq!(host, "node003");
    assert!((15000..35000).contains(port));
    assert_eq!((start.restart, start.run.as_deref()), (1, Some("1234.0")));

    let start = read(&[]).unwrap();
    assert_eq!(who(&start), (0, 1, None, None, Launcher::None));
    assert_eq!(start.meeting, Meeting::Alone);
}

#[test]
fn torchrun_without_an_agents_store_leaves_the_port_to_process_0() {
    let start = with(TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]).unwrap();
    assert_eq!(start.meeting, bind("node1", 29500));
}

#[test]
fn one_process_of_any_launcher_is_alone() {
    for (set, rank, size) in [
        (TORCHRUN, "RANK", "WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (MPICH, "PMI_RANK", "PMI_SIZE"),
    ] {
        let one = [
            (rank, "0"),
            (size, "1"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("MPI_LOCALRANKID", "0"),
            ("MPI_LOCALNRANKS", "1"),
        ];
        let known = |name: &str| set.iter().any(|(n, _)| *n == name);
        let one: Vec<_> = one.into_iter().filter(|(name, _)| known(name)).collect();
        let start = with(set, &one).unwrap();
        assert_eq!((start.size, start.meeting), (1, Meeting::Alone));
    }
}

#[test]
fn a_step_tells_another_port_than_its_neighbours_and_all_its_tasks_the_same() {
    let port = |job: &str, step: &str, task: &str| {
        let more = [
            ("SLURM_JOB_ID", job),
            ("SLURM_STEP_ID", step),
            ("SLURM_PROCID", task),
        ];
        match with(SLURM, &more).unwrap().meeting {
            Meeting::Bind { port, .. } => port,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(port("1234", "0", "0"), port("1234", "0", "3"));
    let mut ports: Vec<u16> = (0..40)
        .flat_map(|job| (0..5).map(move |step| (job, step)))
        .map(|(job, step)| port(&(9000 + job).to_string(), &step.to_string(), "1"))
        .collect();
    ports.sort();
    ports.dedup();
    assert_eq!(ports.len(), 200);
    assert!((15000..35000).contains(&port("18446744073709551615", "4294967279", "0")));
}

#[test]
fn a_shell_or_a_batch_script_in_an_allocation_is_one_process() {
    let allocation = [
        ("SLURM_JOB_ID", "1234"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_JOB_NODELIST", "node[1-2]"),
    ];
    let alone = |more: &[(&str, &str)]| {
        let start = read(&[&allocation, more]).unwrap();
        assert_eq!((start.size, start.meeting), (1, Meeting::Alone));
        assert_eq!(start.launcher, Launcher::None);
    };
    alone(&[]);
    alone(&[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")]);
    alone(&[("SLURM_PROCID", "0"), ("SLURM_STEP_ID", "4294967291")]);
    // What is exported for a later srun does not make the script itself one of many.
    alone(&[("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")]);
    let shell = [
        ("SLURM_PROCID", "0"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_TASKS", "1"),
    ];
    assert_eq!(read(&[&allocation, &shell]).unwrap().size, 1);
    // Outside of an allocation, an address without a number is a mistake.
    let error = read(&[&BY_HAND[2..]]).unwrap_err();
    assert_eq!(error.problem, Problem::Missing("RANK and WORLD_SIZE"));
}

#[test]
fn the_innermost_launcher_counts_where_launchers_are_nested() {
    // srun or mpirun starts one torchrun per node.
    for outer in [SLURM, OPEN_MPI, MPICH] {
        let start = read(&[outer, TORCHRUN]).unwrap();
        assert_eq!(who(&start), (5, 8, Some(1), Some(4), Launcher::Torchrun));
    }
    // `srun anymesh launch`.
    let start = read(&[SLURM, ANYMESH]).unwrap();
    assert_eq!(who(&start), (1, 4, Some(1), Some(4), Launcher::Anymesh));
    // Both say the same.
    assert_eq!(
        read(&[SLURM, OPEN_MPI]).unwrap().launcher,
        Launcher::OpenMpi
    );
    assert_eq!(read(&[SLURM, MPICH]).unwrap().launcher, Launcher::Slurm);
    assert_eq!(
        read(&[OPEN_MPI, MPICH]).unwrap().launcher,
        Launcher::OpenMpi
    );
    // mpirun in a batch script.
    let script = [
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_JOB_ID", "1"),
    ];
    assert_eq!(read(&[&script, OPEN_MPI]).unwrap().rank, 3);
    // mpirun's daemons are tasks of a step, one for each node.
    let daemon = [
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_LOCALID", "0"),
    ];
    for (set, launcher) in [(OPEN_MPI, Launcher::OpenMpi), (MPICH, Launcher::Mpich)] {
        let start = read(&[SLURM, &daemon, set]).unwrap();
        assert_eq!(who(&start), (3, 4, Some(1), Some(2), launcher));
    }
    // A script that sets RANK from SLURM's number.
    let again = [("RANK", "3"), ("WORLD_SIZE", "4")];
    assert_eq!(
        who(&read(&[SLURM, &again]).unwrap()),
        (3, 4, Some(1), None, Launcher::Slurm)
    );
}

#[test]
fn launchers_that_disagree_are_an_error_that_names_both() {
    let disagree = |sets: &[&[(&str, &str)]]| {
        let error = read(sets).unwrap_err();
        assert!(
            matches!(error.problem, Problem::Disagree { .. }),
            "{error:?}"
        );
        error.to_string()
    };
    let text = disagree(&[SLURM, OPEN_MPI, &[("OMPI_COMM_WORLD_RANK", "2")]]);
    for part in [
        "Open MPI says process 2 of 4",
        "SLURM says process 3 of 4",
        "unset",
        "OMPI_COMM_WORLD_RANK=\"2\"",
        "SLURM_PROCID=\"3\"",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let text = disagree(&[SLURM, OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_RANK", "0")]]);
    assert!(text.contains("0 on its node"), "{text}");
    disagree(&[SLURM, OPEN_MPI, &[("SLURM_STEP_NUM_TASKS", "8")]]);
    disagree(&[OPEN_MPI, MPICH, &[("PMI_RANK", "0")]]);
    disagree(&[SLURM, BY_HAND]);
    disagree(&[OPEN_MPI, BY_HAND]);
    disagree(&[MPICH, BY_HAND]);
    disagree(&[OPEN_MPI, ANYMESH]);
}

#[test]
fn an_mpi_job_without_mpi_is_told_what_to_do() {
    for set in [OPEN_MPI, MPICH] {
        let error = Start::read_with(&map(&[set]), false).unwrap_err();
        assert_eq!(error.problem, Problem::NeedsMpi);
        let text = error.to_string();
        assert!(
            text.contains("mpirun -x MASTER_ADDR") && text.contains("feature `mpi`"),
            "{text}"
        );
        assert!(Start::read_with(&map(&[set, &BY_HAND[2..]]), false).is_ok());
    }
}
