//! Who is where: ranks of meshes, devices of processes, and the groups that they meet in.

use anymesh_core::{Error, Result};
use std::time::Duration;

/// What processes leave for each other while they meet.
pub(super) trait Store {
    /// Leaves a value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// A value that another process leaves, waiting for it.
    fn get(&self, key: &str, within: Duration) -> Result<Vec<u8>>;
}

/// The devices of all processes, numbered through.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Places {
    /// How many devices each process has.
    counts: Vec<usize>,
}

impl Places {
    /// Every process has at least one.
    pub(super) fn new(counts: Vec<usize>) -> Self {
        Self { counts }
    }

    /// How many devices there are.
    pub(super) fn devices(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The first device of a process.
    pub(super) fn first_of(&self, process: usize) -> usize {
        self.counts[..process].iter().sum()
    }

    /// The process that has a device.
    pub(super) fn process_of(&self, device: usize) -> usize {
        let mut before = 0;
        let found = self.counts.iter().position(|count| {
            before += count;
            device < before
        });
        found.unwrap_or(self.counts.len())
    }

    /// The device of a rank by its id. Ids are dealt out to processes in turn, and a process gives
    /// its own to its devices in turn.
    pub(super) fn of_id(&self, id: usize) -> usize {
        let (process, place) = (id % self.counts.len(), id / self.counts.len());
        self.first_of(process) + place % self.counts[process]
    }
}

/// How the members of a group lie on devices.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Spread {
    /// All on one: nothing leaves it.
    One,
    /// Each on its own, in this order.
    Apart(Vec<usize>),
    /// Some share one.
    Shared,
}

impl Spread {
    pub(super) fn of(devices: &[usize]) -> Self {
        let repeats = |i: &usize| devices[..*i].contains(&devices[*i]);
        if devices.iter().all(|d| *d == devices[0]) {
            Self::One
        } else if (0..devices.len()).any(|i| repeats(&i)) {
            Self::Shared
        } else {
            Self::Apart(devices.to_vec())
        }
    }
}

/// What a group is called in the store: the same in all its processes, another in every cluster that
/// the same processes make.
pub(super) fn key(epoch: u32, group: &[usize]) -> String {
    let members: Vec<String> = group.iter().map(usize::to_string).collect();
    format!("nccl/{epoch}/{}", members.join("-"))
}

/// The id of a group: its first member makes it, the others are told. Why not split one communicator
/// of all? Because all its members would have to come, and those outside of the group do not know of
/// it.
pub(super) fn meet<const N: usize>(
    store: &impl Store,
    key: &str,
    is_first: bool,
    make: impl FnOnce() -> Result<[u8; N]>,
    within: Duration,
) -> Result<[u8; N]> {
    if is_first {
        let id = make()?;
        store.set(key, &id)?;
        return Ok(id);
    }
    let told = store.get(key, within)?;
    told.try_into().map_err(|told: Vec<u8>| Error::Transport {
        op: "init",
        detail: format!(
            "the id of group '{key}' has {} bytes instead of {N}",
            told.len()
        ),
        ranks: vec![],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        collections::HashMap,
        sync::{Condvar, Mutex},
        thread,
    };

    #[derive(Default)]
    struct Shelf(Mutex<HashMap<String, Vec<u8>>>, Condvar);

    impl Store for Shelf {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            let mut values = self.0.lock().expect("no panic");
            assert!(
                values.insert(key.into(), value.into()).is_none(),
                "set once"
            );
            self.1.notify_all();
            Ok(())
        }

        fn get(&self, key: &str, within: Duration) -> Result<Vec<u8>> {
            let values = self.0.lock().expect("no panic");
            let (values, _) = self
                .1
                .wait_timeout_while(values, within, |values| !values.contains_key(key))
                .expect("no panic");
            values.get(key).cloned().ok_or_else(|| Error::Timeout {
                op: "init",
                seconds: within.as_secs_f64(),
                missing: [].into(),
                detail: String::new(),
            })
        }
    }

    #[test]
    fn ids_are_dealt_to_processes_and_then_to_their_devices() {
        let places = Places::new(vec![2, 1, 3]);
        assert_eq!(places.devices(), 6);
        // Process 0 has ids 0, 3, 6, 9 on its devices 0 and 1 in turn.
        let of = [0, 3, 6, 9].map(|id| places.of_id(id));
        assert_eq!(of, [0, 1, 0, 1]);
        let of = [1, 4, 2, 5, 8, 11].map(|id| places.of_id(id));
        assert_eq!(of, [2, 2, 3, 4, 5, 3]);
        let processes: Vec<usize> = (0..6).map(|d| places.process_of(d)).collect();
        assert_eq!(processes, [0, 0, 1, 2, 2, 2]);
    }

    #[test]
    fn a_group_is_on_one_device_on_as_many_as_members_or_in_between() {
        assert_eq!(Spread::of(&[4]), Spread::One);
        assert_eq!(Spread::of(&[4, 4]), Spread::One);
        assert_eq!(Spread::of(&[3, 1, 0]), Spread::Apart(vec![3, 1, 0]));
        assert_eq!(Spread::of(&[3, 1, 3]), Spread::Shared);
    }

    #[test]
    fn members_of_a_group_learn_the_id_that_its_first_one_made() -> Result<()> {
        let shelf = Shelf::default();
        let groups: [&[usize]; 3] = [&[0, 1], &[1, 0], &[2, 0, 1]];
        for group in groups {
            let key = key(7, group);
            let member = |device: usize| {
                let make = || Ok([device as u8; 128]);
                meet(
                    &shelf,
                    &key,
                    device == group[0],
                    make,
                    Duration::from_secs(10),
                )
            };
            // The others ask before there is anything.
            let ids: Vec<Result<[u8; 128]>> = thread::scope(|scope| {
                let member = &member;
                let asking: Vec<_> = (group[1..].iter())
                    .map(|d| scope.spawn(move || member(*d)))
                    .collect();
                let first = member(group[0]);
                let others = asking.into_iter().map(|t| t.join().expect("no panic"));
                std::iter::once(first).chain(others).collect()
            });
            for id in ids {
                assert_eq!(id?, [group[0] as u8; 128]);
            }
        }
        Ok(())
    }

    #[test]
    fn a_first_member_that_never_comes_is_a_timeout_and_a_mangled_id_an_error() {
        let shelf = Shelf::default();
        let get = |within| meet(&shelf, "nccl/0/0-1", false, || Ok([0; 128]), within);
        let late = get(Duration::from_millis(10));
        assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
        shelf.set("nccl/0/0-1", &[1, 2, 3]).expect("a shelf");
        let mangled = get(Duration::from_secs(1));
        assert!(
            matches!(mangled, Err(Error::Transport { .. })),
            "{mangled:?}"
        );
    }
}
