//! What one rank holds, by the count of a device without memory, of which only that rank is run.

use crate::{
    layers::{Gpt, Layer, LlamaEach, MEGATRON, Settle, Sizes, zeros},
    table::{gpt, llama, sizes},
};
use anymesh_core::{
    DType, Device, Mesh, Result, Tensor, meta,
    spmd::{Keep, with_kept},
};

/// A device of its own, so that nothing else is counted, and a mesh of which it runs one rank.
fn one_rank(axes: &str) -> Result<(Device, Mesh)> {
    let device = meta().decorated(|backend, kernel| backend.launch(kernel));
    let mesh = Mesh::new(axes, &device)?.addressing(&[0])?;
    Ok((device, mesh))
}

/// What a rank holds of one layer, in bytes beyond parameters, the input and the gradient of the
/// result.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    /// By one more layer between the passes: what it keeps, and its result.
    kept: usize,
    /// At the peak of the forward and of the backward pass of one layer alone.
    forward: usize,
    backward: usize,
}

/// A layer on tp=8 with weights as Megatron cuts them.
#[derive(Clone, Copy)]
struct Case<'a> {
    layer: &'a dyn Layer,
    stream: &'a str,
    input: [usize; 3],
}

const TP: usize = 8;

impl Case<'_> {
    fn run(&self, layers: usize) -> Result<[usize; 3]> {
        let settle: Settle<'_> = &|x: Tensor| x.reshard(self.stream);
        let (device, mesh) = one_rank(&format!("tp={TP}"))?;
        let p = zeros(self.layer, &mesh, MEGATRON, DType::BF16, |_| true)?;
        let make = || Tensor::zeros(self.input, DType::BF16, (&mesh, self.stream));
        let (x, seed) = (make()?.require_grad()?, make()?);
        let before = device.memory().in_use;
        device.reset_peak();
        let forward = |x: Tensor, _| self.layer.forward(&p, &x, settle);
        let y = (0..layers).try_fold(x.clone(), forward)?;
        let kept = device.memory().in_use - before;
        let forward = device.memory().peak - before;
        device.reset_peak();
        let grads = y.backward_with(&seed)?;
        grads.partial(&x)?;
        let backward = device.memory().peak - before;
        Ok([kept, forward, backward].map(|n| n as usize))
    }

    fn measure(&self) -> Result<Held> {
        let ([one, forward, backward], [two, ..]) = (self.run(1)?, self.run(2)?);
        Ok(Held {
            kept: two - one,
            forward,
            backward,
        })
    }

    /// No more than by hand, and kept between the passes exactly as much.
    #[track_caller]
    fn hold(&self, hand: Held) -> Result<()> {
        let held = self.measure()?;
        let text = format!("{}: {held:?}, by hand {hand:?}", self.stream);
        println!("{text}");
        assert_eq!(held.kept, hand.kept, "{text}");
        assert!(held.forward <= hand.forward, "forward, {text}");
        assert!(held.backward <= hand.backward, "backward, {text}");
        Ok(())
    }
}

const WHOLE: &str = "[_, _, _]";
const CUT: &str = "[_, @tp, _]";
const INPUT: [usize; 3] = [1, 4096, 8192];
/// Elements of the stream; in bf16 it has twice as many bytes.
const E: usize = INPUT[0] * INPUT[1] * INPUT[2];
/// An f32 for each query of the heads of a rank, which attention keeps.
const LSE: usize = INPUT[0] * INPUT[1] * 64 / TP * 4;

/// Bytes of the gradient of a matrix on a rank.
fn matrix(rows: usize, columns: usize) -> usize {
    2 * rows * columns / TP
}

