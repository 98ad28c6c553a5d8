//! A transport between threads, each of which addresses some of the ranks: what the provided
//! collectives do when data is elsewhere.

use anymesh_core::{
    DType, Error, Mesh, Reduction, Tensor,
    transport::{Part, Threads},
};
use std::time::Duration;

fn mesh(ranks: usize, limit: Duration) -> Mesh {
    Mesh::new(&format!("x={ranks}"), &anymesh_backend_cpu::device())
        .expect("a mesh")
        .with_transport(Threads::new(limit))
}

fn part(mesh: &Mesh, rank: usize, values: &[f32]) -> Part {
    match mesh.addressable().position(|r| r == rank) {
        Some(at) => Part::new(
            rank,
            &Tensor::from_slice(values, [values.len()], mesh.device(at)).expect("a part"),
        ),
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
                let got = mesh
                    .transport()
                    .expect("threads")
                    .all_reduce(&mesh, &parts, Reduction::Sum)
                    .expect("sums");
                for (r, got) in got.into_iter().enumerate() {
                    assert_eq!(
                        got.map(|t| t.to_vec::<f32>().expect("values")),
                        (r == rank).then(|| vec![3.0, 30.0])
                    );
                }
            });
        }
    });
}

#[test]
fn a_rank_that_never_calls_is_named_when_the_deadline_has_passed() {
    let mesh = mesh(3, Duration::from_millis(50))
        .addressing(&[0, 1])
        .expect("two of three");
    let parts: Vec<Part> = (0..3).map(|r| part(&mesh, r, &[1.0])).collect();
    let transport = mesh.transport().expect("threads");
    let timeout = |op, missing: &[usize]| Error::Timeout {
        op,
        seconds: 0.05,
        missing: missing.into(),
        detail: String::new(),
    };
    assert_eq!(
        transport
            .all_gather(&mesh, &parts, 0)
            .expect_err("rank 2 is missing"),
        timeout("exchange", &[2])
    );
    assert_eq!(
        transport
            .barrier(&mesh, &[0, 2])
            .expect_err("rank 2 is missing"),
        timeout("barrier", &[2])
    );
    assert_eq!(
        transport
            .recv(&mesh, 2, DType::F32, [1].into(), 0)
            .expect_err("rank 2 is missing"),
        timeout("exchange", &[2])
    );
}
