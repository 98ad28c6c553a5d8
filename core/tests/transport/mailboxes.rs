//! A transport between threads, each of which addresses some of the ranks: what the provided collectives do when data is elsewhere.

use anymesh_core::{
    DType, Error, Mesh, Reduction, Result, Tensor,
    transport::{Message, Part, Transport, check_group},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

/// Messages that have been sent and not yet received, by sender and receiver; a barrier sends empty ones.
#[derive(Debug)]
pub(crate) struct Mailboxes {
    boxes: Mutex<HashMap<(usize, usize), VecDeque<Tensor>>>,
    arrived: Condvar,
    limit: Duration,
}

impl Mailboxes {
    pub(crate) fn new(limit: Duration) -> Arc<Self> {
        Arc::new(Self { boxes: Mutex::default(), arrived: Condvar::new(), limit })
    }

    /// Posts what this process sends, then takes what it should get.
    fn pass(&self, op: &'static str, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        let mut boxes = self.boxes.lock().expect("no thread panics");
        for Message { part, to } in &messages {
            if let Some(t) = &part.data {
                boxes.entry((part.rank, *to)).or_default().push_back(t.clone());
            }
        }
        self.arrived.notify_all();
        let end = Instant::now() + self.limit;
        let here = |rank: usize| mesh.addressable().any(|r| r == rank);
        let wanted: Vec<Option<(usize, usize)>> = messages.iter().map(|m| here(m.to).then_some((m.part.rank, m.to))).collect();
        let mut got: Vec<Option<Tensor>> = vec![None; wanted.len()];
        loop {
            for (got, wanted) in got.iter_mut().zip(&wanted).filter(|(got, _)| got.is_none()) {
                *got = wanted.and_then(|w| boxes.get_mut(&w)?.pop_front());
            }
            let mut missing: Vec<usize> = got.iter().zip(&wanted).filter(|(got, _)| got.is_none()).filter_map(|(_, w)| w.map(|(from, _)| from)).collect();
            if missing.is_empty() {
                return Ok(got);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                missing.sort_unstable();
                missing.dedup();
                return Err(Error::Timeout { op, seconds: self.limit.as_secs_f64(), missing });
            }
            boxes = self.arrived.wait_timeout(boxes, left).expect("no thread panics").0;
        }
    }
}

impl Transport for Mailboxes {
    fn name(&self) -> &str {
        "mailboxes"
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.limit)
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        messages.iter().try_for_each(|m| m.check(mesh))?;
        self.pass("exchange", mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        check_group("barrier", mesh, group.iter().copied())?;
        let here = |rank: usize| mesh.addressable().position(|r| r == rank);
        let note = |rank: usize| match here(rank) {
            Some(at) => Ok(Part::new(rank, &Tensor::zeros([0], DType::Bool, mesh.device(at))?)),
            None => Ok(Part::elsewhere(rank, DType::Bool, [0])),
        };
        let pairs = group.iter().flat_map(|from| group.iter().map(move |to| (*from, *to))).filter(|(from, to)| here(*from).or(here(*to)).is_some());
        self.pass("barrier", mesh, pairs.map(|(from, to)| Ok(Message { part: note(from)?, to })).collect::<Result<_>>()?).map(|_| ())
    }
}

fn mesh(ranks: usize, limit: Duration) -> Mesh {
    Mesh::new(&format!("x={ranks}"), &anymesh_backend_cpu::device()).expect("a mesh").with_transport(Mailboxes::new(limit))
}

fn part(mesh: &Mesh, rank: usize, values: &[f32]) -> Part {
    match mesh.addressable().position(|r| r == rank) {
        Some(at) => Part::new(rank, &Tensor::from_slice(values, [values.len()], mesh.device(at)).expect("a part")),
        None => Part::elsewhere(rank, DType::F32, [values.len()]),
    }
}

#[test]
fn threads_that_each_address_a_rank_agree_on_a_sum() {
    let mesh = mesh(3, Duration::from_secs(20));
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let mesh = mesh.addressing(&[rank]).expect("one rank");
            scope.spawn(move || {
                let parts: Vec<Part> = (0..3).map(|r| part(&mesh, r, &[r as f32, 10.0])).collect();
                let got = mesh.transport().expect("mailboxes").all_reduce(&mesh, &parts, Reduction::Sum).expect("sums");
                for (r, got) in got.into_iter().enumerate() {
                    assert_eq!(got.map(|t| t.to_vec::<f32>().expect("values")), (r == rank).then(|| vec![3.0, 30.0]));
                }
            });
        }
    });
}

#[test]
fn a_rank_that_never_calls_is_named_when_the_deadline_has_passed() {
    let mesh = mesh(3, Duration::from_millis(50)).addressing(&[0, 1]).expect("two of three");
    let parts: Vec<Part> = (0..3).map(|r| part(&mesh, r, &[1.0])).collect();
    let transport = mesh.transport().expect("mailboxes");
    let timeout = |op, missing: &[usize]| Error::Timeout { op, seconds: 0.05, missing: missing.into() };
    assert_eq!(transport.all_gather(&mesh, &parts, 0).expect_err("rank 2 is missing"), timeout("exchange", &[2]));
    assert_eq!(transport.barrier(&mesh, &[0, 2]).expect_err("rank 2 is missing"), timeout("barrier", &[2]));
    assert_eq!(transport.recv(&mesh, 2, DType::F32, [1].into(), 0).expect_err("rank 2 is missing"), timeout("exchange", &[2]));
}
