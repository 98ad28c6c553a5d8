//! From one mesh to another.

use super::cases::{device, expect_values, mesh, tensor};
use anymesh_conformance::sweep::shardings;
use anymesh_core::{
    DType, Error, Mesh, Reduction, Result, Shape, Sharding, Tensor,
    reshard::plan_across,
    spmd::Ledger,
    transport::{InProcess, Message, Transport},
};
use std::sync::Arc;

/// Moves between all pairs of shardings of two meshes and checks every element; answers with the
/// number of moves.
fn sweep(source: &Mesh, mesh: &Mesh, dims: &[usize]) -> usize {
    let (froms, tos) = (
        shardings(dims.len(), source.axes().len(), &[Reduction::Sum]),
        shardings(dims.len(), mesh.axes().len(), &[Reduction::Max]),
    );
    for from in &froms {
        let x = tensor(source, dims, from);
        for to in &tos {
            let plan = plan_across(source, from, mesh, to, x.shape(), DType::I32).expect("a plan");
            let (y, ledger) = Ledger::record(|| x.to_mesh(mesh, to));
            let y = y.unwrap_or_else(|e| panic!("{e}: {plan}"));
            assert_eq!(ledger.bytes(), plan.recv_bytes, "{plan}\n{ledger}");
            assert_eq!((y.mesh(), y.sharding()), (mesh, to));
            expect_values(&y, &|| plan.to_string());
            assert!(
                plan.lower_bound.is_none_or(|b| b == plan.recv_bytes),
                "{plan}"
            );
            assert_eq!(
                plan.lower_bound.is_none(),
                from.is_partial() && x.numel() > 0,
                "{plan}"
            );
        }
    }
    froms.len() * tos.len()
}

#[test]
fn tensors_move_between_meshes_of_other_shapes_and_sizes() {
    for (source, other) in [
        (&[2, 2][..], &[4][..]),
        (&[3], &[2]),
        (&[2], &[3]),
        (&[2, 3], &[3, 2]),
        (&[4], &[2, 3]),
    ] {
        for dims in [&[7][..], &[4, 5], &[0, 3], &[1, 2]] {
            assert!(sweep(&mesh(source), &mesh(other), dims) > 0);
        }
    }
}

#[test]
fn tensors_move_to_sub_meshes_and_back() {
    let whole = mesh(&[2, 3]);
    for part in [
        whole.at("a", 1),
        whole.at("b", 2),
        whole.only(&["b"]),
        whole.only(&["b", "a"]),
    ] {
        let part = part.expect("a sub-mesh");
        assert!(sweep(&whole, &part, &[5, 4]) > 0);
        assert!(sweep(&part, &whole, &[5, 4]) > 0);
    }
}

#[test]
fn tensors_move_to_a_single_device() {
    let source = mesh(&[2, 2]);
    let x = tensor(
        &source,
        &[5, 3],
        &Sharding::replicated()
            .cut(0, 1)
            .partial_over(0, Reduction::Sum),
    );
    let y = x
        .to_mesh(&Mesh::single(&device()), Sharding::replicated())
        .expect("a plain tensor");
    assert!(y.is_plain());
    assert_eq!(
        y.to_vec::<i32>().expect("values"),
        x.to_vec::<i32>().expect("values")
    );
}

#[test]
fn ranks_that_are_in_both_meshes_keep_what_they_have() {
    let whole = mesh(&[2, 4]);
    let row = whole.at("a", 1).expect("a sub-mesh");
    let shape = Shape::from([64, 64]);
    let bytes = |from: &Sharding, to: &Sharding| {
        plan_across(&whole, from, &row, to, &shape, DType::F32)
            .expect("a plan")
            .recv_bytes
    };
    let columns = Sharding::replicated().cut(1, 0);
    // The same cut on both: nothing moves. Cut by the axis that goes: the other half comes.
    assert_eq!(bytes(&Sharding::replicated().cut(1, 1), &columns), 0);
    assert_eq!(
        bytes(&Sharding::replicated().cut(0, 0), &Sharding::replicated()),
        8192
    );
    assert_eq!(bytes(&Sharding::replicated().cut(0, 0), &columns), 2048);
    // Back: the ranks of the other row have nothing yet.
    let back = plan_across(
        &row,
        &columns,
        &whole,
        &Sharding::replicated().cut(1, 1),
        &shape,
        DType::F32,
    )
    .expect("a plan");
    assert_eq!(back.recv_bytes, 4096);
}

#[test]
fn partial_values_are_scattered_before_they_travel() {
    let (whole, other) = (mesh(&[4]), mesh(&[2, 4]));
    let from = Sharding::replicated().partial_over(0, Reduction::Sum);
    let plan = plan_across(
        &whole,
        &from,
        &other,
        &Sharding::replicated(),
        &Shape::from([64, 64]),
        DType::F32,
    )
    .expect("a plan");
    assert_eq!(plan.source.steps.len(), 1, "{plan}");
    assert_eq!(
        plan.source.steps[0].kind,
        anymesh_core::reshard::Collective::ReduceScatter
    );
    // Three quarters to scatter; the new ranks then need everything.
    assert_eq!(plan.recv_bytes, 12288 + 16384);
}

#[test]
fn a_ceiling_holds_between_meshes_too() {
    let mut cost = mesh(&[2, 2]).cost().clone();
    cost.memory = Some(9000);
    let source = mesh(&[2, 2]).with_cost(cost);
    let other = mesh(&[4]);
    let (shape, rows, columns) = (
        Shape::from([32, 32]),
        Sharding::replicated().cut(0, 0),
        Sharding::replicated().cut(1, 0),
    );
    let plan = |source: &Mesh, from: &Sharding| {
        plan_across(source, from, &other, &columns, &shape, DType::F64)
    };
    assert!(plan(&source, &rows).expect("a plan").peak_bytes <= 9000);
    assert!(
        matches!(
            plan(&source, &Sharding::replicated()),
            Err(Error::Memory { needed: 10240, .. })
        ),
        "{:?}",
        plan(&source, &Sharding::replicated())
    );
}

#[derive(Debug)]
struct Pigeons(InProcess);

impl Transport for Pigeons {
    fn name(&self) -> &str {
        "pigeons"
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        self.0.exchange(mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.0.barrier(mesh, group)
    }
}

#[test]
fn meshes_of_different_transports_do_not_mix() {
    let (source, other) = (
        mesh(&[2]),
        mesh(&[3]).with_transport(Arc::new(Pigeons(InProcess))),
    );
    let error = tensor(&source, &[4], &Sharding::replicated())
        .to_mesh(&other, "[@a]")
        .expect_err("two transports");
    assert!(error.to_string().contains("with_transport"), "{error}");
    let source = source.with_transport(Arc::new(Pigeons(InProcess)));
    tensor(&source, &[4], &Sharding::replicated())
        .to_mesh(&other, "[@a]")
        .expect("one transport");
}
