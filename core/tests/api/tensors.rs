//! How the library is called: operators, constructors, places, and tensors as text.

use anymesh_backend_cpu as cpu;
use anymesh_core::{
    DType, Device, Error, Mesh, Reduction, Result, Sharding, Tensor, TensorType, bf16, meta,
    ops::Rng,
    spmd::{Held, Ledger, Policy, with_held, with_policy},
};

fn values(x: &Tensor) -> Vec<f32> {
    x.to_vec::<f32>().unwrap()
}

fn text(x: &Tensor) -> String {
    x.to_string()
}

#[test]
fn operators_take_tensors_results_and_numbers() -> Result<()> {
    let device = cpu::device();
    let a = Tensor::new(&[6f32, -7.0], &device)?;
    let b = Tensor::new(&[4f32, 2.0], &device)?;
    // Owned and borrowed, on both sides.
    assert_eq!(values(&(&a + &b)?), [10.0, -5.0]);
    assert_eq!(values(&(a.clone() - &b)?), [2.0, -9.0]);
    assert_eq!(values(&(&a * b.clone())?), [24.0, -14.0]);
    assert_eq!(values(&(a.clone() / b.clone())?), [1.5, -3.5]);
    assert_eq!(values(&(&a % &b)?), [2.0, 1.0], "the sign of the divisor");
    // Results on either side of a tensor.
    assert_eq!(values(&(&a * &b + &a)?), [30.0, -21.0]);
    assert_eq!(values(&(&a - &a * &b)?), [-18.0, 7.0]);
    assert_eq!(values(&(a.neg() + b.clone() - a.abs()?)?), [-8.0, 2.0]);
    // Numbers of any type on the right, literals on the left.
    assert_eq!(values(&(&a + 1)?), [7.0, -6.0]);
    assert_eq!(values(&(&a + 1u8)?), values(&(&a + 1f32)?));
    assert_eq!(values(&(1.0 - &a)?), [-5.0, 8.0]);
    assert_eq!(values(&(12 / b.clone())?), [3.0, 6.0]);
    assert_eq!(values(&(2.0 * (&a - &b)?)?), [4.0, -18.0]);
    assert_eq!(values(&(-&a)?), [-6.0, 7.0]);
    assert_eq!(values(&(-(&a + &b)?)?), [-10.0, 5.0]);
    // Integers and bools.
    let bits = Tensor::new(&[0b1100, 0b1010], &device)?;
    assert_eq!((&bits & 0b0110)?.to_vec::<i32>()?, [0b0100, 0b0010]);
    assert_eq!((&bits | 1 | &bits)?.to_vec::<i32>()?, [0b1101, 0b1011]);
    assert_eq!((3 ^ &bits)?.to_vec::<i32>()?, [0b1111, 0b1001]);
    assert_eq!((!&bits)?.to_vec::<i32>()?, [!0b1100, !0b1010]);
    assert_eq!((&bits << 1)?.to_vec::<i32>()?, [0b11000, 0b10100]);
    assert_eq!((&bits >> 2)?.to_vec::<i32>()?, [0b11, 0b10]);
    let positive = a.gt(0)?;
    assert_eq!((!&positive)?.to_vec::<bool>()?, [false, true]);
    assert_eq!(
        (!positive.clone() | &positive)?.to_vec::<bool>()?,
        [true, true]
    );
    Ok(())
}

#[test]
fn an_operator_passes_on_the_error_of_its_operand() {
    let device = cpu::device();
    let a = Tensor::new(&[1f32, 2.0], &device).unwrap();
    let b = Tensor::new(&[1f32, 2.0, 3.0], &device).unwrap();
    let shapes = (&a + &b).unwrap_err();
    assert!(matches!(shapes, Error::Shape { op: "add", .. }), "{shapes}");
    assert_eq!((&a + &b - &a).unwrap_err(), shapes);
    assert_eq!((&a * (&a + &b)).unwrap_err(), shapes);
    assert!(matches!(&a & 1, Err(Error::DType { .. })));
}

