//! Tensors that are brought before an op needs them.

use crate::{gate::Gate, support::device};
use anymesh_core::{
    DType, Error, Mesh, Result, Tensor,
    spmd::{Fingerprint, Held, Ledger, OnDifference, PlanOptions, plan, with_held, with_plan},
    transport::{Background, Fault, Faulty, InProcess, Threads, Transport},
};
use std::{sync::Arc, time::Duration};

fn mesh(transport: Arc<dyn Transport>) -> Mesh {
    let mesh = Mesh::new("dp=2", &device()).expect("a mesh");
    mesh.with_transport(transport)
}

/// A parameter that is cut, and a batch whose product needs it whole.
fn operands(mesh: &Mesh) -> Result<(Tensor, Tensor)> {
    let numbers = |n: i64, dims: [usize; 2]| {
        let plain = Tensor::arange(0, n, 1, DType::F32, &device())?;
        plain.reshape(dims)?.to_mesh(mesh, "[@dp, _]")
    };
    Ok((numbers(16, [4, 4])?, numbers(64, [16, 4])?))
}

#[test]
fn what_is_on_its_way_is_at_hand_for_what_ops_decide() -> Result<()> {
    let gate = Arc::new(Gate::default());
    let beside = mesh(Background::new(gate.clone()));
    let at_once = mesh(Arc::new(Gate::default()));
    let step = |mesh: &Mesh, open: &dyn Fn()| {
        let (w, x) = operands(mesh)?;
        let (result, print) = Fingerprint::record(|| {
            Ledger::record(|| {
                let ahead = w.prefetch("[_, _]")?;
                open();
                let y = x.matmul(&w)?;
                drop(ahead);
                Ok(y)
            })
        });
        let (y, ledger): (Result<Tensor>, Ledger) = result;
        let ops: Vec<&str> = ledger.entries.iter().map(|e| e.op).collect();
        assert_eq!(ops, ["prefetch"], "nothing is brought twice");
        Ok((y?.to_vec::<f32>()?, print))
    };
    let expected = step(&at_once, &|| {})?;
    gate.shut();
    // It has not arrived when the op decides: the gate opens a moment later.
    let opener = gate.clone();
    let late = || {
        let opener = opener.clone();
        assert!(opener.seen().len() <= 1);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            opener.open();
        });
    };
    assert_eq!(step(&beside, &late)?, expected);
    assert_eq!(step(&beside, &|| {})?, expected);
    let (w, x) = operands(&at_once)?;
    assert_eq!(x.matmul(&w)?.to_vec::<f32>()?, expected.0);
    Ok(())
}

#[test]
fn what_was_brought_goes_when_nobody_holds_it() -> Result<()> {
    let mesh = mesh(Background::new(Arc::new(InProcess)));
    let (w, x) = operands(&mesh)?;
    let sent = |f: &dyn Fn() -> Result<()>| {
        let (result, ledger) = Ledger::record(f);
        result.map(|()| ledger.entries.len())
    };
    assert_eq!(sent(&|| w.prefetch("[_, _]").map(drop))?, 1);
    assert_eq!(sent(&|| x.matmul(&w).map(drop))?, 1, "brought again");
    let none = Held { calls: 0, bytes: 0 };
    let (w, x) = operands(&mesh)?;
    with_held(none, || {
        let ahead = w.prefetch("[_, _]")?;
        assert_eq!(sent(&|| x.matmul(&w).map(drop))?, 1, "nobody looks for it");
        assert_eq!(ahead.wait()?.to_vec::<f32>()?, w.to_vec::<f32>()?);
        Ok::<_, Error>(())
    })?;
    // What is there already is not sent.
    let whole = w.prefetch("[_, _]")?;
    assert_eq!(sent(&|| w.prefetch("[_, _]").map(drop))?, 0);
    assert_eq!(sent(&|| w.prefetch("[@dp, _]").map(drop))?, 0);
    assert!(whole.wait()?.sharding().is_replicated() && whole.is_done());
    let plain = Tensor::ones([2], DType::F32, &device())?;
    assert!(plain.prefetch("[_]")?.wait()?.is(&plain));
    Ok(())
}

#[test]
fn what_went_wrong_on_the_way_is_told_to_the_op_that_needs_it() -> Result<()> {
    let faulty = Faulty::new(Arc::new(InProcess), [Fault::Fail { call: 0 }]);
    let mesh = mesh(Background::new(Arc::new(faulty)));
    let (w, x) = operands(&mesh)?;
    let ahead = w.prefetch("[_, _]")?;
    let error = x.matmul(&w).expect_err("it does not come");
    assert!(matches!(error, Error::Transport { .. }), "{error}");
    assert_eq!(ahead.wait().expect_err("nor here"), error);
    Ok(())
}

#[test]
fn a_plan_knows_what_a_step_brings_ahead() -> Result<()> {
    let mesh = mesh(Background::new(Arc::new(InProcess)));
    let (w, x) = operands(&mesh)?;
    let w = w.require_grad()?;
    let step = || {
        let ahead = w.prefetch("[_, _]")?;
        let loss = x.matmul(&w)?.square()?.sum(&[], false)?;
        drop(ahead);
        loss.backward()?.of(&w)
    };
    let free = step()?.to_vec::<f32>()?;
    let made = plan(&PlanOptions::default(), || step().map(drop))?;
    let (planned, ledger) = Ledger::record(|| with_plan(&made, OnDifference::Error, step));
    assert_eq!(planned?.to_vec::<f32>()?, free);
    assert_eq!(ledger.bytes(), made.bytes());
    Ok(())
}

#[test]
fn processes_bring_ahead_what_they_need() {
    let threads = Threads::new(Duration::from_secs(60));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let mesh = mesh(Background::new(threads.clone()));
            scope.spawn(move || {
                let mesh = mesh.addressing(&[rank]).expect("a rank");
                let all = |beside: bool| -> Result<Vec<f32>> {
                    let (w, mut x) = operands(&mesh)?;
                    for _ in 0..5 {
                        let ahead = beside.then(|| w.prefetch("[_, _]")).transpose()?;
                        x = x.mul(0.01)?.tanh()?.matmul(&w)?;
                        drop(ahead);
                    }
                    x.to_vec()
                };
                let expected = all(false).expect("values");
                assert_eq!(all(true).expect("values"), expected);
            });
        }
    });
}
