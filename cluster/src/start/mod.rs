//! What the launcher told this process: which of how many it is, and where they meet.
//!
//! Who counts, innermost first:
//! - torchrun (any `TORCHELASTIC_*`): it runs inside whatever else there is, often once per node
//!   under srun or mpirun, so the others' numbers are not looked at.
//! - `RANK` and `WORLD_SIZE`, by `anymesh launch` (`ANYMESH_RUN`) or by hand. MPI's and SLURM's
//!   numbers must be the same where they are set; inside `anymesh launch` SLURM's are the outer ones.
//! - Open MPI (`OMPI_COMM_WORLD_*`), then MPICH and its relatives (`PMI_*`, `MPI_LOCALRANKID`). A
//!   SLURM step with fewer tasks started mpirun or its daemons; otherwise its numbers must agree.
//! - A SLURM step. A batch script has `SLURM_PROCID=0` but no step, a shell in an allocation has
//!   no `SLURM_PROCID`: both are one process.
//! - Nothing: one process.

mod error;
mod slurm;
mod sources;
#[cfg(test)]
mod sweep;
#[cfg(test)]
mod tests;
mod variables;

pub use error::{Problem, StartError};

use sources::Job;
use std::{collections::BTreeMap, path::PathBuf, time::Duration};
use variables::Variables;

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Nobody: one process.
    None,
    /// `torchrun`.
    Torchrun,
    /// `anymesh launch`.
    Anymesh,
    /// `RANK` and `WORLD_SIZE` were set by other means.
    ByHand,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// `mpiexec` of MPICH, Intel MPI and others that set `PMI_RANK`.
    Mpich,
    /// `srun`.
    Slurm,
}

impl std::fmt::Display for Launcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "no launcher",
            Self::Torchrun => "torchrun",
            Self::Anymesh => "anymesh launch",
            Self::ByHand => "RANK and WORLD_SIZE",
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
            Self::Slurm => "SLURM",
        })
    }
}

/// Where the processes find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// There is one process.
    Alone,
    /// Process 0 listens there, the others connect.
    Bind {
        /// A name or an address.
        host: String,
        /// The port.
        port: u16,
    },
    /// The launcher's TCPStore is there: process 0 listens where it likes and says so in the store.
    /// The store outlives restarts, so what is said in it must name [`Start::restart`].
    TorchStore {
        /// A name or an address.
        host: String,
        /// The port.
        port: u16,
    },
    /// Process 0 listens where it likes and says so by MPI.
    ThroughMpi,
}

/// What carries tensors between processes (`ANYMESH_TRANSPORT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Over {
    /// NCCL where the devices are NVIDIA GPUs, MPI where it started the processes, else TCP; of
    /// those that this build has.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// MPI.
    Mpi,
    /// NCCL.
    Nccl,
}

/// In which order sums over ranks are made (`ANYMESH_SUMS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sums {
    /// In the order of the ranks where that costs nothing, else as the engine does it: NCCL has an
    /// order of its own.
    #[default]
    Native,
    /// In the order of the ranks: the bits of a simulated mesh, on every engine.
    Fixed,
}

/// What the launcher told this process.
#[derive(Clone)]
pub struct Start {
    /// The number of this process.
    pub rank: usize,
    /// How many processes there are, at least 1.
    pub size: usize,
    /// The number of this process among those of its node, where it is known.
    pub local_rank: Option<usize>,
    /// How many processes there are on this node, where it is known.
    pub local_size: Option<usize>,
    /// Who said so.
    pub launcher: Launcher,
    /// Where the processes find each other.
    pub meeting: Meeting,
    /// How many times the launcher has started this run again.
    pub restart: u64,
    /// What the launcher calls this run: the same in all processes and restarts, another in other
    /// runs.
    pub run: Option<String>,
    /// What a process must show to be let in (`ANYMESH_TOKEN`).
    pub token: Option<String>,
    /// How long a wait for other processes may take (`ANYMESH_TIMEOUT`, 300 seconds).
    pub timeout: Duration,
    /// How long it may take until all have met (`ANYMESH_START_TIMEOUT`, 120 seconds).
    pub start_timeout: Duration,
    /// Where flight records go on a failure (`ANYMESH_FLIGHT`).
    pub flight: Option<PathBuf>,
    /// What carries tensors.
    pub over: Over,
    /// In which order sums are made.
    pub sums: Sums,
}

impl std::fmt::Debug for Start {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Start")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("local_rank", &self.local_rank)
            .field("local_size", &self.local_size)
            .field("launcher", &self.launcher)
            .field("meeting", &self.meeting)
            .field("restart", &self.restart)
            .field("run", &self.run)
            // Whoever reads a log must not be able to join.
            .field("token", &self.token.as_ref().map(|_| "hidden"))
            .field("timeout", &self.timeout)
            .field("start_timeout", &self.start_timeout)
            .field("flight", &self.flight)
            .field("over", &self.over)
            .field("sums", &self.sums)
            .finish()
    }
}

