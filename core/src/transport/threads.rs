//! Ranks in threads.

use super::{Incoming, Message, Outgoing, Part, Transport, check::fail, check_group};
use crate::{DType, Device, Error, Mesh, Result, Tensor};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Carries data between threads, each of which runs the program as one of several processes would:
/// with the ranks that its mesh can [address](Mesh::addressing). So what happens between processes
/// is tried in one.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Sharding, Tensor, transport::Threads};
/// # use std::time::Duration;
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("x=2", &device)?.with_transport(Threads::new(Duration::from_secs(10)));
/// let process = |rank: usize| {
///     let mesh = mesh.addressing(&[rank])?;
///     let half = Tensor::ones([4], DType::F32, (&mesh, &Sharding::replicated().cut(0, 0)))?;
///     half.sum(&[], false)?.reshard("[]")?.shards()[0].1.to_vec::<f32>()
/// };
/// std::thread::scope(|scope| {
///     let threads = [0, 1].map(|rank| scope.spawn(move || process(rank)));
///     for thread in threads {
///         assert_eq!(thread.join().expect("no panic"), Ok(vec![4.0]));
///     }
/// });
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Threads {
    post: Mutex<Post>,
    arrived: Condvar,
    limit: Duration,
}

/// What a message is on its way: bytes, as between processes. So a fault of the sender's device
/// shows at the sender.
#[derive(Debug)]
struct Parcel {
    part: Part,
    bytes: Outgoing,
}

impl Parcel {
    /// The tensor at the receiver, who knows its type.
    fn open(&self, op: &'static str, expected: &Part, device: &Device) -> Result<Tensor> {
        let Part {
            rank, dtype, shape, ..
        } = expected;
        let mut tensor = Incoming::new(*dtype, shape.clone(), device)?;
        let (bytes, room) = (self.bytes.as_ref(), tensor.bytes());
        let fits = (self.part.dtype, &self.part.shape) == (*dtype, shape);
        if !fits || bytes.len() != room.len() {
            let (sent, to) = (self.part.dtype, &self.part.shape);
            let detail = format!("it sent {sent}{to} where {dtype}{shape} was expected");
            return Err(fail(op, &[*rank], detail));
        }
        room.copy_from_slice(bytes);
        tensor.finish()
    }
}

#[derive(Debug, Default)]
struct Post {
    /// Messages that have been sent and not yet received, by the ids of sender and receiver; a
    /// barrier sends empty ones.
    boxes: HashMap<(usize, usize), VecDeque<Parcel>>,
    /// The first error that a rank had alone, with its id. Nothing is carried after it.
    failed: Option<(usize, Error)>,
}

impl Post {
    /// What a failure means to a process with these ranks.
    fn check(&self, op: &'static str, mesh: &Mesh) -> Result<()> {
        let Some((rank, error)) = &self.failed else {
            return Ok(());
        };
        let own = mesh.addressable().any(|r| mesh.ids()[r] == *rank);
        Err(match own {
            true => error.clone(),
            false => Error::Elsewhere {
                op,
                rank: *rank,
                error: error.to_string(),
            },
        })
    }
}

impl Threads {
    /// Waits so long for other threads before it gives up.
    pub fn new(limit: Duration) -> Arc<Self> {
        Arc::new(Self {
            post: Mutex::default(),
            arrived: Condvar::new(),
            limit,
        })
    }

    /// Posts what this process sends, then takes what it should get.
    fn pass(
        &self,
        op: &'static str,
        mesh: &Mesh,
        messages: Vec<Message>,
    ) -> Result<Vec<Option<Tensor>>> {
        let ids = mesh.ids();
        let mut parcels = vec![];
        for Message { part, to } in &messages {
            if let Some(t) = &part.data {
                let (part, bytes) = (part.clone(), Outgoing::new(t)?);
                parcels.push(((ids[part.rank], ids[*to]), Parcel { part, bytes }));
            }
        }
        let mut post = self.post.lock().unwrap_or_else(PoisonError::into_inner);
        post.check(op, mesh)?;
        for (ends, parcel) in parcels {
            post.boxes.entry(ends).or_default().push_back(parcel);
        }
        self.arrived.notify_all();
        let end = Instant::now() + self.limit;
        let wanted: Vec<Option<(usize, usize)>> = messages
            .iter()
            .map(|m| mesh.position_of(m.to).and(Some((m.part.rank, m.to))))
            .collect();
        let mut got: Vec<Option<Parcel>> = wanted.iter().map(|_| None).collect();
        loop {
            for (got, wanted) in got.iter_mut().zip(&wanted).filter(|(got, _)| got.is_none()) {
                let ends = wanted.map(|(from, to)| (ids[from], ids[to]));
                *got = ends.and_then(|ends| post.boxes.get_mut(&ends)?.pop_front());
            }
            let mut missing: Vec<usize> = got
                .iter()
                .zip(&wanted)
                .filter(|(got, _)| got.is_none())
                .filter_map(|(_, w)| w.map(|(from, _)| from))
                .collect();
            if missing.is_empty() {
                drop(post);
                let open = |(message, parcel): (&Message, Option<Parcel>)| {
                    let (Some(at), Some(parcel)) = (mesh.position_of(message.to), parcel) else {
                        return Ok(None);
                    };
                    parcel.open(op, &message.part, mesh.device(at)).map(Some)
                };
                return messages.iter().zip(got).map(open).collect();
            }
            post.check(op, mesh)?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                missing.sort_unstable();
                missing.dedup();
                return Err(Error::Timeout {
                    op,
                    seconds: self.limit.as_secs_f64(),
                    missing: missing.into(),
                    detail: String::new(),
                });
            }
            post = self
                .arrived
                .wait_timeout(post, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Transport for Threads {
    fn name(&self) -> &str {
        "threads"
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.limit)
    }

    fn report(&self, rank: usize, error: &Error) {
        let mut post = self.post.lock().unwrap_or_else(PoisonError::into_inner);
        post.failed.get_or_insert_with(|| (rank, error.clone()));
        self.arrived.notify_all();
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        messages.iter().try_for_each(|m| m.check(mesh))?;
        self.pass("exchange", mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        check_group("barrier", mesh, group.iter().copied())?;
        let here = |rank: usize| mesh.addressable().position(|r| r == rank);
        let note = |rank: usize| match here(rank) {
            Some(at) => Ok(Part::new(
                rank,
                &Tensor::zeros([0], DType::Bool, mesh.device(at))?,
            )),
            None => Ok(Part::elsewhere(rank, DType::Bool, [0])),
        };
        let pairs = group
            .iter()
            .flat_map(|from| group.iter().map(move |to| (*from, *to)))
            .filter(|(from, to)| here(*from).or(here(*to)).is_some());
        self.pass(
            "barrier",
            mesh,
            pairs
                .map(|(from, to)| {
                    Ok(Message {
                        part: note(from)?,
                        to,
                    })
                })
                .collect::<Result<_>>()?,
        )
        .map(|_| ())
    }
}
