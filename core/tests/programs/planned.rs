//! Steps that are planned: their totals are what the ledger counts, they never cost more than no
//! plan, and they give the same values.

use crate::{
    layers::{
        FULLY_SHARDED, Gpt, Layer, Layout, Llama, MEGATRON, MEGATRON_OVER_DP, Parameters, Sizes,
        sharding_of,
    },
    support::{device, mesh},
};
use anymesh_core::{
    DType, Error, Mesh, Result, Tensor, meta,
    spmd::{
        Fingerprint, Ledger, OnDifference, PlanOptions, StepPlan,
        plan::{PlanFor, plan},
        with_plan,
    },
    transport::Threads,
};
use std::time::Duration;

const SIZES: Sizes = Sizes {
    width: 16,
    heads: 4,
    kv_heads: 4,
    d: 4,
    ffn: 24,
};

/// A stack of layers with everything it needs for a step.
struct Stack<'a> {
    layer: &'a dyn Layer,
    parameters: Vec<Parameters>,
    x: Tensor,
    seed: Tensor,
    stream: &'a str,
    settles: bool,
}

impl<'a> Stack<'a> {
    fn new(
        layer: &'a dyn Layer,
        layers: usize,
        mesh: &Mesh,
        layout: &Layout,
        stream: &'a str,
        settles: bool,
    ) -> Result<Self> {
        let value = |name: &str, shape: &[usize], sharding: &str| {
            let seed = name.bytes().fold(7, |h, b| (h * 31 + b as usize) % 997);
            let numbers: Vec<f32> = (0..shape.iter().product::<usize>())
                .map(|i| ((i * 61 + seed) % 997) as f32 / 997.0 - 0.5)
                .collect();
            Tensor::from_slice(&numbers, shape, (mesh, sharding))
        };
        let one = |_| {
            let make = |(name, shape): (&'static str, Vec<usize>)| {
                let sharding = sharding_of(layout, name, shape.len());
                let w = value(name, &shape, &sharding)?.require_grad()?;
                Ok((name.to_string(), w))
            };
            let all = layer.shapes().into_iter().map(make);
            all.collect::<Result<_>>().map(Parameters)
        };
        let input = [4, 8, SIZES.width];
        Ok(Self {
            layer,
            parameters: (0..layers).map(one).collect::<Result<_>>()?,
            x: value("x", &input, stream)?.require_grad()?,
            seed: value("seed", &input, stream)?,
            stream,
            settles,
        })
    }

    fn forward(&self) -> Result<Tensor> {
        let settle = |x: Tensor| match self.settles {
            true => x.reshard(self.stream),
            false => Ok(x),
        };
        let run = |x: Tensor, p: &Parameters| self.layer.forward(p, &x, &settle);
        self.parameters.iter().try_fold(self.x.clone(), run)
    }

    /// The result and all gradients.
    fn step(&self) -> Result<Vec<Tensor>> {
        let y = self.forward()?;
        let grads = y.backward_with(&self.seed)?;
        let weights = self.parameters.iter().flat_map(Parameters::trained);
        let of = weights.chain([&self.x]).map(|w| grads.of(w));
        std::iter::once(Ok(y.detach())).chain(of).collect()
    }
}

fn seconds(ledger: &Ledger) -> f64 {
    ledger.entries.iter().map(|e| e.modelled).sum()
}

/// Holds a plan of a step against what a run under it does, and gives both results.
#[track_caller]
fn hold(plan: &StepPlan, stack: &Stack<'_>, what: &str) -> Result<Vec<Tensor>> {
    let run = || Ledger::record(|| with_plan(plan, OnDifference::Error, || stack.step()));
    let ((out, ledger), print) = Fingerprint::record(run);
    let out = out?;
    assert_eq!(ledger.bytes(), plan.bytes(), "{what}\n{plan}");
    let steps: u64 = plan.steps().iter().map(|s| s.bytes).sum();
    assert_eq!(steps, plan.bytes(), "{what}");
    let (planned, counted) = (plan.totals().seconds, seconds(&ledger));
    assert!((planned - counted).abs() <= 1e-9 * counted, "{what}");
    assert!(ledger.notes.is_empty(), "{what}: {:?}", ledger.notes);
    assert_eq!(print, plan.fingerprint(), "{what}");
    Ok(out)
}

