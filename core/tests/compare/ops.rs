//! Every op of the library passes where it is seen, on a device and on a mesh, forward and backward,
//! and is one op in both.

use anymesh_conformance::registry::{self, Attrs, Entry, Sample};
use anymesh_core::{DType, Error, Mesh, Result, Sharding, Tensor, compare::compare};

/// Calls an op with operands that are cut along one of their dimensions, and goes back.
fn call(entry: &Entry, sample: &Sample, mesh: &Mesh, last: bool) -> Result<usize> {
    let attrs = Attrs::new(entry, &sample.attrs)?;
    let mut inputs = sample.make(7, mesh.device(0))?;
    for x in inputs.iter_mut().flatten() {
        if !mesh.is_single() {
            let sharding = match x.rank() {
                0 => Sharding::replicated(),
                rank => Sharding::replicated().cut(if last { rank - 1 } else { 0 }, 0),
            };
            *x = x.to_mesh(mesh, sharding)?;
        }
        if x.dtype().is_float() && x.dtype().size() >= 4 {
            *x = x.require_grad()?;
        }
    }
    let results = entry.call(&inputs, &attrs, mesh)?;
    let mut gone_back = 0;
    for y in results.iter().filter(|y| y.requires_grad()) {
        let gradients = y.sum(&[], false)?.backward_retain()?;
        for x in inputs.iter().flatten().filter(|x| x.requires_grad()) {
            gone_back += usize::from(gradients.get(x)?.is_some());
        }
    }
    Ok(gone_back)
}

#[test]
fn every_op_is_one_value_on_a_device_and_on_a_mesh() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let (mut cases, mut gradients, mut wrong) = (0, 0, vec![]);
    for entry in registry::entries() {
        for (i, sample) in entry.samples().iter().enumerate() {
            for (axes, last) in [("x=2", false), ("x=3", true)] {
                let (a, b) = (Mesh::single(&cpu), Mesh::new(axes, &cpu)?);
                let run = |mesh: &Mesh| {
                    gradients += call(entry, sample, mesh, last)?;
                    Ok::<_, Error>(())
                };
                cases += 1;
                let name = format!("{} {i} {} on {axes}", entry.name, sample.attrs);
                match compare(run, &a, &b) {
                    // Tables of angles are made on the host.
                    Ok(found) if found.is_same() && entry.name == "rope_tables" => {}
                    Ok(found) if found.is_same() && found.values > 0 => {}
                    Ok(found) => wrong.push(format!("{name}: {found}")),
                    Err(error) => wrong.push(format!("{name}: {error}")),
                }
            }
        }
    }
    println!(
        "{cases} cases, {gradients} gradients, {} wrong",
        wrong.len()
    );
    let shown = wrong.iter().take(20).cloned().collect::<Vec<_>>();
    assert!(wrong.is_empty(), "{}", shown.join("\n\n"));
    assert!(cases > 1000 && gradients > 1000);
    Ok(())
}

#[test]
fn what_is_drawn_and_made_is_seen() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let broken = cpu.decorated(|cpu, kernel| match kernel.op() {
        "arange" => Ok([cpu.upload(&[0; 24])?].into_iter().collect()),
        _ => cpu.launch(kernel),
    });
    let run = |m: &Mesh| Tensor::arange(0, 6, 1, DType::F32, m)?.exp();
    let found = compare(run, &Mesh::single(&cpu), &Mesh::single(&broken))?;
    let first = found.first().expect("an arange of zeros");
    assert_eq!(first.op, "arange");
    assert!(first.caller.contains("tests/compare/ops.rs"), "{found}");
    Ok(())
}
