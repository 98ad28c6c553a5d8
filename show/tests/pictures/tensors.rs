//! Tensors: tables, maps and samples of values.

use crate::{cpu, inspect::check, mesh, svg};
use anymesh_core::{DType, Error, Mesh, Tensor, backend::Kernel, ops::Rng, spmd::Ledger};
use anymesh_show::Show;

fn random(dims: &[usize]) -> Tensor {
    Tensor::normal(dims, 0.0, 1.0, DType::F32, &cpu(), Rng::new(3)).unwrap()
}

#[test]
fn tensors_of_every_shape_dtype_and_place() {
    let shapes: [&[usize]; 14] = [
        &[],
        &[1],
        &[12],
        &[13],
        &[5000],
        &[4, 6],
        &[16, 12],
        &[17, 12],
        &[300, 2],
        &[1, 400],
        &[200, 300],
        &[2, 3, 4],
        &[5, 3, 20, 30],
        &[0, 7],
    ];
    let meshes = ["a=2", "a=3, b=2", "a=2, b=2, c=2"];
    for dims in shapes {
        let plain = random(dims);
        check(&plain);
        for dtype in DType::ALL {
            check(&plain.cast(dtype).unwrap());
        }
        for axes in meshes {
            let mesh = Mesh::new(axes, &cpu()).unwrap();
            check(&plain.to_mesh(&mesh, "[...]").unwrap());
            if !dims.is_empty() {
                check(&plain.to_mesh(&mesh, "[@a, ...]").unwrap());
                check(&plain.to_mesh(&mesh, "[..., @a@b?]").unwrap());
            }
            if dims.len() > 1 {
                check(&plain.to_mesh(&mesh, "[@b?, ..., @a]").unwrap());
            }
        }
    }
}

#[test]
fn a_table_has_every_value_and_the_colour_of_who_holds_it() {
    let mesh = Mesh::new("dp=2, tp=2", &cpu()).unwrap();
    let x = Tensor::arange(0, 24, 1, DType::I32, &cpu())
        .unwrap()
        .reshape([4, 6])
        .unwrap();
    let picture = svg(&x.to_mesh(&mesh, "[@dp, @tp]").unwrap());
    for n in 0..24 {
        assert!(
            picture.contains(&format!("class=\"mono end\">{n}</text>")),
            "{n}"
        );
    }
    assert_eq!(
        picture.matches("class=\"cut\"").count(),
        2,
        "a line for each cut"
    );
    // Six values and the part itself, for each of four holders.
    for i in 0..4 {
        assert_eq!(picture.matches(&format!("\"fill hold{i}\"")).count(), 7);
    }
    assert!(picture.contains("[2..4, 3..6]: rank 3 holds it"));
}

#[test]
fn uneven_cuts_are_where_the_parts_end() {
    let mesh = Mesh::new("a=3", &cpu()).unwrap();
    let x = Tensor::arange(0, 7, 1, DType::F32, (&mesh, "[@a]")).unwrap();
    let picture = svg(&x);
    // Parts of 2, 2 and 3.
    assert!(picture.contains(">0..2<") && picture.contains(">2..4<") && picture.contains(">4..7<"));
    assert_eq!(picture.matches("class=\"cut\"").count(), 2);
}

#[test]
fn what_is_no_number_is_seen() {
    let x = Tensor::new(
        &[[1.0f32, f32::NAN], [f32::INFINITY, f32::NEG_INFINITY]],
        &cpu(),
    )
    .unwrap();
    let picture = svg(&x);
    for word in ["NaN", "inf", "-inf"] {
        assert!(picture.contains(&format!(">{word}</text>")), "{word}");
    }
    assert!(x.figure().text().contains("1 NaN, 2 infinite"));
    let mut values = vec![0.5f32; 100 * 100];
    (values[0], values[5000]) = (f32::NAN, f32::INFINITY);
    let large = Tensor::from_slice(&values, [100, 100], &cpu()).unwrap();
    let picture = svg(&large);
    assert!(picture.contains(">NaN</text>") && picture.contains("#ff1fc7"));
    assert!(picture.contains(">inf</text>") && !picture.contains(">-inf</text>"));
}

#[test]
fn all_values_may_be_no_numbers_or_the_same_or_extreme() {
    for value in [
        f32::NAN,
        f32::INFINITY,
        0.0,
        -3.0,
        f32::MAX,
        f32::MIN_POSITIVE,
    ] {
        check(&Tensor::full([40, 40], value, DType::F32, &cpu()).unwrap());
        check(&Tensor::full([2, 2], value, DType::F32, &cpu()).unwrap());
    }
    check(&Tensor::new(&[[f64::MAX, -f64::MAX], [1e-300, 0.0]], &cpu()).unwrap());
    let wide = Tensor::new(&[f64::MAX, -f64::MAX], &cpu()).unwrap();
    check(&wide.expand([50, 2]).unwrap());
}

