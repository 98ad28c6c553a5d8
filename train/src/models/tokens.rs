//! What models are given.

use crate::{
    Error, Result,
    nn::{Attend, Context},
    pipeline::on_mesh,
};
use anymesh_core::{Mesh, Tensor, ops::SequenceOrder};

/// Tokens, and where they stand.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[b, s]`, integers.
    pub ids: Tensor,
    /// The position of each token in its text, `[b, s]`. Without it they count up, from what
    /// caches have.
    pub positions: Option<Tensor>,
    /// Which keys a token sees, besides what causality says: a bool that broadcasts to
    /// `[b, heads, s, t]`.
    pub mask: Option<Tensor>,
    /// The document of each token, `[b, s]`, of which it sees the others.
    pub documents: Option<Tensor>,
    /// The order that all of these are in along the sequence.
    pub order: SequenceOrder,
}

impl Tokens {
    /// Texts of one length.
    pub fn new(ids: Tensor) -> Self {
        Self {
            ids,
            positions: None,
            mask: None,
            documents: None,
            order: SequenceOrder::Straight,
        }
    }

    /// Packed documents: a token sees those of its own document, whose positions begin at 0.
    /// `documents` and `positions` are `[b, s]`.
    #[track_caller]
    pub fn packed(ids: Tensor, documents: &Tensor, positions: Tensor) -> Result<Self> {
        if documents.dims() != ids.dims() {
            let detail = format!(
                "tokens {} need a document each, these are {}",
                ids.type_string(),
                documents.type_string()
            );
            return Err(Error::config("documents", detail));
        }
        Ok(Self {
            positions: Some(positions),
            documents: Some(documents.clone()),
            ..Self::new(ids)
        })
    }

    /// The same, said to be in this order along the sequence.
    pub fn in_order(self, order: SequenceOrder) -> Self {
        Self { order, ..self }
    }

    /// What causal attention of all layers has in common.
    pub(crate) fn attend(&self, context: Context) -> Attend {
        Attend {
            causal: true,
            mask: self.mask.clone(),
            documents: self.documents.clone(),
            order: self.order,
            context: context.attention,
            ..Attend::default()
        }
    }

    /// Texts as rows of a tensor, cut over `dp`, whose tokens are on every rank.
    pub fn of_rows(mesh: &Mesh, rows: &[Vec<u32>]) -> Result<Self> {
        let length = rows.first().map_or(0, Vec::len);
        if let Some(other) = rows.iter().find(|row| row.len() != length) {
            let detail = format!("texts of {length} and {} tokens", other.len());
            return Err(Error::config("tokens", detail));
        }
        let id = |at: &[usize]| rows[at[0]][at[1]] as i32;
        let place = (mesh, "[@dp?@ep?, _]");
        Ok(Self::new(Tensor::from_fn([rows.len(), length], place, id)?))
    }

    /// The same on another mesh, such as that of a stage.
    pub(crate) fn on(&self, mesh: &Mesh) -> Result<Self> {
        let moved = |x: &Option<Tensor>| x.as_ref().map(|x| on_mesh(x, mesh)).transpose();
        Ok(Self {
            ids: on_mesh(&self.ids, mesh)?,
            positions: moved(&self.positions)?,
            mask: moved(&self.mask)?,
            documents: moved(&self.documents)?,
            order: self.order,
        })
    }

    /// How many tokens a text has.
    pub(crate) fn length(&self) -> Result<usize> {
        match self.ids.dims() {
            [_, length] => Ok(*length),
            _ => Err(Error::config(
                "tokens",
                format!("ids are [b, s], got {}", self.ids.type_string()),
            )),
        }
    }
}

impl From<Tensor> for Tokens {
    fn from(ids: Tensor) -> Self {
        Self::new(ids)
    }
}
