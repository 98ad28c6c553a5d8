//! A smoke test that a browser runs: [`run`] resolves to a report, or rejects with the reason.
//!
//! The `control_*` exports go wrong on purpose. `scripts/wasm controls` asks that each of them
//! fails the run, so that a green [`run`] means something.

mod console;

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgpu::{RuntimeOptions, WebGpu, WgpuDevice, try_init_setup_async};
use wasm_bindgen::prelude::*;

/// Not a multiple of [`CUBE_UNITS`]: the last cube is ragged.
const LEN: usize = 1000;
const CUBE_UNITS: u32 = 64;

#[cube(launch_unchecked)]
fn scale_add(input: &[f32], output: &mut [f32], scale: f32) {
    if ABSOLUTE_POS < output.len() {
        output[ABSOLUTE_POS] = input[ABSOLUTE_POS] * scale + 1.0f32;
    }
}

/// Browsers reject this one: the barrier is not reached by all units of a cube.
#[cube(launch_unchecked)]
fn divergent_barrier(input: &[f32], output: &mut [f32]) {
    if input[ABSOLUTE_POS] > 3.0f32 {
        sync_cube();
    }
    output[ABSOLUTE_POS] = input[ABSOLUTE_POS];
}

/// Installs the console hooks: called once by the page, before anything else.
#[wasm_bindgen(start)]
fn start() {
    console::install();
}

/// The smoke test.
#[wasm_bindgen]
pub async fn run() -> Result<String, JsValue> {
    let (client, adapter) = init().await?;
    let worst = scale_add_error(&client, 2.5, 2.5).await?;
    Ok(format!(
        "adapter: {adapter}\nscale_add over {LEN} floats: max abs error {worst:e}"
    ))
}

/// The reference has another scale than the kernel: the comparison must notice.
#[wasm_bindgen]
pub async fn control_wrong_reference() -> Result<String, JsValue> {
    let (client, _) = init().await?;
    scale_add_error(&client, 2.5, 2.0).await?;
    Ok("a wrong reference was not noticed".into())
}

/// Looks at no result: a rejected shader leaves stale data and a resolved promise, so only the
/// page's error handlers can notice it.
#[wasm_bindgen]
pub async fn control_bad_shader() -> Result<String, JsValue> {
    let (client, _) = init().await?;
    let input = client.create_from_slice(f32::as_bytes(&ramp()));
    let output = client.empty(LEN * size_of::<f32>());
    // SAFETY: one cube of units, all of them below LEN.
    unsafe {
        divergent_barrier::launch_unchecked(
            &client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(CUBE_UNITS),
            BufferArg::from_raw_parts(input, LEN),
            BufferArg::from_raw_parts(output.clone(), LEN),
        );
    }
    let values = read(&client, output).await?;
    Ok(format!(
        "a rejected shader was not noticed; it left {}",
        values[0]
    ))
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

/// A client on the browser's adapter, and that adapter's description.
///
/// Devices cannot be acquired synchronously in a browser, so this comes before `client()`, which
/// then finds what was registered for the same device value.
async fn init() -> Result<(Client, String), String> {
    let device = WgpuDevice::default();
    let setup = try_init_setup_async::<WebGpu>(&device, RuntimeOptions::default())
        .await
        .map_err(|error| format!("no WebGPU device: {error}"))?;
    let info = setup.adapter.get_info();
    let adapter = format!("{} {:?} {:?}", info.name, info.backend, info.device_type);
    Ok((cubecl::Device::Wgpu(device).client(), adapter))
}

fn ramp() -> Vec<f32> {
    (0..LEN).map(|i| i as f32 / 8.0).collect()
}

/// Runs `scale_add` with `scale` and returns the largest distance from the host's result with
/// `reference_scale`, or an error where that is more than rounding.
async fn scale_add_error(client: &Client, scale: f32, reference_scale: f32) -> Result<f32, String> {
    let host = ramp();
    let input = client.create_from_slice(f32::as_bytes(&host));
    let output = client.empty(LEN * size_of::<f32>());
    // SAFETY: both buffers hold LEN floats, and the kernel checks its position against that.
    unsafe {
        scale_add::launch_unchecked(
            client,
            CubeCount::Static((LEN as u32).div_ceil(CUBE_UNITS), 1, 1),
            CubeDim::new_1d(CUBE_UNITS),
            BufferArg::from_raw_parts(input, LEN),
            BufferArg::from_raw_parts(output.clone(), LEN),
            scale,
        );
    }
    let got = read(client, output).await?;
    let mut worst = 0.0f32;
    for (i, (got, x)) in got.iter().zip(&host).enumerate() {
        let want = x * reference_scale + 1.0;
        let error = (got - want).abs();
        // Written so that a NaN fails.
        if !(error <= 1e-6 * want.abs()) {
            return Err(format!("scale_add: element {i} is {got}, not {want}"));
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

/// Never `read_one` or `read`: they panic in a browser, and leave the client damaged.
async fn read(client: &Client, handle: Handle) -> Result<Vec<f32>, String> {
    let bytes = client
        .read_async(vec![handle])
        .await
        .map_err(|error| format!("read back: {error:?}"))?;
    let values = f32::from_bytes(&bytes[0]).to_vec();
    if values.len() != LEN {
        return Err(format!("read back {} floats, not {LEN}", values.len()));
    }
    Ok(values)
}