#[test]
fn terms_of_a_sum_are_added_and_said_to_be_terms() {
    let mesh = Mesh::new("a=2, b=2", &cpu()).unwrap();
    let x = Tensor::ones([4, 4], DType::F32, (&mesh, "[_, @a]")).unwrap();
    let sum = x.sum(&[1], false).unwrap();
    assert_eq!(sum.type_string(), "f32[4]{sum:a}");
    let picture = svg(&sum);
    assert_eq!(
        picture.matches("class=\"mono end\">4</text>").count(),
        4,
        "{picture}"
    );
    assert!(sum.figure().text().contains("the value is the sum over a"));
}

#[test]
fn showing_a_tensor_sends_nothing() {
    let mesh = Mesh::new("a=2", &cpu()).unwrap();
    let x = random(&[30, 30])
        .to_mesh(&mesh, "[@a, _]")
        .unwrap()
        .require_grad()
        .unwrap();
    let (_, ledger) = Ledger::record(|| (x.html(), x.svg(), x.figure()));
    assert!(ledger.entries.is_empty());
    assert!(x.figure().title.ends_with("of cpu, requires_grad"));
}

#[test]
fn a_large_tensor_is_sampled_and_its_statistics_are_of_all_of_it() {
    let x = Tensor::arange(0, 2_000_000, 1, DType::F32, &cpu())
        .unwrap()
        .reshape([1000, 2000])
        .unwrap();
    let picture = svg(&x);
    assert!(picture.len() < 200_000, "{}", picture.len());
    let text = x.figure().text();
    assert!(text.contains("smallest 0, mean 1e6, largest 2e6"), "{text}");
    assert!(
        text.contains("Read was one row of each 2 and one column of each 4."),
        "{text}"
    );
    // A value that the sample misses is not missed in all.
    let mesh = Mesh::new("a=2", &cpu()).unwrap();
    let mut values = vec![0f32; 2_000_000];
    values[1999] = f32::NAN;
    let x = Tensor::from_slice(&values, [1000, 2000], (&mesh, "[@a, _]")).unwrap();
    let text = x.figure().text();
    assert!(text.contains("some of all values are NaN"), "{text}");
}

#[test]
fn a_tensor_without_values_shows_its_type_and_parts() {
    let mesh = mesh("dp=64, tp=8");
    let x = Tensor::zeros([1 << 20, 1 << 14], DType::BF16, (&mesh, "[@dp, @tp]")).unwrap();
    let picture = svg(&x);
    assert!(picture.contains("bf16[1048576@dp, 16384@tp]") && picture.contains("without values"));
    assert!(check(&Tensor::zeros([4], DType::F32, &anymesh_core::meta()).unwrap()).is_none());
}

#[test]
fn a_device_that_fails_says_so_in_the_figure() {
    let broken = cpu().decorated(|backend, kernel| match kernel {
        Kernel::Map(_) => Err(Error::DeviceFailed {
            device: "cpu".into(),
            detail: "<lost> & \"gone\"".into(),
        }),
        kernel => backend.launch(kernel),
    });
    // A view that is not dense is copied by a kernel before it is read.
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], &broken)
        .unwrap()
        .t()
        .unwrap();
    check(&x);
    let html = x.html();
    assert!(
        html.contains("Its values cannot be shown") && html.contains("&lt;lost&gt; &amp;"),
        "{html}"
    );
    check(&Err::<Tensor, _>(Error::DeviceFailed {
        device: "cpu".into(),
        detail: "off".into(),
    }));
}

#[test]
fn parts_of_other_processes_are_left_out_and_nobody_waits_for_them() {
    let mesh = Mesh::new("a=4", &cpu()).unwrap().addressing(&[1]).unwrap();
    let x = Tensor::arange(0, 8, 1, DType::F32, (&mesh, "[@a]")).unwrap();
    let picture = svg(&x);
    assert!(picture.contains(">2</text>") && picture.contains(">3</text>"));
    assert!(picture.contains("6 of the values shown lie in other processes"));
    let map = Tensor::ones([40, 40], DType::F32, (&mesh, "[@a, _]")).unwrap();
    check(&map);
    let terms = Tensor::ones([4, 8], DType::F32, (&mesh, "[_, @a]"))
        .unwrap()
        .sum(&[1], false)
        .unwrap();
    check(&terms);
}

#[test]
fn a_hundred_million_elements_are_a_small_picture() {
    // A view of one row, so that the test needs no memory of that size.
    let row = Tensor::arange(0, 10_000, 1, DType::F32, &cpu()).unwrap();
    let x = row.expand([10_000, 10_000]).unwrap();
    let picture = svg(&x.figure());
    assert!(picture.len() < 150_000, "{}", picture.len());
    assert!(
        picture.contains("smallest 0, mean 4999.5, largest 9999."),
        "{picture}"
    );
}
