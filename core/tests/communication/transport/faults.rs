//! What callers see when communication goes wrong, and that they can try again.

use super::devices::{Minimal, counting, device, parts, values};
use anymesh_core::{
    DType, Error, Mesh, Reduction, Sharding, Tensor,
    transport::{Counts, Fault, Faulty, InProcess, Part, Transport},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const SHORT: Duration = Duration::from_millis(20);

fn faulty(axes: &str, faults: impl IntoIterator<Item = Fault>) -> (Mesh, Arc<Faulty>) {
    let transport = Arc::new(Faulty::new(Arc::new(InProcess), faults).with_deadline(SHORT));
    (
        Mesh::new(axes, &device())
            .expect("a mesh")
            .with_transport(transport.clone()),
        transport,
    )
}

/// Rows over ranks to columns over ranks must fail in the given way, leave the source as it was,
/// and then work.
#[track_caller]
fn fails_then_works(mesh: &Mesh, transport: &Faulty, fault: Fault, right: impl Fn(&Error) -> bool) {
    let whole = counting(&[5, 6], DType::F32);
    let x = whole.to_mesh(mesh, "[@x, _]").expect("rows");
    let held = |t: &Tensor| {
        t.shards()
            .iter()
            .map(|(_, s)| s.to_bytes().expect("bytes"))
            .collect::<Vec<_>>()
    };
    let before = held(&x);
    let lasting = matches!(fault, Fault::Death { .. });
    transport.inject(fault);
    let error = x.reshard("[_, @x]").expect_err("the fault strikes");
    assert!(right(&error), "{error}");
    assert_eq!(held(&x), before, "the source is as it was");
    assert_eq!(x.type_string(), "f32[5@x, 6]");
    if lasting {
        transport.heal();
    }
    let y = x.reshard("[_, @x]").expect("the second try works");
    assert_eq!(y.type_string(), "f32[5, 6@x]");
    for (rank, shard) in y.shards() {
        let columns = y.sharding().range(mesh, rank, 1, 6);
        let expected = whole
            .narrow(1, columns.start, columns.len())
            .expect("columns");
        assert_eq!(
            shard.to_vec::<f32>().expect("values"),
            expected.to_vec::<f32>().expect("values")
        );
    }
}

#[test]
fn a_reshard_whose_exchange_fails_leaves_its_source_and_can_be_repeated() {
    let (mesh, transport) = faulty("x=3", []);
    fails_then_works(
        &mesh,
        &transport,
        Fault::Fail { call: 0 },
        |e| matches!(e, Error::Transport { ranks, .. } if ranks == &[0, 1, 2]),
    );
    assert_eq!(transport.counts().failed, 1);
}

#[test]
fn a_reshard_that_waits_for_a_late_rank_stops_at_the_deadline_and_names_it() {
    let (mesh, transport) = faulty("x=3", []);
    let start = Instant::now();
    let hour = Duration::from_secs(3600);
    fails_then_works(
        &mesh,
        &transport,
        Fault::Delay {
            call: 0,
            rank: 2,
            by: hour,
        },
        |e| matches!(e, Error::Timeout { missing, .. } if **missing == [2]),
    );
    assert!(start.elapsed() >= SHORT, "the deadline was waited for");
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "and not the hour"
    );
}

#[test]
fn a_reshard_with_a_dead_rank_fails_until_the_rank_is_back() {
    let (mesh, transport) = faulty("x=3", [Fault::Death { call: 0, rank: 1 }]);
    let x = counting(&[6], DType::F32)
        .to_mesh(&mesh, "[@x]")
        .expect("cut");
    for _ in 0..3 {
        let error = x.full_tensor().expect_err("rank 1 is dead");
        assert!(
            matches!(&error, Error::Transport { ranks, .. } if ranks == &[1]),
            "{error}"
        );
    }
    transport.heal();
    fails_then_works(
        &mesh,
        &transport,
        Fault::Death { call: 0, rank: 1 },
        |e| matches!(e, Error::Transport { ranks, .. } if ranks == &[1]),
    );
}

