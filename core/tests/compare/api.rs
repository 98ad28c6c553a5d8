//! What a user does with it: files of hashes, reproductions, other programs, threads, errors.

use super::lossy::{lossy, trigger};
use anymesh_conformance::replay;
use anymesh_core::{
    Context, DType, Device, Error, Mesh, Result, Tensor,
    compare::{Compare, Given, Run, Trace, Why, compare},
    meta,
    ops::{NormOptions, Rng},
};

fn cpu() -> Device {
    anymesh_backend_cpu::device()
}

/// A device on which a kernel of this op gives zeros.
fn zeros(op: &'static str) -> Device {
    cpu().decorated(move |cpu, kernel| {
        if kernel.op() != op {
            return cpu.launch(kernel);
        }
        let sizes = kernel.outputs();
        let zeros = |(dtype, shape): &(DType, anymesh_core::Shape)| {
            cpu.upload(&vec![0; dtype.size() * shape.numel()])
        };
        sizes.iter().map(zeros).collect()
    })
}

fn small(mesh: &Mesh) -> Result<Tensor> {
    let place = (mesh, "[@x?, _]");
    let x = Tensor::normal([4, 6], 0.0, 1.0, DType::F32, place, Rng::new(1))?;
    let w = Tensor::normal([6, 6], 0.0, 1.0, DType::F32, mesh, Rng::new(2))?.require_grad()?;
    let y = x.matmul(&w)?.layer_norm(&NormOptions::new())?.softmax(-1)?;
    y.square()?.mean_all()?.backward()?.of(&w)
}

