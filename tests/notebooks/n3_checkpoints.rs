//! Written from examples/notebooks/3-checkpoints.ipynb: `ANYMESH_UPDATE=1 cargo test --test notebook_programs` writes it again.

#![allow(unused, unreachable_pub, clippy::all)]

use crate::shown::{Outcome, begin, line, show};

macro_rules! println {
    ($($t:tt)*) => { line(format_args!($($t)*)) };
}

pub(crate) fn run() -> Outcome {
    begin(0);
    // Builds the library, for the first notebook on a machine: some minutes. Run the cells in order.
    begin(1);
    use anymesh::{prelude::*, reshard::{Objective, plan}};

    let cpu = device("cpu")?;
    let mesh = Mesh::new("dp=2, tp=4", &cpu)?;
    begin(2);
    let from = TensorType::parse("f32[64@dp, 64]", &mesh)?;
    let to = TensorType::parse("f32[64, 64@tp]", &mesh)?;
    show(&(
    plan(&mesh, &from.shape, from.dtype, &from.sharding, &to.sharding, Objective::Bytes)?
    ));
    begin(3);
    let from = TensorType::parse("f32[64@dp, 64]{sum:tp}", &mesh)?;
    let to = TensorType::parse("f32[64@tp, 64@dp]", &mesh)?;
    show(&(
    plan(&mesh, &from.shape, from.dtype, &from.sharding, &to.sharding, Objective::Bytes)?
    ));
    begin(4);
    let small = Mesh::new("dp=4", &cpu)?;
    let x = Tensor::arange(0, 30, 1, DType::F32, &small)?.reshape([5, 6])?.reshard("[@dp, _]")?;
    show(&(
    x
    ));
    begin(5);
    let y = x.to_mesh(&Mesh::new("x=3", &cpu)?, "[_, @x]")?;
    assert_eq!(x.to_vec::<f32>()?, y.to_vec::<f32>()?);
    show(&(
    y
    ));
    begin(6);
    use anymesh::checkpoint::{Checkpoint, Contents, Load, save};

    fn state(mesh: &Mesh, rng: u64) -> Result<Contents> {
        let mut rng = Rng::new(rng);
        let mut draw = |shape: [usize; 2], text: &str| Tensor::normal(shape, 0.0, 1.0, DType::F32, (mesh, text), rng.split());
        Ok(Contents::new(7, [
            ("mlp.up.weight".to_string(), draw([512, 128], "[@tp?, _]")?),
            ("mlp.down.weight".to_string(), draw([128, 512], "[_, @tp?]")?),
            ("head.weight".to_string(), draw([1000, 128], "[@tp?, @dp?]")?),
        ].into()))
    }

    let folder: std::path::PathBuf = "../../target/notebook-checkpoints".into();
    let _ = std::fs::remove_dir_all(&folder);                  // of a run before
    let saved: Contents = state(&mesh, 1)?;
    let checkpoint: Checkpoint = Checkpoint::open(save(&folder, "step-7", &saved)?)?;
    show(&(
    checkpoint.manifest().clone()
    ));
    begin(7);
    for axes in ["dp=1", "tp=3", "dp=4, tp=2", "dp=2, tp=4"] {
        let other = Mesh::new(axes, &cpu)?;
        let loaded = Load::default().replace(&checkpoint, &state(&other, 2)?)?;
        let mut equal = true;
        for (name, tensor) in &saved.tensors {
            equal &= tensor.to_bytes()? == loaded.tensors[name].to_bytes()?;
        }
        println!("{axes:12} {:28} equal: {equal}", loaded.tensors["head.weight"].type_string());
    };
    begin(8);
    {
        let file = checkpoint.path().join("rank-00003.safetensors");
        let mut bytes = std::fs::read(&file)?;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&file, bytes)?;
        for error in checkpoint.verify() {
            println!("{error}");
        }
        std::fs::remove_dir_all(&folder)?;
    };
    Ok(())
}
