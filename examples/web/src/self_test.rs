//! A test that a browser runs: [`run`] resolves to a report, or rejects with the reason.
//!
//! The `control_*` exports go wrong on purpose. `scripts/wasm controls` asks that each of them
//! fails the run, so that a green [`run`] means something.

use crate::text;
use anymesh_core::{
    DType, Device, Error, Tensor,
    ops::{Order, Rng},
};
use wasm_bindgen::prelude::*;

/// The smoke test: a few kernels of each kind against plain loops.
#[wasm_bindgen]
pub async fn run() -> Result<String, JsValue> {
    let device = open().await?;
    let about = &device.backend().capabilities().description;
    Ok(format!(
        "device: {device}, {about}\n{}",
        check(&device).await?
    ))
}

/// Holds a few kernels of each kind against plain loops; a line for each.
pub async fn check(device: &Device) -> Result<String, String> {
    let mut report = String::new();
    for (name, error) in kernels(device, 1.0).await.map_err(text)? {
        // Written so that a NaN fails.
        if !(error <= 1e-5) {
            return Err(format!(
                "the GPU gives wrong values: {name} has a relative error of {error}; choose the CPU"
            ));
        }
        report += &format!("{name}: relative error {error:.1e}\n");
    }
    Ok(report)
}

/// The references are scaled: the comparison must notice.
#[wasm_bindgen]
pub async fn control_wrong_reference() -> Result<String, JsValue> {
    let device = open().await?;
    match kernels(&device, 1.5)
        .await
        .map_err(text)?
        .into_iter()
        .find(|(_, error)| !(*error <= 1e-5))
    {
        Some((name, error)) => Err(format!("{name}: relative error {error}, as it should").into()),
        None => Ok("a wrong reference was not noticed".into()),
    }
}

/// An index out of range must surface at the read, not as memory of somebody else.
#[wasm_bindgen]
pub async fn control_bad_index() -> Result<String, JsValue> {
    let device = open().await?;
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0], [3], &device).map_err(text)?;
    let index = Tensor::from_slice(&[7i32], [1], &device).map_err(text)?;
    x.index_select(0, &index)
        .map_err(text)?
        .to_vec_async::<f32>()
        .await
        .map_err(text)?;
    Ok("an index out of range was not noticed".into())
}

/// A panic outside any promise the page waits for.
#[wasm_bindgen]
pub async fn control_panic() -> Result<String, JsValue> {
    wasm_bindgen_futures::spawn_local(async { panic!("on purpose") });
    Ok("a panic was not noticed".into())
}

/// Never resolves: the time-out must end it.
#[wasm_bindgen]
pub async fn control_hang() -> Result<String, JsValue> {
    std::future::pending().await
}

async fn open() -> Result<Device, String> {
    anymesh_backend_wgpu::device_async().await.map_err(text)
}

/// The largest difference from `expected * scale`, relative to its largest value.
async fn error(actual: &Tensor, expected: &[f64], scale: f64) -> Result<f64, Error> {
    let actual = actual.cast(DType::F32)?.to_vec_async::<f32>().await?;
    if actual.len() != expected.len() {
        return Ok(f64::INFINITY);
    }
    let top = expected.iter().fold(1e-30f64, |m, v| m.max(v.abs()));
    let differences = actual
        .iter()
        .zip(expected)
        .map(|(a, e)| (f64::from(*a) - e * scale).abs());
    Ok(differences.fold(0.0, |m, d| if d.is_nan() { f64::NAN } else { m.max(d) }) / top)
}

/// Runs kernels of every kind and returns how far each is from a plain loop.
async fn kernels(device: &Device, scale: f64) -> Result<Vec<(&'static str, f64)>, Error> {
    let (rows, columns) = (37, 64);
    let x = Tensor::normal([rows, columns], 0.0, 1.0, DType::F32, device, Rng::new(7))?;
    let host: Vec<f64> = x
        .to_vec_async::<f32>()
        .await?
        .into_iter()
        .map(f64::from)
        .collect();
    let row = |r: usize| &host[r * columns..(r + 1) * columns];
    let mut out = Vec::new();

    let tanh: Vec<f64> = host.iter().map(|v| v.tanh()).collect();
    out.push(("tanh", error(&x.tanh()?, &tanh, scale).await?));

    let transposed: Vec<f64> = (0..columns)
        .flat_map(|c| (0..rows).map(move |r| (r, c)))
        .map(|(r, c)| host[r * columns + c])
        .collect();
    out.push((
        "transpose",
        error(&x.t()?.contiguous()?, &transposed, scale).await?,
    ));

    let bytes: Vec<f64> = host.iter().map(|v| (v.abs() * 10.0).trunc()).collect();
    let packed = x
        .abs()?
        .mul(10.0)?
        .cast(DType::U8)?
        .t()?
        .t()?
        .contiguous()?;
    out.push(("u8 packing", error(&packed, &bytes, scale).await?));

    let sums: Vec<f64> = (0..rows).map(|r| row(r).iter().sum()).collect();
    out.push(("sum", error(&x.sum(&[1], false)?, &sums, scale).await?));

    let softmax: Vec<f64> = (0..rows)
        .flat_map(|r| {
            let top = row(r).iter().copied().fold(f64::MIN, f64::max);
            let total: f64 = row(r).iter().map(|v| (v - top).exp()).sum();
            row(r)
                .iter()
                .map(move |v| (v - top).exp() / total)
                .collect::<Vec<_>>()
        })
        .collect();
    out.push(("softmax", error(&x.softmax(-1)?, &softmax, scale).await?));

    let gram: Vec<f64> = (0..rows)
        .flat_map(|a| (0..rows).map(move |b| (a, b)))
        .map(|(a, b)| row(a).iter().zip(row(b)).map(|(p, q)| p * q).sum())
        .collect();
    out.push(("matmul", error(&x.matmul(&x.t()?)?, &gram, scale).await?));

    let mut sorted = host.clone();
    sorted.sort_by(f64::total_cmp);
    out.push((
        "sort",
        error(
            &x.reshape([rows * columns])?.sort(0, Order::Ascending)?.0,
            &sorted,
            scale,
        )
        .await?,
    ));

    let running: Vec<f64> = host
        .iter()
        .scan(0.0, |total, v| {
            *total += v;
            Some(*total)
        })
        .collect();
    out.push((
        "cumsum",
        error(&x.reshape([rows * columns])?.cumsum(0)?, &running, scale).await?,
    ));
    Ok(out)
}
