//! LoRA adapters merged into base weights, region by region.
//!
//! A region of a merged weight is `W + scale * B A` of that region alone: the rows of `B` and the
//! columns of `A` that it needs, multiplied in `f32` in one fixed order, and rounded once to the
//! type of `W`. So the bits do not depend on the regions that are asked for.
//!
//! ```
//! use anymesh_checkpoint::{lora::{Config, Merged}, Memory, Source, TensorInfo};
//! use anymesh_core::DType;
//!
//! let matrix = |shape: [usize; 2], values: &[f32]| {
//!     let info = TensorInfo { dtype: DType::F32, shape: shape.to_vec() };
//!     (info, values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
//! };
//! let (mut base, mut adapter) = (Memory::default(), Memory::default());
//! let (info, bytes) = matrix([2, 2], &[1., 2., 3., 4.]);
//! base.insert("q.weight", info, bytes)?;
//! let (info, bytes) = matrix([1, 2], &[1., 10.]);
//! adapter.insert("base_model.model.q.lora_A.weight", info, bytes)?;
//! let (info, bytes) = matrix([2, 1], &[1., 2.]);
//! adapter.insert("base_model.model.q.lora_B.weight", info, bytes)?;
//!
//! let config = Config {
//!     r: 1,
//!     alpha: 0.5,
//!     use_rslora: false,
//!     fan_in_fan_out: false,
//!     rank_pattern: [].into(),
//!     alpha_pattern: [].into(),
//! };
//! let merged = Merged::new(&base, &adapter, &config)?;
//! let (_, expected) = matrix([2, 2], &[1.5, 7., 4., 14.]);
//! assert_eq!(merged.read_all("q.weight")?, expected);
//! # Ok::<(), anymesh_checkpoint::Error>(())
//! ```

mod config;
mod write;

use crate::element::{cast, floats, store};
use crate::source::check_region;
use crate::{Error, Result, Source, TensorInfo, safetensors};
use anymesh_core::{DType, Region};
use std::collections::BTreeMap;
use std::path::Path;

pub use config::Config;
pub use write::{PREFIX, write};

/// The file of an adapter's tensors.
const TENSORS: &str = "adapter_model.safetensors";
/// The file of its settings.
const CONFIG: &str = "adapter_config.json";

/// Opens the folder of an adapter: `adapter_model.safetensors` and `adapter_config.json`.
pub fn open(folder: impl AsRef<Path>) -> Result<(safetensors::File, Config)> {
    let folder = folder.as_ref();
    Ok((
        safetensors::File::open(folder.join(TENSORS))?,
        Config::open(folder.join(CONFIG))?,
    ))
}

/// What an adapter does to one tensor of the base.
#[derive(Clone, Debug)]
enum Change {
    /// Adds a scaled product; `transposed` where the base holds `[inputs, outputs]`.
    Add {
        a: String,
        b: String,
        rank: usize,
        scale: f32,
        transposed: bool,
    },
    /// Puts the adapter's own tensor in its place, such as a head or a bias that was trained whole.
    Replace(String),
}

/// The tensors of a base with an adapter merged into them.
#[derive(Clone)]
pub struct Merged<'s> {
    base: &'s dyn Source,
    adapter: &'s dyn Source,
    changes: BTreeMap<String, Change>,
}

impl std::fmt::Debug for Merged<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Merged")
            .field("changes", &self.changes)
            .finish_non_exhaustive()
    }
}

/// The two factors of a module, as the adapter names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Factors {
    /// That which meets the inputs, `[rank, inputs]`.
    pub a: String,
    /// That which gives the outputs, `[outputs, rank]`.
    pub b: String,
    /// Whether the module is an embedding, whose weight has the inputs first.
    pub embedding: bool,
}

/// What an adapter has, by what it is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Factors, by the name of the module.
    pub factors: BTreeMap<String, Factors>,
    /// Tensors that stand in the place of the base's, by the name of that.
    pub whole: BTreeMap<String, String>,
}

