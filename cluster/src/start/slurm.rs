//! What SLURM says.

use super::{
    Launcher, Problem,
    sources::{Job, host_name},
    variables::{Variables, within},
};

/// SLURM numbers its own steps (batch scripts, interactive shells) from the end.
const SPECIAL_STEPS: u64 = 0xffff_fff0;

fn step(vars: Variables<'_>) -> Result<Option<u64>, Problem> {
    // The second is how older versions call it.
    Ok(vars
        .number::<u64>("SLURM_STEP_ID")?
        .or(vars.number("SLURM_STEPID")?))
}

/// The task of a step, if this is one.
pub(super) fn task(vars: Variables<'_>) -> Result<Option<Job>, Problem> {
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

/// Where the processes of a step meet when nobody said: on its first node, at a port that steps
/// rarely share.
pub(super) fn address(vars: Variables<'_>) -> Result<(String, u16), Problem> {
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
