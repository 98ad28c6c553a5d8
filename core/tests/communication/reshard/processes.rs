//! Ranks in several processes, here threads: each runs the same plan with the ranks it can address.

use super::cases::{mesh, positions, tensor, value};
use anymesh_conformance::sweep::shardings;
use anymesh_core::{
    DType, Mesh, Reduction, Result, Shape, Sharding, Tensor, TensorType,
    reshard::{Objective, plan, run},
    transport::{Message, Transport},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

/// Carries messages between threads; those between the same two ranks stay in order.
#[derive(Debug, Default)]
struct Post {
    boxes: Mutex<HashMap<(usize, usize), VecDeque<Tensor>>>,
    arrived: Condvar,
}

impl Transport for Post {
    fn name(&self) -> &str {
        "post"
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        let here = |rank: usize| mesh.addressable().any(|r| r == rank);
        let mut boxes = self.boxes.lock().expect("no thread has failed");
        for m in &messages {
            if let (Some(data), false) = (&m.part.data, here(m.to)) {
                boxes
                    .entry((m.part.rank, m.to))
                    .or_default()
                    .push_back(data.clone());
            }
            assert!(here(m.to) || here(m.part.rank), "a message between others");
        }
        self.arrived.notify_all();
        let mut out = vec![];
        for m in messages {
            if !here(m.to) || m.part.data.is_some() {
                out.push(m.part.data.filter(|_| here(m.to)));
                continue;
            }
            loop {
                if let Some(data) = boxes
                    .get_mut(&(m.part.rank, m.to))
                    .and_then(VecDeque::pop_front)
                {
                    assert_eq!(data.shape(), &m.part.shape, "sender and receiver disagree");
                    out.push(Some(data));
                    break;
                }
                let (again, late) = self
                    .arrived
                    .wait_timeout(boxes, Duration::from_secs(20))
                    .expect("no thread has failed");
                boxes = again;
                assert!(
                    !late.timed_out(),
                    "rank {} never sent to rank {}",
                    m.part.rank,
                    m.to
                );
            }
        }
        Ok(out)
    }

    fn barrier(&self, _: &Mesh, _: &[usize]) -> Result<()> {
        Ok(())
    }
}

/// The parts that a process has of a tensor made elsewhere.
fn seen_by(whole: &Tensor, mesh: &Mesh) -> Tensor {
    let parts: Vec<Tensor> = whole
        .shards()
        .into_iter()
        .filter(|(rank, _)| mesh.addressable().any(|r| r == *rank))
        .map(|(_, part)| part)
        .collect();
    let ty = TensorType {
        dtype: whole.dtype(),
        shape: whole.shape().clone(),
        sharding: whole.sharding().clone(),
    };
    Tensor::from_shards(&ty, mesh, &parts).expect("parts")
}

fn sweep(sizes: &[usize], dims: &[usize], owners: &[&[usize]]) {
    let whole = mesh(sizes);
    let post = Arc::new(Post::default());
    let all = shardings(dims.len(), sizes.len(), &[Reduction::Sum]);
    let process = |ranks: &[usize]| {
        let mesh = whole
            .with_transport(post.clone())
            .addressing(ranks)
            .expect("a process");
        for from in &all {
            let x = seen_by(&tensor(&whole, dims, from), &mesh);
            // Where the result is whole every part can be checked by itself.
            for to in all.iter().filter(|s| !s.is_partial()) {
                let plan = plan(
                    &mesh,
                    &Shape::from(dims),
                    DType::I32,
                    from,
                    to,
                    Objective::Time,
                )
                .expect("a plan");
                let y = run(&x, &plan.valid_for(&x).expect("valid"))
                    .unwrap_or_else(|e| panic!("{e}: {plan}"));
                for (rank, part) in y.shards() {
                    let region = to.region(&mesh, rank, y.shape());
                    let expected: Vec<i32> =
                        positions(&region, dims).into_iter().map(value).collect();
                    assert_eq!(
                        part.to_vec::<i32>().expect("values"),
                        expected,
                        "rank {rank} of {ranks:?}: {plan}"
                    );
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for ranks in owners {
            scope.spawn(|| process(ranks));
        }
    });
    assert!(
        post.boxes
            .lock()
            .expect("no thread has failed")
            .values()
            .all(VecDeque::is_empty),
        "something was sent that nobody wanted"
    );
}

#[test]
fn processes_with_some_ranks_each_agree_on_what_is_sent() {
    sweep(&[2, 2], &[5, 3], &[&[0, 3], &[1, 2]]);
    sweep(&[2, 2], &[4, 2], &[&[0], &[1], &[2], &[3]]);
    sweep(&[2, 3], &[4], &[&[0, 1, 2], &[3], &[4, 5]]);
}

#[test]
fn ranks_of_other_processes_are_reached_over_one_transport_only() {
    let part = mesh(&[2]).addressing(&[0]).expect("a process");
    let x = tensor(&mesh(&[3]), &[4], &Sharding::replicated());
    let error = x.to_mesh(&part, "[@a]").expect_err("rank 1 is elsewhere");
    assert!(
        matches!(
            &error,
            anymesh_core::Error::Argument {
                argument: "mesh",
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("another in-process"), "{error}");
}
