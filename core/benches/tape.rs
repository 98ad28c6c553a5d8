//! What remembering costs: an op on tracked operands over the same op on plain ones, with the graph
//! made and dropped, and a whole backward pass.
//!
//! `cargo bench -p anymesh-core --bench tape`

use anymesh_core::{DType, Result, Tensor, grad::no_grad, meta};
use std::time::Instant;

const OPS: usize = 200;

/// The median time of an op in nanoseconds, over chains of many.
fn median(mut chain: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = vec![];
    for _ in 0..101 {
        let start = Instant::now();
        chain()?;
        times.push(start.elapsed().as_nanos() as f64 / OPS as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn chain(x: &Tensor, op: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    (0..OPS).try_fold(x.clone(), |y, _| op(&y))
}

fn main() -> Result<()> {
    // Without values only what core does is left.
    let device = meta();
    let x = Tensor::ones([8, 8], DType::F32, &device)?;
    let tracked = x.require_grad()?;
    let ops: [(&str, &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>); 6] = [
        ("add", &|y, w| y.add(w)),
        ("mul", &|y, w| y.mul(w)),
        ("tanh", &|y, _| y.tanh()),
        ("matmul", &|y, w| y.matmul(w)),
        ("reshape", &|y, _| y.reshape([64])?.reshape([8, 8])),
        ("sum", &|y, _| y.sum(&[0], true)?.expand([8, 8])),
    ];
    for (name, op) in ops {
        let plain = median(|| chain(&x, |y| op(y, &x)).map(drop))?;
        let recorded = median(|| chain(&tracked, |y| op(y, &tracked)).map(drop))?;
        let off = median(|| no_grad(|| chain(&tracked, |y| op(y, &tracked))).map(drop))?;
        let seed = x.clone();
        let both = median(|| {
            chain(&tracked, |y| op(y, &tracked))?
                .backward_with(&seed)
                .map(drop)
        })?;
        println!(
            "{name}: plain {plain:.0} ns, recorded {recorded:.0} ns: the tape adds {:.0} ns (limit 1000); under no_grad {off:.0} ns; forward and backward {both:.0} ns",
            recorded - plain
        );
    }
    Ok(())
}