impl Start {
    /// One process.
    pub fn alone() -> Self {
        Self {
            rank: 0,
            size: 1,
            local_rank: None,
            local_size: None,
            launcher: Launcher::None,
            meeting: Meeting::Alone,
            restart: 0,
            run: None,
            token: None,
            timeout: Duration::from_secs(300),
            start_timeout: Duration::from_secs(120),
            flight: None,
            over: Over::Auto,
            sums: Sums::Native,
        }
    }

    /// Reads the variables of this process.
    pub fn from_env() -> Result<Self, StartError> {
        let vars = std::env::vars_os()
            .filter_map(|(name, value)| {
                Some((
                    name.into_string().ok()?,
                    value.to_string_lossy().into_owned(),
                ))
            })
            .collect();
        let mut start = Self::read(&vars)?;
        // A folder's name need not be text.
        if start.flight.is_some() {
            start.flight = std::env::var_os("ANYMESH_FLIGHT").map(PathBuf::from);
        }
        Ok(start)
    }

    /// Reads variables.
    ///
    /// ```
    /// # use anymesh_cluster::{Meeting, Start};
    /// let set = [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")];
    /// let start = Start::read(&set.map(|(name, value)| (name.into(), value.into())).into())?;
    /// assert_eq!((start.rank, start.size), (3, 4));
    /// assert_eq!(start.meeting, Meeting::Bind { host: "node1".into(), port: 29500 });
    /// # Ok::<(), anymesh_cluster::StartError>(())
    /// ```
    pub fn read(variables: &BTreeMap<String, String>) -> Result<Self, StartError> {
        Self::read_with(variables, cfg!(feature = "mpi"))
    }

    /// `mpi`: whether addresses can go over MPI.
    fn read_with(variables: &BTreeMap<String, String>, mpi: bool) -> Result<Self, StartError> {
        let vars = Variables(variables);
        Self::find(vars, mpi).map_err(|problem| StartError {
            problem,
            found: vars.found(),
        })
    }

    fn find(vars: Variables<'_>, mpi: bool) -> Result<Self, Problem> {
        let Job {
            launcher,
            rank,
            size,
            local_rank,
            local_size,
            restart,
            run,
        } = sources::job(vars)?;
        let address = sources::address(vars)?;
        let meeting = match (launcher, address) {
            (Launcher::None, Some(_)) if !vars.has("SLURM_JOB_ID") => {
                return Err(Problem::Missing("RANK and WORLD_SIZE"));
            }
            _ if size == 1 => Meeting::Alone,
            (Launcher::Torchrun, Some((host, port))) => {
                // Without the agent's store, process 0 is expected to listen at the address.
                if vars.flag("TORCHELASTIC_USE_AGENT_STORE")?.unwrap_or(true) {
                    Meeting::TorchStore { host, port }
                } else {
                    Meeting::Bind { host, port }
                }
            }
            (_, Some((host, port))) => Meeting::Bind { host, port },
            (Launcher::Slurm, None) => {
                let (host, port) = slurm::address(vars)?;
                Meeting::Bind { host, port }
            }
            (Launcher::OpenMpi | Launcher::Mpich, None) if mpi => Meeting::ThroughMpi,
            (Launcher::OpenMpi | Launcher::Mpich, None) => return Err(Problem::NeedsMpi),
            (_, None) => return Err(Problem::Missing("MASTER_ADDR and MASTER_PORT")),
        };
        Ok(Self {
            rank,
            size,
            local_rank,
            local_size,
            launcher,
            meeting,
            restart,
            run,
            token: vars.text("ANYMESH_TOKEN")?.map(str::to_string),
            timeout: vars.seconds("ANYMESH_TIMEOUT", 300)?,
            start_timeout: vars.seconds("ANYMESH_START_TIMEOUT", 120)?,
            flight: vars.text("ANYMESH_FLIGHT")?.map(PathBuf::from),
            over: match vars.text("ANYMESH_TRANSPORT")? {
                None | Some("auto") => Over::Auto,
                Some("tcp") => Over::Tcp,
                Some("mpi") => Over::Mpi,
                Some("nccl") => Over::Nccl,
                Some(_) => {
                    return Err(Problem::Value {
                        name: "ANYMESH_TRANSPORT",
                        expected: "auto, tcp, mpi or nccl",
                    });
                }
            },
            sums: match vars.text("ANYMESH_SUMS")? {
                None | Some("native") => Sums::Native,
                Some("fixed") => Sums::Fixed,
                Some(_) => {
                    return Err(Problem::Value {
                        name: "ANYMESH_SUMS",
                        expected: "native or fixed",
                    });
                }
            },
        })
    }
}