/// What a GPT layer of `sizes` keeps, by terms, in units of one byte for each element of the stream:
///
/// | | whole stream | cut stream | |
/// |---|---|---|---|
/// | inputs of the norms | 4 | 4/t | |
/// | inputs of the first products | 4 | 4, or 4/t if gathered again | |
/// | queries, keys, values | 6/t | 6/t | |
/// | result of attention | 2/t | 2/t | |
/// | input and result of gelu | 16/t | 16/t | |
///
/// Megatron has two masks of dropout besides (2, or 2/t).
#[test]
fn gpt_holds_what_it_should() -> Result<()> {
    let layer = gpt();
    let case = |stream| Case {
        layer: &layer,
        stream,
        input: INPUT,
    };
    let (down, up) = (matrix(8192, 4 * 8192), matrix(4 * 8192, 8192));
    // Of the biases of `down`, which is whole, and `up`.
    let biases = 2 * 8192 + 2 * 4 * 8192 / TP;
    // Forward: everything kept but the input, then the last product, its sum with the stream and
    // the reduced sum. Backward: while the gradients of `up` are made; the result of the layer is
    // still there, the input and result of gelu are not.
    let kept = 6 * E + 24 * E / TP + LSE;
    case(WHOLE).hold(Held {
        kept: kept + 2 * E,
        forward: kept + 6 * E,
        backward: kept - 16 * E / TP + 2 * E + 8 * E / TP + 2 * E + down + up + biases,
    })?;
    // Forward: while `down` runs: its product in f32, to which the bias is added before it is
    // rounded, and the result, beside everything kept. Without biases it would be the product, what
    // is left of it when it was scattered, and the sum. Backward as before; or while those of `down`
    // are made, with the gathered gradient.
    let kept = 4 * E + 26 * E / TP + LSE;
    let last = kept + 2 * E / TP + 2 * E + 8 * E / TP + down;
    let first = kept - 16 * E / TP + 2 * E / TP + 8 * E / TP + 2 * E + down + up;
    case(CUT).hold(Held {
        kept: kept + 2 * E / TP,
        forward: kept + 4 * E + 2 * E,
        backward: last.max(first) + biases,
    })
}

/// As GPT, with queries and keys turned, so that attention's result lies as they do and is copied
/// into rows (2/t), and three of 3h each between gate, up and down. The tables
/// of the turns are made by each layer.
#[test]
fn llama_holds_what_it_should() -> Result<()> {
    let layer = llama();
    let case = |stream| Case {
        layer: &layer,
        stream,
        input: INPUT,
    };
    let each = matrix(8192, 3 * 8192);
    let tables = 2 * INPUT[1] * 64 * 4;
    // Backward: while the gradients of `gate` are made; that of its input by way of `up` is there,
    // and what gate, up and their product were is not.
    let back = |kept: usize, result: usize| {
        kept - 18 * E / TP + result + 6 * E / TP + 2 * 2 * E + 3 * each
    };
    let kept = 6 * E + 28 * E / TP + LSE + tables;
    case(WHOLE).hold(Held {
        kept: kept + 2 * E,
        forward: kept + 6 * E,
        backward: back(kept, 2 * E),
    })?;
    let kept = 4 * E + 30 * E / TP + LSE + tables;
    case(CUT).hold(Held {
        kept: kept + 2 * E / TP,
        forward: kept + 2 * E + 4 * E / TP,
        backward: back(kept, 2 * E / TP),
    })
}

/// One op for gate and up holds what two do: the gradients of their input are added up. Only the
/// gradients of both results are there until its own are made, where two ops let one go before.
#[test]
fn llama_with_one_op_for_products_of_one_input_holds_what_it_should() -> Result<()> {
    let layer = LlamaEach(sizes(3 * 8192));
    let each = matrix(8192, 3 * 8192);
    let tables = 2 * INPUT[1] * 64 * 4;
    let back = |kept: usize, result: usize| {
        kept - 18 * E / TP + result + 2 * 6 * E / TP + 2 * 2 * E + 3 * each
    };
    let whole = 6 * E + 28 * E / TP + LSE + tables;
    let cut = 4 * E + 30 * E / TP + LSE + tables;
    for (stream, kept, x, last) in [
        (WHOLE, whole, 2 * E, 6 * E),
        (CUT, cut, 2 * E / TP, 2 * E + 4 * E / TP),
    ] {
        let case = Case {
            layer: &layer,
            stream,
            input: INPUT,
        };
        case.hold(Held {
            kept: kept + x,
            forward: kept + last,
            backward: back(kept, x),
        })?;
    }
    Ok(())
}