#[test]
fn a_finding_says_everything() -> Result<()> {
    let (a, b) = (
        Mesh::single(&cpu()),
        Mesh::new("x=2", &zeros("layer_norm"))?,
    );
    let found = compare(small, &a, &b)?;
    let first = found.first().expect("a norm of zeros");
    assert_eq!(
        (first.op.as_str(), first.given, first.run),
        ("layer_norm", Given::Result(0), Run::B)
    );
    assert_eq!(first.operands, ["f32[4@x, 6]"]);
    assert_eq!(
        (first.ty.as_str(), first.other.as_deref()),
        ("f32[4@x, 6]", Some("f32[4, 6]"))
    );
    let Why::Values(difference) = &first.why else {
        panic!("{found}");
    };
    assert_eq!((difference.b, difference.of), (0.0, 24));
    assert_eq!(difference.largest, difference.a.abs());
    assert_eq!(difference.index.len(), 2);
    let text = found.to_string();
    for part in [
        "layer_norm at core/tests/compare/api.rs:",
        "cpu",
        "mesh(x=2)",
        "largest difference",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let json = found.to_json();
    assert_eq!(json["findings"][0]["op"], "layer_norm");
    assert_eq!(json["same"], false);
    Ok(())
}

#[test]
fn a_gradient_is_named_by_its_op_and_operand_and_can_be_replayed() -> Result<()> {
    // The kernel that only the gradient of a softmax uses.
    let broken = cpu().decorated(|cpu, kernel| {
        let gradient =
            kernel.op() == "softmax" && matches!(kernel, anymesh_core::backend::Kernel::Map(_));
        let outputs = kernel.outputs();
        let mut out = cpu.launch(kernel)?;
        if gradient {
            out[0] = cpu.upload(&vec![0; 4 * outputs[0].1.numel()])?;
        }
        Ok(out)
    });
    let compare = Compare {
        reproduce: true,
        ..Compare::default()
    };
    let (a, b) = (Mesh::single(&cpu()), Mesh::new("x=2", &broken)?);
    let found = compare.run(small, &a, &b)?;
    let first = found.first().expect("a gradient of zeros");
    assert_eq!(
        (first.op.as_str(), first.given),
        ("softmax", Given::Gradient(0))
    );
    let alone = found.reproduction.as_ref().expect("with its operands");
    assert_eq!((alone.operands.len(), alone.gradients.len()), (1, 1));
    assert_eq!(alone.operands[0].sharding, "[@x, _]");
    replay::check(alone, &cpu())?;
    assert!(
        replay::replay(alone, &b)?.is_some(),
        "it shows again on the broken device"
    );
    assert!(replay::replay(alone, &Mesh::new("x=2", &cpu())?)?.is_none());
    Ok(())
}

#[test]
fn hashes_compare_runs_of_two_processes() -> Result<()> {
    let exact = Compare::default();
    let run = |m: &Mesh| {
        Tensor::arange(0, 64, 1, DType::F32, (m, "[@x?]"))?
            .mul(0.1)?
            .exp()
    };
    let text = exact.record(run, &Mesh::single(&cpu()))?.to_text();
    let trace = Trace::parse(&text)?;
    assert_eq!((trace.len(), trace.to_text()), (3, text));
    // Elementwise ops have the same bits on a mesh.
    let found = exact.against(&trace, run, &Mesh::new("x=3", &cpu())?)?;
    assert!(found.is_same(), "{found}");
    let found = exact.against(&trace, run, &Mesh::new("x=3", &zeros("exp"))?)?;
    let first = found.first().expect("other bits");
    assert_eq!((first.op.as_str(), &first.why), ("exp", &Why::Bits));
    assert_ne!(
        trace.hash(),
        exact.record(run, &Mesh::single(&zeros("exp")))?.hash()
    );
    Ok(())
}

#[test]
fn a_trace_that_is_none_is_refused() {
    let good = Compare::default()
        .record(small, &Mesh::single(&cpu()))
        .expect("runs")
        .to_text();
    for (name, text) in [
        ("nothing", String::new()),
        ("another file", "{\"a\": 1}\n".into()),
        ("half a line", good[..good.len() - 20].into()),
        ("a line of something", format!("{good}[1, 2]\n")),
        (
            "a negative size",
            good.replace("\"shape\":[4", "\"shape\":[-4"),
        ),
        ("an unknown dtype", good.replace("\"f32\"", "\"f99\"")),
        ("no hash", good.replace("\"hash\":\"", "\"hash\":\"z")),
    ] {
        let error = Trace::parse(&text).expect_err(name);
        assert!(
            matches!(
                error,
                Error::Argument {
                    argument: "trace",
                    ..
                }
            ),
            "{name}: {error}"
        );
    }
}

#[test]
fn a_program_that_goes_another_way_is_told_from_one_that_computes_something_else() -> Result<()> {
    let (a, b) = (Mesh::single(&cpu()), Mesh::new("x=2", &cpu())?);
    let other_op = |m: &Mesh| {
        let x = Tensor::ones([4], DType::F32, m)?;
        match m.is_single() {
            true => x.exp(),
            false => x.log(),
        }
    };
    let found = compare(other_op, &a, &b)?;
    let first = found.first().expect("another op");
    assert_eq!(
        (first.op.as_str(), &first.why, first.run),
        ("log", &Why::NotInOther, Run::B)
    );
    let fewer = |m: &Mesh| {
        let x = Tensor::ones([4], DType::F32, m)?;
        (0..if m.is_single() { 3 } else { 2 }).try_fold(x, |x, _| x.exp())
    };
    let found = compare(fewer, &a, &b)?;
    let first = found.first().expect("one op less");
    assert_eq!(
        (first.op.as_str(), first.nth, first.run),
        ("exp", 2, Run::A)
    );
    let other_type = |m: &Mesh| {
        let n = if m.is_single() { 4 } else { 5 };
        Tensor::ones([n], DType::F32, m)?.exp()
    };
    let found = compare(other_type, &a, &b)?;
    assert_eq!(found.first().map(|f| &f.why), Some(&Why::Type), "{found}");
    Ok(())
}

#[test]
fn values_that_do_not_fit_into_memory_go_to_a_file() -> Result<()> {
    let little = Compare {
        memory: 100,
        ..Compare::default()
    };
    let (a, b) = (Mesh::single(&cpu()), Mesh::new("x=2", &cpu())?);
    let found = little.run(small, &a, &b)?;
    assert!(found.is_same(), "{found}");
    Ok(())
}

#[test]
fn errors_of_the_program_are_its_own_unless_the_runs_parted_before() -> Result<()> {
    #[derive(Debug, PartialEq)]
    enum Mine {
        Core(Error),
        Enough,
    }
    impl From<Error> for Mine {
        fn from(error: Error) -> Self {
            Mine::Core(error)
        }
    }
    let (a, good) = (Mesh::single(&cpu()), Mesh::new("x=2", &cpu())?);
    let bad = Mesh::new("x=2", &zeros("exp"))?;
    let run = |m: &Mesh| -> std::result::Result<(), Mine> {
        let y = Tensor::ones([4], DType::F32, m).and_then(|x| x.exp());
        // It goes on although it is told to end.
        let z = y.or_else(|_| Tensor::zeros([4], DType::F32, m))?;
        drop(z);
        match m.is_single() {
            true => Ok(()),
            false => Err(Mine::Enough),
        }
    };
    assert_eq!(compare(run, &a, &good), Err(Mine::Enough));
    let found = compare(run, &a, &bad).expect("they part before the error");
    assert_eq!(found.first().map(|f| f.op.as_str()), Some("exp"));
    let nowhere = compare(run, &a, &Mesh::single(&meta()));
    assert!(matches!(nowhere, Err(Mine::Core(Error::Argument { .. }))));
    Ok(())
}

#[test]
fn threads_that_take_the_context_along_are_seen() -> Result<()> {
    let run = |m: &Mesh| -> Result<()> {
        let x = Tensor::ones([4], DType::F32, m)?;
        let context = Context::capture();
        std::thread::scope(|threads| {
            let work = threads.spawn(|| context.run(|| x.exp().map(drop)));
            work.join().expect("no panic")
        })
    };
    let found = compare(run, &Mesh::single(&cpu()), &Mesh::single(&zeros("exp")))?;
    assert_eq!(found.first().map(|f| f.op.as_str()), Some("exp"), "{found}");
    Ok(())
}

#[test]
fn a_move_that_changes_its_value_is_named_in_the_run_it_is_in() -> Result<()> {
    let run = |m: &Mesh| -> Result<Tensor> {
        let x = Tensor::ones([4, 4], DType::F32, (m, "[_, @x?]"))?;
        let sums = x.sum(&[1], false)?;
        sums.reshard("[_]")?.exp()
    };
    let lossy = || -> Result<Mesh> {
        Ok(Mesh::new("x=2", &cpu())?.with_transport(lossy(&trigger(Some(0)))))
    };
    for (a, b, side) in [
        (Mesh::single(&cpu()), lossy()?, Run::B),
        (lossy()?, Mesh::single(&cpu()), Run::A),
    ] {
        let found = compare(run, &a, &b)?;
        let first = found.first().expect("sums that were not added up");
        assert_eq!((first.op.as_str(), first.run), ("reshard", side), "{found}");
        assert!(matches!(first.why, Why::Moved(_)), "{found}");
    }
    Ok(())
}
