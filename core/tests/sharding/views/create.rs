//! Tensors that are made on a mesh, random ones among them.

use super::*;

/// The constructor gives the same values on a device and in every place of every mesh.
fn sweep_place(what: &str, make: impl Fn(Place) -> Result<Tensor>) {
    let expected = make((&device()).into()).unwrap();
    for mesh in meshes() {
        let (rank, axes) = (expected.rank(), mesh.axes().len());
        for sharding in shardings(rank, axes, reductions(expected.dtype())) {
            let found = make((&mesh, &sharding).into_place(rank).unwrap()).unwrap();
            assert_eq!(found.sharding(), &sharding, "{what}");
            assert_eq!(
                (found.shape(), found.dtype()),
                (expected.shape(), expected.dtype()),
                "{what}"
            );
            assert_eq!(
                found.to_bytes().unwrap(),
                expected.to_bytes().unwrap(),
                "{what} as {} on {mesh}",
                found.type_string()
            );
        }
    }
}

#[test]
fn constants_and_ranges_are_the_same_on_every_mesh() {
    for n in [0, 1, 5, 8] {
        sweep_place("full", |p| Tensor::full([n, 3], 7, DType::I32, p));
        sweep_place("arange", |p| {
            Tensor::arange(3, 3 + 2 * n as i64, 2, DType::I64, p)
        });
        sweep_place("arange of floats", |p| {
            Tensor::arange(0.1, 0.1 + 0.3 * n as f64, 0.3, DType::F32, p)
        });
        sweep_place("linspace", |p| {
            Tensor::linspace(-1.0, 2.5, n, DType::F32, p)
        });
        for k in [-2, 0, 1, i64::MAX] {
            sweep_place("eye", |p| Tensor::eye(n, 4, k, DType::F32, p));
            sweep_place("tril_mask", |p| Tensor::tril_mask(n, 4, k, p));
            sweep_place("triu_mask", |p| Tensor::triu_mask(4, n, k, p));
        }
        sweep_place("causal_mask", |p| Tensor::causal_mask(n, 5, p));
        sweep_place("cosines", |p| {
            Ok(Tensor::rope_tables(
                n,
                6,
                &RopeOptions {
                    base: 100.0,
                    offset: 11,
                },
                p,
            )?
            .0)
        });
        sweep_place("sines", |p| {
            Ok(Tensor::rope_tables(
                n,
                6,
                &RopeOptions {
                    base: 100.0,
                    offset: 11,
                },
                p,
            )?
            .1)
        });
    }
}

#[test]
fn random_values_are_the_same_on_every_mesh() {
    let rng = Rng::new(17);
    for shape in [[4, 6], [5, 3], [1, 2], [0, 4]] {
        sweep_place("uniform", |p| {
            Tensor::uniform(shape, -1.0, 1.0, DType::F32, p, rng)
        });
        sweep_place("normal", |p| {
            Tensor::normal(shape, 0.0, 1.0, DType::F64, p, rng)
        });
        sweep_place("bernoulli", |p| {
            Tensor::bernoulli(shape, 0.4, DType::U8, p, rng)
        });
        sweep_place("a sure bernoulli", |p| {
            Tensor::bernoulli(shape, 1.0, DType::U8, p, rng)
        });
        sweep_place("randint", |p| {
            Tensor::randint(shape, -5, 90, DType::I32, p, rng)
        });
        sweep_place("permutation", |p| Tensor::permutation(shape[1], p, rng));
        sweep_place("dropout_mask", |p| Tensor::dropout_mask(shape, 0.5, p, rng));
    }
    for shape in [&[4, 6][..], &[3, 5], &[5], &[2, 2, 3], &[0, 4]] {
        let weights = Tensor::uniform(shape, 0.0, 1.0, DType::F32, &device(), Rng::new(3)).unwrap();
        sweep_close("multinomial", &[weights.clone()], 0.0, |x| {
            Ok(vec![x[0].multinomial(7, true, rng)?])
        });
        sweep_close("multinomial without replacement", &[weights], 0.0, |x| {
            Ok(vec![x[0].multinomial(2, false, rng)?])
        });
    }
}

#[test]
fn tensors_like_another_lie_where_it_lies() {
    sweep_one(
        "zeros_like",
        &[&[4, 3], &[5, 1], &[0, 2]],
        Tensor::zeros_like,
    );
    sweep_one("full_like", &[&[4, 3]], |x| x.full_like(2.5));
    let mesh = Mesh::new("x=2, y=2", &device()).unwrap();
    let x = numbers(&[4, 3]).to_mesh(&mesh, "[@x, _]{sum:y}").unwrap();
    assert_eq!(x.ones_like().unwrap().type_string(), "f32[4@x, 3]");
}

#[test]
fn a_place_that_does_not_fit_is_an_error() {
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let rows = Sharding::replicated().cut(1, 0);
    assert!(matches!(
        Tensor::arange(0, 4, 1, DType::I32, (&mesh, &rows)),
        Err(Error::Sharding { .. })
    ));
    assert!(matches!(
        Tensor::zeros(
            [2, 2],
            DType::F32,
            (&mesh, &Sharding::replicated().cut(0, 3))
        ),
        Err(Error::Sharding { .. })
    ));
}

#[test]
fn dropout_takes_the_same_elements_on_every_mesh() {
    let rng = Rng::new(5);
    sweep_one("dropout", &[&[4, 6], &[5, 3], &[1, 2], &[0, 4]], |x| {
        x.dropout(0.5, rng)
    });
    sweep_one("dropout of all", &[&[4, 3]], |x| x.dropout(1.0, rng));
    sweep("dropout_add", &[numbers(&[4, 3]), numbers(&[4, 3])], |x| {
        Ok(vec![x[0].dropout_add(&x[1], 0.5, rng)?])
    });
    assert_eq!(
        free("x=2, y=2", &[4, 6], "[@x, _]{sum:y}", |x| x
            .dropout(0.5, rng)),
        "f32[4@x, 6]{sum:y}"
    );
}