impl Parts {
    /// Reads the names of an adapter's tensors, as PEFT writes them.
    pub fn of(adapter: &dyn Source) -> Result<Self> {
        if let Some((name, dtype)) = adapter.foreign().into_iter().next() {
            return Err(wrong(
                name,
                format!("it has elements of type {dtype}, which cannot be merged"),
            ));
        }
        let mut parts = Self::default();
        let mut first: BTreeMap<String, (String, bool)> = BTreeMap::new();
        let mut second: BTreeMap<String, String> = BTreeMap::new();
        for name in adapter.tensors().keys() {
            match role(name)? {
                Role::A(module, embedding) => {
                    first.insert(module, (name.clone(), embedding));
                }
                Role::B(module) => {
                    second.insert(module, name.clone());
                }
                Role::Whole(target) => {
                    parts.whole.insert(target, name.clone());
                }
            }
        }
        for (module, (a, embedding)) in first {
            let b = second.remove(&module).ok_or_else(|| half(&module))?;
            parts.factors.insert(module, Factors { a, b, embedding });
        }
        match second.keys().next() {
            Some(module) => Err(half(module)),
            None => Ok(parts),
        }
    }
}

fn half(module: &str) -> Error {
    wrong(module, "it has only one of its two factors")
}

impl<'s> Merged<'s> {
    /// Holds an adapter against its base. Every tensor of the adapter must have its place there.
    pub fn new(base: &'s dyn Source, adapter: &'s dyn Source, config: &Config) -> Result<Self> {
        let mut changes = BTreeMap::new();
        let parts = Parts::of(adapter)?;
        for (target, name) in parts.whole {
            let (new, old) = (adapter.info(&name)?, base.info(&target)?);
            if new.shape != old.shape
                || (new.dtype != old.dtype && !(new.dtype.is_float() && old.dtype.is_float()))
            {
                return Err(wrong(name, format!("it is {new}, but '{target}' is {old}")));
            }
            changes.insert(target, Change::Replace(name));
        }
        for (module, Factors { a, b, embedding }) in parts.factors {
            let target = format!("{module}.weight");
            let transposed = config.fan_in_fan_out || embedding;
            let rank = config.rank(&module);
            fits(
                base.info(&target)?,
                adapter.info(&a)?,
                adapter.info(&b)?,
                rank,
                transposed,
            )
            .map_err(|detail| wrong(&module, detail))?;
            changes.insert(
                target,
                Change::Add {
                    a,
                    b,
                    rank,
                    scale: config.scale(&module) as f32,
                    transposed,
                },
            );
        }
        Ok(Self {
            base,
            adapter,
            changes,
        })
    }

    /// The names of the tensors that the adapter changes.
    pub fn changed(&self) -> impl Iterator<Item = &str> {
        self.changes.keys().map(String::as_str)
    }

    /// A region of a matrix of the adapter, in `f32`.
    fn factor(&self, name: &str, start: [usize; 2], shape: [usize; 2]) -> Result<Vec<f32>> {
        let dtype = self.adapter.info(name)?.dtype;
        let mut bytes = vec![0; shape[0] * shape[1] * dtype.size()];
        self.adapter.read(
            name,
            &Region {
                start: start[..].into(),
                shape: shape[..].into(),
            },
            &mut bytes,
        )?;
        Ok(floats(&bytes, dtype))
    }
}

impl Source for Merged<'_> {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.base.tensors()
    }

    fn foreign(&self) -> Vec<(String, String)> {
        self.base.foreign()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.base.info(name)
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.base.info(name)?;
        let Some(change) = self.changes.get(name) else {
            return self.base.read(name, region, out);
        };
        check_region(name, info, region, out)?;
        let size = info.dtype.size();
        match change {
            Change::Replace(new) => {
                let dtype = self.adapter.info(new)?.dtype;
                if dtype == info.dtype {
                    return self.adapter.read(new, region, out);
                }
                let mut bytes = vec![0; region.numel() * dtype.size()];
                self.adapter.read(new, region, &mut bytes)?;
                out.copy_from_slice(&cast(&bytes, dtype, info.dtype));
            }
            Change::Add {
                a,
                b,
                rank,
                scale,
                transposed,
            } => {
                self.base.read(name, region, out)?;
                let (&[r0, c0], &[rows, columns]) = (&region.start[..], &region.shape[..]) else {
                    return Err(wrong(a, format!("the base's '{name}' is not a matrix")));
                };
                if rows == 0 || columns == 0 {
                    return Ok(());
                }
                // `left` is [rows, rank], `right` is [rank, columns].
                let (left, right) = if *transposed {
                    let (a, b) = (
                        self.factor(a, [0, r0], [*rank, rows])?,
                        self.factor(b, [c0, 0], [columns, *rank])?,
                    );
                    (transpose(&a, *rank, rows), transpose(&b, columns, *rank))
                } else {
                    (
                        self.factor(b, [r0, 0], [rows, *rank])?,
                        self.factor(a, [0, c0], [*rank, columns])?,
                    )
                };
                let mut sums = vec![0f32; columns];
                for (row, weights) in left
                    .chunks_exact(*rank)
                    .zip(out.chunks_exact_mut(columns * size))
                {
                    sums.fill(0.0);
                    for (x, line) in row.iter().zip(right.chunks_exact(columns)) {
                        sums.iter_mut().zip(line).for_each(|(sum, y)| *sum += x * y);
                    }
                    add(info.dtype, weights, &sums, *scale);
                }
            }
        }
        Ok(())
    }
}

