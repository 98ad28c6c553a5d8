//! Which of how many processes this is, as each launcher says it, and whom to believe.

use super::{Launcher, Problem, slurm, variables::Variables};

/// Which of how many, and who said so.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) launcher: Launcher,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) local_rank: Option<usize>,
    pub(super) local_size: Option<usize>,
    pub(super) restart: u64,
    pub(super) run: Option<String>,
}

impl Job {
    pub(super) fn of(launcher: Launcher, rank: usize, size: usize) -> Self {
        Self {
            launcher,
            rank,
            size,
            local_rank: None,
            local_size: None,
            restart: 0,
            run: None,
        }
    }

    fn says(&self) -> String {
        format!(
            "{} says process {} of {}",
            self.launcher, self.rank, self.size
        )
    }

    fn same(&self, other: &Self) -> Result<(), Problem> {
        let local = match (self.local_rank, other.local_rank) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        };
        if (self.rank, self.size) == (other.rank, other.size) && local {
            return Ok(());
        }
        let local = |job: &Self| match (local, job.local_rank) {
            (false, Some(n)) => format!(", {n} on its node"),
            _ => String::new(),
        };
        Err(Problem::Disagree {
            one: self.says() + &local(self),
            other: other.says() + &local(other),
        })
    }
}

/// The innermost launcher's job; see the module for who that is.
pub(super) fn job(vars: Variables<'_>) -> Result<Job, Problem> {
    let named = named(vars)?;
    if let Some(job) = &named
        && job.launcher == Launcher::Torchrun
    {
        return Ok(job.clone());
    }
    let slurm = slurm::task(vars)?;
    let mpi = match (open_mpi(vars)?, mpich(vars)?) {
        (Some(open), other) => {
            other.map_or(Ok(()), |other| open.same(&other))?;
            Some(open)
        }
        (None, other) => other,
    };
    if let Some(job) = &named {
        for other in mpi.iter().chain(&slurm) {
            if (job.launcher, other.launcher) != (Launcher::Anymesh, Launcher::Slurm) {
                job.same(other)?;
            }
        }
    }
    let outer = match (mpi, slurm) {
        (Some(mpi), Some(slurm)) if slurm.size < mpi.size => Some(mpi),
        (Some(mpi), Some(slurm)) => {
            mpi.same(&slurm)?;
            // srun itself sets PMI_RANK too, and its processes can meet without MPI.
            Some(match mpi.launcher {
                Launcher::OpenMpi => mpi,
                _ => slurm,
            })
        }
        (mpi, slurm) => mpi.or(slurm),
    };
    Ok(match (named, outer) {
        (Some(named), _) if named.launcher == Launcher::Anymesh => named,
        // RANK repeats what the outer one says.
        (Some(named), Some(outer)) => Job {
            local_rank: named.local_rank.or(outer.local_rank),
            local_size: named.local_size.or(outer.local_size),
            ..outer
        },
        (Some(named), None) => named,
        (None, Some(outer)) => outer,
        (None, None) => Job::of(Launcher::None, 0, 1),
    })
}

/// What `RANK` and its relatives say.
fn named(vars: Variables<'_>) -> Result<Option<Job>, Problem> {
    let torch = [
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_USE_AGENT_STORE",
    ]
    .iter()
    .any(|name| vars.has(name));
    let launcher = match (torch, vars.has("ANYMESH_RUN")) {
        (true, _) => Launcher::Torchrun,
        (false, true) => Launcher::Anymesh,
        _ => Launcher::ByHand,
    };
    vars.count("GROUP_RANK")?;
    let Some((rank, size)) = vars.pair("RANK", "WORLD_SIZE")? else {
        let rest = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"];
        return match launcher != Launcher::ByHand || rest.iter().any(|name| vars.has(name)) {
            true => Err(Problem::Missing("RANK and WORLD_SIZE")),
            false => Ok(None),
        };
    };
    let (local_rank, local_size) = vars.local("LOCAL_RANK", "LOCAL_WORLD_SIZE", size)?;
    let (restart, run) = match torch {
        true => ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
        false => ("ANYMESH_RESTART", "ANYMESH_RUN"),
    };
    Ok(Some(Job {
        local_rank,
        local_size,
        restart: vars.number(restart)?.unwrap_or(0),
        run: vars.text(run)?.map(str::to_string),
        ..Job::of(launcher, rank, size)
    }))
}

fn open_mpi(vars: Variables<'_>) -> Result<Option<Job>, Problem> {
    let pair = vars.pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?;
    let names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
    mpi_job(vars, Launcher::OpenMpi, pair, names)
}

fn mpich(vars: Variables<'_>) -> Result<Option<Job>, Problem> {
    let pair = vars.pair("PMI_RANK", "PMI_SIZE")?;
    let names = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS");
    mpi_job(vars, Launcher::Mpich, pair, names)
}

fn mpi_job(
    vars: Variables<'_>,
    launcher: Launcher,
    pair: Option<(usize, usize)>,
    local: (&'static str, &'static str),
) -> Result<Option<Job>, Problem> {
    let Some((rank, size)) = pair else {
        return match vars.has(local.0) || vars.has(local.1) {
            true => Err(Problem::Missing(match launcher {
                Launcher::OpenMpi => "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
                _ => "PMI_RANK and PMI_SIZE",
            })),
            false => Ok(None),
        };
    };
    let (local_rank, local_size) = vars.local(local.0, local.1, size)?;
    Ok(Some(Job {
        local_rank,
        local_size,
        ..Job::of(launcher, rank, size)
    }))
}

/// `MASTER_ADDR` and `MASTER_PORT`: both or none.
pub(super) fn address(vars: Variables<'_>) -> Result<Option<(String, u16)>, Problem> {
    let port = vars.number::<u16>("MASTER_PORT")?;
    if port == Some(0) {
        return Err(Problem::Range {
            name: "MASTER_PORT",
            expected: "from 1 to 65535".into(),
        });
    }
    match (vars.0.get("MASTER_ADDR"), port) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(Problem::Missing("MASTER_ADDR")),
        (Some(_), None) => Err(Problem::Missing("MASTER_PORT")),
        (Some(host), Some(port)) => match host_name(host) {
            Some(host) => Ok(Some((host, port))),
            None => Err(Problem::Value {
                name: "MASTER_ADDR",
                expected: "the name or the address of a host",
            }),
        },
    }
}

/// A name or an address; IPv6 addresses with or without brackets.
pub(super) fn host_name(text: &str) -> Option<String> {
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(text);
    let fits = |b: u8| b.is_ascii_alphanumeric() || b".-_:%".contains(&b);
    (!bare.is_empty() && bare.len() <= 255 && !bare.starts_with('-') && bare.bytes().all(fits))
        .then(|| bare.to_string())
}