#[test]
fn the_totals_of_a_plan_are_what_the_ledger_counts_and_never_above_no_plan() -> Result<()> {
    let (gpt, llama) = (Gpt(SIZES), Llama(SIZES));
    let (whole, cut, wide) = ("[@dp, _, _]", "[@dp, @tp, _]", "[_, _, @tp]");
    let cases: [(&str, &dyn Layer, &Layout, &str, bool); 7] = [
        ("gpt", &gpt, MEGATRON, whole, false),
        ("gpt", &gpt, MEGATRON, cut, true),
        ("gpt", &gpt, FULLY_SHARDED, whole, true),
        ("llama", &llama, MEGATRON, whole, true),
        ("llama", &llama, MEGATRON, cut, false),
        ("llama", &llama, MEGATRON_OVER_DP, wide, false),
        ("llama", &llama, FULLY_SHARDED, whole, false),
    ];
    for (name, layer, layout, stream, settles) in cases {
        let what = format!("{name}, stream {stream}, resharded {settles}");
        let mesh = Mesh::new("dp=2, tp=2", &meta())?;
        let stack = Stack::new(layer, 2, &mesh, layout, stream, settles)?;
        let (eager, ledger) = Ledger::record(|| stack.step());
        eager?;
        let start = std::time::Instant::now();
        let plan = plan(&PlanOptions::default(), || stack.step())?;
        let (free, planned) = (ledger.bytes(), plan.bytes());
        println!("{what}: {free} -> {planned} bytes, {:?}", start.elapsed());
        assert_eq!(plan.eager().bytes, free, "{what}");
        assert!(planned <= free, "{what}");
        hold(&plan, &stack, &what)?;
    }
    Ok(())
}

#[test]
fn a_plan_that_was_made_without_values_gives_the_same_values_elsewhere() -> Result<()> {
    let llama = Llama(SIZES);
    for (layout, stream) in [
        (MEGATRON, "[@dp, @tp, _]"),
        (FULLY_SHARDED, "[@dp, _, _]"),
        (MEGATRON_OVER_DP, "[_, _, @tp]"),
    ] {
        let nothing = Mesh::new("dp=2, tp=2", &meta())?;
        let stack = Stack::new(&llama, 2, &nothing, layout, stream, false)?;
        let made = plan(&PlanOptions::default(), || stack.step())?;
        let values = Stack::new(&llama, 2, &mesh("dp=2, tp=2"), layout, stream, false)?;
        let free = values.step()?;
        let planned = hold(&made, &values, stream)?;
        for (a, b) in planned.iter().zip(&free) {
            let (a, b) = (a.to_vec::<f32>()?, b.to_vec::<f32>()?);
            for (a, b) in a.iter().zip(&b) {
                // Sums may be taken in another order.
                assert!(
                    (a - b).abs() <= 1e-4 * b.abs().max(1.0),
                    "{stream}: {a} and {b}"
                );
            }
        }
        // Made on the mesh with values, it is the same plan.
        let there = plan(&PlanOptions::default(), || values.step())?;
        let diff = made.diff(&there);
        assert!(diff.changes.is_empty(), "{stream}: {diff}");
        assert_eq!(there.fingerprint(), made.fingerprint(), "{stream}");
    }
    Ok(())
}

