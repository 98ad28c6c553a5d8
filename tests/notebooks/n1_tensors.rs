//! Written from examples/notebooks/1-tensors.ipynb: `ANYMESH_UPDATE=1 cargo test --test notebook_programs` writes it again.

#![allow(unused, unreachable_pub, clippy::all)]

use crate::shown::{Outcome, begin, line, show};

macro_rules! println {
    ($($t:tt)*) => { line(format_args!($($t)*)) };
}

pub(crate) fn run() -> Outcome {
    begin(0);
    // Builds the library, for the first notebook on a machine: some minutes. Run the cells in order.
    begin(1);
    use anymesh::prelude::*;

    let cpu = device("cpu")?;
    let x = Tensor::arange(0, 24, 1, DType::F32, &cpu)?.reshape([4, 6])?;
    show(&(
    x
    ));
    begin(2);
    let centered = (&x - x.mean(&[1], true)?)?;
    let y = (centered.tanh()? * 10.0)?;
    println!("{y:.2}");
    begin(3);
    println!("{}\n", x.get(i![1..3, ..;-2])?);                 // x[1:3, ::-2]
    println!("{}\n", x.get(i![&x.gt(19.0)?])?);                // x[x > 19]
    println!("{}", x.set(i![.., 0], -1.0)?);                   // a new tensor; x stays as it is
    begin(4);
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16, DType::F8E4M3] {
        let third = Tensor::full([1], 1.0 / 3.0, dtype, &cpu)?;
        println!("{dtype:8} {:.10}", third.cast(DType::F64)?.item()?.to_f64());
    }
    println!("{}", (Tensor::ones([2], DType::BF16, &cpu)? + Tensor::ones([2], DType::I32, &cpu)?)?.type_string());
    begin(5);
    let noise = Tensor::normal([12, 32], 0.0, 1.0, DType::F32, &cpu, Rng::new(7))?;
    show(&(
    noise
    ));
    begin(6);
    println!("{}\n", x.matmul(&x).expect_err("4x6 times 4x6"));
    println!("{}\n", x.get(i![9]).expect_err("there are four rows"));
    println!("{}", x.backward().map(|_| ()).expect_err("nothing was tracked"));
    begin(7);
    for found in anymesh::found() {
        println!("{}: {}", found.name, found.description);
    };
    begin(8);
    let huge = Tensor::zeros([1 << 20, 1 << 20], DType::BF16, &meta())?;
    println!("{}, {} GiB if it were there", huge.matmul(&huge)?.type_string(), huge.numel() * 2 >> 30);
    Ok(())
}
