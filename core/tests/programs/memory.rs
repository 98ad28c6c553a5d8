//! What one rank holds, by the count of a device without memory: only that rank is run, and a
//! transport that answers for the others gives it what they would send.

use crate::{
    layers::{Layer, Layout, MEGATRON, Settle, zeros},
    table::{gpt, llama},
};
use anymesh_core::{
    DType, Device, Error, Mesh, Reduction, Result, Shape, Tensor, meta, split,
    transport::{Message, Part, Transport},
};
use std::sync::Arc;

/// Answers with tensors without values for ranks that do not run. Collectives hold their operands
/// and results and nothing else.
#[derive(Debug)]
struct Absent;

impl Absent {
    /// A result for each member that is here.
    fn each(
        mesh: &Mesh,
        parts: &[Part],
        shape: impl Fn(usize) -> Shape,
    ) -> Result<Vec<Option<Tensor>>> {
        let result = |(i, part): (usize, &Part)| {
            let at = mesh.position_of(part.rank);
            at.map(|at| Tensor::zeros(shape(i), part.dtype, mesh.device(at)))
                .transpose()
        };
        parts.iter().enumerate().map(result).collect()
    }
}

impl Transport for Absent {
    fn name(&self) -> &str {
        "absent"
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        let receive = |m: Message| {
            let Some(at) = mesh.position_of(m.to) else {
                return Ok(None);
            };
            match m.part.data {
                Some(data) => Ok(Some(data)),
                None => Tensor::zeros(m.part.shape, m.part.dtype, mesh.device(at)).map(Some),
            }
        };
        messages.into_iter().map(receive).collect()
    }

    fn barrier(&self, _: &Mesh, _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn all_reduce(&self, mesh: &Mesh, parts: &[Part], _: Reduction) -> Result<Vec<Option<Tensor>>> {
        Self::each(mesh, parts, |i| parts[i].shape.clone())
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>> {
        let all = parts.iter().map(|p| p.shape[dim]).sum();
        Self::each(mesh, parts, |i| parts[i].shape.with(dim, all))
    }

    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        _: Reduction,
        dim: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let own = |i: usize| split(parts[i].shape[dim], i, parts.len()).len();
        Self::each(mesh, parts, |i| parts[i].shape.with(dim, own(i)))
    }
}

/// A device of its own, so that nothing else is counted, and a mesh of which it runs one rank.
fn one_rank(axes: &str) -> Result<(Device, Mesh)> {
    let device = meta().decorated(|backend, kernel| backend.launch(kernel));
    let mesh = Mesh::new(axes, &device)?.addressing(&[0])?;
    Ok((device.clone(), mesh.with_transport(Arc::new(Absent))))
}

/// What a rank holds of one layer, in bytes beyond parameters, the input and the seed.
#[derive(Debug)]
struct Held {
    /// By one more layer between the passes: what it keeps and its result.
    kept: usize,
    /// At the peak of the forward and the backward pass of one layer alone.
    forward: usize,
    backward: usize,
}

fn held(
    layer: &dyn Layer,
    layout: &Layout,
    axes: &str,
    stream: &str,
    input: &[usize],
    explicit: bool,
) -> Result<Held> {
    let settle: Settle<'_> = &|x: Tensor| if explicit { x.reshard(stream) } else { Ok(x) };
    let run = |layers: usize| {
        let (device, mesh) = one_rank(axes)?;
        let p = zeros(layer, &mesh, layout, DType::BF16, |_| true)?;
        let x = Tensor::zeros(input, DType::BF16, (&mesh, stream))?.require_grad()?;
        let seed = Tensor::zeros(input, DType::BF16, (&mesh, stream))?;
        let before = device.memory().in_use;
        device.reset_peak();
        let forward = |x: Tensor, _| layer.forward(&p, &x, settle);
        let y = (0..layers).try_fold(x.clone(), forward)?;
        let kept = device.memory().in_use - before;
        let forward = device.memory().peak - before;
        device.reset_peak();
        let grads = y.backward_with(&seed)?;
        grads.partial(&x)?;
        let backward = device.memory().peak - before;
        Ok::<_, Error>([kept, forward, backward].map(|n| n as usize))
    };
    let ([one, forward, backward], [two, ..]) = (run(1)?, run(2)?);
    Ok(Held {
        kept: two - one,
        forward,
        backward,
    })
}

#[test]
fn look() -> Result<()> {
    let input: &[usize] = &[1, 4096, 8192];
    let unit = (4096 * 8192) as f64;
    for (name, layer) in [("gpt", &gpt() as &dyn Layer), ("llama", &llama())] {
        for stream in ["[_, _, _]", "[_, @tp, _]"] {
            for explicit in [true, false] {
                let h = held(layer, MEGATRON, "tp=8", stream, input, explicit)?;
                println!(
                    "{name} {stream} {explicit} {h:?} in sbh: {:.5} {:.5} {:.5}",
                    h.kept as f64 / unit,
                    h.forward as f64 / unit,
                    h.backward as f64 / unit
                );
            }
        }
    }
    Ok(())
}
