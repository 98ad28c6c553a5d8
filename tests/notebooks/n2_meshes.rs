//! Written from examples/notebooks/2-meshes.ipynb: `ANYMESH_UPDATE=1 cargo test --test notebook_programs` writes it again.

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
    let mesh = Mesh::new("dp=2, tp=4", &cpu)?;                 // eight ranks, simulated in this process
    show(&(
    mesh
    ));
    begin(2);
    let x = Tensor::arange(0, 8 * 16, 1, DType::F32, &mesh)?.reshape([8, 16])?.reshard("[@dp, @tp]")?;
    show(&(
    x
    ));
    begin(3);
    fn scores(x: &Tensor, w: &Tensor) -> Result<Tensor> {
        x.matmul(w)?.softmax(-1)
    }

    /// The operands on a mesh: `?` says that it may lack the axis.
    fn operands(mesh: &Mesh) -> Result<(Tensor, Tensor)> {
        let x = Tensor::normal([64, 32], 0.0, 1.0, DType::F32, (mesh, "[@dp?, _]"), Rng::new(1))?;
        let w = Tensor::normal([32, 16], 0.0, 1.0, DType::F32, (mesh, "[_, @tp?]"), Rng::new(2))?;
        Ok((x, w))
    }

    let (a, b) = operands(&Mesh::single(&cpu))?;
    let alone = scores(&a, &b)?.to_vec::<f32>()?;
    for axes in ["dp=4", "tp=4", "dp=2, tp=4", "dp=3, tp=5"] {
        let (a, b) = operands(&Mesh::new(axes, &cpu)?)?;
        let y = scores(&a, &b)?;
        let apart = alone.iter().zip(y.to_vec::<f32>()?).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{axes:12} {:20} within 1e-6: {}", y.type_string(), apart < 1e-6);
    };
    begin(4);
    let (a, b) = operands(&mesh)?;
    let (y, ledger) = Ledger::record(|| scores(&a, &b));
    y?;
    let sent: Vec<_> = ledger.entries.iter().map(|e| (e.op, e.kind, e.axes.join(","), e.bytes)).collect();
    show(&(
    ledger
    ));
    begin(5);
    for (op, kind, axes, bytes) in &sent {
        println!("{op}: {kind} over {axes}, {bytes} bytes");
    };
    begin(6);
    use anymesh::show::{Bar, Bars, Unit};

    fn bytes(x: &str, w: &str) -> Result<(String, u64)> {
        let mesh = Mesh::new("dp=2, tp=4", &meta())?;
        let x = Tensor::zeros([8192, 4096], DType::BF16, (&mesh, x))?;
        let w = Tensor::zeros([4096, 16384], DType::BF16, (&mesh, w))?;
        let (y, ledger) = Ledger::record(|| x.matmul(&w));
        Ok((y?.type_string(), ledger.bytes()))
    }

    let mut bars = vec![];
    for (x, w) in [
        ("[@dp, _]", "[_, @tp]"), ("[@dp, @tp]", "[@tp, _]"), ("[@dp, _]", "[@dp, @tp]"),
        ("[@dp, @tp]", "[_, @tp]"), ("[@dp@tp, _]", "[_, @tp]"), ("[@tp, _]", "[_, @tp]"),
    ] {
        let (ty, bytes) = bytes(x, w)?;
        println!("{x:12} times {w:12} gives {ty}");
        bars.push(Bar::new(format!("{x} times {w}"), [bytes as f64]));
    }
    let chart = Bars { title: "what a rank receives for one product".into(), unit: Unit::Bytes, bars, ..Bars::default() };
    show(&(
    chart
    ));
    begin(7);
    let (a, b) = operands(&mesh)?;
    let b = b.reshard("[@dp, _]")?;
    println!("{}", with_policy(Policy::Explicit, &[], || a.matmul(&b)).expect_err("it would have to move something"));
    Ok(())
}