#[test]
fn a_partial_sum_whose_reduction_fails_can_be_summed_later() {
    let (mesh, transport) = faulty("x=2, y=2", []);
    let ty = anymesh_core::TensorType::parse("f32[4]{sum:y}", &mesh).expect("a type");
    let held = |rank: usize| {
        Tensor::from_slice(&[rank as f32, 1.0, 2.0, 3.0], [4], &device()).expect("a part")
    };
    // Along x the values are the same.
    let x =
        Tensor::from_shards(&ty, &mesh, &[held(0), held(1), held(0), held(1)]).expect("partial");
    transport.inject(Fault::Fail {
        call: transport.counts().calls,
    });
    assert!(matches!(
        x.reshard(Sharding::replicated()),
        Err(Error::Transport { .. })
    ));
    assert_eq!(
        x.reshard(Sharding::replicated())
            .expect("sums")
            .full_tensor()
            .expect("whole")
            .to_vec::<f32>()
            .expect("values"),
        [1.0, 2.0, 4.0, 6.0]
    );
}

#[test]
fn a_delay_within_the_deadline_is_only_a_delay() {
    let (mesh, transport) = faulty(
        "x=2",
        [Fault::Delay {
            call: 0,
            rank: 0,
            by: SHORT / 2,
        }],
    );
    let start = Instant::now();
    assert_eq!(
        values(
            transport
                .all_reduce(&mesh, &parts(&[&[1.0], &[2.0]]), Reduction::Sum)
                .expect("late")
        ),
        [[3.0], [3.0]]
    );
    assert!(start.elapsed() >= SHORT / 2);
}

#[test]
fn a_rank_that_takes_no_part_disturbs_nobody() {
    let (mesh, transport) = faulty(
        "x=3",
        [
            Fault::Death { call: 0, rank: 2 },
            Fault::Delay {
                call: 0,
                rank: 2,
                by: SHORT * 100,
            },
        ],
    );
    let two = parts(&[&[1.0], &[2.0]]);
    assert_eq!(
        values(transport.all_gather(&mesh, &two, 0).expect("both live")),
        [[1.0, 2.0], [1.0, 2.0]]
    );
    assert!(transport.barrier(&mesh, &[0, 1]).is_ok());
    assert!(transport.barrier(&mesh, &[0, 1, 2]).is_err());
}

#[test]
fn every_kind_of_call_meets_the_fault() {
    type Call = fn(&Faulty, &Mesh, &[Part]) -> Option<Error>;
    let fails = |call: Call| {
        let (mesh, transport) = faulty("x=2", [Fault::Death { call: 0, rank: 1 }]);
        let error = call(&transport, &mesh, &parts(&[&[1.0, 2.0], &[3.0, 4.0]])).expect("a fault");
        assert!(
            matches!(&error, Error::Transport { ranks, .. } if ranks == &[1]),
            "{error}"
        );
        transport.heal();
        assert_eq!(
            call(&transport, &mesh, &parts(&[&[1.0, 2.0], &[3.0, 4.0]])),
            None,
            "after that it works"
        );
    };
    fails(|t, mesh, p| t.all_reduce(mesh, p, Reduction::Sum).err());
    fails(|t, mesh, p| t.all_gather(mesh, p, 0).err());
    fails(|t, mesh, p| t.reduce_scatter(mesh, p, Reduction::Max, 0).err());
    fails(|t, mesh, p| t.all_to_all(mesh, p, 0, 0).err());
    fails(|t, mesh, p| t.broadcast(mesh, &p[0], &[0, 1]).err());
    fails(|t, mesh, p| t.send(mesh, p[0].clone(), 1).err());
    fails(|t, mesh, _| t.barrier(mesh, &[0, 1]).err());
}

