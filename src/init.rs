//! The start of a program that may run in several processes.

#![cfg(not(target_family = "wasm"))]

use crate::{default_device, device};
use anymesh_cluster::{Cluster, Start, stop};
use anymesh_core::{Device, Error, Result};

/// Meets the other processes of this run, as torchrun, mpirun, srun or `anymesh launch` started
/// them; without a launcher it is one process, and meshes are simulated.
///
/// ```
/// use anymesh::prelude::*;
/// let cluster = anymesh::init()?;
/// let mesh = Mesh::new("dp=2, tp=2", &cluster)?;
/// let ones = Tensor::ones([8, 8], DType::F32, (&mesh, "[@dp, @tp]"))?;
/// assert_eq!(ones.sum(&[], false)?.item()?.to_f64(), 64.0);
/// # Ok::<(), anymesh::Error>(())
/// ```
///
/// # The devices of a process
/// `ANYMESH_DEVICE` names them as [`device`] does, several with commas between them: `cpu`,
/// `cuda:1`, `cuda:0,cuda:1`. `cuda` alone is the GPU of this process: the one with its number on the
/// node (its number in the run, where the launcher does not say), counted round where there are
/// fewer GPUs than processes.
///
/// Where nothing is set:
/// - with CUDA built in and a GPU there, as `cuda`;
/// - else one process on a node takes what [`default_device`] says;
/// - else the CPU, because processes that share a GPU through wgpu wait for each other. Set
///   `ANYMESH_DEVICE=wgpu` to share it all the same.
///
/// # Signals
/// From here on SIGTERM and the first SIGINT do not end the process: ask
/// [`Cluster::stop_requested`] between steps, save and leave. A second SIGINT ends it as usual.
///
/// # Errors
/// Variables of launchers that are missing or contradict each other, with a list of what was found;
/// a device that is not there; processes that do not come within `ANYMESH_START_TIMEOUT`.
pub fn init() -> Result<Cluster> {
    let start = Start::from_env()
        .map_err(|problem| Error::argument("init", "environment", problem.to_string()))?;
    let devices = devices(&start)?;
    stop::install().map_err(|e| {
        let detail = format!("signals cannot be handled: {e}");
        Error::argument("init", "signals", detail)
    })?;
    Cluster::new(&start, &devices)
}

fn devices(start: &Start) -> Result<Vec<Device>> {
    if let Ok(asked) = std::env::var("ANYMESH_DEVICE") {
        return names(&asked, start, gpus)?
            .iter()
            .map(|n| device(n))
            .collect();
    }
    if cfg!(feature = "cuda") {
        match gpus() {
            Ok(count) => return Ok(vec![device(&format!("cuda:{}", own(start) % count))?]),
            Err(why) if start.size > 1 && own(start) == 0 => {
                eprintln!("anymesh: no GPU found, using the CPU.\n  {why}");
            }
            Err(_) => {}
        }
    }
    let shared = start.size > 1 && start.local_size != Some(1);
    let chosen = match shared && cfg!(feature = "cpu") {
        true => device("cpu"),
        false => default_device(),
    };
    Ok(vec![chosen?])
}

/// The number of this process on its node.
fn own(start: &Start) -> usize {
    start.local_rank.unwrap_or(start.rank)
}

/// How many GPUs CUDA shows to this process, at least one.
fn gpus() -> Result<usize> {
    #[cfg(feature = "cuda")]
    let count = anymesh_backend_cuda::gpu_count()?;
    // Opening the device tells what this build lacks.
    #[cfg(not(feature = "cuda"))]
    let count = device("cuda").map(|_| 1)?;
    Ok(count)
}

/// The names in a list of devices, with `cuda` as the GPU of this process.
fn names(asked: &str, start: &Start, gpus: impl Fn() -> Result<usize>) -> Result<Vec<String>> {
    asked
        .split(',')
        .map(|name| match name.trim() {
            "" => Err(Error::argument(
                "init",
                "ANYMESH_DEVICE",
                format!(
                    "ANYMESH_DEVICE={asked:?} has an empty name: write devices with commas between them, such as cpu or cuda:0,cuda:1, or unset it"
                ),
            )),
            "cuda" => Ok(format!("cuda:{}", own(start) % gpus()?)),
            name => Ok(name.to_string()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(rank: usize, local_rank: Option<usize>) -> Start {
        Start {
            rank,
            size: 16,
            local_rank,
            ..Start::alone()
        }
    }

    #[test]
    fn cuda_is_the_gpu_of_the_process_and_other_names_are_as_they_are() {
        let of = |asked: &str, rank, local, gpus| {
            names(asked, &process(rank, local), || Ok(gpus)).expect("names")
        };
        assert_eq!(of("cuda", 5, Some(1), 4), ["cuda:1"]);
        assert_eq!(of("cuda", 5, None, 4), ["cuda:1"]);
        assert_eq!(of("cuda", 3, Some(3), 1), ["cuda:0"]);
        assert_eq!(
            of("cuda:2, cpu,wgpu:0", 1, Some(1), 1),
            ["cuda:2", "cpu", "wgpu:0"]
        );
    }

    #[test]
    fn a_list_with_an_empty_name_is_an_error_that_shows_it() {
        for asked in ["", ",", "cpu,", "cpu,,cpu", " "] {
            let error = names(asked, &Start::alone(), || Ok(1)).expect_err(asked);
            assert!(error.to_string().contains(&format!("{asked:?}")), "{error}");
        }
    }

    #[test]
    fn cuda_without_a_gpu_is_an_error_and_nothing_else_asks_for_one() {
        let none = || {
            Err(Error::DeviceUnavailable {
                device: "cuda".into(),
                reason: "none".into(),
                hint: "none".into(),
            })
        };
        assert!(names("cpu,cuda", &Start::alone(), none).is_err());
        assert!(names("cpu,cuda:0", &Start::alone(), none).is_ok());
    }
}
