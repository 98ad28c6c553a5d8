//! One layer of h = 8192 with 4096 tokens of each dp rank in bf16 on dp=8, tp=8: bytes that a rank
//! receives for one forward and backward pass, against plans by hand.
//!
//! With `u = tokens * h * 2 * 7/8`, what a rank receives for one gather or one reduce-scatter of
//! the residual stream (fact 1):
//! - tensor parallel by hand: 4 all-reduces = 8u, two forward and two backward;
//! - with a cut stream: 4 gathers and 4 reduce-scatters = 8u where gathered inputs are kept for the
//!   backward pass, 10u where they are gathered again;
//! - matrices cut over dp: gathered for each pass, gradients reduce-scattered: 3 * 7/8 of what a
//!   rank would hold whole.

use crate::{
    layers::{
        FULLY_SHARDED, Gpt, Layer, Layout, Llama, LlamaEach, MEGATRON, MEGATRON_OVER_DP, Sizes,
    },
    measure::{Flow, Program, Traffic},
};
use anymesh_core::{
    DType, Mesh, Result, meta,
    spmd::{Keep, with_kept},
};

const LENGTH: usize = 4096;
const WIDTH: usize = 8192;
const DP: usize = 8;
const TP: usize = 8;
/// See the head of this file.
const U: u64 = (LENGTH * WIDTH * 2 / TP * (TP - 1)) as u64;
const WHOLE: &str = "[@dp, _, _]";
const CUT: &str = "[@dp, @tp, _]";

/// 64 heads of 128; the matrices have 12 h^2 elements with ffn = 4h (GPT), 13 h^2 with ffn = 3h
/// (llama).
pub(crate) fn sizes(ffn: usize) -> Sizes {
    Sizes {
        width: WIDTH,
        heads: 64,
        kv_heads: 64,
        d: 128,
        ffn,
    }
}

pub(crate) fn gpt() -> Gpt {
    Gpt(sizes(4 * WIDTH))
}

pub(crate) fn llama() -> Llama {
    Llama(sizes(3 * WIDTH))
}

/// A row of the table.
struct Row<'a> {
    name: &'a str,
    layer: &'a dyn Layer,
    layout: &'a Layout,
    mesh: &'a str,
    stream: &'a str,
    /// Bytes by hand along tp, for activations.
    tp: u64,
    /// Bytes by hand along dp, where parameters are cut over it: all that is sent for them. Without
    /// it, the gradients of parameters are not counted: their sum over dp is once for a step.
    dp: Option<u64>,
}

impl Row<'_> {
    /// One layer more in a stack that has some already: that of `layers` less that of one fewer.
    fn marginal(&self, flow: Flow, layers: usize, norms: bool) -> Result<u64> {
        let more = self.counted(&self.measure(flow, layers, norms)?);
        Ok(more - self.counted(&self.measure(flow, layers - 1, norms)?))
    }

    fn measure(&self, flow: Flow, layers: usize, norms: bool) -> Result<Traffic> {
        let mesh = Mesh::new(self.mesh, &meta())?;
        let program = Program {
            layer: self.layer,
            layout: self.layout,
            mesh: &mesh,
            stream: self.stream,
            flow,
            layers,
            norms,
        };
        program.measure(&[DP, LENGTH, WIDTH], DType::BF16)
    }

    /// The bytes of a run that the plan by hand counts.
    fn counted(&self, t: &Traffic) -> u64 {
        match self.dp {
            None => t.activations(),
            Some(_) => t.bytes(),
        }
    }

    /// No way to write the layer costs more than the plan by hand.
    #[track_caller]
    fn hold(&self) -> Result<()> {
        let hand = self.tp + self.dp.unwrap_or(0);
        let mut failed = false;
        let mut report = format!(
            "{} on {}, stream {}: by hand {hand}\n",
            self.name, self.mesh, self.stream
        );
        let mut add = |what: &str, bytes: u64, bound: u64| {
            let (units, ratio) = (bytes as f64 / U as f64, bytes as f64 / hand as f64);
            report += &format!("  {what:<48} {bytes:>14}  {units:>6.2} u  {ratio:.3}\n");
            failed |= bytes > bound;
        };
        // Where the stream or its gradient is cut between additions, the gradients of the norms are
        // partial along tp. Megatron all-reduces them too.
        let vectors = self.layer.shapes().into_iter();
        let vectors =
            vectors.filter(|(name, _)| name.starts_with("norm") || name.starts_with("shift"));
        let vectors: usize = vectors.map(|(_, shape)| shape[0]).sum();
        let trained = match self.dp {
            Some(_) if self.tp > 0 => hand + (2 * vectors * 2 / TP * (TP - 1)) as u64,
            _ => hand,
        };
        let each = self.measure(Flow::EachAdd, 1, true)?;
        let end = self.measure(Flow::AtEnd, 1, true)?;
        let more = |flow, norms| self.marginal(flow, 3, norms);
        add(
            "resharded after each addition",
            self.counted(&each),
            trained,
        );
        add("resharded at the end", self.counted(&end), trained);
        let text = "one more, resharded after each addition";
        add(text, more(Flow::EachAdd, true)?, trained);
        add(
            "one more, never resharded",
            more(Flow::Never, true)?,
            trained,
        );
        let text = "one more, never resharded, norms not trained";
        add(text, more(Flow::Never, false)?, hand);
        println!("{report}");
        let (each, end) = (each.explain(), end.explain());
        assert!(
            !failed,
            "{report} after each addition:\n{each} at the end:\n{end}"
        );
        Ok(())
    }
}

