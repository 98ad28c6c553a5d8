//! What a mesh costs an op: the sharded dispatch on a mesh of one rank over the plain op, a rule
//! that is known, and a rule that is new on a mesh of three axes.
//!
//! `cargo bench -p anymesh-core --bench spmd`

use anymesh_core::{DType, Mesh, Tensor, meta};
use std::time::Instant;

/// The median time of one call in nanoseconds, over runs of many calls.
fn median(calls: usize, mut f: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..31)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| f());
            start.elapsed().as_nanos() as f64 / calls as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> anymesh_core::Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let plain = Tensor::ones([4, 4], DType::F32, &cpu)?;
    let one = plain.to_mesh(&Mesh::new("x=1", &cpu)?, "[@x, _]")?;
    let (a, b) = (
        median(2000, || drop(plain.add(&plain))),
        median(2000, || drop(one.add(&one))),
    );
    println!(
        "add 4x4 on the CPU: plain {a:.0} ns, on a mesh of one rank {b:.0} ns: {:.0} ns more (limit 1000)",
        b - a
    );

    // Without values only the dispatch is left.
    let device = meta();
    let mesh = Mesh::new("x=1", &device)?;
    let plain = Tensor::ones([64, 64], DType::F32, &device)?;
    let one = plain.to_mesh(&mesh, "[@x, _]")?;
    let whole = plain.to_mesh(&mesh, "[_, _]")?;
    let (a, b) = (
        median(2000, || drop(plain.matmul(&plain))),
        median(2000, || drop(one.matmul(&whole))),
    );
    println!(
        "matmul without values: plain {a:.0} ns, known rule on one rank {b:.0} ns: lookup and dispatch {:.0} ns (limit 1000)",
        b - a
    );

    for (name, x, w) in [
        ("nothing moves", "[@a, @b]", "[@b, @c]"),
        ("one operand moves", "[@a, @b]", "[@c, @b]"),
        ("all axes disagree", "[@a@b, @c]", "[@b@c, @a]"),
        ("a partial operand", "[@a, _]{sum:b}", "[@c, @b]"),
    ] {
        let mut cold = vec![];
        for _ in 0..201 {
            let mesh = Mesh::new("a=2, b=2, c=2", &device)?;
            let (x, w) = (plain.to_mesh(&mesh, x)?, plain.to_mesh(&mesh, w)?);
            let (_, decisions) = anymesh_core::spmd::trace(|| x.matmul(&w));
            let start = Instant::now();
            std::hint::black_box(decisions[0].solve()?);
            cold.push(start.elapsed().as_nanos() as f64 / 1000.0);
        }
        cold.sort_by(f64::total_cmp);
        println!(
            "matmul on 2x2x2, {name}: new rule solved in {:.1} us median, {:.1} us worst (limit 50)",
            cold[cold.len() / 2],
            cold[cold.len() - 1]
        );
    }
    Ok(())
}
