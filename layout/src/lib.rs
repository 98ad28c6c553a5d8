//! How to lay a model out on a mesh: which axes, where parameters are cut, whether the residual stream
//! is, what is computed again.
//!
//! A [`Search`] prices every way by a closed form under a [cost model](anymesh_core::cost), rejects
//! what does not fit into memory and ranks the rest by time. [`Search::verify`] then runs the model
//! itself on a mesh without values and holds the ledger against the closed form. The result is a
//! table for a person, and a [`Layout`]: text that the model takes.
//!
//! ```
//! use anymesh_core::cost::CostModel;
//! use anymesh_layout::{Llama, Search};
//! // One layer of a 70B model on one node, one sequence of 4096 tokens.
//! let config = r#"{"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
//!     "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 128256}"#;
//! let model = Llama { vocabulary: 0, ..Llama::from_config(config, 4096)? };
//! let cost = CostModel::preset("h100")?;
//! let search = Search { model: &model, cost: &cost, ranks: 8, sequences: 1, optimizer: 12.0 };
//! let report = search.run()?;
//! let best = report.best().expect("a layer fits");
//! assert_eq!(best.layout.to_string(), "\
//! mesh tp=8
//! microbatches 1
//! recompute no
//! stream [_, @tp, _]
//! model.layers.*.self_attn.q_proj.weight = [@tp, _]
//! model.layers.*.self_attn.k_proj.weight = [@tp, _]
//! model.layers.*.self_attn.v_proj.weight = [@tp, _]
//! model.layers.*.self_attn.o_proj.weight = [_, @tp]
//! model.layers.*.mlp.gate_proj.weight = [@tp, _]
//! model.layers.*.mlp.up_proj.weight = [@tp, _]
//! model.layers.*.mlp.down_proj.weight = [_, @tp]
//! ");
//! # Ok::<(), anymesh_core::Error>(())
//! ```

#![forbid(unsafe_code)]

mod llama;
mod model;
mod price;
mod report;
mod search;
mod text;
mod verify;

pub use llama::Llama;
pub use model::{Block, Matrix, Middle, Model};
pub use price::{Price, Received};
pub use report::Report;
pub use search::{Candidate, Search, state_bytes};
pub use text::{Layout, pattern_of};
pub use verify::Check;