/// Two products, of which the first is cheapest in a way that makes the second dear.
fn chain(mesh: &Mesh) -> Result<Tensor> {
    let x = Tensor::ones([4096, 64], DType::F32, (mesh, "[@tp, _]"))?;
    let w = Tensor::ones([64, 128], DType::F32, (mesh, "[_, @tp]"))?;
    let v = Tensor::ones([128, 4096], DType::F32, (mesh, "[@tp, _]"))?;
    x.matmul(&w)?.matmul(&v)?.sum(&[], false)
}

#[test]
fn a_first_choice_that_costs_its_readers_more_is_made_otherwise() -> Result<()> {
    let mesh = Mesh::new("tp=2", &meta())?;
    let made = plan(&PlanOptions::default(), || chain(&mesh))?;
    // By itself: half of w, then half of the product or of v. Together: half of x, nothing more.
    assert_eq!(made.eager().bytes, 64 * 128 * 4 / 2 + 4096 * 128 * 4 / 2);
    assert_eq!(made.bytes(), 4096 * 64 * 4 / 2, "{made}");
    let none = PlanOptions {
        tries: 0,
        ..PlanOptions::default()
    };
    let eager = plan(&none, || chain(&mesh))?;
    assert_eq!(eager.bytes(), made.eager().bytes);
    let faster = PlanOptions {
        target: PlanFor::Seconds,
        ..PlanOptions::default()
    };
    let faster = plan(&faster, || chain(&mesh))?;
    assert!(faster.totals().seconds <= eager.totals().seconds);
    // What changed, and why.
    let diff = eager.diff(&made);
    assert_eq!(
        diff.totals.0.bytes - diff.totals.1.bytes,
        8192 * 2 + 1_048_576 - 524_288
    );
    assert!(
        diff.changes
            .iter()
            .all(|c| c.first.is_some() && c.second.is_some())
    );
    let text = made.explain(1).to_string();
    assert!(text.contains("matmul") && text.contains("chosen"), "{text}");
    assert!(made.diff(&made).changes.is_empty());
    Ok(())
}

#[test]
fn a_program_that_differs_is_told_with_its_op_and_line() -> Result<()> {
    let mesh = Mesh::new("tp=2", &meta())?;
    let x = Tensor::zeros([8, 8], DType::F32, (&mesh, "[@tp, _]"))?;
    let made = plan(&PlanOptions::default(), || x.exp()?.cumsum(0)?.sin())?;
    let other = || x.exp()?.cumsum(0)?.cos();
    let found = with_plan(&made, OnDifference::Error, other);
    let Err(Error::PlanDiffers {
        number,
        planned,
        found,
        ..
    }) = found
    else {
        panic!("{found:?}");
    };
    assert_eq!(number, made.steps().len() - 1);
    assert!(
        planned.starts_with("sin at core/tests/programs/planned.rs:"),
        "{planned}"
    );
    assert!(
        found.starts_with("cos at core/tests/programs/planned.rs:"),
        "{found}"
    );
    let (result, ledger) = Ledger::record(|| with_plan(&made, OnDifference::Auto, other));
    result?;
    assert_eq!(ledger.notes.len(), 1);
    assert!(ledger.notes[0].contains("cos at"), "{}", ledger.notes[0]);
    // Other operands, too few calls, too many calls.
    let y = Tensor::zeros([8, 10], DType::F32, (&mesh, "[@tp, _]"))?;
    let wider = with_plan(&made, OnDifference::Error, || y.exp());
    let detail = |e: Result<Tensor>| match e {
        Err(Error::PlanDiffers { detail, .. }) => detail,
        other => panic!("{other:?}"),
    };
    let told = detail(wider);
    assert!(
        told.contains("f32[8@tp, 8]") && told.contains("f32[8@tp, 10]"),
        "{told}"
    );
    let told = detail(with_plan(&made, OnDifference::Error, || x.exp()));
    assert!(told.contains("ended before"), "{told}");
    let more = || x.exp()?.cumsum(0)?.sin()?.exp();
    let told = detail(with_plan(&made, OnDifference::Error, more));
    assert!(told.contains("ends after"), "{told}");
    let (early, ledger) = Ledger::record(|| with_plan(&made, OnDifference::Auto, || x.exp()));
    early?;
    assert_eq!(ledger.notes.len(), 1);
    let nested = with_plan(&made, OnDifference::Auto, || {
        plan(&PlanOptions::default(), || x.exp())
    });
    assert!(matches!(nested, Err(Error::Argument { .. })));
    Ok(())
}

