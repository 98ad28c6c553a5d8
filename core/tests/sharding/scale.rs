//! Many ranks: what one rank that stands for all says of a program, held against meshes that hold
//! every rank.

use crate::support::{
    device,
    layer::{LAYOUTS, Layout, Sizes, parameters, step},
};
use anymesh_conformance::{
    registry::{self, Attrs, Entry, Sample},
    sweep::{reductions, shardings},
};
use anymesh_core::{
    DType, Device, Error, Mesh, Place, Result, Tensor, TensorType, meta,
    spmd::{self, Ledger},
    transport::{NoValues, Part, Transport},
};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// A device like another one that counts its kernels.
fn counting(device: &Device) -> (Device, Arc<AtomicUsize>) {
    let kernels = Arc::new(AtomicUsize::new(0));
    let count = kernels.clone();
    let device = device.decorated(move |backend, kernel| {
        count.fetch_add(1, Ordering::Relaxed);
        backend.launch(kernel)
    });
    (device, kernels)
}

/// A device without values that counts by itself.
fn blank() -> Device {
    counting(&meta()).0
}

/// What a user sees of a program: the type of every result with the size of every rank's part, and
/// what was sent; or the error.
fn seen(run: impl FnOnce() -> Result<Vec<Tensor>>) -> std::result::Result<Vec<String>, Error> {
    let (results, ledger) = Ledger::record(run);
    let mut seen = vec![];
    for result in results? {
        seen.push(result.type_string());
        for (rank, part) in result.shards() {
            seen.push(format!("{rank}: {}{:?}", part.dtype(), part.dims()));
        }
    }
    for e in ledger.entries {
        seen.push(format!(
            "{} {} {} {} {}",
            e.op, e.kind, e.from, e.to, e.bytes
        ));
    }
    Ok(seen)
}

/// A sample with its operands in the `n`-th of the ways that they can lie.
fn sample_on(
    entry: &'static Entry,
    sample: &Sample,
    attrs: &Attrs,
    (mesh, n): (&Mesh, usize),
) -> Result<Vec<Tensor>> {
    let place = |(i, x): (usize, Option<Tensor>)| {
        let lay = |x: Tensor| {
            let all = shardings(x.rank(), mesh.axes().len(), reductions(x.dtype()));
            let way = (n * 7 + i * 3 + n * i) % all.len();
            x.to_mesh(mesh, all[way].clone())
        };
        x.map(lay).transpose()
    };
    let operands = sample.make(5, mesh.device(0))?;
    let operands: Vec<Option<Tensor>> = operands
        .into_iter()
        .enumerate()
        .map(place)
        .collect::<Result<_>>()?;
    entry.call(&operands, attrs, Place::from(mesh))
}

