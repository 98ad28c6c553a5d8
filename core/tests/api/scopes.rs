//! Scopes end where their closure does, also by a panic, and hold for one thread unless they are
//! carried to another.

use anymesh_core::{
    Context, DType, Error, Mesh, Result, Tensor,
    grad::{checkpoint, no_grad},
    ops::{Promotion, with_promotion},
    spmd::{Ledger, Policy, trace, with_policy},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A vector of four, cut in two.
fn cut() -> Tensor {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("tp=2", &device).expect("a mesh");
    Tensor::ones([4], DType::F32, &device)
        .and_then(|x| x.to_mesh(&mesh, "[@tp]"))
        .expect("on the mesh")
}

fn leaf() -> Tensor {
    Tensor::ones([2], DType::F32, &anymesh_backend_cpu::device())
        .and_then(|x| x.require_grad())
        .expect("a leaf")
}

/// Runs something that panics.
fn broken<T>(f: impl FnOnce() -> T) {
    assert!(catch_unwind(AssertUnwindSafe(f)).is_err());
}

fn panics<T>() -> T {
    std::panic::resume_unwind(Box::new("as it should"))
}

/// An op that has to communicate.
fn gathers(x: &Tensor) -> Result<Tensor> {
    x.cumsum(0)
}

#[test]
fn a_panic_ends_a_ledger_and_an_outer_one_keeps_what_it_saw() {
    let x = cut();
    let ((), outer) = Ledger::record(|| {
        broken(|| {
            Ledger::record(|| {
                gathers(&x).expect("auto");
                panics::<()>()
            })
        });
        gathers(&x).expect("auto");
    });
    let ((), alone) = Ledger::record(|| drop(gathers(&x).expect("auto")));
    assert!(!alone.entries.is_empty());
    assert_eq!(outer.entries.len(), 2 * alone.entries.len());
}

#[test]
fn a_panic_ends_a_trace() {
    let x = cut();
    let ((), decisions) = trace(|| {
        broken(|| trace(|| panics::<()>()));
        drop(gathers(&x).expect("auto"));
    });
    assert!(!decisions.is_empty(), "the outer trace goes on");
    broken(|| trace(|| panics::<()>()));
    let ((), after) = trace(|| ());
    assert!(after.is_empty());
}

#[test]
fn a_panic_ends_policies_and_no_grad() {
    let (x, w) = (cut(), leaf());
    broken(|| with_policy(Policy::Explicit, &[], panics::<()>));
    assert!(gathers(&x).is_ok());
    broken(|| with_promotion(Promotion::Explicit, panics::<()>));
    let narrow = w.detach().cast(DType::BF16).expect("castable");
    assert!(narrow.dot(&w).is_ok());
    broken(|| no_grad(panics::<()>));
    assert!(w.exp().expect("valid").requires_grad());
}

#[test]
fn a_panic_inside_of_a_checkpoint_or_a_hook_leaves_the_tape_usable() -> Result<()> {
    let w = leaf();
    broken(|| checkpoint(|_| panics(), &[&w]));
    let y = checkpoint(|x| Ok(vec![x[0].exp()?]), &[&w])?.remove(0);
    let hook = w.on_gradient(|_| panics())?;
    broken(|| y.sum(&[], false).and_then(|y| y.backward_retain()));
    hook.remove();
    assert!(w.exp()?.requires_grad(), "the pass turned recording off");
    let grads = y.sum(&[], false)?.backward()?;
    assert_eq!(grads.of(&w)?.dims(), [2]);
    Ok(())
}

#[test]
fn a_thread_has_its_own_scopes() {
    let (x, w) = (cut(), leaf());
    let ((), ledger) = Ledger::record(|| {
        no_grad(|| {
            with_policy(Policy::Explicit, &[], || {
                std::thread::scope(|threads| {
                    threads.spawn(|| {
                        assert!(gathers(&x).is_ok());
                        assert!(w.exp().expect("valid").requires_grad());
                    });
                });
            })
        })
    });
    assert!(ledger.entries.is_empty());
}

#[test]
fn a_context_carries_every_scope_to_other_threads() {
    let (x, w) = (cut(), leaf());
    let (((), decisions), ledger) = Ledger::record(|| {
        trace(|| {
            let auto = Context::capture();
            let explicit = with_policy(Policy::Explicit, &["tp"], || {
                with_promotion(Promotion::Explicit, || no_grad(Context::capture))
            });
            std::thread::scope(|threads| {
                for _ in 0..3 {
                    threads.spawn(|| auto.run(|| gathers(&x).map(drop)));
                }
                threads.spawn(|| {
                    explicit.run(|| {
                        let refused = gathers(&x).expect_err("explicit");
                        assert!(matches!(refused, Error::ImplicitCommunication { .. }));
                        let narrow = w.detach().cast(DType::BF16).expect("castable");
                        let refused = narrow.dot(&w).expect_err("explicit");
                        assert!(matches!(
                            refused,
                            Error::Promotion {
                                left: DType::BF16,
                                right: DType::F32,
                                to: DType::F32,
                                ..
                            }
                        ));
                        assert!(!w.exp().expect("valid").requires_grad());
                    });
                    assert!(gathers(&x).is_ok(), "its own scopes are back");
                    assert!(w.exp().expect("valid").requires_grad());
                });
            });
        })
    });
    let ((), one) = Ledger::record(|| drop(gathers(&x).expect("auto")));
    assert_eq!(ledger.entries.len(), 3 * one.entries.len());
    assert!(decisions.len() >= 4, "{}", decisions.len());
    for entry in &ledger.entries {
        assert!(entry.caller.contains("scopes.rs"), "{ledger}");
    }
}

#[test]
fn a_panic_under_a_context_restores_the_threads_own_scopes() {
    let x = cut();
    let context = with_policy(Policy::Explicit, &[], Context::capture);
    broken(|| context.run(panics::<()>));
    assert!(gathers(&x).is_ok());
}

#[test]
fn a_checkpoint_notes_what_other_threads_use_for_it() -> Result<()> {
    let (x, hidden) = (leaf(), leaf());
    let captured = hidden.clone();
    let y = checkpoint(
        move |x| {
            let context = Context::capture();
            let doubled = std::thread::scope(|threads| {
                threads
                    .spawn(|| context.run(|| captured.mul(2.0)))
                    .join()
                    .expect("no panic")
            })?;
            Ok(vec![x[0].mul(&doubled)?])
        },
        &[&x],
    )?
    .remove(0);
    let grads = y.sum(&[], false)?.backward()?;
    assert_eq!(grads.of(&x)?.to_vec::<f32>()?, [2.0, 2.0]);
    assert_eq!(grads.of(&hidden)?.to_vec::<f32>()?, [2.0, 2.0]);
    Ok(())
}