/// Along dp: each matrix is gathered for both passes and its gradient reduce-scattered, the
/// gradients of vectors are all-reduced. `parts` is how many tp ranks share a matrix.
pub(crate) fn over_dp(layer: &dyn Layer, layout: &Layout, parts: usize) -> u64 {
    let vectors = layer
        .shapes()
        .into_iter()
        .filter(|(_, shape)| shape.len() == 1);
    let vectors: usize = vectors
        .map(|(name, shape)| {
            let cut = layout.iter().any(|(n, s)| *n == name && *s == "[@tp]");
            shape[0] / if cut { parts } else { 1 }
        })
        .sum();
    ((3 * layer.matrices() / parts + 2 * vectors) * 2 / DP * (DP - 1)) as u64
}

const MESH: &str = "dp=8, tp=8";

#[test]
fn gpt_with_a_whole_stream_costs_four_all_reduces() -> Result<()> {
    assert_eq!(8 * U, 469_762_048);
    let row = Row {
        name: "GPT",
        layer: &gpt(),
        layout: MEGATRON,
        mesh: MESH,
        stream: WHOLE,
        tp: 8 * U,
        dp: None,
    };
    row.hold()
}

#[test]
fn gpt_with_a_cut_stream_costs_no_more_than_gathering_again() -> Result<()> {
    assert_eq!(10 * U, 587_202_560);
    let row = Row {
        name: "GPT",
        layer: &gpt(),
        layout: MEGATRON,
        mesh: MESH,
        stream: CUT,
        tp: 10 * U,
        dp: None,
    };
    row.hold()
}

/// Megatron's choice: inputs of products that were gathered are kept (8u), or gathered again (10u).
#[test]
fn what_is_kept_of_a_cut_stream_is_the_programs_choice() -> Result<()> {
    for (name, layer) in [("GPT", &gpt() as &dyn Layer), ("llama", &llama())] {
        let row = Row {
            name,
            layer,
            layout: MEGATRON,
            mesh: MESH,
            stream: CUT,
            tp: 0,
            dp: None,
        };
        let run = || row.marginal(Flow::Never, 3, true);
        assert_eq!(run()?, 8 * U, "{name}");
        let again = with_kept(Keep::Nothing, &["tp"], run)?;
        assert_eq!(again, 10 * U, "{name}");
    }
    Ok(())
}

#[test]
fn llama_with_a_whole_stream_costs_four_all_reduces() -> Result<()> {
    let row = Row {
        name: "llama",
        layer: &llama(),
        layout: MEGATRON,
        mesh: MESH,
        stream: WHOLE,
        tp: 8 * U,
        dp: None,
    };
    row.hold()
}

#[test]
fn llama_with_one_op_for_products_of_one_input_costs_the_same() -> Result<()> {
    for (stream, tp) in [(WHOLE, 8 * U), (CUT, 8 * U)] {
        let row = Row {
            name: "llama, linear_each",
            layer: &LlamaEach(sizes(3 * WIDTH)),
            layout: MEGATRON,
            mesh: MESH,
            stream,
            tp,
            dp: None,
        };
        row.hold()?;
    }
    Ok(())
}

#[test]
fn llama_with_a_cut_stream_costs_no_more_than_gathering_again() -> Result<()> {
    let row = Row {
        name: "llama",
        layer: &llama(),
        layout: MEGATRON,
        mesh: MESH,
        stream: CUT,
        tp: 10 * U,
        dp: None,
    };
    row.hold()
}

#[test]
fn llama_cut_over_dp_too_adds_two_gathers_and_a_scatter_of_its_matrices() -> Result<()> {
    let dp = over_dp(&llama(), MEGATRON_OVER_DP, TP);
    // The two norms are all-reduced, 57,344 bytes that tables in MB do not show.
    assert_eq!(8 * U + dp, 1_042_284_544 + 57_344);
    let row = Row {
        name: "llama over dp and tp",
        layer: &llama(),
        layout: MEGATRON_OVER_DP,
        mesh: MESH,
        stream: WHOLE,
        tp: 8 * U,
        dp: Some(dp),
    };
    row.hold()
}

#[test]
fn gpt_fully_sharded_costs_its_matrices_three_times() -> Result<()> {
    let dp = over_dp(&gpt(), FULLY_SHARDED, 1);
    assert_eq!(dp, 4_227_858_432 + 372_736);
    for mesh in [MESH, "dp=8"] {
        let row = Row {
            name: "GPT over dp",
            layer: &gpt(),
            layout: FULLY_SHARDED,
            mesh,
            stream: WHOLE,
            tp: 0,
            dp: Some(dp),
        };
        row.hold()?;
    }
    Ok(())
}

#[test]
fn llama_fully_sharded_costs_its_matrices_three_times() -> Result<()> {
    let dp = over_dp(&llama(), FULLY_SHARDED, 1);
    assert_eq!(dp, 4_580_179_968 + 57_344);
    for mesh in [MESH, "dp=8"] {
        let row = Row {
            name: "llama over dp",
            layer: &llama(),
            layout: FULLY_SHARDED,
            mesh,
            stream: WHOLE,
            tp: 0,
            dp: Some(dp),
        };
        row.hold()?;
    }
    Ok(())
}