#[test]
fn every_op_without_values_says_what_it_says_with_them() -> Result<()> {
    let (mut same, mut errors, mut unread) = (0, 0, 0);
    for axes in ["a=3", "a=2, b=4"] {
        let with_values = Mesh::new(axes, &device())?;
        let one = Mesh::new(axes, &blank())?;
        let ranks: Vec<usize> = (0..one.ranks()).collect();
        let all = one.addressing(&ranks)?;
        for entry in registry::entries() {
            for sample in entry.samples() {
                let attrs = Attrs::new(entry, &sample.attrs)?;
                for n in 0..2 {
                    let on = |mesh| seen(|| sample_on(entry, &sample, &attrs, (mesh, n)));
                    let name = format!("{} {} on {axes}, way {n}", entry.name, sample.attrs);
                    match (on(&with_values), on(&one)) {
                        // What depends on values cannot be planned without them.
                        (_, Err(Error::Unsupported { what, .. })) if what == "reading values" => {
                            unread += 1;
                            continue;
                        }
                        (Ok(expected), actual) => {
                            assert_eq!(actual.as_ref(), Ok(&expected), "{name}");
                            assert_eq!(on(&all), Ok(expected), "{name}, all ranks held");
                            same += 1;
                        }
                        (Err(expected), actual) => {
                            assert_eq!(actual.as_ref(), Err(&expected), "{name}");
                            assert_eq!(on(&all), Err(expected), "{name}, all ranks held");
                            errors += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(
        same > 2500 && unread < same / 10,
        "{same} cases alike, {errors} of errors, {unread} that read values"
    );
    Ok(())
}

/// Sizes that cut evenly nowhere.
const ODD: Sizes = Sizes {
    sequences: 3,
    length: 5,
    width: 12,
    heads: 6,
    hidden: 10,
    dtype: DType::F32,
};

fn train(layout: &Layout, sizes: &Sizes, mesh: &Mesh) -> Result<Vec<Tensor>> {
    step(sizes, layout, &parameters(sizes, layout, mesh)?)
}

#[test]
fn a_layer_seen_by_any_one_rank_is_the_layer_seen_by_all() -> Result<()> {
    for layout in &LAYOUTS {
        let axes = "dp=2, tp=4";
        let program = |mesh: &Mesh| seen(|| train(layout, &ODD, mesh));
        let expected = program(&Mesh::new(axes, &device())?)?;
        let whole = Mesh::new(axes, &blank())?;
        assert_eq!(program(&whole)?, expected, "{}", layout.name);
        for rank in 0..whole.ranks() {
            let of_others = |line: &&String| {
                let owner = line
                    .split_once(": ")
                    .and_then(|(rank, _)| rank.parse().ok());
                owner.is_none_or(|owner: usize| owner == rank)
            };
            let expected: Vec<String> = expected.iter().filter(of_others).cloned().collect();
            let actual = program(&whole.addressing(&[rank])?)?;
            assert_eq!(actual, expected, "{}, rank {rank}", layout.name);
        }
    }
    Ok(())
}

#[test]
fn a_layer_on_16384_ranks_takes_the_kernels_and_the_memory_of_one() -> Result<()> {
    for layout in &LAYOUTS {
        let run = |ranks: usize| -> Result<_> {
            let (device, kernels) = counting(&meta());
            let mesh = Mesh::new(&format!("dp={}, tp=8", ranks / 8), &device)?;
            let sizes = Sizes {
                sequences: ranks / 8,
                length: 4096,
                width: 8192,
                heads: 64,
                hidden: 28_672,
                dtype: DType::BF16,
            };
            let (results, ledger) = Ledger::record(|| train(layout, &sizes, &mesh));
            let part = results?[9].shards().swap_remove(ranks - 1);
            // What crosses tp: parts of the stream. Over dp, where weights are gathered and their
            // gradients scattered, bytes depend on its size.
            let of_the_stream = |e: &spmd::Entry| e.bytes > 1 << 20;
            let crosses_tp =
                |e: &&spmd::Entry| e.op == "rms_norm" && e.kind != "all_gather" && of_the_stream(e);
            let stream = ledger.entries.iter().filter(crosses_tp);
            let bytes: u64 = stream.map(|e| e.bytes).sum();
            assert!(bytes > 0, "{}", layout.name);
            let kernels = kernels.load(Ordering::Relaxed);
            Ok((bytes, part.1.dims().to_vec(), kernels, device.memory().peak))
        };
        let (few, many) = (run(64)?, run(16_384)?);
        assert_eq!((&few.0, &few.1), (&many.0, &many.1), "{}", layout.name);
        assert_eq!(few.2, many.2, "kernels, {}", layout.name);
        // Weights that are cut over dp are smaller on more ranks; the rest is the same.
        assert!(many.3 <= few.3, "peak {} and {}", few.3, many.3);
        if !layout.columns.contains("dp") {
            assert_eq!(many.3, few.3, "peak, {}", layout.name);
        }
    }
    Ok(())
}

#[test]
fn memory_without_values_is_that_of_one_rank() -> Result<()> {
    let in_use = |mesh: &Mesh, expected: &[u64]| -> Result<()> {
        let memory = || mesh.device(0).memory().in_use;
        let mut used = vec![];
        // 10 rows on 4 ranks: 2, 3, 2 and 3 of them.
        let w = Tensor::zeros([10, 6], DType::F32, (mesh, "[@tp, _]"))?;
        used.push(memory());
        let x = Tensor::zeros([5, 6], DType::F32, (mesh, "[@dp, _]"))?;
        used.push(memory());
        let y = x.linear(&w, None)?;
        used.push(memory());
        let gathered = w.reshard("[_, _]")?;
        used.push(memory());
        let sum = y.sum(&[1], false)?.reshard("[@dp]")?;
        used.push(memory());
        assert_eq!(
            used,
            expected,
            "{:?}",
            mesh.addressable().collect::<Vec<_>>()
        );
        drop((w, x, y, gathered, sum));
        assert_eq!(memory(), 0, "nothing is kept");
        Ok(())
    };
    let mesh = || Mesh::new("dp=2, tp=4", &blank());
    let (w, x, whole) = (6 * 4, 6 * 4, 60 * 4);
    // The last rank: 3 rows of each, 3 x 3 results, 3 sums.
    let largest = [3 * w, 3 * w + 3 * x, 3 * w + 3 * x + 36];
    let largest = |sums| {
        let [a, b, c] = largest;
        [a, b, c, c + whole, c + whole + sums]
    };
    in_use(&mesh()?, &largest(12))?;
    in_use(&mesh()?.addressing(&[7])?, &largest(12))?;
    // The first rank: 2 rows of each.
    let c = 2 * w + 2 * x + 16;
    let first = [2 * w, 2 * w + 2 * x, c, c + whole, c + whole + 8];
    in_use(&mesh()?.addressing(&[0])?, &first)
}

#[test]
fn a_rank_that_stands_for_all_receives_what_the_worst_one_does() -> Result<()> {
    let used = |mesh: Mesh| -> Result<u64> {
        let x = Tensor::zeros([8], DType::F32, (&mesh, "[@a]"))?;
        let moved = x.reshard("[@b]")?;
        let used = mesh.device(0).memory().in_use;
        drop((x, moved));
        Ok(used)
    };
    let mesh = || Mesh::new("a=2, b=2", &blank());
    // The ranks (0, 0) and (1, 1) have what they need, the other two swap it.
    assert_eq!(used(mesh()?)?, 16 + 16);
    assert_eq!(used(mesh()?.addressing(&[3])?)?, 16);
    assert_eq!(used(mesh()?.addressing(&[1])?)?, 16 + 16);
    Ok(())
}

#[test]
fn an_op_that_refuses_empty_parts_fails_where_only_other_ranks_have_them() -> Result<()> {
    let refuse = |x: &[Tensor]| match x[0].numel() {
        0 => Err(Error::argument("most", "x", "there is nothing here")),
        _ => Ok(vec![x[0].clone()]),
    };
    let run = |mesh: &Mesh, dims: [usize; 2]| {
        let x = Tensor::zeros(dims, DType::F32, (mesh, "[@a, @b]"))?;
        let out = spmd::apply("most", "mn -> mn", &[&x], refuse)?;
        Ok::<_, Error>(out[0].type_string())
    };
    for axes in ["a=4, b=2", "a=2, b=3"] {
        let meshes = [Mesh::new(axes, &device())?, Mesh::new(axes, &blank())?];
        for dims in [[4, 3], [3, 8], [1, 8], [8, 1], [1, 1], [3, 2]] {
            let [expected, actual] = meshes.each_ref().map(|mesh| run(mesh, dims));
            assert_eq!(actual, expected, "{dims:?} on {axes}");
        }
    }
    assert!(run(&Mesh::new("a=4, b=2", &blank())?, [3, 8]).is_err());
    assert!(run(&Mesh::new("a=4, b=2", &blank())?, [4, 8]).is_ok());
    Ok(())
}

#[test]
fn parts_of_ranks_that_another_stands_for_can_be_had_and_given() -> Result<()> {
    let mesh = Mesh::new("a=4, b=2", &blank())?;
    let ty = TensorType::parse("i32[3@a, 5@b]{sum:}".trim_end_matches("{sum:}"), &mesh)?;
    let x = Tensor::zeros([3, 5], DType::I32, (&mesh, &ty.sharding))?;
    assert!(mesh.is_local() && mesh.addressable().eq(0..8));
    let parts: Vec<Tensor> = x.shards().into_iter().map(|(_, part)| part).collect();
    for (rank, part) in parts.iter().enumerate() {
        let region = ty.sharding.region(&mesh, rank, x.shape());
        assert_eq!(part.dims(), &region.shape[..]);
    }
    let again = Tensor::from_shards(&ty, &mesh, &parts)?;
    assert_eq!(again.type_string(), x.type_string());
    let swapped: Vec<Tensor> = parts.into_iter().rev().collect();
    assert!(Tensor::from_shards(&ty, &mesh, &swapped).is_err());
    Ok(())
}

#[test]
fn transfers_between_meshes_without_values_are_those_with_them() -> Result<()> {
    let run = |device: &Device| -> Result<Vec<String>> {
        let mesh = Mesh::new("stage=2, a=3, b=2", device)?;
        let (first, second) = (mesh.at("stage", 0)?, mesh.at("stage", 1)?);
        seen(|| {
            let x = Tensor::ones([5, 7], DType::F32, (&first, "[@a, @b]"))?;
            let partial = x.sum(&[0], false)?;
            Ok(vec![
                x.to_mesh(&second, "[@b, _]")?,
                x.to_mesh(&mesh, "[@a, _]{sum:b}")?,
                partial.to_mesh(&second, "[@a]")?,
                mesh_part(&x, &mesh)?,
                x.full_tensor()?,
            ])
        })
    };
    assert_eq!(run(&blank())?, run(&device())?);
    // To a device that has values there is nothing to bring.
    let x = Tensor::ones([5, 7], DType::F32, &Mesh::new("a=2", &blank())?)?;
    let moved = x.to_mesh(&Mesh::new("a=2", &device())?, "[@a, _]");
    assert!(matches!(moved, Err(Error::Unsupported { .. })));
    Ok(())
}

/// Over a larger mesh to a smaller one that has it already.
fn mesh_part(x: &Tensor, mesh: &Mesh) -> Result<Tensor> {
    x.to_mesh(mesh, "[_, _]")?
        .to_mesh(&mesh.at("a", 1)?, "[@b, _]")
}

#[test]
fn ranks_elsewhere_answer_without_values() -> Result<()> {
    let mesh = Mesh::new("x=5", &blank())?.addressing(&[1, 3])?;
    let part = |rank: usize| match mesh.position_of(rank) {
        Some(i) => Ok(Part::new(
            rank,
            &Tensor::zeros([2, rank], DType::F32, mesh.device(i))?,
        )),
        None => Ok(Part::elsewhere(rank, DType::F32, [2, rank])),
    };
    let parts = (0..5).map(part).collect::<Result<Vec<_>>>()?;
    let gathered = NoValues.all_gather(&mesh, &parts, 1)?;
    let dims: Vec<_> = gathered
        .iter()
        .map(|t| t.as_ref().map(|t| t.dims().to_vec()))
        .collect();
    assert_eq!(
        dims,
        [None, Some(vec![2, 10]), None, Some(vec![2, 10]), None]
    );
    NoValues.barrier(&mesh, &[0, 1, 4])?;
    assert!(NoValues.barrier(&mesh, &[0, 5]).is_err());
    Ok(())
}

#[test]
fn with_values_kernels_grow_with_the_ranks_and_not_with_their_pairs() -> Result<()> {
    let kernels = |ranks: usize, from: &str, to: &str| -> Result<usize> {
        let (device, kernels) = counting(&device());
        let mesh = Mesh::new(&format!("x={ranks}"), &device)?;
        let whole = Tensor::ones([2 * ranks, 2 * ranks], DType::F32, &device)?;
        let x = whole.to_mesh(&mesh, from)?;
        kernels.store(0, Ordering::Relaxed);
        x.reshard(to)?;
        Ok(kernels.load(Ordering::Relaxed))
    };
    for (from, to) in [
        ("[@x, _]", "[_, _]"),
        ("[@x, _]", "[_, @x]"),
        ("[_, _]{sum:x}", "[_, _]"),
        ("[_, _]{sum:x}", "[@x, _]"),
        ("[_, _]{sum:x}", "[_, @x]"),
    ] {
        let (few, many) = (kernels(16, from, to)?, kernels(64, from, to)?);
        assert!(
            many <= 5 * few.max(1),
            "{from} to {to}: {few} on 16, {many} on 64"
        );
    }
    Ok(())
}
