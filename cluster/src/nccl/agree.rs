//! Whether the devices of all processes can be reached by NCCL: asked before anybody begins, so that
//! all decide alike.

use super::groups::Store;
use anymesh_backend_cuda::nccl;
use anymesh_core::{Device, Error, Result};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a process has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Offer {
    /// The names of its GPUs in all the world; nothing where a device is none.
    gpus: Vec<String>,
    /// The version of its NCCL.
    version: u32,
    /// What is in the way.
    trouble: Option<String>,
    /// Whether several ranks may share a GPU.
    shares: bool,
}

impl Offer {
    fn of(devices: &[Device]) -> Self {
        let gpus: Option<Vec<String>> = devices.iter().map(nccl::identity).collect();
        let (version, trouble) = match (nccl::Library::open(), &gpus) {
            (_, None) => (0, Some("not all its devices are CUDA's".into())),
            (Ok(library), _) => (library.version(), None),
            (Err(e), _) => (0, Some(e.to_string())),
        };
        let shares = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|v| v == "1");
        Self {
            gpus: gpus.unwrap_or_default(),
            version,
            trouble,
            shares,
        }
    }
}

/// NCCL from here on lets several ranks share a GPU, if it is told to.
const SHARES: u32 = 23000;

/// How many devices each process has, or why NCCL cannot be used: the same in all processes.
pub(super) fn agree(
    store: &impl Store,
    devices: &[Device],
    (process, size, epoch): (usize, usize, u32),
    within: Duration,
) -> Result<std::result::Result<Vec<usize>, String>> {
    let key = |process: usize| format!("nccl/{epoch}/offer/{process}");
    let own = serde_json::to_vec(&Offer::of(devices)).map_err(|e| unreadable(&e))?;
    store.set(&key(process), &own)?;
    let all = (0..size)
        .map(|p| {
            let told = store.get(&key(p), within)?;
            serde_json::from_slice(&told).map_err(|e| unreadable(&e))
        })
        .collect::<Result<Vec<Offer>>>()?;
    Ok(judge(&all))
}

fn unreadable(error: &serde_json::Error) -> Error {
    Error::Transport {
        op: "init",
        detail: format!("what a process says of its devices cannot be read: {error}"),
        ranks: vec![],
    }
}

fn judge(all: &[Offer]) -> std::result::Result<Vec<usize>, String> {
    if let Some((p, why)) = all
        .iter()
        .enumerate()
        .find_map(|(p, offer)| Some((p, offer.trouble.as_ref()?)))
    {
        return Err(format!("process {p}: {why}"));
    }
    let versions: Vec<u32> = all.iter().map(|offer| offer.version).collect();
    if let Some(p) = versions.iter().position(|v| *v != versions[0]) {
        let text = |p: usize| nccl::version_text(versions[p]);
        return Err(format!(
            "processes 0 and {p} have NCCL {} and {}, which do not work together: install the same",
            text(0),
            text(p)
        ));
    }
    let mut seen: Vec<(&String, usize)> = vec![];
    for (p, offer) in all.iter().enumerate() {
        for gpu in &offer.gpus {
            match seen.iter().find(|(name, _)| *name == gpu) {
                Some((_, first)) if !offer.shares || offer.version < SHARES => {
                    return Err(format!(
                        "processes {first} and {p} share a GPU: give each its own (ANYMESH_DEVICE, CUDA_VISIBLE_DEVICES), or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer"
                    ));
                }
                Some(_) => {}
                None => seen.push((gpu, p)),
            }
        }
    }
    Ok(all.iter().map(|offer| offer.gpus.len()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(gpus: &[&str]) -> Offer {
        Offer {
            gpus: gpus.iter().map(|g| g.to_string()).collect(),
            version: 22803,
            trouble: None,
            shares: false,
        }
    }

    #[test]
    fn processes_with_gpus_of_their_own_are_counted() {
        let all = [offer(&["a", "b"]), offer(&["c"])];
        assert_eq!(judge(&all), Ok(vec![2, 1]));
    }

    #[test]
    fn what_is_in_the_way_of_one_is_told_to_all() {
        let mut blind = offer(&[]);
        blind.trouble = Some("not all its devices are CUDA's".into());
        let said = judge(&[offer(&["a"]), blind]);
        assert_eq!(
            said,
            Err("process 1: not all its devices are CUDA's".into())
        );
        let mut old = offer(&["b"]);
        old.version = 21800;
        let said = judge(&[offer(&["a"]), old]).expect_err("versions differ");
        assert!(said.contains("2.28.3 and 2.18.0"), "{said}");
    }

    #[test]
    fn a_gpu_is_shared_only_where_nccl_can_and_was_told_to() {
        let both = |version, shares| {
            [offer(&["a"]), offer(&["a"])].map(|o| Offer {
                version,
                shares,
                ..o
            })
        };
        let said = judge(&both(23203, false)).expect_err("not told to");
        assert!(said.starts_with("processes 0 and 1 share a GPU"), "{said}");
        assert!(judge(&both(22803, true)).is_err(), "too old");
        assert_eq!(judge(&both(23203, true)), Ok(vec![1, 1]));
    }
}
