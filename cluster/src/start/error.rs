//! What can be wrong with the variables of a launcher.

use std::fmt;

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// A part of a set is there and this is not.
    Missing(&'static str),
    /// A variable has a value of another form.
    Value {
        /// The variable.
        name: &'static str,
        /// What it must be.
        expected: &'static str,
    },
    /// A number is not less than another, or more than another.
    Range {
        /// The variable.
        name: &'static str,
        /// What it must be.
        expected: String,
    },
    /// Two launchers say different things.
    Disagree {
        /// One variable or launcher and what it says.
        one: String,
        /// The other.
        other: String,
    },
    /// Processes of an MPI job need MPI to find each other, and it was not built in.
    NeedsMpi,
}

/// The variables of the launcher make no sense: what is wrong, and all of them that were found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartError {
    /// What is wrong.
    pub problem: Problem,
    /// The variables that were looked at and their values; the token's is hidden.
    pub found: Vec<(String, String)>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(what) => write!(
                f,
                "{what} not set: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process (or start them with `anymesh launch`, torchrun, mpirun or srun), or unset them all to run one process"
            ),
            Self::Value { name, expected } => {
                write!(f, "{name} must be {expected}: set it so, or unset it")
            }
            Self::Range { name, expected } => {
                write!(f, "{name} must be {expected}: correct it, or unset what is left over from another run")
            }
            Self::Disagree { one, other } => write!(
                f,
                "{one}, but {other}: unset the variables of the one that did not start this process"
            ),
            Self::NeedsMpi => f.write_str(
                "the processes of this MPI job cannot find each other: pass an address that all can reach with `mpirun -x MASTER_ADDR=host -x MASTER_PORT=port` (MPICH: `-genv NAME VALUE`), or build with the feature `mpi`",
            ),
        }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "start: {}", self.problem)?;
        if self.found.is_empty() {
            return f.write_str("; no variable of a launcher is set");
        }
        f.write_str("; found")?;
        for (i, (name, value)) in self.found.iter().enumerate() {
            write!(f, "{} {name}={value}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl std::error::Error for StartError {}