#[test]
fn a_plan_survives_as_json_and_what_is_no_plan_is_refused() -> Result<()> {
    let llama = Llama(SIZES);
    let mesh = Mesh::new("dp=2, tp=2", &meta())?;
    let stack = Stack::new(&llama, 2, &mesh, MEGATRON, "[@dp, @tp, _]", false)?;
    let made = plan(&PlanOptions::default(), || stack.step())?;
    let json = made.to_json();
    let read = StepPlan::from_json(&json)?;
    assert_eq!(read, made);
    let text: serde_json::Value = serde_json::from_str(&json.to_string()).expect("JSON");
    hold(&StepPlan::from_json(&text)?, &stack, "from text")?;
    for field in ["format", "totals", "eager", "fingerprint", "steps"] {
        let mut broken = json.clone();
        broken.as_object_mut().expect("an object").remove(field);
        assert!(
            matches!(StepPlan::from_json(&broken), Err(Error::Parse { .. })),
            "{field}"
        );
    }
    let fields: Vec<String> = json["steps"][0]
        .as_object()
        .expect("a step")
        .keys()
        .cloned()
        .collect();
    for field in fields {
        let mut broken = json.clone();
        broken["steps"][0][&field] = serde_json::json!([{ "a": -1.5 }, 300]);
        assert!(StepPlan::from_json(&broken).is_err(), "{field}");
    }
    Ok(())
}

#[test]
fn a_bound_on_memory_is_kept_or_an_error() -> Result<()> {
    let llama = Llama(SIZES);
    let mesh = Mesh::new("dp=2, tp=2", &meta())?;
    let stack = Stack::new(&llama, 2, &mesh, MEGATRON, "[@dp, @tp, _]", true)?;
    let within = |memory: Option<u64>| {
        let options = PlanOptions {
            memory,
            ..PlanOptions::default()
        };
        plan(&options, || stack.step())
    };
    let free = within(None)?;
    let most = free.totals().memory;
    assert_eq!(
        free.steps()
            .iter()
            .map(|s| s.memory)
            .max()
            .unwrap_or(0)
            .max(most),
        most
    );
    let tight = within(Some(most - 1))?;
    assert!(
        tight.totals().memory < most,
        "{} and {most}",
        tight.totals().memory
    );
    hold(&tight, &stack, "tight")?;
    let Err(Error::PlanMemory { needed, bound, .. }) = within(Some(16)) else {
        panic!("16 bytes are not enough");
    };
    assert!(bound == 16 && needed > 16 && needed <= most);
    // With room, matrices that are cut are held until the backward pass.
    let cut = Stack::new(&llama, 1, &mesh, FULLY_SHARDED, "[@dp, _, _]", true)?;
    let options = PlanOptions {
        memory: Some(1 << 30),
        ..PlanOptions::default()
    };
    let roomy = plan(&options, || cut.step())?;
    assert!(roomy.bytes() < roomy.eager().bytes, "{roomy}");
    hold(&roomy, &cut, "roomy")?;
    Ok(())
}