#[test]
fn a_rank_is_known_by_its_id_in_a_part_of_the_mesh() {
    let (mesh, transport) = faulty("x=2, y=2", [Fault::Death { call: 0, rank: 3 }]);
    let healthy = mesh.at("x", 0).expect("ranks 0 and 1");
    let broken = mesh.at("x", 1).expect("ranks 2 and 3");
    assert!(transport.barrier(&healthy, &[0, 1]).is_ok());
    let error = transport
        .barrier(&broken, &[0, 1])
        .expect_err("its rank 1 is rank 3 of the whole");
    assert!(
        matches!(&error, Error::Transport { ranks, .. } if ranks == &[1]),
        "{error}"
    );
}

#[test]
fn bytes_are_counted_as_the_ranks_receive_them() {
    let (mesh, transport) = faulty("x=4", []);
    let part = |rank: usize| {
        Part::new(
            rank,
            &Tensor::zeros([8, 3], DType::F32, &device()).expect("a part"),
        )
    };
    let p: Vec<Part> = (0..4).map(part).collect();
    let n = 8 * 3 * 4;
    let mut counted = 0;
    let mut adds = |bytes: u64| {
        let total = transport.counts().bytes;
        assert_eq!(total - counted, bytes);
        counted = total;
    };
    transport.all_gather(&mesh, &p, 0).expect("runs");
    adds(4 * 3 * n);
    transport
        .reduce_scatter(&mesh, &p, Reduction::Sum, 0)
        .expect("runs");
    adds(3 * n);
    transport
        .all_reduce(&mesh, &p, Reduction::Sum)
        .expect("runs");
    adds(6 * n);
    transport
        .broadcast(&mesh, &p[1], &[0, 1, 2, 3])
        .expect("runs");
    adds(3 * n);
    transport.all_to_all(&mesh, &p, 0, 1).expect("runs");
    adds(3 * n);
    transport.send(&mesh, p[0].clone(), 1).expect("runs");
    adds(n);
    transport.send(&mesh, p[0].clone(), 0).expect("runs");
    adds(0);
    transport
        .broadcast(&mesh, &p[1], &[0])
        .expect_err("the root is missing");
    adds(0);
    assert_eq!(
        transport.counts(),
        Counts {
            calls: 8,
            failed: 1,
            bytes: counted
        }
    );
}

#[test]
fn the_same_seed_gives_the_same_script_and_another_seed_another() {
    let script = |seed| Fault::script(seed, 400, 4, SHORT);
    assert_eq!(script(7), script(7));
    assert_ne!(script(7), script(8));
    assert!(
        (60..140).contains(&script(7).len()),
        "about one call in four: {}",
        script(7).len()
    );
    for fault in script(7) {
        assert!(
            !matches!(fault, Fault::Death { .. } | Fault::Delay { rank: 4.., .. }),
            "{fault:?}"
        );
    }
    assert!(
        Fault::script(7, 50, 0, SHORT).len() > 1,
        "no ranks are no reason to panic"
    );
}

#[test]
fn a_program_that_retries_gets_through_any_script() {
    let mut failed = 0;
    for seed in 0..20 {
        let script = Fault::script(seed, 60, 4, Duration::from_millis(2));
        let transport = Arc::new(
            Faulty::new(Arc::new(Minimal), script).with_deadline(Duration::from_millis(1)),
        );
        let mesh = Mesh::new("x=2, y=2", &device())
            .expect("a mesh")
            .with_transport(transport.clone());
        let mut x = counting(&[5, 7], DType::I32)
            .to_mesh(&mesh, "[@x, @y]")
            .expect("cut");
        for to in [
            "[@y, @x]",
            "[_, @x@y]",
            "[@y@x, _]",
            "[_, _]",
            "[@x, _]",
            "[_, @y]",
            "[@x@y, _]",
            "[@x, @y]",
        ] {
            let tries = (0..20).find_map(|_| x.reshard(to).ok());
            x = tries.unwrap_or_else(|| panic!("seed {seed}: no try to reach {to} got through"));
        }
        transport.heal();
        assert_eq!(
            x.to_vec::<i32>().expect("values"),
            (0..35).collect::<Vec<_>>(),
            "seed {seed}"
        );
        failed += transport.counts().failed;
    }
    assert!(failed > 20, "only {failed} calls failed");
}
