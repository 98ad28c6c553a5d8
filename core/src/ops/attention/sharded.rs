//! Attention on a mesh: each rank has some heads, texts or queries, and all keys that they see.

use super::{
    Attention, AttentionOptions, BACKWARD, FORWARD, Sight, Sizes, attention_backward,
    heads::KeyHeads, optional, with_sight,
};
use crate::{
    Result, Tensor,
    ops::PadMode,
    spmd::{Call, Local, parts_of},
};
use smallvec::smallvec;

impl Sizes {
    /// The options with the mask in the shape of the scores.
    #[track_caller]
    fn whole_mask(&self, options: &AttentionOptions) -> Result<AttentionOptions> {
        let whole = |mask: &Tensor| mask.expand([self.batch, self.heads, self.s, self.t]);
        Ok(AttentionOptions {
            mask: options.mask.as_ref().map(whole).transpose()?,
            ..options.clone()
        })
    }

    /// How many keys the queries of a rank can see, and the options for its part of the problem:
    /// causal queries that end before the last one are the last ones of fewer keys.
    fn part(
        &self,
        l: &Local<'_>,
        options: &AttentionOptions,
        sight: &[Tensor],
    ) -> Result<(usize, AttentionOptions)> {
        let seen = match l.part('s') {
            Some((range, s)) if options.causal => (range.end + self.t).saturating_sub(s),
            _ => self.t,
        };
        let (mask, documents) = Sight::of(options).split(sight);
        let mask = mask.map(|mask| mask.narrow(3, 0, seen)).transpose()?;
        let documents = documents
            .map(|documents| Sight::first_keys(documents, seen))
            .transpose()?;
        Ok((
            seen,
            AttentionOptions {
                scale: Some(self.scale),
                causal: options.causal,
                mask,
                documents,
            },
        ))
    }

    /// Which rule holds: the second one where query heads are cut finer than there are key heads,
    /// and these do not lie apart on the ranks that read them.
    pub(super) fn variant(&self, q: &Tensor, k: &Tensor) -> usize {
        let parts = parts_of(k, 1);
        let finer = !self.key_heads.is_multiple_of(parts_of(q, 1));
        usize::from(finer && (parts == 1 || parts > self.key_heads))
    }

    /// The key heads that the query heads of a rank read.
    fn heads_of(&self, l: &Local<'_>) -> KeyHeads {
        KeyHeads {
            all: l[1].dims()[1],
            group: self.group(),
            queries: l.part('q').map(|(range, _)| range),
        }
    }

    #[track_caller]
    pub(super) fn sharded(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttentionOptions,
    ) -> Result<Attention> {
        let options = &self.whole_mask(options)?;
        let local = |l: &Local<'_>| {
            let (seen, options) = self.part(l, options, &l.inputs[3..])?;
            let heads = self.heads_of(l);
            let Attention { out, lse } = l[0].attention(
                &heads.of(&l[1].narrow(2, 0, seen)?)?,
                &heads.of(&l[2].narrow(2, 0, seen)?)?,
                &options,
            )?;
            Ok(smallvec![out, lse])
        };
        let mut out = Call::of(&FORWARD, &with_sight(&[q, k, v], options))
            .variant(self.variant(q, k))
            .optional(3, &optional(options))
            .run(local)?;
        Ok(Attention {
            lse: out.remove(1),
            out: out.remove(0),
        })
    }

    #[track_caller]
    pub(super) fn sharded_backward(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        forward: &Attention,
        grad: &Tensor,
        options: &AttentionOptions,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let options = &self.whole_mask(options)?;
        let tensors = with_sight(&[q, k, v, &forward.out, &forward.lse, grad], options);
        let local = |l: &Local<'_>| {
            let (seen, options) = self.part(l, options, &l.inputs[6..])?;
            let heads = self.heads_of(l);
            let forward = Attention {
                out: l[3].clone(),
                lse: l[4].clone(),
            };
            let (dq, dk, dv) = attention_backward(
                &l[0],
                &heads.of(&l[1].narrow(2, 0, seen)?)?,
                &heads.of(&l[2].narrow(2, 0, seen)?)?,
                &forward,
                &l[5],
                &options,
            )?;
            // Keys that no query of this rank sees have no gradient from it.
            let unseen = |x: Tensor| match self.t - seen {
                0 => Ok(x),
                more => x.pad(
                    &[(0, 0), (0, 0), (0, more), (0, 0)],
                    PadMode::Constant(0.0.into()),
                ),
            };
            Ok(smallvec![
                dq,
                unseen(heads.back(&dk)?)?,
                unseen(heads.back(&dv)?)?
            ])
        };
        let mut out = Call::of(&BACKWARD, &tensors)
            .variant(self.variant(q, k))
            .optional(6, &optional(options))
            .run(local)?;
        Ok((out.remove(0), out.remove(0), out.remove(0)))
    }
}