/// Published activation memory of the first pipeline stage of four models, in bytes of a rank, with
/// a cut stream and without the scores of attention: `34 s b h / t` for each layer, as many layers
/// as there are, and more where stages are interleaved. Ours is that and the f32 of attention,
/// without the two masks of dropout.
///
/// Without a cut stream the published terms are `10 + 24/t + 5 a s / (h t)`: we lack the masks (2)
/// and the scores (the last term).
#[test]
fn activations_are_those_of_published_models() -> Result<()> {
    struct Model {
        heads: usize,
        width: usize,
        batch: usize,
        layers: usize,
        /// What interleaving multiplies with, as a fraction.
        more: [usize; 2],
        gib: f64,
    }
    let model = |heads, width, batch, layers, more, gib| Model {
        heads,
        width,
        batch,
        layers,
        more,
        gib,
    };
    for m in [
        model(64, 6144, 4, 48, [1, 1], 9.5625),
        model(96, 12_288, 1, 96, [8 * 3 + 7, 8 * 3], 12.3515625),
        model(128, 20_480, 1, 105, [35 * 3 + 34, 35 * 3], 23.076171875),
        model(160, 25_600, 1, 128, [1, 1], 26.5625),
    ] {
        let length = 2048;
        let layer = Gpt(Sizes {
            width: m.width,
            heads: m.heads,
            kv_heads: m.heads,
            d: m.width / m.heads,
            ffn: 4 * m.width,
        });
        let case = |stream| Case {
            layer: &layer,
            stream,
            input: [m.batch, length, m.width],
        };
        let stream = m.batch * length * m.width;
        let lse = 4 * m.batch * length * m.heads / TP;
        let again = || case(CUT).measure();
        let kept = with_kept(Keep::Nothing, &["tp"], again)?.kept;
        let masks = 2 * stream / TP;
        assert_eq!(kept, 34 * stream / TP - masks + lse);
        let stage = (kept - lse + masks) * m.layers * m.more[0] / m.more[1];
        assert_eq!(stage as f64, m.gib * (1u64 << 30) as f64);
        let kept = case(WHOLE).measure()?.kept;
        assert_eq!(kept, (10 - 2) * stream + 24 * stream / TP + lse);
    }
    Ok(())
}

/// Of the gradients of a fully sharded model each rank holds its part as soon as a layer is done,
/// not all of them whole until the end.
#[test]
fn gradients_of_cut_parameters_are_scattered_layer_by_layer() -> Result<()> {
    let peak = |layers: usize| -> Result<u64> {
        let device = meta().decorated(|backend, kernel| backend.launch(kernel));
        let mesh = Mesh::new("dp=8", &device)?;
        let weight = |_| {
            let w = Tensor::zeros([4096, 4096], DType::BF16, (&mesh, "[@dp, _]"))?;
            w.require_grad()
        };
        let weights = (0..layers).map(weight).collect::<Result<Vec<_>>>()?;
        let x = Tensor::zeros([8, 4096], DType::BF16, (&mesh, "[@dp, _]"))?;
        let y = weights.iter().try_fold(x, |x, w| x.linear(w, None))?;
        let loss = y.sum(&[], false)?;
        device.reset_peak();
        let grads = loss.backward()?;
        weights.iter().try_for_each(|w| grads.of(w).map(drop))?;
        Ok(device.memory().peak)
    };
    let whole = 4096 * 4096 * 2;
    // One layer more: the parameter's part and its gradient's, and an activation.
    let more = (peak(24)? - peak(12)?) / 12;
    assert!(more < whole / 8 * 3, "{more} of {whole}");
    Ok(())
}
