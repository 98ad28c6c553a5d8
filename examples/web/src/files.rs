//! Checkpoints that the browser was given: read where they lie, part by part.

use crate::Answer;
use anymesh_checkpoint::{Checkpoint, ReadAt, Source, gguf, safetensors};
use anymesh_core::{Region, Tensor};
use anymesh_show::{Show, TensorView};
use serde_json::{Value, json};
use std::{collections::BTreeMap, io, sync::Arc};
use wasm_bindgen::prelude::*;

/// As many elements of a tensor are read to be shown.
const SHOWN: usize = 1 << 20;

#[wasm_bindgen]
extern "C" {
    /// A file of the browser, or a part of one.
    #[derive(Clone, Debug)]
    pub type Blob;
    #[wasm_bindgen(method, getter)]
    fn size(this: &Blob) -> f64;
    #[wasm_bindgen(method)]
    fn slice(this: &Blob, from: f64, to: f64) -> Blob;

    /// Reads at once, which browsers allow in workers.
    type FileReaderSync;
    #[wasm_bindgen(constructor)]
    fn new() -> FileReaderSync;
    #[wasm_bindgen(method, catch, js_name = readAsArrayBuffer)]
    fn read(this: &FileReaderSync, part: &Blob) -> Result<js_sys::ArrayBuffer, JsValue>;
}

#[derive(Debug)]
struct Given(Blob);

// SAFETY: WebAssembly is built without threads here, so there is no other thread to go to.
unsafe impl Send for Given {}
// SAFETY: as above.
unsafe impl Sync for Given {}

impl ReadAt for Given {
    fn length(&self) -> u64 {
        self.0.size() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let part = self
            .0
            .slice(offset as f64, (offset + out.len() as u64) as f64);
        let read = FileReaderSync::new()
            .read(&part)
            .map_err(|e| io::Error::other(format!("the browser says {e:?}")))?;
        let bytes = js_sys::Uint8Array::new(&read);
        if bytes.length() as usize != out.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.copy_to(out);
        Ok(())
    }
}

struct Opened {
    name: String,
    title: String,
    source: Box<dyn Source>,
    /// Tensors that are stored as something else than they are read: as what, and in how many bytes.
    packed: BTreeMap<String, (&'static str, usize)>,
}

/// The checkpoints among the files that were chosen.
#[wasm_bindgen]
pub struct Files(Vec<Opened>);

#[wasm_bindgen]
impl Files {
    /// Opens what can be opened among these files; `names` are their paths. A folder with a manifest
    /// is one checkpoint.
    pub fn open(names: Vec<String>, files: Vec<Blob>) -> Result<Files, String> {
        let given: BTreeMap<String, Arc<dyn ReadAt>> = names
            .into_iter()
            .zip(files)
            .map(|(name, file)| (name, Arc::new(Given(file)) as _))
            .collect();
        let (mut opened, mut wrong) = (vec![], vec![]);
        let mut folders = vec![];
        for (name, file) in given.iter().filter(|(name, _)| ends(name, "manifest.json")) {
            let folder = &name[..name.len() - "manifest.json".len()];
            match checkpoint(folder, file.as_ref(), &given) {
                Ok(one) => {
                    opened.push(one);
                    folders.push(folder);
                }
                Err(error) => wrong.push(error),
            }
        }
        for (name, file) in &given {
            let covered = folders.iter().any(|folder| name.starts_with(folder));
            let one = match name.rsplit('.').next() {
                _ if covered => continue,
                Some("safetensors") => tensors(name, file),
                Some("gguf") => llama(name, file),
                _ => continue,
            };
            match one {
                Ok(one) => opened.push(one),
                Err(error) => wrong.push(error),
            }
        }
        match (opened.is_empty(), wrong.is_empty()) {
            (false, _) => Ok(Files(opened)),
            (true, false) => Err(wrong.join("\n")),
            (true, true) => Err("none of these files is a checkpoint that the page reads: *.safetensors, *.gguf, or a folder with the manifest.json of anymesh".into()),
        }
    }

    /// What there is, as JSON.
    pub fn list(&self) -> String {
        let file = |(n, one): (usize, &Opened)| {
            let tensor = |(name, info): (&String, &anymesh_checkpoint::TensorInfo)| {
                let plain = (info.dtype.name(), info.bytes());
                let (dtype, bytes) = one.packed.get(name).copied().unwrap_or(plain);
                json!({ "file": n, "name": name, "dtype": dtype, "shape": info.shape, "bytes": bytes })
            };
            let foreign: Vec<Value> = one
                .source
                .foreign()
                .iter()
                .map(|(name, kind)| json!({ "name": name, "type": kind }))
                .collect();
            json!({ "name": one.name, "title": one.title, "foreign": foreign, "tensors": one.source.tensors().iter().map(tensor).collect::<Vec<_>>() })
        };
        Value::from_iter(self.0.iter().enumerate().map(file)).to_string()
    }