#[test]
fn the_ledger_names_the_line_of_an_operator() -> Result<()> {
    let mesh = Mesh::new("x=2", &cpu::device())?;
    let a = Tensor::ones([4, 4], DType::F32, (&mesh, "[@x, _]"))?;
    let b = Tensor::ones([4, 4], DType::F32, (&mesh, "[_, @x]"))?;
    // Each of them is to bring its operands itself.
    let nothing = Held { calls: 0, bytes: 0 };
    let check = |run: &dyn Fn() -> Result<Tensor>, line: u32| {
        let (result, ledger) = Ledger::record(|| with_held(nothing, run));
        result.unwrap();
        let caller = format!("core/tests/api/tensors.rs:{line}:");
        assert!(!ledger.entries.is_empty());
        for entry in &ledger.entries {
            assert!(
                entry.caller.contains(&caller),
                "{} for {caller}",
                entry.caller
            );
        }
    };
    check(&|| &a + &b, line!());
    check(&|| a.clone() * b.clone(), line!());
    check(&|| a.exp() - &b, line!());
    check(&|| &a / b.exp(), line!());
    let partial = Tensor::ones([4], DType::F32, (&mesh, "[_]{sum:x}"))?;
    check(&|| 1.0 - partial.clone(), line!());
    check(&|| 1 % &partial, line!());
    let (signs, flags) = (
        Tensor::ones([4], DType::I32, (&mesh, "[_]{max:x}"))?,
        Tensor::ones([4], DType::Bool, (&mesh, "[_]{or:x}"))?,
    );
    check(&|| -&signs, line!());
    check(&|| !flags.clone(), line!());
    Ok(())
}

#[test]
fn nested_arrays_make_tensors() -> Result<()> {
    let device = cpu::device();
    let ty = |t: Result<Tensor>| t.map(|t| t.type_string());
    assert_eq!(ty(Tensor::new(1.5f32, &device))?, "f32[]");
    assert_eq!(ty(Tensor::new([1u8, 2], &device))?, "u8[2]");
    assert_eq!(
        ty(Tensor::new(&[[[[true; 5]; 4]; 3]; 2], &device))?,
        "bool[2, 3, 4, 5]"
    );
    assert_eq!(ty(Tensor::new(vec![[1i64; 3]; 2], &device))?, "i64[2, 3]");
    assert_eq!(
        ty(Tensor::new(&vec![bf16::ONE; 3][..], &device))?,
        "bf16[3]"
    );
    let rows: [&[f64]; 2] = [&[1.0, 2.0], &[3.0, 4.0]];
    let x = Tensor::new(rows, &device)?;
    assert_eq!(x.to_vec::<f64>()?, [1.0, 2.0, 3.0, 4.0]);
    // Without elements.
    assert_eq!(ty(Tensor::new([[0f32; 3]; 0], &device))?, "f32[0, 3]");
    assert_eq!(
        ty(Tensor::new(Vec::<Vec<i32>>::new(), &device))?,
        "i32[0, 0]"
    );
    assert_eq!(
        ty(Tensor::new(vec![Vec::<i32>::new(); 2], &device))?,
        "i32[2, 0]"
    );
    // Rows of different lengths.
    let ragged = Tensor::new(vec![vec![1, 2], vec![3]], &device).unwrap_err();
    assert_eq!(
        ragged.to_string(),
        "new: shapes do not fit: a row of 1 where the first one has 2: all rows must have the same length"
    );
    Ok(())
}

/// Every constructor, each with the rank of what it makes.
fn made(place: impl Fn(usize) -> anymesh_core::Place) -> Result<Vec<Tensor>> {
    let rng = Rng::new(1);
    Ok(vec![
        Tensor::zeros([4, 6], DType::F32, &place(2))?,
        Tensor::ones([4, 6], DType::F32, &place(2))?,
        Tensor::full([4, 6], 3, DType::I32, &place(2))?,
        Tensor::arange(0, 7, 1, DType::I32, &place(1))?,
        Tensor::linspace(0.0, 1.0, 7, DType::F32, &place(1))?,
        Tensor::eye(4, 6, 0, DType::F32, &place(2))?,
        Tensor::causal_mask(4, 6, &place(2))?,
        Tensor::uniform([4, 6], 0.0, 1.0, DType::F32, &place(2), rng)?,
        Tensor::normal([4, 6], 0.0, 1.0, DType::F32, &place(2), rng)?,
        Tensor::bernoulli([4, 6], 0.5, DType::Bool, &place(2), rng)?,
        Tensor::randint([4, 6], 0, 9, DType::I32, &place(2), rng)?,
        Tensor::permutation(7, &place(1), rng)?,
        Tensor::from_fn([4, 6], &place(2), |at| (at[0] * 6 + at[1]) as i32)?,
        Tensor::from_slice(&(0..24).collect::<Vec<i32>>(), [4, 6], &place(2))?,
        Tensor::new([[1f32, 2.0, 3.0], [4.0, 5.0, 6.0]], &place(2))?,
    ])
}

