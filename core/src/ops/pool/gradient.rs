//! Gradients of pools: every window hands its own to the elements that it covers.

use super::{
    super::{
        PadMode,
        conv::{Job, name, run_conv},
    },
    Windows, on_mesh_of, table,
};
use crate::{Dims, Result, Shape, Tensor, backend::ScatterOp};

impl Windows {
    /// The shape of the input of which `g` is the gradient of the windows.
    fn input_shape(&self, g: &Tensor) -> Shape {
        g.dims()[..g.rank() - self.slides.len()]
            .iter()
            .copied()
            .chain(self.slides.iter().map(|s| s.size))
            .collect()
    }

    /// Hands each gradient to one element, given by its position among the pooled dimensions.
    pub(super) fn unpicked(&self, g: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let lead = g.rank() - self.slides.len();
        let shape = self.input_shape(g);
        let flat = |dims: &[usize]| {
            dims[..lead]
                .iter()
                .copied()
                .chain([dims[lead..].iter().product()])
                .collect::<Shape>()
        };
        let (g, positions) = (
            g.reshape(flat(g.dims()))?,
            positions.reshape(flat(positions.dims()))?,
        );
        Tensor::zeros(flat(shape.dims()), g.dtype(), &g)?
            .scatter(-1, &positions, &g, ScatterOp::Add)?
            .reshape(shape)
    }

    /// Hands every element of a window its share.
    pub(super) fn unaveraged(&self, g: &Tensor, count_include_pad: bool) -> Result<Tensor> {
        let wide = g.cast(g.dtype().kind().dtype())?;
        let shares = match self.counts("avg_pool", count_include_pad)? {
            None => wide.div(self.slides.iter().map(|s| s.kernel).product::<usize>() as f64)?,
            Some(counts) => wide.div(&on_mesh_of(
                table(&counts, self.out.clone(), wide.dtype(), g)?,
                g,
            )?)?,
        };
        self.unsummed(&shares)?.cast(g.dtype())
    }

    /// Adds each gradient to all elements of its window: a transposed convolution with ones.
    fn unsummed(&self, g: &Tensor) -> Result<Tensor> {
        let (n, shape) = (self.slides.len(), self.input_shape(g));
        if shape.numel() == 0 {
            return Tensor::zeros(shape, g.dtype(), g);
        }
        let (lead, out) = g.dims().split_at(g.rank() - n);
        let (channels, batch) = lead
            .split_last()
            .map_or((1, 1), |(last, rest)| (*last, rest.iter().product()));
        let planes = g.reshape(
            [batch, channels]
                .iter()
                .chain(out)
                .copied()
                .collect::<Shape>(),
        )?;
        let ones: Shape = [channels, 1]
            .into_iter()
            .chain(self.slides.iter().map(|s| s.kernel))
            .collect();
        let (stride, dilation): (Dims, Dims) =
            self.slides.iter().map(|s| (s.stride, s.dilation)).unzip();
        let none = Dims::from_elem(0, n);
        let job = Job {
            op: name(n, true),
            stride: &stride,
            padding: &none,
            dilation: &dilation,
            groups: channels,
            transposed: Some(&none),
        };
        let mut spread = run_conv(
            &planes,
            &Tensor::ones(ones, g.dtype(), g.mesh())?,
            None,
            &job,
        )?;
        // What fell on the edges goes, and what no window reached is added.
        let mut missing = vec![(0, 0); n + 2];
        for (d, slide) in self.slides.iter().enumerate() {
            let reached = slide.size.min(spread.dims()[d + 2] - slide.padding);
            spread = spread.narrow(d as i64 + 2, slide.padding, reached)?;
            missing[d + 2].1 = slide.size - reached;
        }
        spread
            .pad(&missing, PadMode::Constant(0.0.into()))?
            .reshape(shape)
    }
}