    /// A picture of a tensor's values, or of as many of them as are read, as JSON.
    pub async fn values(&self, file: usize, name: &str) -> Result<String, String> {
        let one = self.0.get(file).ok_or("there is no such file")?;
        let info = one.source.info(name).map_err(|e| e.to_string())?;
        let mut part = info.whole();
        // Leading dimensions are cut first: a matrix is shown whole as long as it can be.
        let mut read = part.shape.iter().product::<usize>();
        for d in 0..part.shape.len() {
            let row = read / part.shape[d].max(1);
            part.shape[d] = part.shape[d].min((SHOWN / row.max(1)).max(1));
            read = row * part.shape[d];
            if read <= SHOWN {
                break;
            }
        }
        let x = tensor(one.source.as_ref(), name, &part).map_err(|e| e.to_string())?;
        let title = match part.numel() == info.numel() {
            true => info.to_string(),
            false => format!("{info}: the first {:?} of it", part.shape.to_vec()),
        };
        let seen = TensorView::read(&x).await;
        Ok(json!({ "title": title, "picture": seen.svg(), "text": seen.text() }).to_string())
    }
}

fn ends(name: &str, with: &str) -> bool {
    name == with || name.ends_with(&format!("/{with}"))
}

/// A region of a tensor as a tensor on the host.
fn tensor(
    source: &dyn Source,
    name: &str,
    part: &Region,
) -> Result<Tensor, Box<dyn std::error::Error>> {
    let dtype = source.info(name)?.dtype;
    let mut bytes = vec![0; part.numel() * dtype.size()];
    source.read(name, part, &mut bytes)?;
    Ok(Tensor::from_bytes(
        &bytes,
        dtype,
        &part.shape[..],
        &anymesh_backend_cpu::device(),
    )?)
}

fn checkpoint(
    folder: &str,
    manifest: &dyn ReadAt,
    given: &BTreeMap<String, Arc<dyn ReadAt>>,
) -> Answer<Opened> {
    let mut text = vec![0; manifest.length() as usize];
    manifest.read_at(0, &mut text).map_err(|e| e.to_string())?;
    let file = |name: &str| given.get(&format!("{folder}{name}")).cloned();
    let source = Checkpoint::reading(folder, &text, file).map_err(|e| e.to_string())?;
    let manifest = source.manifest();
    let axes: Vec<String> = manifest
        .mesh
        .iter()
        .map(|(a, n)| format!("{a}={n}"))
        .collect();
    let title = format!(
        "checkpoint of anymesh, step {}, saved from mesh({})",
        manifest.step,
        axes.join(", ")
    );
    Ok(Opened {
        name: folder.trim_end_matches('/').into(),
        title,
        source: Box::new(source),
        packed: BTreeMap::new(),
    })
}

fn tensors(name: &str, file: &Arc<dyn ReadAt>) -> Answer<Opened> {
    let source = safetensors::File::reading(name, file.clone()).map_err(|e| e.to_string())?;
    let notes: Vec<String> = source
        .metadata()
        .iter()
        .map(|(k, v)| format!("{k}: {v}"))
        .collect();
    let title = ["safetensors".to_string()]
        .into_iter()
        .chain(notes)
        .collect::<Vec<_>>()
        .join(", ");
    Ok(Opened {
        name: name.into(),
        title,
        source: Box::new(source),
        packed: BTreeMap::new(),
    })
}

fn llama(name: &str, file: &Arc<dyn ReadAt>) -> Answer<Opened> {
    let source = gguf::File::reading(name, file.clone()).map_err(|e| e.to_string())?;
    let title = format!(
        "GGUF {}, {}",
        source.version(),
        source.architecture().unwrap_or("architecture not said")
    );
    let packed = source
        .tensors()
        .keys()
        .filter_map(|name| {
            Some((
                name.clone(),
                (source.tensor_type(name)?.name(), source.stored_bytes(name)?),
            ))
        })
        .collect();
    Ok(Opened {
        name: name.into(),
        title,
        source: Box::new(source),
        packed,
    })
}
