//! Programs over the ranks of a mesh that check themselves: what a user does with tensors on meshes,
//! whatever processes the ranks are in.
//!
//! Each takes a mesh with the axes `a` and `b`, of at least two ranks each, and holds what its ranks
//! have against the same on a single device. A process may have no rank at all.

use crate::sweep::{Precision, compare};
use anymesh_core::{
    DType, Error, Mesh, Result, Scalar, Tensor,
    grad::checkpoint,
    i,
    ops::{Order, Rng, RowExchange},
    spmd::{Fingerprint, Held, Ledger, OnDifference, PlanOptions, plan, with_held, with_plan},
};
use std::fmt::Debug;

/// A program by its name.
pub type Program = (&'static str, fn(&Mesh) -> Result<()>);

/// All of them.
pub const ALL: [Program; 13] = [
    ("making", making),
    ("reading", reading),
    ("printing", printing),
    ("moving between meshes", moving),
    ("ops on other meshes", ops_elsewhere),
    ("a pipeline of two stages", pipeline),
    ("indexing", indexing),
    ("sizes that depend on values", dynamic),
    ("sorting", sorting),
    ("dropout and recomputing", recomputing),
    ("plans and held forms", plans),
    ("agreeing", agreeing),
    ("rows to where data says", rows),
];

/// Runs all of them on one mesh.
pub fn run_all(mesh: &Mesh) -> Result<()> {
    for (name, program) in ALL {
        program(mesh).map_err(|error| match error {
            Error::Argument {
                op: CHECK, detail, ..
            } => wrong(format!("{name}: {detail}")),
            error => error,
        })?;
    }
    Ok(())
}

const CHECK: &str = "check";

fn wrong(detail: String) -> Error {
    Error::argument(CHECK, "values", detail)
}

fn same<T: PartialEq + Debug>(what: &str, actual: T, expected: T) -> Result<()> {
    match actual == expected {
        true => Ok(()),
        false => Err(wrong(format!(
            "{what} is {actual:?}, expected {expected:?}"
        ))),
    }
}

/// Whether this process has ranks, so that it can read values.
fn is_here(mesh: &Mesh) -> bool {
    mesh.addressable().len() > 0
}

/// Holds what the ranks of this process have of a tensor against the whole one.
fn holds(what: &str, x: &Tensor, whole: &Tensor) -> Result<()> {
    near(Precision::Bits, what, x, whole)
}

fn near(precision: Precision, what: &str, x: &Tensor, whole: &Tensor) -> Result<()> {
    if !is_here(x.mesh()) {
        return same(what, x.dims(), whole.dims());
    }
    let (x, whole) = ([x.detach()], [whole.detach()]);
    compare(precision, &x, &whole).map_err(|why| wrong(format!("{what}: {why}")))
}

/// Values that tell where they are and whose sums are exact.
fn value(at: &[usize]) -> f32 {
    let number = at.iter().fold(3, |n, i| n * 5 + i * 3);
    (number % 17) as f32 - 8.0
}

fn filled(shape: &[usize], mesh: &Mesh, layout: &str) -> Result<Tensor> {
    Tensor::from_fn(shape, (mesh, layout), value)
}

/// The same without a mesh, where this process has ranks.
fn plain(shape: &[usize], mesh: &Mesh) -> Result<Tensor> {
    Tensor::from_fn(shape, mesh.device(0), value)
}

const LAYOUTS: [&str; 7] = [
    "[@a, @b]",
    "[@b, _]",
    "[_, @a@b]",
    "[@b@a, _]",
    "[_, _]",
    "[@a, _]{sum:b}",
    "[_, _]{sum:a, sum:b}",
];

fn making(mesh: &Mesh) -> Result<()> {
    let device = mesh.device(0);
    let (shape, rng) = ([5, 6], Rng::new(11));
    for layout in LAYOUTS {
        let place = || (mesh, layout);
        let numbers: Vec<f32> = (0..30).map(|n| value(&[n / 6, n % 6])).collect();
        let whole = plain(&shape, mesh)?;
        holds("from_fn", &filled(&shape, mesh, layout)?, &whole)?;
        let made = Tensor::from_slice(&numbers, shape, place())?;
        holds("from_slice", &made, &whole)?;
        holds("to_mesh", &whole.to_mesh(mesh, layout)?, &whole)?;
        let ints = |place| Tensor::randint(shape, -9, 9, DType::I32, place, rng);
        let at = anymesh_core::IntoPlace::into_place(place(), 2)?;
        holds("randint", &ints(at.clone())?, &ints(device.into())?)?;
        let normal = |place| Tensor::normal(shape, 0.0, 1.0, DType::F32, place, rng);
        holds("normal", &normal(at)?, &normal(device.into())?)?;
    }
    let order = Tensor::permutation(9, (mesh, "[@a]"), rng)?;
    holds("permutation", &order, &Tensor::permutation(9, device, rng)?)
}

fn reading(mesh: &Mesh) -> Result<()> {
    let whole = plain(&[5, 6], mesh)?;
    for layout in LAYOUTS {
        let x = filled(&[5, 6], mesh, layout)?;
        if !is_here(mesh) {
            for error in [
                x.full_tensor().map(drop),
                x.to_vec::<f32>().map(drop),
                x.sum(&[], false)?.item().map(drop),
            ] {
                same("reading", matches!(error, Err(Error::Mesh { .. })), true)?;
            }
            continue;
        }
        let expected = whole.to_vec::<f32>()?;
        same("to_vec", &x.to_vec::<f32>()?, &expected)?;
        same("full_tensor", &x.full_tensor()?.to_vec::<f32>()?, &expected)?;
        let mut bytes = vec![0; 120];
        x.copy_bytes(&mut bytes)?;
        same("copy_bytes", bytes, whole.to_bytes()?)?;
        let sum = x.sum(&[], false)?.item()?.to_f64();
        same("item", sum, f64::from(expected.iter().sum::<f32>()))?;
    }
    Ok(())
}

fn printing(mesh: &Mesh) -> Result<()> {
    let whole = plain(&[40, 40], mesh)?;
    let values = |text: &str| text.rsplit_once('\n').map(|(values, _)| values.to_string());
    for layout in LAYOUTS {
        let x = filled(&[40, 40], mesh, layout)?;
        let text = x.to_string();
        if is_here(mesh) {
            same("the text", values(&text), values(&whole.to_string()))?;
        }
        // One process alone may look, and nobody waits for the others.
        if mesh.is_first() {
            same("the type", format!("{x:?}").starts_with("f32[40"), true)?;
        }
    }
    Ok(())
}

/// The meshes of a mesh that its tensors go to and come from.
fn meshes(mesh: &Mesh) -> Result<Vec<(Mesh, [&'static str; 3])>> {
    let both = ["[@a, @b]", "[_, @b@a]", "[@a, _]{sum:b}"];
    let of_b = ["[@b, _]", "[_, @b]", "[_, _]"];
    let of_a = ["[@a, _]", "[_, @a]", "[_, _]{sum:a}"];
    Ok(vec![
        (mesh.clone(), both),
        (mesh.at("a", 0)?, of_b),
        (mesh.at("a", 1)?, of_b),
        (mesh.at("b", 1)?, of_a),
        (mesh.only(&["b"])?, of_b),
    ])
}

fn moving(mesh: &Mesh) -> Result<()> {
    let whole = plain(&[5, 6], mesh)?;
    let all = meshes(mesh)?;
    for (source, layouts) in &all {
        for (target, targets) in &all {
            for (from, to) in layouts.iter().zip(targets) {
                let x = filled(&[5, 6], source, from)?.require_grad()?;
                let y = x.to_mesh(target, *to)?;
                holds("what moved", &y, &whole)?;
                // And back, as a gradient.
                let seed = filled(&[5, 6], target, "[_, _]")?;
                let back = y.backward_with(&seed)?.of(&x)?;
                same("its mesh", back.mesh(), source)?;
                holds("its gradient", &back, &whole)?;
            }
        }
    }
    // Between meshes without a rank in common, and to a device of each process.
    let (first, second) = (mesh.at("a", 0)?, mesh.at("a", 1)?);
    let x = filled(&[7], &first, "[@b]")?.to_mesh(&second, "[_]")?;
    let everywhere = x.to_mesh(mesh, "[@a@b]")?;
    holds("what went on", &everywhere, &plain(&[7], mesh)?)?;
    if is_here(mesh) {
        let here = everywhere.to_mesh(&Mesh::single(mesh.device(0)), "[_]")?;
        let expected = plain(&[7], mesh)?.to_vec::<f32>()?;
        same("on the device", here.to_vec::<f32>()?, expected)?;
    }
    Ok(())
}

/// Many ops in a row.
fn chain(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let y = x.matmul(w)?.softmax(-1)?;
    let (sorted, _) = y.sort(0, Order::Ascending)?;
    let z = Tensor::concat(&[&sorted, &y.cumsum(1)?], 0)?.flip(&[0])?;
    let z = z
        .reshape([6, 2, 4])?
        .transpose(1, 2)?
        .dropout(0.25, Rng::new(3))?;
    let z = z.get(i![1.., .., -1])?.set(i![0, 1..3], 2.0)?;
    z.layer_norm_last()?.exp()?.sum(&[0], false)
}

/// A norm over the last dimension, out of parts.
trait LayerNorm {
    fn layer_norm_last(&self) -> Result<Tensor>;
}

impl LayerNorm for Tensor {
    fn layer_norm_last(&self) -> Result<Tensor> {
        let centred = self.sub(&self.mean(&[-1], true)?)?;
        let square = centred.mul(&centred)?.mean(&[-1], true)?;
        centred.div(&square.add(0.5)?.sqrt()?)
    }
}

fn ops_elsewhere(mesh: &Mesh) -> Result<()> {
    let (x, w) = (plain(&[6, 6], mesh)?, plain(&[6, 4], mesh)?);
    let (x, w) = (x.require_grad()?, w.require_grad()?);
    let expected = chain(&x, &w)?;
    let pulled = expected.sum(&[], false)?.backward()?;
    for (place, [rows, columns, _]) in &meshes(mesh)? {
        let a = filled(&[6, 6], place, rows)?.require_grad()?;
        let b = filled(&[6, 4], place, columns)?.require_grad()?;
        let y = chain(&a, &b)?;
        let home = y.to_mesh(mesh, "[@a]")?;
        near(Precision::ROUNDED, "the result", &home, &expected)?;
        let mut grads = home.sum(&[], false)?.backward()?;
        for (leaf, plain) in [(&a, &x), (&b, &w)] {
            let gradient = grads.take(leaf)?;
            let expected = pulled.of(plain)?;
            near(Precision::ROUNDED, "a gradient", &gradient, &expected)?;
        }
    }
    Ok(())
}

/// Two layers on different ranks, trained for a few steps. Processes without ranks of a stage have
/// its parameters without values.
fn pipeline(mesh: &Mesh) -> Result<()> {
    let (first, second) = (mesh.at("a", 0)?, mesh.at("a", 1)?);
    let mut w = [plain(&[6, 8], mesh)?, plain(&[8, 2], mesh)?];
    let mut on = [
        filled(&[6, 8], &first, "[_, @b]")?,
        filled(&[8, 2], &second, "[@b, _]")?,
    ];
    for _ in 0..3 {
        let step = |w: &[Tensor; 2], x: Tensor, hop: &dyn Fn(&Tensor) -> Result<Tensor>| {
            let w = [w[0].require_grad()?, w[1].require_grad()?];
            let h = hop(&x.mul(0.125)?.matmul(&w[0])?.tanh()?)?;
            let y = h.matmul(&w[1])?.tanh()?;
            let loss = y.mul(&y)?.mean(&[], false)?;
            let grads = loss.backward()?;
            let next = |w: &Tensor| w.detach().sub(&grads.of(w)?.mul(0.5)?);
            Ok::<_, Error>((loss.detach(), [next(&w[0])?, next(&w[1])?]))
        };
        let (expected, next) = step(&w, plain(&[4, 6], mesh)?, &|h| Ok(h.clone()))?;
        w = next;
        let input = filled(&[4, 6], &first, "[@b, _]")?;
        let (loss, next) = step(&on, input, &|h| h.to_mesh(&second, "[_, @b]"))?;
        on = next;
        near(Precision::ROUNDED, "the loss", &loss, &expected)?;
        // Everybody hears of it.
        let loss = loss.to_mesh(mesh, "[]")?;
        near(Precision::ROUNDED, "the loss", &loss, &expected)?;
    }
    near(Precision::ROUNDED, "the first layer", &on[0], &w[0])?;
    near(Precision::ROUNDED, "the second layer", &on[1], &w[1])
}

fn indexing(mesh: &Mesh) -> Result<()> {
    let whole = plain(&[6, 8], mesh)?;
    let picks = |place: &Mesh| Tensor::from_slice(&[4i32, 0, 5, -2], [4], place);
    let single = Mesh::single(mesh.device(0));
    let run = |x: &Tensor, picks: &Tensor| {
        Ok::<_, Error>([
            x.get(i![1..5, ..;2])?,
            x.get(i![.., -3])?,
            x.get(i![picks, ..;-1])?,
            x.set(i![2.., 1..3], 7.0)?,
            x.set(i![picks, 3], -1.0)?,
            x.add_at(i![.., picks], 2.0)?,
        ])
    };
    let expected = run(&whole, &picks(&single)?)?;
    for layout in &LAYOUTS[..5] {
        let found = run(&filled(&[6, 8], mesh, layout)?, &picks(mesh)?)?;
        for (n, (found, expected)) in found.iter().zip(&expected).enumerate() {
            holds(&format!("index {n} of {layout}"), found, expected)?;
        }
    }
    Ok(())
}

fn dynamic(mesh: &Mesh) -> Result<()> {
    if !is_here(mesh) {
        let x = filled(&[6, 8], mesh, "[@a, _]")?;
        let found = x.nonzero();
        return same("nonzero", matches!(found, Err(Error::Mesh { .. })), true);
    }
    let whole = plain(&[6, 8], mesh)?;
    for bound in [-100.0, 0.0, 6.0, 100.0] {
        let expected = whole.gt(bound)?;
        for layout in &LAYOUTS[..5] {
            let x = filled(&[6, 8], mesh, layout)?;
            let mask = x.gt(bound)?;
            holds("nonzero", &mask.nonzero()?, &expected.nonzero()?)?;
            let awaited = pollster::block_on(mask.nonzero_async())?;
            holds("nonzero_async", &awaited, &expected.nonzero()?)?;
            let selected = whole.masked_select(&expected)?;
            holds("masked_select", &x.masked_select(&mask)?, &selected)?;
            holds("get by mask", &x.get(i![&mask])?, &selected)?;
            let set = whole.set(i![&expected], 0.5)?;
            holds("set by mask", &x.set(i![&mask], 0.5)?, &set)?;
        }
    }
    let expected = whole.unique()?;
    for layout in &LAYOUTS[..5] {
        let found = filled(&[6, 8], mesh, layout)?.unique()?;
        holds("values", &found.values, &expected.values)?;
        holds("counts", &found.counts, &expected.counts)?;
        holds("inverse", &found.inverse, &expected.inverse)?;
    }
    Ok(())
}

fn sorting(mesh: &Mesh) -> Result<()> {
    let whole = plain(&[6, 9], mesh)?;
    for layout in LAYOUTS {
        let x = filled(&[6, 9], mesh, layout)?;
        for axis in [0, 1] {
            let (values, order) = x.sort(axis, Order::Descending)?;
            let (expected, places) = whole.sort(axis, Order::Descending)?;
            holds("sort", &values, &expected)?;
            holds("its order", &order, &places)?;
            let (values, order) = x.topk(3, axis, Order::Ascending)?;
            let (expected, places) = whole.topk(3, axis, Order::Ascending)?;
            holds("topk", &values, &expected)?;
            holds("its positions", &order, &places)?;
        }
    }
    Ok(())
}

fn recomputing(mesh: &Mesh) -> Result<()> {
    let run = |x: &Tensor, w: &Tensor| {
        let (x, w) = (x.require_grad()?, w.require_grad()?);
        let block = |t: &[Tensor]| {
            let h = t[0].matmul(&t[1])?.mul(0.0625)?.tanh()?;
            Ok(vec![h.dropout(0.5, Rng::new(5))?])
        };
        let y = checkpoint(block, &[&x, &w])?.remove(0);
        let grads = y.mul(&y)?.sum(&[], false)?.backward()?;
        Ok::<_, Error>([y.detach(), grads.of(&x)?, grads.of(&w)?])
    };
    let expected = run(&plain(&[6, 8], mesh)?, &plain(&[8, 5], mesh)?)?;
    for (rows, columns) in [("[@a, _]", "[_, @b]"), ("[_, @b]", "[@b, @a]")] {
        let (x, w) = (
            filled(&[6, 8], mesh, rows)?,
            filled(&[8, 5], mesh, columns)?,
        );
        for (found, expected) in run(&x, &w)?.iter().zip(&expected) {
            near(Precision::ROUNDED, "recomputed", found, expected)?;
        }
    }
    Ok(())
}

fn plans(mesh: &Mesh) -> Result<()> {
    let expected = {
        let (x, w) = (plain(&[5, 6], mesh)?, plain(&[6, 6], mesh)?);
        x.matmul(&w)?.matmul(&w)?.sum(&[1], false)?
    };
    let (x, w) = (
        filled(&[5, 6], mesh, "[@a, @b]")?,
        filled(&[6, 6], mesh, "[@b, _]")?,
    );
    let step = || x.matmul(&w)?.matmul(&w)?.sum(&[1], false)?.reshard("[_]");
    let plan = plan(&PlanOptions::default(), step)?;
    let (planned, ledger) = Ledger::record(|| with_plan(&plan, OnDifference::Error, step));
    holds("a planned step", &planned?, &expected)?;
    same("its bytes", ledger.bytes(), plan.bytes())?;
    let none = Held { calls: 0, bytes: 0 };
    for held in [none, Held::default()] {
        let twice = with_held(held, || step()?.add(&step()?))?;
        holds("held forms", &twice, &expected.mul(2.0)?)?;
    }
    Ok(())
}

fn agreeing(mesh: &Mesh) -> Result<()> {
    let x = filled(&[6, 6], mesh, "[@a, @b]")?;
    let run = || x.matmul(&x)?.cumsum(0)?.reshard("[@b, _]");
    let ((result, ledger), decided) = Fingerprint::record(|| Ledger::record(run));
    result?;
    decided.agree(mesh)?;
    let recent = Fingerprint::recent();
    same(
        "the last decision",
        recent.last().map(|d| d.op),
        Some("reshard"),
    )?;
    if !is_here(mesh) {
        return Ok(());
    }
    let all = ledger.gather(mesh)?;
    same("steps", all.entries.len(), ledger.entries.len())?;
    same("bytes", all.bytes(), ledger.bytes())?;
    let times = all.entries.iter().map(|e| e.times.len());
    same("times", times.min(), Some(all.ranks.len()))
}

fn rows(mesh: &Mesh) -> Result<()> {
    let ends = mesh.size(mesh.axis("b")?);
    let goes: [fn(usize, usize) -> usize; 4] = [
        |n, ends| (n * n + n / 3) % ends,
        |_, ends| ends - 1,
        |n, _| n % 2,
        |_, _| 0,
    ];
    for (layout, rows) in [("[@a@b, _]", 11), ("[@b, @a]", 9), ("[@b, _]", 2)] {
        let cut = layout.replace(", _]", "]").replace(", @a]", "]");
        for to in goes {
            let to = |at: &[usize]| to(at[0], ends) as i32;
            let destinations = Tensor::from_fn([rows], (mesh, cut.as_str()), to)?;
            let most = 2 * rows;
            let exchange = match is_here(mesh) {
                true => RowExchange::new(&destinations, "b")?,
                false => RowExchange::within(&destinations, "b", most)?,
            };
            let x = filled(&[rows, 4], mesh, layout)?.require_grad()?;
            let there = exchange.send(&x)?;
            let back = exchange.back(&there.mul(3.0)?)?;
            let whole = plain(&[rows, 4], mesh)?;
            holds("rows that came back", &back, &whole.mul(3.0)?)?;
            let weights = filled(&[rows, 4], mesh, layout)?;
            let gradient = back.mul(&weights)?.sum(&[], false)?.backward()?.of(&x)?;
            holds("their gradient", &gradient, &whole.mul(3.0)?)?;
            if is_here(mesh) {
                let counts: usize = exchange.counts().iter().sum();
                same("rows in all", counts, rows)?;
                let there = there.detach().abs()?.sum(&[], false)?.item()?;
                let all = whole.abs()?.sum(&[], false)?.item()?;
                same("what is there", there.to_f64(), all.to_f64())?;
                let mask = exchange.mask()?.cast(DType::I32)?.sum(&[], false)?;
                same("marks", mask.item()?, Scalar::Int(rows as i64))?;
            }
        }
        // One rank has a destination that there is not; all have the error.
        let far = |at: &[usize]| if at[0] + 1 == rows { ends as i32 } else { 0 };
        let destinations = Tensor::from_fn([rows], (mesh, cut.as_str()), far)?;
        if is_here(mesh) {
            let expected = Error::IndexOutOfRange {
                op: "exchange_rows",
                index: ends as i64,
                len: ends,
            };
            let found = RowExchange::new(&destinations, "b").map(drop);
            same("a destination too far", found, Err(expected))?;
        }
    }
    Ok(())
}
