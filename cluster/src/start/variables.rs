//! Variables with their forms and bounds.

use super::Problem;
use std::{collections::BTreeMap, time::Duration};

/// Everything that is looked at.
pub(super) const NAMES: [&str; 40] = [
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
    "ANYMESH_TRANSPORT",
    "ANYMESH_SUMS",
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

    pub(super) fn number<T: std::str::FromStr>(
        self,
        name: &'static str,
    ) -> Result<Option<T>, Problem> {
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

    pub(super) fn count(self, name: &'static str) -> Result<Option<usize>, Problem> {
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
    pub(super) fn pair(
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
    pub(super) fn local(
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

pub(super) fn within(
    rank: &'static str,
    r: usize,
    size: &'static str,
    n: usize,
) -> Result<(), Problem> {
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
