//! The collectives where all ranks are in this process.

use super::devices::{Minimal, counting_device, device, parts, values};
use anymesh_core::{
    DType, Error, Mesh, Reduction, Tensor, bf16,
    transport::{InProcess, Message, Part, Transport, reduce},
};

fn mesh(ranks: usize) -> Mesh {
    Mesh::new(&format!("x={ranks}"), &device()).expect("a mesh")
}

#[test]
fn parts_are_added_in_the_order_given() {
    // 1 is lost beside 1e8, but not after the two large values have cancelled.
    let forward = parts(&[&[1e8], &[-1e8], &[1.0]]);
    let mut backward = forward.clone();
    backward.reverse();
    for transport in [&InProcess as &dyn Transport, &Minimal] {
        assert_eq!(
            values(
                transport
                    .all_reduce(&mesh(3), &forward, Reduction::Sum)
                    .expect("sums")
            ),
            [[1.0], [1.0], [1.0]]
        );
        assert_eq!(
            values(
                transport
                    .all_reduce(&mesh(3), &backward, Reduction::Sum)
                    .expect("sums")
            ),
            [[0.0], [0.0], [0.0]]
        );
    }
}

#[test]
fn a_sum_of_many_small_floats_is_rounded_once() {
    // 256 + 1 is 256 in bf16, so adding ones one by one would never move.
    for ranks in [2, 6, 7, 12, 40] {
        let tensor = |rank: usize| {
            Tensor::new(
                bf16::from_f32(if rank == 0 { 256.0 } else { 1.0 }),
                &device(),
            )
            .expect("a scalar")
        };
        let parts: Vec<Part> = (0..ranks)
            .map(|rank| Part::new(rank, &tensor(rank)))
            .collect();
        let sum = bf16::from_f32(256.0 + (ranks - 1) as f32);
        for transport in [&InProcess as &dyn Transport, &Minimal] {
            for got in transport
                .all_reduce(&mesh(ranks), &parts, Reduction::Sum)
                .expect("sums")
            {
                assert_eq!(
                    got.expect("here").to_vec::<bf16>().expect("values"),
                    [sum],
                    "{ranks} ranks"
                );
            }
        }
    }
}

#[test]
fn a_small_integer_wraps_and_its_maximum_does_not() {
    let tensors: Vec<Tensor> = (0..9u8)
        .map(|i| Tensor::from_slice(&[250 - i, i], [2], &device()).expect("a part"))
        .collect();
    assert_eq!(
        reduce(&tensors, Reduction::Sum)
            .expect("a sum")
            .to_vec::<u8>()
            .expect("values"),
        [(9 * 250 - 36) as u8, 36]
    );
    assert_eq!(
        reduce(&tensors, Reduction::Max)
            .expect("a maximum")
            .to_vec::<u8>()
            .expect("values"),
        [250, 8]
    );
}

#[test]
fn logical_reductions_of_numbers_answer_zero_or_one_also_for_one_part() {
    let tensor = Tensor::from_slice(&[5f32, 0.0, f32::NAN], [3], &device()).expect("a part");
    for n in [1, 2, 8] {
        let tensors = vec![tensor.clone(); n];
        for reduction in [Reduction::And, Reduction::Or] {
            assert_eq!(
                reduce(&tensors, reduction)
                    .expect("truth")
                    .to_vec::<f32>()
                    .expect("values"),
                [1.0, 0.0, 1.0],
                "{n} {reduction}"
            );
        }
    }
}

#[test]
fn not_a_number_survives_maximum_and_minimum() {
    for reduction in [
        Reduction::Max,
        Reduction::Min,
        Reduction::Sum,
        Reduction::Prod,
    ] {
        for got in values(
            InProcess
                .all_reduce(&mesh(3), &parts(&[&[1.0], &[f32::NAN], &[2.0]]), reduction)
                .expect("runs"),
        ) {
            assert!(got[0].is_nan(), "{reduction}");
        }
    }
}

#[test]
fn nothing_to_reduce_and_parts_that_differ_are_refused() {
    let a = Tensor::zeros([2], DType::F32, &device()).expect("a part");
    let b = Tensor::zeros([3], DType::F32, &device()).expect("a part");
    assert!(matches!(
        reduce(&[], Reduction::Sum),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        reduce(&[a, b], Reduction::Sum),
        Err(Error::Shape { .. })
    ));
}

#[test]
fn a_replicated_result_is_computed_once_on_the_device() {
    let (device, work) = counting_device();
    let mesh = Mesh::new("x=6", &device).expect("a mesh");
    let part = |rank: usize| {
        Part::new(
            rank,
            &Tensor::from_slice(&[rank as f32, 1.0], [2], &device).expect("a part"),
        )
    };
    let parts: Vec<Part> = (0..6).map(part).collect();
    work.take();
    let sums = InProcess
        .all_reduce(&mesh, &parts, Reduction::Sum)
        .expect("sums");
    assert_eq!(
        work.take(),
        (1, 0),
        "one kernel for six parts and six results"
    );
    let joined = InProcess.all_gather(&mesh, &parts, 0).expect("joins");
    assert_eq!(
        work.take(),
        (1, 0),
        "one kernel for six parts and six results"
    );
    InProcess
        .broadcast(&mesh, &parts[2], &[0, 1, 2, 3, 4, 5])
        .expect("shares");
    InProcess
        .exchange(
            &mesh,
            vec![Message {
                part: parts[1].clone(),
                to: 5,
            }],
        )
        .expect("hands over");
    assert_eq!(work.take(), (0, 0), "nothing is copied");
    InProcess
        .reduce_scatter(&mesh, &parts, Reduction::Sum, 0)
        .expect("sums");
    assert_eq!(
        work.take(),
        (1, 0),
        "one kernel, of whose result every member has a window"
    );
    assert_eq!(values(sums), [[15.0, 6.0]; 6]);
    assert_eq!(
        values(joined)[3],
        [0.0, 1.0, 1.0, 1.0, 2.0, 1.0, 3.0, 1.0, 4.0, 1.0, 5.0, 1.0]
    );
}