/// A tensor or a module of an adapter that cannot be merged.
fn wrong(tensor: impl Into<String>, detail: impl Into<String>) -> Error {
    Error::Adapter {
        tensor: tensor.into(),
        detail: detail.into(),
    }
}

/// What a tensor of an adapter is for.
enum Role {
    /// The factor that meets the inputs, of a module; whether of an embedding.
    A(String, bool),
    /// The factor that gives the outputs.
    B(String),
    /// A tensor of the base, whole.
    Whole(String),
}

/// Reads a name as PEFT writes it, with or without the name of the default adapter in it.
fn role(name: &str) -> Result<Role> {
    let short = name.strip_prefix("base_model.model.").unwrap_or(name);
    let module = |end: &str| short.strip_suffix(end).map(str::to_string);
    let linear = |factor: &str| {
        module(&format!(".lora_{factor}.weight"))
            .or_else(|| module(&format!(".lora_{factor}.default.weight")))
    };
    let embedding = |factor: &str| {
        module(&format!(".lora_embedding_{factor}"))
            .or_else(|| module(&format!(".lora_embedding_{factor}.default")))
    };
    if let Some(module) = linear("A") {
        return Ok(Role::A(module, false));
    }
    if let Some(module) = embedding("A") {
        return Ok(Role::A(module, true));
    }
    if let Some(module) = linear("B").or_else(|| embedding("B")) {
        return Ok(Role::B(module));
    }
    if short.contains(".lora_") {
        return Err(wrong(
            name,
            "it is a part of a LoRA adapter that cannot be merged; only factors A and B can",
        ));
    }
    let target = short
        .replace(".modules_to_save.default.", ".")
        .replace(".modules_to_save.", ".")
        .replace(".base_layer.", ".");
    Ok(Role::Whole(target))
}

/// Whether two factors have the shapes that a base weight asks for.
fn fits(
    base: &TensorInfo,
    a: &TensorInfo,
    b: &TensorInfo,
    rank: usize,
    transposed: bool,
) -> std::result::Result<(), String> {
    if ![base, a, b].iter().all(|info| info.dtype.is_float()) {
        return Err(format!(
            "{} += {} x {}: all three must be floats",
            base.dtype, b.dtype, a.dtype
        ));
    }
    let &[first, second] = base.shape.as_slice() else {
        return Err(format!(
            "the base weight has shape {:?}; only matrices can be merged",
            base.shape
        ));
    };
    let (inputs, outputs) = if transposed {
        (first, second)
    } else {
        (second, first)
    };
    if a.shape != [rank, inputs] || b.shape != [outputs, rank] {
        return Err(format!(
            "the factors have shapes {:?} and {:?}, but rank {rank} and a base of {:?} ask for {:?} and {:?}",
            a.shape,
            b.shape,
            base.shape,
            [rank, inputs],
            [outputs, rank]
        ));
    }
    Ok(())
}

fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns)
        .flat_map(|j| (0..rows).map(move |i| values[i * columns + j]))
        .collect()
}

/// Adds scaled sums to weights, each rounded once.
fn add(dtype: DType, weights: &mut [u8], sums: &[f32], scale: f32) {
    if dtype == DType::F64 {
        for (target, sum) in weights.as_chunks_mut::<8>().0.iter_mut().zip(sums) {
            *target = (f64::from_le_bytes(*target) + f64::from(scale * sum)).to_le_bytes();
        }
        return;
    }
    let old = floats(weights, dtype);
    for ((target, w), sum) in weights.chunks_exact_mut(dtype.size()).zip(old).zip(sums) {
        store(w + scale * sum, dtype, target);
    }
}
