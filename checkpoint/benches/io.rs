//! Saving and loading 512 MiB, as JSON lines; `benches/peers/checkpoint.py` runs it beside the
//! peers.
//!
//! `cargo bench -p anymesh-checkpoint --bench io -- FOLDER`

use anymesh_checkpoint::{Background, Checkpoint, Contents, Error, Load, Saver, safetensors};
use anymesh_core::{DType, Mesh, Tensor, ops::Rng};
use serde_json::json;
use std::{collections::BTreeMap, path::PathBuf, time::Instant};

const TENSORS: usize = 8;
const ROWS: usize = 4096;
const COLUMNS: usize = 4096;

fn tell(what: &str, seconds: Vec<f64>) {
    let mut sorted = seconds;
    sorted.sort_by(f64::total_cmp);
    println!(
        "{}",
        json!({"what": what, "seconds": sorted[sorted.len() / 2]})
    );
}

fn timed<T>(f: impl FnOnce() -> Result<T, Error>) -> Result<(T, f64), Error> {
    let start = Instant::now();
    Ok((f()?, start.elapsed().as_secs_f64()))
}

fn main() -> Result<(), Error> {
    let root = std::env::args()
        .skip(1)
        .find(|a| !a.starts_with("--"))
        .map_or_else(std::env::temp_dir, PathBuf::from)
        .join("anymesh-bench-io");
    std::fs::remove_dir_all(&root).ok();
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("x=4", &device)?;
    let make = |i: usize| {
        Tensor::normal(
            [ROWS, COLUMNS],
            0.0,
            1.0,
            DType::F32,
            &device,
            Rng::new(i as u64),
        )
    };
    let whole: BTreeMap<String, Tensor> = (0..TENSORS)
        .map(|i| Ok((format!("w{i}"), make(i)?)))
        .collect::<Result<_, Error>>()?;
    let cut = |by: &str| {
        whole
            .iter()
            .map(|(n, t)| Ok((n.clone(), t.to_mesh(&mesh, by)?)))
            .collect::<Result<BTreeMap<_, _>, Error>>()
    };
    let (rows, columns) = (cut("[@x, _]")?, cut("[_, @x]")?);
    let (saved, other) = (Contents::new(0, rows.clone()), Contents::new(0, columns));
    let (mut saves, mut loads, mut reshards, mut ones) = (vec![], vec![], vec![], vec![]);
    for i in 0..5 {
        let name = format!("s{i}");
        let (path, seconds) =
            timed(|| Saver::default().save(&root, &name, &Contents::new(i, rows.clone())))?;
        saves.push(seconds);
        let checkpoint = Checkpoint::open(path)?;
        loads.push(timed(|| Load::default().replace(&checkpoint, &saved))?.1);
        reshards.push(timed(|| Load::default().replace(&checkpoint, &other))?.1);
        let file = root.join(format!("one-{i}.safetensors"));
        ones.push(
            timed(|| {
                safetensors::write_source(&file, &checkpoint, &BTreeMap::new(), safetensors::CHUNK)
            })?
            .1,
        );
        std::fs::remove_file(&file).ok();
        std::fs::remove_dir_all(root.join(&name)).ok();
    }
    tell("save 512 MiB of 4 ranks, synced", saves);
    tell("load as saved", loads);
    tell("load resharded to the other axis", reshards);
    tell("merge into one file, synced", ones);

    // A training loop of 200 ms steps that saves in the background: what its calls cost a step.
    let mut saver = Background::new(&root);
    let mut stalls = vec![];
    // 512 MiB in pieces of 8.
    for step in 0..64u64 {
        let start = Instant::now();
        if step == 0 {
            saver.begin(&format!("b{step}"), &Contents::new(step, rows.clone()))?;
        }
        saver.advance(8 << 20)?;
        stalls.push(start.elapsed().as_secs_f64());
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    saver.finish()?;
    stalls.sort_by(f64::total_cmp);
    println!(
        "{}",
        json!({"what": "stall of a step with 8 MiB copied, median", "seconds": stalls[32]})
    );
    println!(
        "{}",
        json!({"what": "stall of a step with 8 MiB copied, worst", "seconds": stalls[stalls.len() - 1]})
    );
    std::fs::remove_dir_all(&root).ok();
    Ok(())
}
