//! Saves in the background: snapshots do not change, errors come out, averages begin with the first
//! weights.

mod common;

use anymesh_checkpoint::{Background, Checkpoint, Contents, Error, latest, list};
use anymesh_core::{DType, Mesh, Tensor};
use common::{Temporary, named};
use std::collections::BTreeMap;

/// A tensor `w` and nothing else, at a step.
fn only(w: &Tensor, step: u64) -> Contents {
    Contents::new(step, named([("w", w.clone())]))
}

#[test]
fn what_is_computed_after_the_snapshot_is_not_in_the_file() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("dp=2, tp=2", &device)?;
    let root = Temporary::here();
    let mut saver = Background::new(&*root);
    let mut w = Tensor::arange(0, 3_000_000, 1, DType::F32, &device)?
        .reshape([1500, 2000])?
        .to_mesh(&mesh, "[@dp, @tp]")?;
    for step in 1..=4 {
        let expected = w.to_vec::<f32>()?;
        saver.begin(&format!("s{step}"), &only(&w, step))?;
        let mut calls = 0;
        loop {
            w = w.add(1.0)?;
            calls += 1;
            if saver.advance(1 << 20)? {
                break;
            }
        }
        assert!(calls > 2, "12 MB in pieces");
        let path = saver.finish()?.expect("written");
        let checkpoint = Checkpoint::open(path)?;
        assert_eq!(checkpoint.verify(), []);
        assert_eq!(checkpoint.values::<f32>("w")?, expected);
    }
    Ok(())
}

#[test]
fn the_error_of_a_save_comes_out_at_the_next_call_and_the_one_after_works() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let root = Temporary::here();
    let w = Tensor::ones([10], DType::F32, &device)?;
    let mut saver = Background::new(&*root);
    saver.begin("one", &only(&w, 1))?;
    saver.finish()?;
    let taken = saver
        .begin("one", &only(&w, 2))
        .expect_err("the name is taken");
    assert!(taken.to_string().contains("exists already"), "{taken}");
    // Somebody removes the folder while it is being written to.
    saver.begin("two", &only(&w, 2))?;
    std::fs::remove_dir_all(root.join(".tmp-two")).expect("begun");
    assert!(saver.advance(usize::MAX)?, "all is copied");
    let error = saver
        .begin("three", &only(&w, 3))
        .expect_err("it could not be written");
    assert!(error.to_string().contains(".tmp-two"), "{error}");
    saver.begin("two", &only(&w, 3))?;
    drop(saver);
    assert_eq!(
        latest(&root)?.expect("completed on drop").manifest().step,
        3
    );
    assert_eq!(list(&root)?.len(), 2);
    Ok(())
}

#[test]
fn averages_begin_with_the_first_weights_and_follow_changes_of_shape() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("x=3", &device)?;
    let root = Temporary::here();
    assert!(Background::new(&*root).with_average(1.5, None).is_err());
    let mut saver = Background::new(&*root).with_average(0.75, None)?;
    let ids = Tensor::ones([2], DType::I64, &device)?;
    let mut average: Option<Vec<f64>> = None;
    for step in 1..=5u64 {
        // From the fourth step on the tensor has another shape: its average begins again.
        let n = if step < 4 { 7 } else { 5 };
        let w = Tensor::from_fn([n, 3], &device, |at| {
            (at[0] * 3 + at[1]) as f32 * step as f32
        })?
        .cast(DType::BF16)?
        .to_mesh(&mesh, "[@x, _]")?;
        let values: Vec<f64> = w.cast(DType::F64)?.to_vec::<f64>()?;
        average = Some(match average.filter(|a| a.len() == values.len()) {
            Some(old) => old
                .iter()
                .zip(&values)
                .map(|(a, v)| f64::from((0.75 * a + 0.25 * v) as f32))
                .collect(),
            None => values.clone(),
        });
        let tensors = BTreeMap::from([("w".to_string(), w), ("ids".to_string(), ids.clone())]);
        saver.begin(&format!("s{step}"), &Contents::new(step, tensors.clone()))?;
        let checkpoint = Checkpoint::open(saver.finish()?.expect("written"))?;
        let found: Vec<f64> = checkpoint
            .values::<f32>("ema.w")?
            .into_iter()
            .map(f64::from)
            .collect();
        assert_eq!(Some(found), average, "step {step}");
        assert!(
            !checkpoint.manifest().tensors.contains_key("ema.ids"),
            "integers have no average"
        );
    }
    Ok(())
}

#[test]
fn averages_go_on_from_a_checkpoint_and_where_a_tensor_lies_otherwise() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let root = Temporary::here();
    let save = |saver: &mut Background, step: u64, value: f64, axes: &str, layout: &str| {
        let mesh = Mesh::new(axes, &device)?;
        // Rows differ, so that one in the wrong place shows.
        let rows = Tensor::arange(0, 5, 1, DType::F32, &device)?
            .reshape([5, 1])?
            .mul(100.0)?;
        let w = rows
            .add(&Tensor::full([5, 6], value, DType::F32, &device)?)?
            .to_mesh(&mesh, layout)?;
        saver.begin(&format!("s{step}"), &only(&w, step))?;
        let checkpoint = Checkpoint::open(saver.finish()?.expect("written"))?;
        let average = checkpoint.values::<f32>("ema.w")?;
        assert!(
            (0..30).all(|i| average[i] == average[0] + (i / 6 * 100) as f32),
            "{average:?}"
        );
        Ok::<_, Error>((checkpoint, average[0]))
    };
    let mut first = Background::new(&*root).with_average(0.5, None)?;
    assert_eq!(save(&mut first, 1, 1.0, "x=2", "[@x, _]")?.1, 1.0);
    let (checkpoint, average) = save(&mut first, 2, 3.0, "x=3", "[_, @x]")?;
    assert_eq!(average, 2.0, "cut otherwise");
    drop(first);
    let mut second = Background::new(&*root).with_average(0.5, Some(checkpoint))?;
    assert_eq!(
        save(&mut second, 3, 4.0, "a=2, b=2", "[@b, @a]")?.1,
        3.0,
        "another run"
    );
    assert_eq!(save(&mut second, 4, 5.0, "x=1", "[_, _]")?.1, 4.0);

    let x = Tensor::ones([2], DType::F32, &device)?;
    let taken = named([("w", x.clone()), ("ema.w", x)]);
    let error = second
        .begin("s5", &Contents::new(5, taken))
        .expect_err("two of one name");
    assert!(
        matches!(&error, Error::DuplicateName { name, .. } if name == "ema.w"),
        "{error}"
    );
    Ok(())
}
