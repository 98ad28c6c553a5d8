//! The variables of each launcher.

use super::{Carrier, Launcher, Problem};
use std::{collections::BTreeMap, time::Duration};

/// Everything that is looked at.
pub(super) const NAMES: [&str; 39] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "ANYMESH_RUN",
    "ANYMESH_RESTART",
    "ANYMESH_TOKEN",
    "ANYMESH_TIMEOUT",
    "ANYMESH_START_TIMEOUT",
    "ANYMESH_FLIGHT",
    "ANYMESH_WIRE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_RESTART_COUNT",
    "SLURM_NNODES",
    "SLURM_NODEID",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
];

/// The longest value that an error quotes in full.
const QUOTED: usize = 120;

#[derive(Clone, Copy)]
pub(super) struct Variables<'a>(pub(super) &'a BTreeMap<String, String>);

impl<'a> Variables<'a> {
    pub(super) fn has(self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// What is there of [`NAMES`], for an error.
    pub(super) fn found(self) -> Vec<(String, String)> {
        let quoted = |name: &str, value: &String| match name {
            "ANYMESH_TOKEN" => "(hidden)".to_string(),
            _ if value.chars().count() <= QUOTED => format!("{value:?}"),
            _ => format!("{:?}...", value.chars().take(QUOTED).collect::<String>()),
        };
        NAMES
            .iter()
            .filter_map(|name| Some((name.to_string(), quoted(name, self.0.get(*name)?))))
            .collect()
    }

    /// A text that is not empty.
    pub(super) fn text(self, name: &'static str) -> Result<Option<&'a str>, Problem> {
        match self.0.get(name).map(String::as_str) {
            Some("") => Err(Problem::Value {
                name,
                expected: "more than an empty text",
            }),
            value => Ok(value),
        }
    }

    fn number<T: std::str::FromStr>(self, name: &'static str) -> Result<Option<T>, Problem> {
        let Some(text) = self.0.get(name) else {
            return Ok(None);
        };
        // `parse` would take a sign too.
        let number = match text.bytes().all(|b| b.is_ascii_digit()) {
            true => text.parse().ok(),
            false => None,
        };
        number.map(Some).ok_or(Problem::Value {
            name,
            expected: "a whole number, not too large",
        })
    }

    fn count(self, name: &'static str) -> Result<Option<usize>, Problem> {
        Ok(self.number::<u32>(name)?.map(|n| n as usize))
    }

    pub(super) fn flag(self, name: &'static str) -> Result<Option<bool>, Problem> {
        match self.0.get(name).map(|text| text.to_ascii_lowercase()) {
            None => Ok(None),
            Some(text) if ["true", "1"].contains(&text.as_str()) => Ok(Some(true)),
            Some(text) if ["false", "0"].contains(&text.as_str()) => Ok(Some(false)),
            Some(_) => Err(Problem::Value {
                name,
                expected: "True or False",
            }),
        }
    }

    pub(super) fn seconds(self, name: &'static str, default: u64) -> Result<Duration, Problem> {
        let Some(text) = self.0.get(name) else {
            return Ok(Duration::from_secs(default));
        };
        // A year at most: what is added to the time of a clock must not overflow.
        text.parse::<f64>()
            .ok()
            .filter(|s| *s >= 0.001 && *s <= 365.0 * 86400.0)
            .map(Duration::from_secs_f64)
            .ok_or(Problem::Value {
                name,
                expected: "a number of seconds from 0.001 to a year",
            })
    }

    /// A rank and its size: both or none.
    fn pair(
        self,
        rank: &'static str,
        size: &'static str,
    ) -> Result<Option<(usize, usize)>, Problem> {
        match (self.count(rank)?, self.count(size)?) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(Problem::Missing(rank)),
            (Some(_), None) => Err(Problem::Missing(size)),
            (Some(r), Some(n)) => {
                within(rank, r, size, n)?;
                Ok(Some((r, n)))
            }
        }
    }

    /// A rank on a node and how many there are, each of which may be unknown; `all` processes.
    fn local(
        self,
        rank: &'static str,
        size: &'static str,
        all: usize,
    ) -> Result<(Option<usize>, Option<usize>), Problem> {
        let (r, n) = (self.count(rank)?, self.count(size)?);
        if let Some(n) = n.filter(|n| *n == 0 || *n > all) {
            return Err(Problem::Range {
                name: size,
                expected: format!("from 1 to the number of all processes, {all}, and not {n}"),
            });
        }
        if let Some(r) = r {
            within(rank, r, size, n.unwrap_or(all))?;
        }
        Ok((r, n))
    }
}

fn within(rank: &'static str, r: usize, size: &'static str, n: usize) -> Result<(), Problem> {
    if n == 0 {
        return Err(Problem::Range {
            name: size,
            expected: "at least 1".into(),
        });
    }
    if r >= n {
        return Err(Problem::Range {
            name: rank,
            expected: format!("less than the number of processes, {n}, and not {r}"),
        });
    }
    Ok(())
}

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
    fn of(launcher: Launcher, rank: usize, size: usize) -> Self {
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
    let slurm = slurm(vars)?;
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

/// SLURM numbers its own steps (batch scripts, interactive shells) from the end.
const SPECIAL_STEPS: u64 = 0xffff_fff0;

fn step(vars: Variables<'_>) -> Result<Option<u64>, Problem> {
    // The second is how older versions call it.
    Ok(vars
        .number::<u64>("SLURM_STEP_ID")?
        .or(vars.number("SLURM_STEPID")?))
}

/// The task of a step, if this is one.
fn slurm(vars: Variables<'_>) -> Result<Option<Job>, Problem> {
    let (job, step) = (vars.number::<u64>("SLURM_JOB_ID")?, step(vars)?);
    // In an allocation SLURM_NTASKS is how many tasks a step would have.
    let (tasks, own) = (
        vars.count("SLURM_NTASKS")?,
        vars.count("SLURM_STEP_NUM_TASKS")?,
    );
    let Some(rank) = vars.count("SLURM_PROCID")? else {
        return Ok(None);
    };
    let batch_script = step.is_none() && rank == 0 && job.is_some();
    if batch_script || step.is_some_and(|step| step >= SPECIAL_STEPS) {
        return Ok(None);
    }
    let (name, size) = own
        .map(|n| ("SLURM_STEP_NUM_TASKS", n))
        .or(tasks.map(|n| ("SLURM_NTASKS", n)))
        .ok_or(Problem::Missing("SLURM_NTASKS"))?;
    within("SLURM_PROCID", rank, name, size)?;
    let (local_rank, _) = vars.local("SLURM_LOCALID", "", size)?;
    Ok(Some(Job {
        local_rank,
        restart: vars.number("SLURM_RESTART_COUNT")?.unwrap_or(0),
        run: job.zip(step).map(|(job, step)| format!("{job}.{step}")),
        ..Job::of(Launcher::Slurm, rank, size)
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
fn host_name(text: &str) -> Option<String> {
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(text);
    let fits = |b: u8| b.is_ascii_alphanumeric() || b".-_:%".contains(&b);
    (!bare.is_empty() && bare.len() <= 255 && !bare.starts_with('-') && bare.bytes().all(fits))
        .then(|| bare.to_string())
}

/// Where the processes of a step meet when nobody said: on its first node, at a port that steps
/// rarely share.
pub(super) fn slurm_address(vars: Variables<'_>) -> Result<(String, u16), Problem> {
    let name = match vars.has("SLURM_STEP_NODELIST") {
        true => "SLURM_STEP_NODELIST",
        false => "SLURM_JOB_NODELIST",
    };
    let list = vars.0.get(name).ok_or(Problem::Missing(
        "MASTER_ADDR and MASTER_PORT, or SLURM_STEP_NODELIST,",
    ))?;
    let host = first_host(list).ok_or(Problem::Value {
        name,
        expected: "a list of hosts such as node[001-004,7]",
    })?;
    let job = vars
        .number::<u64>("SLURM_JOB_ID")?
        .ok_or(Problem::Missing("SLURM_JOB_ID"))?;
    let step = step(vars)?.ok_or(Problem::Missing("SLURM_STEP_ID"))?;
    // Neighbouring jobs and the steps of a job are far apart.
    let place = job
        .wrapping_mul(7919)
        .wrapping_add(step.wrapping_mul(104729))
        % 20_000;
    Ok((host, 15_000 + place as u16))
}

/// `node001` of `node[001-004,7],other`.
fn first_host(list: &str) -> Option<String> {
    let (mut host, mut rest) = (String::new(), list);
    loop {
        let plain = rest.find(['[', ',', ']']).unwrap_or(rest.len());
        host.push_str(&rest[..plain]);
        rest = &rest[plain..];
        let Some(inside) = rest.strip_prefix('[') else {
            let ends = rest.is_empty() || rest.starts_with(',');
            return ends.then(|| host_name(&host)).flatten();
        };
        let (ranges, after) = inside.split_once(']')?;
        let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let range = |text: &str| match text.split_once('-') {
            Some((from, to)) => number(from) && number(to),
            None => number(text),
        };
        if !ranges.split(',').all(range) {
            return None;
        }
        let first = ranges.split([',', '-']).next()?;
        host.push_str(first);
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::first_host;

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, host) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[001-004,7]", "node001"),
            ("node[7,001-004],other[1-2]", "node7"),
            ("r[0-1]n[08-15].cluster", "r0n08.cluster"),
            ("gpu-[3]", "gpu-3"),
            ("a-b[2-3]-ib0,c", "a-b2-ib0"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for list in [
            "",
            ",",
            ",a",
            "node[",
            "node[]",
            "node[1",
            "node]1[",
            "node[1-]",
            "node[-2]",
            "node[a-b]",
            "node[1,,2]",
            "node[[1]]",
            "node 1",
            "nöde",
            "node[1-2-3]",
            "-oProxy",
        ] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }
}

/// What carries tensors; `mpi`: whether it was built in.
pub(super) fn carrier(
    vars: Variables<'_>,
    launcher: Launcher,
    mpi: bool,
) -> Result<Carrier, Problem> {
    let job_of_mpi = matches!(launcher, Launcher::OpenMpi | Launcher::Mpich);
    match vars.text("ANYMESH_WIRE")? {
        None if job_of_mpi && mpi => Ok(Carrier::Mpi),
        None | Some("tcp") => Ok(Carrier::Tcp),
        Some("mpi") if mpi => Ok(Carrier::Mpi),
        Some("mpi") => Err(Problem::NeedsMpi),
        Some(_) => Err(Problem::Value {
            name: "ANYMESH_WIRE",
            expected: "tcp or mpi",
        }),
    }
}
