//! Kernels that are launched together, products that become one, and memory that is used again.

use crate::Suite;
use anymesh::{
    DType, Device, Layout, MapProgram, Mesh, Result, Tensor, View,
    backend::{Kernel, Launch, MapCall, MapInput},
    bf16,
    grad::Gradients,
    map::Builder,
    ops::{Expr, Rng, cross_entropy::CrossEntropyOptions},
};

pub(crate) const SUITE: Suite = &[
    (
        "maps_that_are_launched_together_give_the_bits_of_maps_launched_by_themselves",
        maps_that_are_launched_together_give_the_bits_of_maps_launched_by_themselves,
    ),
    (
        "what_is_let_go_may_be_written_over_and_nothing_else",
        what_is_let_go_may_be_written_over_and_nothing_else,
    ),
    (
        "what_is_let_go_on_a_mesh_may_be_written_over_and_nothing_else",
        what_is_let_go_on_a_mesh_may_be_written_over_and_nothing_else,
    ),
    (
        "the_same_expression_on_a_mesh_gives_what_each_gives_by_itself",
        the_same_expression_on_a_mesh_gives_what_each_gives_by_itself,
    ),
    #[cfg(feature = "train")]
    (
        "a_step_that_fails_leaves_parameters_and_state_as_they_were",
        a_step_that_fails_leaves_parameters_and_state_as_they_were,
    ),
    (
        "linear_maps_of_one_tensor_are_those_of_the_host",
        linear_maps_of_one_tensor_are_those_of_the_host,
    ),
    (
        "logits_that_somebody_reads_later_keep_their_values",
        logits_that_somebody_reads_later_keep_their_values,
    ),
    (
        "sums_that_somebody_holds_are_not_added_to",
        sums_that_somebody_holds_are_not_added_to,
    ),
];

fn random(shape: &[usize], seed: u64, device: &Device) -> Result<Tensor> {
    Tensor::uniform(shape, -1.0, 1.0, DType::F32, device, Rng::new(seed))
}

/// A sum, in place of the first tensor, and a rounded copy of it, in place of the third.
fn sums(each: &mut Vec<Vec<Tensor>>) -> Result<Vec<[Tensor; 2]>> {
    let (over, dtypes) = ([Some(0), Some(2)], [DType::F32, DType::BF16]);
    Expr::maps_over("sums", &[2.0], each, 2, over, dtypes, |a| {
        let sum = a.x[0] * a.p[0] + a.x[1];
        [sum, sum]
    })
}

fn what_is_let_go_may_be_written_over_and_nothing_else(device: &Device) {
    let run = |held: bool| -> Result<()> {
        let sizes = [1usize, 7, 4096, 5000];
        let (mut each, mut expected, mut others) = (vec![], vec![], vec![]);
        for (k, n) in sizes.into_iter().enumerate() {
            let seed = 3 * k as u64;
            // Not as they were uploaded or drawn: with memory of their own.
            let [x, y, z] = [0, 1, 2].map(|i| random(&[n], seed + i, device));
            let (x, y) = (x?.mul(3.0)?, y?.mul(5.0)?);
            let copy = z?.cast(DType::BF16)?;
            expected.push(x.mul(2.0)?.add(&y)?.to_vec::<f32>()?);
            if held {
                others.push((x.clone(), copy.clone(), x.to_vec::<f32>()?));
            } else if k % 2 == 1 {
                // A view of the same memory is another tensor.
                others.push((x.reshape([n, 1])?, copy.clone(), x.to_vec::<f32>()?));
            }
            each.push(vec![x, y, copy]);
        }
        device.sync()?;
        let before = device.memory();
        device.reset_peak();
        let made = sums(&mut each)?;
        assert!(each.is_empty());
        for ([sum, copy], expected) in made.iter().zip(&expected) {
            assert_eq!(sum.to_vec::<f32>()?, *expected);
            let rounded: Vec<bf16> = expected.iter().map(|x| bf16::from_f32(*x)).collect();
            assert_eq!(copy.to_vec::<bf16>()?, rounded);
        }
        for (x, _, values) in &others {
            assert_eq!(x.to_vec::<f32>()?, *values, "somebody holds it");
        }
        let in_place = device.name().starts_with("cuda") && !held;
        let room = (sizes[1] + sizes[3]) as u64 * 6 + 256;
        if in_place {
            let more = device.memory().peak - before.in_use;
            assert!(more <= room, "{more} bytes, and {room} are held by others");
        }
        Ok(())
    };
    run(false).expect("runs");
    run(true).expect("runs");
}

