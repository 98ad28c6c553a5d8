//! How long planning takes: every pair of shardings of 2-D and 3-D tensors, by both objectives.
//! `cargo bench -p anymesh-core --bench plan`.

use anymesh_core::{
    DType, Mesh, Reduction, Shape, Sharding,
    reshard::{Objective, plan},
};
use std::{hint::black_box, time::Instant};

/// All shardings: each axis cuts a dimension (inside or outside of those before it), is partial, or
/// neither.
fn shardings(rank: usize, axes: usize) -> Vec<Sharding> {
    let mut all: Vec<(Vec<Vec<usize>>, Sharding)> =
        vec![(vec![vec![]; rank], Sharding::replicated())];
    for axis in 0..axes {
        let mut next = vec![];
        for (dims, partial) in all {
            next.push((dims.clone(), partial.clone()));
            next.push((
                dims.clone(),
                partial.clone().partial_over(axis, Reduction::Sum),
            ));
            for d in 0..rank {
                for place in 0..=dims[d].len() {
                    let mut dims = dims.clone();
                    dims[d].insert(place, axis);
                    next.push((dims, partial.clone()));
                }
            }
        }
        all = next;
    }
    let cut = |(dims, partial): (Vec<Vec<usize>>, Sharding)| {
        dims.iter()
            .enumerate()
            .flat_map(|(d, axes)| axes.iter().map(move |a| (d, *a)))
            .fold(partial, |s, (d, a)| s.cut(d, a))
    };
    all.into_iter().map(cut).collect()
}

fn main() {
    let device = anymesh_backend_cpu::device();
    println!(
        "{:<8} {:<14} {:<9} {:>7} {:>10} {:>10} {:>10}",
        "mesh", "shape", "objective", "pairs", "median us", "99% us", "max us"
    );
    for axes in ["a=2, b=4", "a=2, b=2, c=2"] {
        let mesh = Mesh::new(axes, &device).expect("a mesh");
        for dims in [
            &[64, 64][..],
            &[8192, 8192],
            &[1000, 777],
            &[64, 64, 64],
            &[37, 129, 1025],
        ] {
            let shape = Shape::from(dims);
            let all = shardings(dims.len(), mesh.axes().len());
            for objective in [Objective::Bytes, Objective::Time] {
                let mut times: Vec<f64> = vec![];
                for (from, to) in all
                    .iter()
                    .flat_map(|from| all.iter().map(move |to| (from, to)))
                {
                    // The best of three: what planning takes, not what the machine does meanwhile.
                    let once = || {
                        let start = Instant::now();
                        black_box(plan(
                            &mesh,
                            &shape,
                            DType::F32,
                            black_box(from),
                            black_box(to),
                            objective,
                        ))
                        .expect("a plan");
                        start.elapsed().as_secs_f64() * 1e6
                    };
                    times.push((0..3).map(|_| once()).fold(f64::INFINITY, f64::min));
                }
                times.sort_by(f64::total_cmp);
                let (median, late, max) = (
                    times[times.len() / 2],
                    times[times.len() * 99 / 100],
                    times[times.len() - 1],
                );
                let sizes: Vec<String> = mesh.axes().iter().map(|(_, n)| n.to_string()).collect();
                println!(
                    "{:<8} {:<14} {:<9} {:>7} {median:>10.2} {late:>10.2} {max:>10.2}",
                    sizes.join("x"),
                    shape.to_string(),
                    format!("{objective:?}"),
                    times.len()
                );
            }
        }
    }
}