#[test]
fn more_parts_than_a_kernel_takes_need_few_kernels() {
    let (device, work) = counting_device();
    let mesh = Mesh::new("x=16", &device).expect("a mesh");
    let parts: Vec<Part> = (0..16)
        .map(|rank| Part::new(rank, &Tensor::new(1f32, &device).expect("a part")))
        .collect();
    work.take();
    InProcess
        .all_reduce(&mesh, &parts, Reduction::Sum)
        .expect("sums");
    assert_eq!(work.take(), (3, 0), "6, then 5 more, then 5 more");
}

#[test]
fn ranks_on_two_devices_get_their_results_on_their_own() {
    let ((a, work_a), (b, work_b)) = (counting_device(), counting_device());
    let mesh = Mesh::over("x=4", &[a.clone(), a.clone(), b.clone(), b.clone()]).expect("a mesh");
    let part = |rank: usize| {
        Part::new(
            rank,
            &Tensor::new(1f32 + rank as f32, mesh.device(rank)).expect("a part"),
        )
    };
    let parts: Vec<Part> = (0..4).map(part).collect();
    work_a.take();
    work_b.take();
    let sums = InProcess
        .all_reduce(&mesh, &parts, Reduction::Sum)
        .expect("sums");
    assert_eq!(
        (work_a.take(), work_b.take()),
        ((1, 4), (1, 4)),
        "two parts over the host in each direction, one kernel on each device"
    );
    let copies = InProcess
        .broadcast(&mesh, &parts[0], &[0, 1, 2, 3])
        .expect("copies");
    assert_eq!(
        (work_a.take(), work_b.take()),
        ((0, 1), (0, 1)),
        "one copy for the two ranks of the other device"
    );
    for got in [&sums, &copies] {
        for (rank, t) in got.iter().enumerate() {
            assert_eq!(t.as_ref().map(Tensor::device), Some(mesh.device(rank)));
        }
    }
    assert_eq!(
        (values(sums), values(copies)),
        (vec![vec![10.0]; 4], vec![vec![1.0]; 4])
    );
}

#[test]
fn a_part_on_the_wrong_device_or_on_a_mesh_is_refused() {
    let (other, _) = counting_device();
    let mesh = mesh(2);
    let mut wrong = parts(&[&[1.0], &[2.0]]);
    wrong[1] = Part::new(
        1,
        &Tensor::new(1f32, &other)
            .and_then(|t| t.reshape([1]))
            .expect("a part"),
    );
    let got = InProcess.all_reduce(&mesh, &wrong, Reduction::Sum);
    assert!(matches!(got, Err(Error::DeviceMismatch { .. })), "{got:?}");
    let sharded = Tensor::zeros([1], DType::F32, &device())
        .and_then(|t| t.to_mesh(&mesh, "[_]"))
        .expect("on the mesh");
    wrong[1] = Part::new(1, &sharded);
    let got = InProcess.all_reduce(&mesh, &wrong, Reduction::Sum);
    assert!(
        matches!(&got, Err(Error::Transport { ranks, .. }) if ranks == &[1]),
        "{got:?}"
    );
}

#[test]
fn a_rank_of_another_process_is_out_of_reach_in_process() {
    let mesh = mesh(3).addressing(&[0, 2]).expect("two of three");
    let t = Tensor::new(1f32, &device()).expect("a part");
    let parts = [
        Part::new(0, &t),
        Part::elsewhere(1, DType::F32, ()),
        Part::new(2, &t),
    ];
    let out_of_reach = |e: Error| {
        assert!(
            matches!(&e, Error::Transport { ranks, .. } if ranks == &[1]),
            "{e}"
        )
    };
    out_of_reach(
        InProcess
            .all_reduce(&mesh, &parts, Reduction::Sum)
            .expect_err("rank 1 is elsewhere"),
    );
    out_of_reach(
        InProcess
            .send(&mesh, parts[0].clone(), 1)
            .expect_err("rank 1 is elsewhere"),
    );
    out_of_reach(
        InProcess
            .broadcast(&mesh, &parts[0], &[0, 1])
            .expect_err("rank 1 is elsewhere"),
    );
    out_of_reach(
        InProcess
            .barrier(&mesh, &[0, 1])
            .expect_err("rank 1 is elsewhere"),
    );
    assert!(InProcess.barrier(&mesh, &[2, 0]).is_ok());
}

#[test]
fn a_process_addresses_ranks_that_are_there() {
    assert!(matches!(mesh(3).addressing(&[]), Err(Error::Mesh { .. })));
    assert!(matches!(
        mesh(3).addressing(&[0, 3]),
        Err(Error::Mesh { .. })
    ));
    let two = mesh(3).addressing(&[2, 0]).expect("two of three");
    assert_eq!(
        (
            two.addressable().collect::<Vec<_>>(),
            two.ranks(),
            two.is_local()
        ),
        (vec![0, 2], 3, false)
    );
}

#[test]
fn an_announced_size_that_no_memory_holds_is_refused() {
    let mesh = mesh(2).addressing(&[0]).expect("one of two");
    let huge = Part::elsewhere(1, DType::F32, [1 << 40, 1 << 40]);
    let got = InProcess.send(&mesh, huge, 0);
    assert!(matches!(got, Err(Error::SizeOverflow { .. })), "{got:?}");
}