fn what_is_let_go_on_a_mesh_may_be_written_over_and_nothing_else(device: &Device) {
    let run = |held: bool| -> Result<()> {
        let mesh = Mesh::new("dp=2,tp=2", device)?;
        let (mut each, mut expected, mut others) = (vec![], vec![], vec![]);
        for (k, sharding) in ["[@dp]", "[@tp]", "[_]", "[@dp@tp]"]
            .into_iter()
            .enumerate()
        {
            let [x, y, z] = [0, 1, 2].map(|i| {
                let plain = random(&[5000], (3 * k + i) as u64, device)?;
                plain.to_mesh(&mesh, sharding)?.mul(3.0)
            });
            let (x, y, copy) = (x?, y?, z?.cast(DType::BF16)?);
            let sum = x.mul(2.0)?.add(&y)?;
            expected.push(sum.full_tensor()?.to_vec::<f32>()?);
            let values = x.full_tensor()?.to_vec::<f32>()?;
            if held {
                others.push((x.clone(), values));
            } else if k % 2 == 1 {
                // In another sharding, or a view of what each rank has.
                others.push((x.reshard("[_]")?, values));
            }
            each.push(vec![x, y, copy]);
        }
        let made = sums(&mut each)?;
        for ([sum, copy], expected) in made.iter().zip(&expected) {
            assert_eq!(sum.full_tensor()?.to_vec::<f32>()?, *expected);
            let rounded: Vec<bf16> = expected.iter().map(|x| bf16::from_f32(*x)).collect();
            assert_eq!(copy.full_tensor()?.to_vec::<bf16>()?, rounded);
        }
        for (x, values) in &others {
            assert_eq!(
                x.full_tensor()?.to_vec::<f32>()?,
                *values,
                "somebody holds it"
            );
        }
        let twice = || random(&[6], 1, device)?.to_mesh(&mesh, "[@tp]")?.mul(2.0);
        let values = twice()?.full_tensor()?.to_vec::<f32>()?;
        let mut w = twice()?;
        let second = w.clone();
        assert!(w.take_values().is_none(), "there is another handle");
        drop(second);
        let taken = w.take_values().expect("nothing else has them");
        assert_eq!(taken.full_tensor()?.to_vec::<f32>()?, values);
        assert_eq!(taken.sharding(), w.sharding());
        assert!(w.full_tensor().and_then(|w| w.to_vec::<f32>()).is_err());
        let w = w.with_values(&taken)?;
        assert_eq!(w.full_tensor()?.to_vec::<f32>()?, values);
        Ok(())
    };
    run(false).expect("runs");
    run(true).expect("runs");
}

fn the_same_expression_on_a_mesh_gives_what_each_gives_by_itself(device: &Device) {
    let run = || -> Result<()> {
        let mesh = Mesh::new("dp=2,tp=2", device)?;
        let mut each = vec![];
        // Some cut unevenly, some so that ranks have nothing, some whole.
        for (k, (n, sharding)) in [(8, "[@dp]"), (7, "[@tp]"), (1, "[@dp]"), (5, "[_]")]
            .into_iter()
            .enumerate()
        {
            let tensor = |seed| random(&[n], seed, device)?.to_mesh(&mesh, sharding);
            each.push([tensor(2 * k as u64)?, tensor(2 * k as u64 + 1)?]);
        }
        let exprs: Vec<Expr<'_>> = (each.iter())
            .map(|[x, y]| Expr::new("mixed", &[x, y]).params(&[0.5]))
            .collect();
        let together = Expr::maps_each(&exprs, [DType::F32, DType::F32], |a| {
            [a.x[0] * a.p[0] - a.x[1], a.x[0].exp()]
        })?;
        for ([x, y], [a, b]) in each.iter().zip(together) {
            let alone = [x.mul(0.5)?.sub(y)?, x.exp()?];
            for (found, expected) in [a, b].iter().zip(&alone) {
                assert_eq!(found.sharding(), expected.sharding());
                let [found, expected] = [found, expected].map(|t| t.full_tensor());
                assert_eq!(found?.to_vec::<f32>()?, expected?.to_vec::<f32>()?);
            }
        }
        Ok(())
    };
    run().expect("runs");
}

