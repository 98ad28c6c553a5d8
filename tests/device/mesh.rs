//! Meshes of simulated ranks on one GPU: collectives stay on the device, and the numbers are those
//! of one device.

use crate::Suite;
use anymesh::conformance::sweep::{self, Options};
use anymesh::{DType, Device, Mesh, Result, Tensor, TypeSpec, ops::Rng, spmd::Ledger};

pub(crate) const SUITE: Suite = &[
    (
        "a_program_on_a_2x4_mesh_gives_the_numbers_of_one_device",
        a_program_on_a_2x4_mesh_gives_the_numbers_of_one_device,
    ),
    (
        "samples_of_the_sweep_hold_on_the_device",
        samples_of_the_sweep_hold_on_the_device,
    ),
];

/// Two layers of a perceptron with a norm; every operand where its type says, on a mesh with all, some
/// or none of the axes.
fn layers(mesh: &Mesh) -> Result<Tensor> {
    let mut rng = Rng::new(3);
    // Small whole numbers, so that sums are exact in any order.
    let mut draw = |ty: &str| {
        let ty: TypeSpec = ty.parse()?;
        Tensor::randint(&ty.shape, -3, 4, ty.dtype, (mesh, &ty), rng.split())?.cast(DType::F32)
    };
    let x = draw("i32[12@dp?, 16]")?;
    let (up, down) = (draw("i32[16, 40@tp?]")?, draw("i32[40@tp?, 16]")?);
    x.matmul(&up)?
        .relu()?
        .matmul(&down)?
        .add(&x)?
        .amax(&[1], true)
}

fn on(device: &Device) -> Result<(Tensor, Tensor, Ledger)> {
    let mesh = Mesh::new("dp=2, tp=4", device)?;
    let plain = layers(&Mesh::single(device))?;
    let (sharded, ledger) = Ledger::record(|| layers(&mesh));
    Ok((plain, sharded?, ledger))
}

fn a_program_on_a_2x4_mesh_gives_the_numbers_of_one_device(device: &Device) {
    let (plain, sharded, ledger) = on(device).unwrap();
    println!("{device}: {}\n{ledger}", sharded.type_string());
    assert_eq!(
        sharded.to_vec::<f32>().unwrap(),
        plain.to_vec::<f32>().unwrap()
    );
    assert!(ledger.bytes() > 0, "the second product is reduced over tp");
    let (cpu, _, theirs) = on(&anymesh::device("cpu").unwrap()).unwrap();
    assert_eq!(cpu.to_vec::<f32>().unwrap(), plain.to_vec::<f32>().unwrap());
    assert_eq!(
        ledger.bytes(),
        theirs.bytes(),
        "what crosses does not depend on the device"
    );
}

fn samples_of_the_sweep_hold_on_the_device(device: &Device) {
    // Gradients are held against the host in `gradients.rs`: every program more is a kernel to
    // compile.
    let options = Options {
        limit: Some(2),
        every: 4,
        threads: 1,
        gradients: std::env::var("ANYMESH_SWEEP_GRADIENTS").is_ok(),
        ..Options::default()
    };
    let report = sweep::run(device, &options.with_env().unwrap());
    println!("{device}: {report}");
    assert_eq!(report.failed, 0, "{report}");
    assert!(report.ops.len() > 250 && report.cases() > 2000, "{report}");
}
