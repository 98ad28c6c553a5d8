//! The layers with values: on a mesh they give what they give on one device, and so do their
//! gradients.

use crate::{
    layers::{
        FULLY_SHARDED, Gpt, Layer, Layout, Llama, LlamaEach, MEGATRON, MEGATRON_OVER_DP,
        Parameters, Sizes, UnevenHeads, sharding_of,
    },
    measure::Flow,
    others::{CONV, ConvBlock, CrossAttention, Experts},
    support::{device, mesh, near},
};
use anymesh_core::{Mesh, Result, Tensor};

/// Sums are taken in another order.
const BOUND: f64 = 1e-12;

/// Numbers that look random and are the same everywhere; norms are near one.
fn values(name: &str, shape: &[usize]) -> Result<Tensor> {
    let seed = name.bytes().fold(7, |h, b| (h * 31 + b as usize) % 10_007);
    let middle = if name.starts_with("norm") { 1.0 } else { 0.0 };
    Tensor::from_fn(shape, &device(), |at| {
        let hash = at.iter().fold(seed, |h, i| (h * 61 + i * 17 + 7) % 10_007);
        middle + (hash as f64 / 10_007.0 - 0.5) * 0.8
    })
}

/// The result, the gradient of the input and those of the parameters.
fn run(
    layer: &dyn Layer,
    input: &[usize],
    place: impl Fn(&str, Tensor) -> Result<Tensor>,
    settle: &dyn Fn(Tensor) -> Result<Tensor>,
) -> Result<Vec<(String, Tensor)>> {
    let make = |name: &str, shape: &[usize]| place(name, values(name, shape)?)?.require_grad();
    let parameters = layer.shapes().into_iter();
    let parameters = parameters.map(|(name, shape)| Ok((name.into(), make(name, &shape)?)));
    let p = Parameters(parameters.collect::<Result<_>>()?);
    let x = make("stream", input)?;
    let y = layer.forward(&p, &x, settle)?;
    let grads = y.backward_with(&place("stream", values("seed", input)?)?)?;
    let mut all = vec![
        ("result".into(), y.detach()),
        ("input".into(), grads.of(&x)?),
    ];
    for (name, w) in &p.0 {
        all.push((name.clone(), grads.of(w)?));
    }
    Ok(all)
}

/// Holds a layer in a layout on a mesh, for each way to treat the stream.
#[track_caller]
fn hold(
    layer: &dyn Layer,
    input: &[usize],
    mesh: &Mesh,
    layout: &Layout,
    stream: &str,
) -> Result<()> {
    let whole = run(layer, input, |_, x| Ok(x), &|x| Ok(x))?;
    let place = |name: &str, x: Tensor| {
        let sharding = match name {
            "stream" => stream.to_string(),
            _ => sharding_of(layout, name, x.rank()),
        };
        x.to_mesh(mesh, &sharding)
    };
    for flow in [Flow::EachAdd, Flow::Never] {
        let settle = |x: Tensor| match flow {
            Flow::EachAdd => x.reshard(stream),
            _ => Ok(x),
        };
        let cut = run(layer, input, place, &settle)?;
        for ((name, cut), (_, whole)) in cut.iter().zip(&whole) {
            near(
                cut,
                whole,
                BOUND,
                &format!("{name}, {stream} on {mesh}, {flow:?}"),
            );
        }
    }
    Ok(())
}

const MESHES: [&str; 3] = ["dp=2, tp=2", "dp=2, tp=4", "dp=1, tp=3"];
const SIZES: Sizes = Sizes {
    width: 12,
    heads: 4,
    kv_heads: 2,
    d: 4,
    ffn: 20,
};

/// On every mesh, in every layout and with every stream.
#[track_caller]
fn hold_all(
    layer: &dyn Layer,
    input: &[usize],
    layouts: &[&Layout],
    streams: &[&str],
) -> Result<()> {
    for axes in MESHES {
        for layout in layouts {
            for stream in streams {
                hold(layer, input, &mesh(axes), layout, stream)?;
            }
        }
    }
    Ok(())
}