#[test]
fn every_constructor_takes_every_place() -> Result<()> {
    use anymesh_core::IntoPlace;
    let device = cpu::device();
    let mesh = Mesh::new("a=2, b=3", &device)?;
    let plain = made(|_| (&device).into())?;
    for text in [
        "[@a, ...]",
        "[..., @b@a]",
        "[@b, ...]{sum:a}",
        "[...]",
        "[@x?, ...]",
    ] {
        let there = made(|rank| (&mesh, text).into_place(rank).unwrap())?;
        for (x, y) in plain.iter().zip(&there) {
            if x.dtype() == DType::Bool && text.contains("sum") {
                continue;
            }
            assert_eq!(x.to_bytes()?, y.to_bytes()?, "{} {text}", y.type_string());
        }
    }
    let sharding = Sharding::replicated().cut(1, 1);
    let x = Tensor::from_slice(&[1, 2, 3, 4], [2, 2], (&mesh, &sharding))?;
    assert_eq!(x.type_string(), "i32[2, 2@b]");
    assert_eq!(x.shards()[2].1.to_vec::<i32>()?, [2, 4]);
    assert_eq!(
        Tensor::new(&[1, 2], &mesh)?.shards()[5].1.to_vec::<i32>()?,
        [1, 2]
    );
    assert_eq!(Tensor::new(&[[7, 8]], &x)?.type_string(), "i32[1, 2@b]");
    Ok(())
}

#[test]
fn a_place_that_makes_no_sense_is_a_typed_error() -> Result<()> {
    let mesh = Mesh::new("a=2", &cpu::device())?;
    let zeros = |text: &str| Tensor::zeros([2, 2], DType::F32, (&mesh, text)).unwrap_err();
    assert!(matches!(
        zeros("[@a"),
        Error::Parse {
            what: "sharding",
            ..
        }
    ));
    assert!(matches!(zeros("[@a]"), Error::Sharding { .. }));
    assert!(matches!(zeros("[@a, @a]"), Error::Sharding { .. }));
    assert!(matches!(zeros("[@a, @c]"), Error::NoSuchAxis { axis, .. } if axis == "c"));
    let short = Tensor::from_slice(&[1f32], [2], (&mesh, "[@a]")).unwrap_err();
    assert!(
        matches!(
            short,
            Error::Shape {
                op: "from_bytes",
                ..
            }
        ),
        "{short}"
    );
    Ok(())
}

#[test]
fn a_program_runs_on_a_mesh_that_lacks_its_axes() -> Result<()> {
    let program = |mesh: &Mesh| -> Result<(String, Vec<f32>)> {
        let x = Tensor::from_fn([4, 6], (mesh, "[@dp?, _]"), |at| (at[0] + at[1]) as f32)?;
        let w = Tensor::from_fn([6, 4], (mesh, "[_, @tp?]"), |at| (at[0] * at[1]) as f32)?;
        let y = x.matmul(&w)?.reshard("[@dp?@tp?, _]")?;
        Ok((y.type_string(), values(&y)))
    };
    let device = cpu::device();
    let (ty, expected) = program(&Mesh::single(&device))?;
    assert_eq!(ty, "f32[4, 4]");
    for (mesh, ty) in [
        ("dp=2, tp=2", "f32[4@dp@tp, 4]"),
        ("dp=2", "f32[4@dp, 4]"),
        ("tp=2", "f32[4@tp, 4]"),
        ("other=3", "f32[4, 4]"),
    ] {
        let found = program(&Mesh::new(mesh, &device)?)?;
        assert_eq!(found, (ty.to_string(), expected.clone()));
    }
    Ok(())
}

#[test]
fn there_is_one_meta_device() -> Result<()> {
    let (a, b) = (meta(), meta());
    assert_eq!(a, b);
    let x = Tensor::zeros([2, 3], DType::F32, &a)?;
    let y = Tensor::zeros([3], DType::F32, &b)?;
    assert_eq!((&x + &y)?.type_string(), "f32[2, 3]");
    Ok(())
}