#[cfg(feature = "train")]
fn a_step_that_fails_leaves_parameters_and_state_as_they_were(device: &Device) {
    use anymesh::train::{
        Build, Init, Module, Policy,
        nn::Linear,
        optim::{Accumulator, AdamW, Groups, Optimizer, Rule},
    };
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };
    let failing = Arc::new(AtomicBool::new(false));
    let fails = failing.clone();
    let device = device.decorated(move |backend, kernel| {
        if fails.load(Ordering::Relaxed) && kernel.op() == "adamw" {
            return Err(anymesh::Error::OutOfMemory {
                device: "this one".into(),
                bytes: 1,
            });
        }
        backend.launch(kernel)
    });
    let mesh = Mesh::single(&device);
    for policy in [Policy::f32(), Policy::bf16()] {
        let b = Build::new(&mesh, policy, 1);
        let mut layer = Linear::new(&b, [8, 4], "[_, _]", Init::Normal(0.1)).expect("a layer");
        let groups = Groups::all(Rule::AdamW(AdamW::default()));
        let mut optimizer = Optimizer::new(&layer, &groups).expect("an optimizer");
        let x = random(&[2, 8], 5, &device).expect("numbers");
        let step = |layer: &mut Linear, optimizer: &mut Optimizer| {
            let dtype = policy.compute;
            let loss = layer.forward(&x.cast(dtype)?)?.square()?.mean_all()?;
            let mut sums = Accumulator::default();
            sums.add(layer, &loss.backward()?)?;
            let sums = sums.finish(layer)?;
            optimizer.step(layer, sums, 1.0)
        };
        let values = |layer: &Linear, optimizer: &Optimizer| -> Vec<Vec<f32>> {
            let mut all = vec![];
            layer.visit("", &mut |_, p| {
                all.push(p.value().to_vec::<f32>().expect("it has values"));
                let weight = p
                    .get()
                    .and_then(|w| Ok(w.detach().cast(DType::F32)?.to_vec()?));
                all.push(weight.expect("it has a weight"));
            });
            all.extend(
                optimizer
                    .state()
                    .values()
                    .map(|s| s.to_vec::<f32>().expect("it is there")),
            );
            all
        };
        step(&mut layer, &mut optimizer).expect("runs");
        let before = values(&layer, &optimizer);
        failing.store(true, Ordering::Relaxed);
        let failed = step(&mut layer, &mut optimizer).expect_err("the launch fails");
        assert!(failed.to_string().contains("memory"), "{failed}");
        assert_eq!(values(&layer, &optimizer), before);
        failing.store(false, Ordering::Relaxed);
        step(&mut layer, &mut optimizer).expect("runs again");
        assert_ne!(values(&layer, &optimizer), before);
    }
}

/// The results of three linear maps of one tensor, and all gradients of a loss that does not depend
/// on the second.
fn linear_maps(device: &Device, biased: bool) -> Result<Vec<Vec<f32>>> {
    let x = random(&[2, 300, 96], 1, device)?.require_grad()?;
    let mut leaves = vec![];
    for (k, rows) in [96, 64, 33].into_iter().enumerate() {
        let seed = 2 + 2 * k as u64;
        leaves.push((
            random(&[rows, 96], seed, device)?.require_grad()?,
            random(&[rows], seed + 1, device)?.require_grad()?,
        ));
    }
    let weights: Vec<(&Tensor, Option<&Tensor>)> = (leaves.iter())
        .map(|(w, b)| (w, biased.then_some(b)))
        .collect();
    let out = x.linear_each(&weights)?;
    let loss = out[0].square()?.sum_all()?.add(&out[2].sum_all()?)?;
    let gradients = loss.backward()?;
    let mut found = vec![];
    for y in &out {
        found.push(y.to_vec()?);
    }
    let all = leaves.iter().flat_map(|(w, b)| [w, b]);
    for leaf in std::iter::once(&x).chain(all) {
        if let Some(gradient) = gradients.get(leaf)? {
            found.push(gradient.to_vec()?);
        }
    }
    Ok(found)
}

