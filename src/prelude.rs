//! What a program needs, in one `use`.
//!
//! ```
//! use anymesh::prelude::*;
//! let mesh = Mesh::new("dp=2", &device("cpu")?)?;
//! let w = Tensor::normal([4, 4], 0.0, 0.1, DType::F32, &mesh, Rng::new(1))?.require_grad()?;
//! let x = Tensor::ones([8, 4], DType::F32, (&mesh, "[@dp, _]"))?;
//! let (loss, ledger) = Ledger::record(|| x.get(i![..4])?.matmul(&w)?.square()?.mean_all());
//! let gradients = loss?.backward()?;
//! assert_eq!(gradients.get(&w)?.map(|g| g.type_string()), Some("f32[4, 4]".into()));
//! assert!(ledger.bytes() > 0);
//! # Ok::<(), anymesh::Error>(())
//! ```

#[cfg(feature = "show")]
pub use crate::show::Show;
pub use crate::{
    DType, Device, Error, Index, IntoPlace, IntoSharding, Mesh, Place, Result, Scalar, Shape,
    Sharding, ShardingSpec, Tensor, TensorType, TypeSpec, bf16, f16,
    grad::{Gradients, no_grad},
    i, meta,
    ops::{
        AttentionOptions, CrossEntropyOptions, LossReduction, NormOptions, Order, Rng, RopeOptions,
        RopeStyle,
    },
    spmd::{Ledger, Policy, with_policy},
};
#[cfg(not(target_family = "wasm"))]
pub use crate::{cluster::Cluster, default_device, device};