#[test]
fn tensors_print_as_in_numpy() -> Result<()> {
    let device = cpu::device();
    let show = |x: Result<Tensor>| x.map(|x| text(&x));
    assert_eq!(show(Tensor::new(2.5f32, &device))?, "2.5\nf32[] on cpu");
    assert_eq!(
        show(Tensor::new(&[[true, false], [false, false]], &device))?,
        "[[ true, false],\n [false, false]]\nbool[2, 2] on cpu"
    );
    assert_eq!(
        show(Tensor::new(&[1u8, 10, 200], &device))?,
        "[  1,  10, 200]\nu8[3] on cpu"
    );
    assert_eq!(
        show(Tensor::new(&[i64::MIN, 0], &device))?,
        "[-9223372036854775808,                    0]\ni64[2] on cpu"
    );
    assert_eq!(
        show(Tensor::zeros([0, 3], DType::F32, &device))?,
        "[]\nf32[0, 3] on cpu"
    );
    assert_eq!(
        show(Tensor::arange(0, 8, 1, DType::BF16, &device)?.reshape([2, 2, 2]))?,
        "[[[0.0, 1.0],\n  [2.0, 3.0]],\n\n [[4.0, 5.0],\n  [6.0, 7.0]]]\nbf16[2, 2, 2] on cpu"
    );
    let x = Tensor::new(&[1e-6f32, f32::INFINITY, f32::NAN, -1.0], &device)?;
    assert_eq!(
        text(&x),
        "[ 1.0e-06,      inf,      NaN, -1.0e+00]\nf32[4] on cpu"
    );
    let x = Tensor::new(&[[1.23456f32, 100.0]], &device)?;
    assert_eq!(format!("{x:.2}"), "[[  1.23, 100.00]]\nf32[1, 2] on cpu");
    assert_eq!(
        show(x.require_grad())?,
        "[[  1.2346, 100.0000]]\nf32[1, 2] on cpu, requires_grad"
    );
    // A view reads what it shows, not what is in memory.
    let view = Tensor::new(&[[1, 2], [3, 4]], &device)?.t()?;
    assert_eq!(text(&view), "[[1, 3],\n [2, 4]]\ni32[2, 2] on cpu");
    Ok(())
}

#[test]
fn long_tensors_are_shortened_and_long_rows_wrap() -> Result<()> {
    let device = cpu::device();
    let table = Tensor::arange(0, 10_000, 1, DType::I32, &device)?.reshape([100, 100])?;
    let expected = "\
[[   0,    1,    2, ...,   97,   98,   99],
 [ 100,  101,  102, ...,  197,  198,  199],
 [ 200,  201,  202, ...,  297,  298,  299],
 ...,
 [9700, 9701, 9702, ..., 9797, 9798, 9799],
 [9800, 9801, 9802, ..., 9897, 9898, 9899],
 [9900, 9901, 9902, ..., 9997, 9998, 9999]]
i32[100, 100]";
    assert_eq!(text(&table), format!("{expected} on cpu"));
    for (axes, sharding, ty) in [
        ("x=3, y=2", "[@x, @y]", "i32[100@x, 100@y]"),
        ("x=3, y=2", "[_, @y@x]", "i32[100, 100@y@x]"),
        ("x=3, y=2", "[@x, _]{sum:y}", "i32[100@x, 100]{sum:y}"),
    ] {
        let mesh = Mesh::new(axes, &device)?;
        let x = table.to_mesh(&mesh, "[...]")?.reshard(sharding)?;
        let expected = expected.replace("i32[100, 100]", ty);
        assert_eq!(text(&x), format!("{expected} on mesh(x=3, y=2) of cpu"));
    }
    let row = Tensor::arange(0, 30, 1, DType::I32, &device)?.reshape([1, 30])?;
    assert_eq!(
        text(&row),
        "[[ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16, 17, 18,\n  \
         19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]\ni32[1, 30] on cpu"
    );
    let deep = Tensor::zeros([2; 14], DType::U8, &device)?;
    assert!(text(&deep).len() < 20_000, "{}", text(&deep).len());
    Ok(())
}

