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
    layers::{FULLY_SHARDED, Gpt, Layer, Layout, Llama, MEGATRON, MEGATRON_OVER_DP, Sizes},
    measure::{Flow, Program, Traffic},
};
use anymesh_core::{DType, Mesh, Result, meta};

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
fn sizes(ffn: usize) -> Sizes {
    Sizes {
        width: WIDTH,
        heads: 64,
        kv_heads: 64,
        d: 128,
        ffn,
    }
}

fn gpt() -> Gpt {
    Gpt(sizes(4 * WIDTH))
}

fn llama() -> Llama {
    Llama(sizes(3 * WIDTH))
}

/// A row of the table.
struct Row<'a> {
    name: &'a str,
    layer: &'a dyn Layer,
    layout: &'a Layout,
    stream: &'a str,
    /// Bytes by hand that activations need along tp.
    tp: u64,
    /// Bytes by hand that matrices cut over dp need along dp.
    dp: u64,
}

impl Row<'_> {
    fn measure(&self, flow: Flow, layers: usize) -> Result<Traffic> {
        let mesh = Mesh::new(&format!("dp={DP}, tp={TP}"), &meta())?;
        let program = Program {
            layer: self.layer,
            layout: self.layout,
            mesh: &mesh,
            stream: self.stream,
            flow,
            layers,
        };
        program.measure([DP, LENGTH, WIDTH], DType::BF16)
    }

    /// The bytes of a run that the plan by hand counts: those of activations along tp, and those
    /// along dp of matrices that are cut over it.
    fn counted(&self, t: &Traffic) -> u64 {
        let tp = t.activations("tp");
        if self.dp == 0 { tp } else { tp + t.all("dp") }
    }

    #[track_caller]
    fn hold(&self) -> Result<()> {
        let hand = self.tp + self.dp;
        let mut worst = 0;
        let mut report = format!("{} {}: by hand {hand}\n", self.name, self.stream);
        let mut add = |what: &str, bytes: u64| {
            let ratio = bytes as f64 / hand as f64;
            report += &format!(
                "  {what:<34} {bytes:>14}  {:>6.2} u  {ratio:.3}\n",
                bytes as f64 / U as f64
            );
            worst = worst.max(bytes);
        };
        let each = self.measure(Flow::EachAdd, 1)?;
        add("resharded after each addition", self.counted(&each));
        add(
            "resharded at the end",
            self.counted(&self.measure(Flow::AtEnd, 1)?),
        );
        let (two, three) = (self.measure(Flow::Never, 2)?, self.measure(Flow::Never, 3)?);
        add(
            "one more layer, never resharded",
            self.counted(&three) - self.counted(&two),
        );
        let (two, three) = (
            self.measure(Flow::EachAdd, 2)?,
            self.measure(Flow::EachAdd, 3)?,
        );
        add(
            "one more layer, resharded",
            self.counted(&three) - self.counted(&two),
        );
        println!("{report}{}", each.explain());
        assert!(worst <= hand, "{report}");
        Ok(())
    }
}

#[test]
fn gpt_with_a_whole_stream_costs_four_all_reduces() -> Result<()> {
    assert_eq!(8 * U, 469_762_048);
    let row = Row {
        name: "GPT",
        layer: &gpt(),
        layout: MEGATRON,
        stream: WHOLE,
        tp: 8 * U,
        dp: 0,
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
        stream: CUT,
        tp: 10 * U,
        dp: 0,
    };
    row.hold()
}

#[test]
fn llama_with_a_whole_stream_costs_four_all_reduces() -> Result<()> {
    let row = Row {
        name: "llama",
        layer: &llama(),
        layout: MEGATRON,
        stream: WHOLE,
        tp: 8 * U,
        dp: 0,
    };
    row.hold()
}

#[test]
fn llama_with_a_cut_stream_costs_no_more_than_gathering_again() -> Result<()> {
    let row = Row {
        name: "llama",
        layer: &llama(),
        layout: MEGATRON,
        stream: CUT,
        tp: 10 * U,
        dp: 0,
    };
    row.hold()
}

#[test]
fn llama_cut_over_dp_too_adds_two_gathers_and_a_scatter_of_its_matrices() -> Result<()> {
    let dp = 3 * (llama().matrices() * 2 / TP / DP * (DP - 1)) as u64;
    assert_eq!(8 * U + dp, 1_042_284_544);
    let row = Row {
        name: "llama over dp and tp",
        layer: &llama(),
        layout: MEGATRON_OVER_DP,
        stream: WHOLE,
        tp: 8 * U,
        dp,
    };
    row.hold()
}

#[test]
fn gpt_fully_sharded_costs_its_matrices_three_times() -> Result<()> {
    let dp = 3 * (gpt().matrices() * 2 / DP * (DP - 1)) as u64;
    assert_eq!(dp, 4_227_858_432);
    let row = Row {
        name: "GPT over dp",
        layer: &gpt(),
        layout: FULLY_SHARDED,
        stream: WHOLE,
        tp: 0,
        dp,
    };
    row.hold()
}

#[test]
fn llama_fully_sharded_costs_its_matrices_three_times() -> Result<()> {
    let dp = 3 * (llama().matrices() * 2 / DP * (DP - 1)) as u64;
    assert_eq!(dp, 4_580_179_968);
    let row = Row {
        name: "llama over dp",
        layer: &llama(),
        layout: FULLY_SHARDED,
        stream: WHOLE,
        tp: 0,
        dp,
    };
    row.hold()
}