fn linear_maps_of_one_tensor_are_those_of_the_host(device: &Device) {
    let host = anymesh::device("eager:cpu").expect("the CPU backend is always there");
    for biased in [false, true] {
        let [found, expected] = [device, &host].map(|d| linear_maps(d, biased).expect("runs"));
        // Gradients of weights that the loss does not depend on may be zeros or missing.
        let some = |all: Vec<Vec<f32>>| -> Vec<Vec<f32>> {
            let zeros = |v: &Vec<f32>| v.iter().all(|x| *x == 0.0);
            all.into_iter().filter(|v| !zeros(v)).collect()
        };
        let (found, expected) = (some(found), some(expected));
        assert_eq!(found.len(), expected.len(), "bias {biased}");
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.len(), expected.len());
            let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
            for (a, b) in found.iter().zip(expected) {
                assert!((a - b).abs() <= 2e-5 * largest, "{a} and {b} of {largest}");
            }
        }
    }
}

/// The gradient of logits that nobody holds may be written over them. It is the same where somebody
/// does, who then still finds the logits, and where the pass is made twice.
fn logits_that_somebody_reads_later_keep_their_values(device: &Device) {
    let bits = |t: &Tensor| t.full_tensor()?.cast(DType::F32)?.to_vec::<f32>();
    let there = |t: Tensor, mesh: &Mesh| match (mesh.is_single(), t.rank()) {
        (true, _) => Ok(t),
        (_, 1) => t.to_mesh(mesh, "[@dp]"),
        _ => t.to_mesh(mesh, "[@dp,@tp]"),
    };
    let run = |mesh: &Mesh, held: bool, twice: bool| -> Result<[Vec<f32>; 3]> {
        let x = random(&[64, 5000], 7, device)?.cast(DType::BF16)?;
        let x = there(x, mesh)?.require_grad()?;
        let target = random(&[64], 8, device)?
            .abs()?
            .mul(4999.0)?
            .cast(DType::I32)?;
        let target = there(target, mesh)?;
        let logits = x.mul(2.0)?;
        let before = bits(&logits)?;
        let loss = logits.cross_entropy(&target, &CrossEntropyOptions::default())?;
        let kept = held.then(|| logits.clone());
        drop(logits);
        if twice {
            loss.backward_retain()?;
        }
        let gradients = loss.backward()?;
        let after = kept
            .as_ref()
            .map(bits)
            .transpose()?
            .unwrap_or_else(|| before.clone());
        let gradient = gradients.get(&x)?.map(|g| bits(&g)).transpose()?;
        Ok([gradient.unwrap_or_default(), before, after])
    };
    let [on_one, ..] = run(&Mesh::single(device), false, false).expect("runs");
    assert!(on_one.iter().any(|g| *g != 0.0));
    let on = |axes| Mesh::new(axes, device).expect("a mesh");
    for mesh in &[
        Mesh::single(device),
        on("dp=4, tp=1"),
        on("dp=1, tp=3"),
        on("dp=2, tp=2"),
    ] {
        let [gradient, ..] = run(mesh, false, false).expect("runs");
        for (a, b) in gradient.iter().zip(&on_one) {
            // Of 16 bits: the log-sum-exp is found in another order where classes are cut.
            assert!((a - b).abs() <= b.abs() / 128.0, "{a} and {b} on {mesh}");
        }
        for (held, twice) in [(true, false), (false, true), (true, true)] {
            let [again, before, after] = run(mesh, held, twice).expect("runs");
            assert!(again == gradient, "held {held}, twice {twice} on {mesh}");
            assert!(before == after, "held {held}, twice {twice} on {mesh}");
        }
    }
}