#[test]
fn a_backward_pass_is_planned_from_the_tape_and_then_does_that() -> Result<()> {
    let llama = Llama(SIZES);
    for stream in ["[@dp, _, _]", "[@dp, @tp, _]", "[_, _, @tp]"] {
        let counting = device().decorated(|backend, kernel| backend.launch(kernel));
        let mesh = Mesh::new("dp=2, tp=2", &counting)?;
        let stack = Stack::new(&llama, 2, &mesh, MEGATRON, stream, false)?;
        let loss = || stack.forward()?.square()?.sum(&[], false);
        let first = loss()?;
        let (grads, free) = Ledger::record(|| first.backward());
        let expected = grads?.of(&stack.x)?.to_vec::<f32>()?;
        let second = loss()?;
        let memory = counting.memory();
        let plan = second.plan_backward(&PlanOptions::default())?;
        assert_eq!(counting.memory(), memory, "nothing was made");
        assert!(plan.bytes() <= free.bytes(), "{stream}");
        let (grads, ledger) =
            Ledger::record(|| with_plan(&plan, OnDifference::Error, || second.backward()));
        let grads = grads?;
        assert_eq!(ledger.bytes(), plan.bytes(), "{stream}\n{plan}");
        for (a, b) in grads.of(&stack.x)?.to_vec::<f32>()?.iter().zip(&expected) {
            assert!(
                (a - b).abs() <= 1e-3 * b.abs().max(1.0),
                "{stream}: {a} and {b}"
            );
        }
    }
    Ok(())
}

#[test]
fn planning_computes_nothing_and_nothing_of_it_can_be_read() -> Result<()> {
    let counting = device().decorated(|backend, kernel| backend.launch(kernel));
    let mesh = Mesh::new("tp=2", &counting)?;
    let x = Tensor::ones([4, 4], DType::F32, (&mesh, "[@tp, _]"))?;
    let read = plan(&PlanOptions::default(), || x.exp()?.to_vec::<f32>());
    assert!(matches!(read, Err(Error::Planned { .. })), "{read:?}");
    let kept = std::cell::RefCell::new(None);
    let before = counting.memory().in_use;
    let ((made, ledger), print) = Fingerprint::record(|| {
        Ledger::record(|| {
            plan(&PlanOptions::default(), || {
                *kept.borrow_mut() = Some(x.cumsum(0)?.add(&x)?);
                Ok(())
            })
        })
    });
    assert!(made?.bytes() > 0);
    assert!(
        ledger.entries.is_empty() && print.calls == 0,
        "nobody notices"
    );
    assert_eq!(counting.memory().in_use, before);
    let kept = kept.take().expect("a result");
    assert!(matches!(kept.to_vec::<f32>(), Err(Error::Planned { .. })));
    assert!(kept.exp().is_err(), "no kernel reads it");
    // What was brought while planning is not at hand.
    assert_eq!(x.cumsum(0)?.to_vec::<f32>()?[12..], [4.0; 4]);
    let (again, ledger) = Ledger::record(|| x.cumsum(0));
    again?;
    assert!(ledger.entries.len() <= 1);
    Ok(())
}

#[test]
fn processes_that_decide_alike_agree_and_one_that_does_not_is_named() -> Result<()> {
    let whole = mesh("tp=4").with_transport(Threads::new(Duration::from_secs(60)));
    let all = |differs: Option<usize>| -> Vec<Result<()>> {
        let process = |rank: usize| {
            let mesh = whole.addressing(&[rank])?;
            let x = Tensor::ones([8, 8], DType::F32, (&mesh, "[@tp, _]"))?;
            let (result, print) = Fingerprint::record(|| x.exp()?.cumsum(0)?.sin());
            result?;
            // As if it had taken another way.
            let print = match differs == Some(rank) {
                true => Fingerprint::record(|| x.exp()).1,
                false => print,
            };
            print.agree(&mesh)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|r| scope.spawn(move || process(r))).collect();
            let join = |t: std::thread::ScopedJoinHandle<'_, _>| t.join().expect("no panic");
            threads.into_iter().map(join).collect()
        })
    };
    assert!(all(None).iter().all(Result::is_ok));
    for result in all(Some(2)) {
        let Err(Error::Disagreement { ranks, .. }) = result else {
            panic!("{result:?}");
        };
        assert_eq!(ranks, [2]);
    }
    Ok(())
}