#[test]
fn partial_values_are_shown_as_what_they_come_to() -> Result<()> {
    let device = cpu::device();
    let mesh = Mesh::new("x=2, y=2", &device)?;
    let check = |reduction: Reduction, a: Tensor, b: Tensor, expected: &str| -> Result<()> {
        let ty = TensorType {
            dtype: a.dtype(),
            shape: a.shape().clone(),
            sharding: Sharding::replicated().partial_over(0, reduction),
        };
        let x = Tensor::from_shards(&ty, &mesh, &[a.clone(), a, b.clone(), b])?;
        let first = text(&x).lines().next().unwrap().to_string();
        assert_eq!(first, expected, "{reduction}");
        assert_eq!(
            text(&x.full_tensor()?).lines().next(),
            Some(expected),
            "as the device has it"
        );
        Ok(())
    };
    let f = |a: [f32; 3]| Tensor::new(a, &device).unwrap();
    let u = |a: [u8; 2]| Tensor::new(a, &device).unwrap();
    let t = |a: [bool; 3]| Tensor::new(a, &device).unwrap();
    let (a, b) = (f([1.0, -2.0, f32::NAN]), f([0.5, 7.0, 1.0]));
    check(Reduction::Sum, a.clone(), b.clone(), "[1.5, 5.0, NaN]")?;
    check(
        Reduction::Prod,
        a.clone(),
        b.clone(),
        "[  0.5, -14.0,   NaN]",
    )?;
    check(Reduction::Max, a.clone(), b.clone(), "[1.0, 7.0, NaN]")?;
    check(Reduction::Min, a, b, "[ 0.5, -2.0,  NaN]")?;
    check(Reduction::Sum, u([200, 1]), u([100, 1]), "[44,  2]")?;
    check(Reduction::Max, u([200, 1]), u([100, 3]), "[200,   3]")?;
    let (a, b) = (t([true, true, false]), t([true, false, false]));
    check(Reduction::Or, a.clone(), b.clone(), "[ true,  true, false]")?;
    check(Reduction::And, a, b, "[ true, false, false]")?;
    Ok(())
}

#[test]
fn showing_a_tensor_communicates_nothing_and_never_fails() -> Result<()> {
    let device = cpu::device();
    let mesh = Mesh::new("x=2", &device)?;
    let x = Tensor::arange(0, 4, 1, DType::I32, (&mesh, "[@x]"))?;
    let partial = Tensor::ones([2], DType::F32, (&mesh, "[_]{sum:x}"))?;
    let (_, ledger) = Ledger::record(|| {
        with_policy(Policy::Explicit, &[], || {
            assert_eq!(text(&x), "[0, 1, 2, 3]\ni32[4@x] on mesh(x=2) of cpu");
            assert!(text(&partial).starts_with("[1.0, 1.0]\n"));
        });
    });
    assert!(ledger.entries.is_empty());

    let planned = Tensor::zeros([1 << 20, 1 << 20], DType::BF16, &meta())?;
    assert_eq!(
        text(&planned),
        "bf16[1048576, 1048576] on meta: its values cannot be shown: meta: reading values is not supported: run the same program on the cpu device"
    );
    assert_eq!(format!("{planned:?}"), "bf16[1048576, 1048576] on meta");

    // A fault that the values depend on is what the text says.
    let faulty = Tensor::new(&[1, 2], &device)?.floor_div(&Tensor::new(&[0, 1], &device)?);
    if let Ok(faulty) = faulty {
        assert!(text(&faulty).contains("division by zero"), "{faulty}");
    }
    Ok(())
}

#[test]
fn printing_over_processes_needs_them_all_and_debugging_none() -> Result<()> {
    let mesh = Mesh::new("x=2", &cpu::device())?;
    for rank in 0..2 {
        // This transport reaches nobody else.
        let mesh = mesh.addressing(&[rank])?;
        for sharding in ["[@x]", "[_]"] {
            let x = Tensor::arange(0, 4, 1, DType::I32, (&mesh, sharding))?;
            assert!(text(&x).contains("the rank is not in this process"), "{x}");
            let debug = format!("{x:?}");
            assert!(debug.contains(&x.type_string()), "{debug}");
        }
    }
    Ok(())
}

#[test]
fn debug_shows_type_place_and_first_values() -> Result<()> {
    let device: Device = cpu::device();
    let debug = |x: &Tensor| format!("{x:?}");
    let x = Tensor::arange(0, 12, 1, DType::F32, &device)?.reshape([4, 3])?;
    assert_eq!(
        debug(&x),
        "f32[4, 3] on cpu [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, ...]"
    );
    assert_eq!(debug(&Tensor::new(true, &device)?), "bool[] on cpu [true]");
    assert_eq!(
        debug(&Tensor::zeros([0], DType::F32, &device)?),
        "f32[0] on cpu []"
    );
    let mesh = Mesh::new("x=4", &device)?;
    assert_eq!(
        debug(&x.to_mesh(&mesh, "[@x, _]")?),
        "f32[4@x, 3] on mesh(x=4) of cpu [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, ...]"
    );
    Ok(())
}