/// A pass may write the sum of a gradient and an earlier one over the latter, if nobody holds that. The
/// new sum is the same where somebody does, who then still finds the old one.
fn sums_that_somebody_holds_are_not_added_to(device: &Device) {
    const N: usize = 512;
    let run = |held: bool| -> Result<([Vec<f32>; 3], u64)> {
        let [x, w] = [
            random(&[N, N], 9, device)?.cast(DType::BF16)?,
            random(&[N, N], 10, device)?.cast(DType::BF16)?,
        ];
        let w = w.require_grad()?;
        let mut sums = Gradients::default();
        sums.set(&w, random(&[N, N], 11, device)?)?;
        let before = sums.of(&w)?.to_vec::<f32>()?;
        let kept = held.then(|| sums.of(&w)).transpose()?;
        // A gradient that lies in memory, as those of layers do.
        let loss = x.linear(&w, None)?.mul(&x)?.sum_all()?;
        device.sync()?;
        device.reset_peak();
        let start = device.memory().in_use;
        let sums = loss.backward_onto(sums)?;
        device.sync()?;
        let most = device.memory().peak.saturating_sub(start);
        let after = kept.map_or_else(|| Ok(before.clone()), |sum| sum.to_vec::<f32>())?;
        Ok(([sums.of(&w)?.to_vec()?, before, after], most))
    };
    let ([free, ..], over) = run(false).expect("runs");
    let ([sum, before, after], beside) = run(true).expect("runs");
    assert!(sum == free, "the same sum");
    assert!(before == after, "what is held stays");
    assert!(sum != before);
    // All but what single numbers take.
    let bytes = (4 * N * N - 1024) as u64;
    assert!(
        !device.name().starts_with("cuda") || over + bytes <= beside,
        "{over} bytes, {beside} where the sum is held"
    );
}

/// Sizes from one element to some cubes, with odd ends.
const SIZES: [usize; 9] = [1, 768, 3, 70_001, 4096, 8191, 8192, 8193, 20_000];

fn view(device: &Device, dtype: DType, elements: usize, offset: usize, salt: usize) -> View {
    // Any bits that are small numbers, whatever the dtype.
    let bytes: Vec<u8> = (0..(elements + offset) * dtype.size())
        .map(|i| match i % dtype.size() + 1 == dtype.size() {
            true => 0x3f,
            false => ((i + salt) * 37 % 251) as u8,
        })
        .collect();
    let mut layout = Layout::contiguous([elements].into());
    layout.offset = offset;
    View {
        buffer: device.upload(&bytes).expect("uploads"),
        dtype,
        layout,
    }
}

/// Steps of two floats in three dtypes, some of which only move.
fn program(inputs: [DType; 2], outputs: [DType; 3]) -> MapProgram {
    let b = Builder::new();
    let (x, y) = (b.load(inputs[0]), b.load(inputs[1]));
    let (x, y) = (x.cast(DType::F32), y.cast(DType::F32));
    let step = b.param(DType::F32);
    let sum = x * step + y / (x * x + 1.0).sqrt();
    b.finish(&[(sum, outputs[0]), (sum.exp(), outputs[1]), (x, outputs[2])])
        .expect("a program")
}

fn maps_that_are_launched_together_give_the_bits_of_maps_launched_by_themselves(device: &Device) {
    use DType::{BF16, F16, F32, U8};
    let programs = [
        program([F32, F32], [F32, F32, F32]),
        program([BF16, F32], [F32, BF16, BF16]),
        program([U8, F16], [BF16, U8, F16]),
    ];
    let dtypes = [[F32, F32], [BF16, F32], [U8, F16]];
    let mut kernels: Vec<Kernel> = vec![];
    for (k, elements) in SIZES.into_iter().enumerate() {
        for (program, dtypes) in programs.iter().zip(dtypes) {
            // One is not aligned, and goes by itself.
            let offset = [0, 8, 0, 1, 4][k % 5];
            let inputs = dtypes.map(|dtype| MapInput {
                view: view(device, dtype, elements, offset, k),
                window: None,
            });
            kernels.push(
                MapCall {
                    op: "steps",
                    program: program.clone(),
                    shape: [elements].into(),
                    inputs: inputs.into_iter().collect(),
                    indices: Default::default(),
                    params: [(0.5 + (k / 5) as f64).into()].into_iter().collect(),
                    over: Default::default(),
                }
                .into(),
            );
        }
    }
    let launches = kernels.iter().cloned().map(Launch::from).collect();
    let together = device.launch_all(launches).expect("launches");
    assert_eq!(together.len(), kernels.len());
    for (kernel, together) in kernels.into_iter().zip(together) {
        let alone = device.launch(kernel).expect("launches");
        assert_eq!(together.len(), alone.len());
        for (a, b) in together.iter().zip(&alone) {
            assert_eq!((a.dtype, &a.layout), (b.dtype, &b.layout));
            let bytes = a.layout.shape.numel() * a.dtype.size();
            let read = |view: &View| {
                pollster::block_on(device.backend().download(&view.buffer, 0..bytes))
                    .expect("downloads")
            };
            assert!(read(a) == read(b), "{} of {:?}", a.dtype, a.layout.shape);
        }
    }
}