const STREAMS: &[&str] = &["[@dp, _, _]", "[@dp, @tp, _]", "[_, _, @tp]"];
const LAYOUTS: &[&Layout] = &[MEGATRON, MEGATRON_OVER_DP, FULLY_SHARDED];

#[test]
fn gpt_is_the_same_on_meshes() -> Result<()> {
    hold_all(&Gpt(SIZES), &[2, 6, 12], LAYOUTS, STREAMS)
}

#[test]
fn llama_is_the_same_on_meshes() -> Result<()> {
    hold_all(&Llama(SIZES), &[2, 6, 12], LAYOUTS, STREAMS)
}

#[test]
fn llama_with_one_op_for_products_of_one_input_is_the_same_on_meshes() -> Result<()> {
    hold_all(&LlamaEach(SIZES), &[2, 6, 12], LAYOUTS, STREAMS)
}

#[test]
fn llama_with_few_and_uneven_heads_is_the_same_on_meshes() -> Result<()> {
    let one = Sizes {
        kv_heads: 1,
        ..SIZES
    };
    hold_all(&Llama(one), &[2, 6, 12], &[MEGATRON], STREAMS)?;
    let nine = Sizes {
        heads: 9,
        kv_heads: 9,
        d: 2,
        ..SIZES
    };
    hold_all(&Llama(nine), &[2, 6, 12], &[MEGATRON], STREAMS)
}

#[test]
fn llama_cut_by_two_axes_is_the_same_on_meshes() -> Result<()> {
    let two: &Layout = &[
        ("wq", "[@dp@tp, _]"),
        ("wk", "[@tp@dp, _]"),
        ("wv", "[@dp@tp, _]"),
        ("wo", "[_, @tp@dp]"),
        ("gate", "[@dp@tp, _]"),
        ("up", "[@dp@tp, _]"),
        ("down", "[_, @dp@tp]"),
    ];
    hold_all(
        &Llama(SIZES),
        &[2, 6, 12],
        &[two],
        &["[_, _, _]", "[_, @dp@tp, _]"],
    )
}

#[test]
fn heads_as_a_dimension_are_the_same_on_meshes() -> Result<()> {
    let nine = Sizes {
        heads: 9,
        d: 2,
        ..SIZES
    };
    let layout: &Layout = &[
        ("wq", "[@tp, _, _]"),
        ("wk", "[@tp, _, _]"),
        ("wv", "[@tp, _, _]"),
        ("wo", "[_, @tp, _]"),
    ];
    hold_all(&UnevenHeads(nine), &[2, 6, 12], &[layout], STREAMS)
}

#[test]
fn cross_attention_is_the_same_on_meshes() -> Result<()> {
    let layer = CrossAttention {
        width: 12,
        heads: 4,
        memory: [2, 5],
    };
    let cut: Vec<_> = MEGATRON
        .iter()
        .copied()
        .chain([("memory", "[@dp, @tp, _]")])
        .collect();
    hold_all(&layer, &[2, 6, 12], &[MEGATRON, &cut], STREAMS)
}

#[test]
fn experts_are_the_same_on_meshes() -> Result<()> {
    let layout: &Layout = &[("up", "[@dp, @tp, _]"), ("down", "[@dp, _, @tp]")];
    for turn in [Some(["[@dp, _, _, _]", "[_, @dp, _, _]"]), None] {
        let layer = Experts {
            width: 12,
            ffn: 8,
            experts: 4,
            capacity: 2,
            turn,
        };
        for axes in MESHES {
            for stream in ["[@dp, _, _]", "[@dp, @tp, _]"] {
                hold(&layer, &[2, 6, 12], &mesh(axes), layout, stream)?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_convolutional_block_is_the_same_on_meshes() -> Result<()> {
    let layer = ConvBlock {
        channels: 8,
        hidden: 6,
    };
    let streams = ["[@dp, _, _, _]", "[@dp, @tp, _, _]", "[@dp, _, @tp, _]"];
    hold_all(&layer, &[2, 8, 5, 4], &[CONV], &streams)
}
