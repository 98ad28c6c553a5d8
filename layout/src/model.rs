//! What the search needs to know of a model.

use crate::Layout;
use anymesh_core::{DType, Mesh, Result};

/// A model whose layout is looked for.
///
/// [`blocks`](Model::blocks) is what the closed form is made of: which matrices read the residual
/// stream, what happens in between, and which matrix writes it. How these matrices may be cut
/// follows from their shapes and from what a product does to a cut operand; nothing depends on
/// names. [`step`](Model::step) runs the model itself, on a device without values, and is what the
/// closed form is held against.
pub trait Model {
    /// The dtype of parameters and activations.
    fn dtype(&self) -> DType;

    /// Elements of the residual stream for each token.
    fn width(&self) -> usize;

    /// Tokens of a sequence, which are never on different data-parallel ranks.
    fn length(&self) -> usize;

    /// The blocks in the order in which they run; equal ones once, with their number.
    fn blocks(&self) -> Vec<Block>;

    /// One forward and backward pass over `sequences` on a mesh that has the axes of the layout,
    /// with every parameter's gradient brought to where the parameter lies.
    fn step(&self, mesh: &Mesh, layout: &Layout, sequences: usize) -> Result<()>;
}

/// A matrix that multiplies, `[outputs, inputs]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// The pattern of its name, layer numbers as `*`.
    pub name: String,
    /// The dimension that the product sums over.
    pub inputs: usize,
    /// The dimension of the result.
    pub outputs: usize,
    /// It is looked up by indices instead of multiplied, and stored `[inputs, outputs]`.
    pub lookup: bool,
}

impl Matrix {
    /// A linear layer's weight.
    pub fn new(name: &str, outputs: usize, inputs: usize) -> Self {
        Self {
            name: name.into(),
            inputs,
            outputs,
            lookup: false,
        }
    }

    /// Its elements.
    pub fn elements(&self) -> f64 {
        self.inputs as f64 * self.outputs as f64
    }
}

/// What happens between the matrices that read the stream and the one that writes it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Middle {
    /// Independent parts: key heads of attention, columns of a feed-forward layer.
    pub units: usize,
    /// Whether tokens see each other, so that the sequence must be whole.
    pub mixes_tokens: bool,
    /// Operations of products inside, for each token, forward. The backward pass takes 2.5 times as
    /// many, as attention does.
    pub products: f64,
    /// Elements for each token that the backward pass needs.
    pub kept: f64,
    /// Elements for each token that elementwise kernels read and write, forward and backward.
    pub touched: f64,
    /// Statistics for each token in f32 that ranks agree on where units are cut, forward.
    pub statistics: f64,
}

/// Part of a model that reads the residual stream and adds to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// For tables.
    pub name: String,
    /// How many such blocks there are, one in each layer.
    pub count: usize,
    /// Matrices that read the stream (or indices).
    pub reads: Vec<Matrix>,
    /// In between.
    pub middle: Middle,
    /// The matrix that writes the stream; none at the end of a model.
    pub writes: Option<Matrix>,
    /// Small parameters that every rank has whole: patterns and elements, such as those of norms.
    pub vectors: Vec<(String, usize)>,
    /// Elements of the stream that elementwise kernels read and write, as multiples of its size,
    /// forward and backward.
    pub touched: f64,
    /// Copies of the stream that the backward pass needs, beside what the matrices read.
    pub kept: f64,
}

impl Block {
    /// Elements of its parameters, all blocks of this kind together.
    pub fn parameters(&self) -> f64 {
        let matrices = self.reads.iter().chain(&self.writes).map(Matrix::elements);
        let vectors = self.vectors.iter().map(|(_, n)| *n as f64);
        self.count as f64 * matrices.chain(vectors).sum::<f64>()
    }
}
