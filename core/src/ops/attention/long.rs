//! Attention over a sequence that is cut over ranks: in a ring, or with the keys gathered.

use super::{Attention, AttentionOptions, Sizes, check::check_documents, order::SequenceOrder};
use crate::{
    Error, NoGradient, Result, Sharding, Tensor,
    grad::{Back, Pulled, is_recording, record},
    ops::{OpInfo, RuleForm},
    spmd::{Call, parts_of, plain, policy},
};
use smallvec::SmallVec;
use std::cell::RefCell;

/// Queries and keys of one place lie together: it is the ring that brings keys to other queries. The
/// last operand says of which document a position is.
pub(super) const RING: OpInfo = OpInfo::new(
    "ring_attention",
    RuleForm::Variants(&[
        "b(hg)sd, bhsd, bhse, bs -> b(hg)se, b(hg)s ; replicate d e",
        "bqsd, bhsd, bhse, bs -> bqse, bqs ; replicate h d e",
    ]),
)
.runs(&["attention"]);

/// Every rank has all keys. The last operands are the documents of queries and of keys.
pub(super) const GATHERED: OpInfo = OpInfo::new(
    "gathered_attention",
    RuleForm::Variants(&[
        "b(hg)sd, bhtd, bhte, bs, bt -> b(hg)se, b(hg)s ; replicate t d e",
        "bqsd, bhtd, bhte, bs, bt -> bqse, bqs ; replicate h t d e",
    ]),
)
.runs(&["attention"]);

/// How the positions of a sequence look at each other, where it may be cut over ranks.
#[derive(Clone, Debug, Default)]
pub struct SequenceOptions {
    /// Factor on the scores; `1 / sqrt(d)` where not given.
    pub scale: Option<f64>,
    /// Each position sees those up to its own.
    pub causal: bool,
    /// The order that the positions of queries, keys and values are in.
    pub order: SequenceOrder,
    /// The document of each position, `[b, s]` in the same order: positions see those of their own
    /// document.
    pub documents: Option<Tensor>,
}

impl SequenceOptions {
    /// Every position sees those up to its own.
    pub fn causal() -> Self {
        Self {
            causal: true,
            ..Self::default()
        }
    }
}

impl Tensor {
    /// [`attention`](Self::attention) of a sequence to itself, whose parts lie on different ranks:
    /// keys and values go from rank to rank in a ring, each rank puts what it sees of each part
    /// together, and none of them ever has all keys. In the backward pass the gradients of keys and
    /// values go around with them. What is sent meanwhile hides behind what is computed, where the
    /// transport works beside the program.
    ///
    /// A rank receives all but its own part of keys and values, and as much again with their
    /// gradients twice. Parts that no query of a rank sees cost it nothing but the passing on.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, ops::{AttentionOptions, Rng, SequenceOptions}};
    /// # let device = anymesh_backend_cpu::device();
    /// let mesh = Mesh::new("cp=4", &device)?;
    /// let x = Tensor::normal([1, 2, 8, 4], 0.0, 1.0, DType::F64, &device, Rng::new(1))?;
    /// let cut = x.to_mesh(&mesh, "[_, _, @cp, _]")?;
    /// let ring = cut.ring_attention(&cut, &cut, &SequenceOptions::causal())?;
    /// assert_eq!(ring.type_string(), "f64[1, 2, 8@cp, 4]");
    /// let one = x.attention(&x, &x, &AttentionOptions::causal())?.out;
    /// for (a, b) in ring.to_vec::<f64>()?.iter().zip(one.to_vec::<f64>()?) {
    ///     assert!((a - b).abs() < 1e-14);
    /// }
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn ring_attention(
        &self,
        k: &Tensor,
        v: &Tensor,
        options: &SequenceOptions,
    ) -> Result<Tensor> {
        Long::run(&RING, [self, k, v], options)
    }

    /// [`attention`](Self::attention) of a sequence to itself, whose queries stay where they are and
    /// whose keys and values are gathered, once for the forward and the backward pass
    /// ([unless told](crate::spmd::with_kept)). Each rank looks at what its queries see, also where
    /// they come in pairs of chunks.
    #[track_caller]
    pub fn gathered_attention(
        &self,
        k: &Tensor,
        v: &Tensor,
        options: &SequenceOptions,
    ) -> Result<Tensor> {
        Long::run(&GATHERED, [self, k, v], options)
    }
}

/// A checked problem.
#[derive(Clone, Copy)]
pub(super) struct Long {
    pub(super) info: &'static OpInfo,
    pub(super) sizes: Sizes,
    pub(super) causal: bool,
    pub(super) order: SequenceOrder,
}

/// The operands as ranks compute with them. Keys are cut as queries are, or whole.
pub(super) struct Brought {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    /// Of queries and of keys.
    pub(super) documents: Option<[Tensor; 2]>,
}

impl Long {
    #[track_caller]
    fn run(
        info: &'static OpInfo,
        [q, k, v]: [&Tensor; 3],
        options: &SequenceOptions,
    ) -> Result<Tensor> {
        let this = Self::check(info, [q, k, v], options)?;
        let documents = options.documents.as_ref();
        let inputs: SmallVec<[&Tensor; 4]> = [q, k, v].into_iter().chain(documents).collect();
        if plain(info.name, &inputs)? || parts_of(q, 2) == 1 {
            return this.whole([q, k, v], documents);
        }
        crate::observe::tell(
            || serde_json::json!({ "scale": options.scale, "causal": options.causal, "order": format!("{:?}", options.order) }),
        );
        let brought = RefCell::new(None);
        let run = || {
            let operands = this.bring([q, k, v], documents)?;
            let seen = this.forward(&operands)?;
            brought.replace(Some(operands));
            Ok(seen)
        };
        let mut out = record(info.name, &inputs, run, |out| {
            let tracked = [q, k, v].map(Tensor::without_holder);
            // What was gathered is held until the backward pass, or gathered again.
            let held = brought.take().filter(|b: &Brought| {
                policy::keeps(k.mesh(), k.sharding(), b.k.sharding(), !k.is_computed())
            });
            let documents = documents.cloned();
            let forward = Attention {
                out: out[0].clone(),
                lse: out[1].clone(),
            };
            Ok(move |b: &Back<'_>| -> Result<Pulled> {
                let grad = b.grad()?;
                let [q, k, v] = [&tracked[0], &tracked[1], &tracked[2]];
                if is_recording(&[grad, q, k, v]) {
                    let detail = "its gradient has none: use `attention`, or no `create_graph`";
                    return Err(Error::gradient(
                        this.info.name,
                        NoGradient::NotDifferentiable,
                        detail,
                    ));
                }
                let again;
                let operands = match &held {
                    Some(operands) => operands,
                    None => {
                        again = this.bring([q, k, v], documents.as_ref())?;
                        &again
                    }
                };
                this.backward(operands, &forward, grad)
            })
        })?;
        Ok(out.remove(0))
    }

    fn check(
        info: &'static OpInfo,
        [q, k, v]: [&Tensor; 3],
        options: &SequenceOptions,
    ) -> Result<Self> {
        let op = info.name;
        let scale = AttentionOptions {
            scale: options.scale,
            ..AttentionOptions::default()
        };
        let sizes = Sizes::check(op, q, k, v, &scale)?;
        if sizes.s != sizes.t {
            let detail = format!(
                "a sequence looks at itself, and these are {} queries and {} keys",
                sizes.s, sizes.t
            );
            return Err(Error::shape(op, [q, k, v], detail));
        }
        options.order.check(sizes.s)?;
        if let Some(documents) = &options.documents {
            check_documents(op, documents, [sizes.batch, sizes.s])?;
        }
        Ok(Self {
            info,
            sizes,
            causal: options.causal,
            order: options.order,
        })
    }

    pub(super) fn rotates(&self) -> bool {
        self.info.name == RING.name
    }

    /// Of a sequence that is whole: attention as it always is, in straight order.
    #[track_caller]
    fn whole(&self, [q, k, v]: [&Tensor; 3], documents: Option<&Tensor>) -> Result<Tensor> {
        let documents = match documents {
            Some(documents) => {
                let documents = documents.from_order(1, self.order)?;
                Some([documents.clone(), documents])
            }
            None => None,
        };
        let straight = |x: &Tensor| x.from_order(2, self.order);
        let options = AttentionOptions {
            scale: Some(self.sizes.scale),
            causal: self.causal,
            mask: None,
            documents,
        };
        let out = straight(q)?.attention(&straight(k)?, &straight(v)?, &options)?;
        out.out.in_order(2, self.order)
    }

    /// The operands where the rule wants them.
    #[track_caller]
    fn bring(&self, [q, k, v]: [&Tensor; 3], documents: Option<&Tensor>) -> Result<Brought> {
        let [q, k, v] = [q, k, v].map(Tensor::detach);
        // Along the sequence nothing is left to the solver: it might send less by exchanging heads.
        let along = |x: &Tensor, dim: usize, cut: bool| {
            let without = |s: Sharding, axis| s.without(axis);
            let own = x.sharding().whole();
            let clear = q.sharding().axes_of(2).fold(own.clone(), without);
            let clear = own.axes_of(dim).fold(clear, without);
            let axes = q.sharding().axes_of(2).filter(|_| cut);
            x.reshard(axes.fold(clear, |s, axis| s.cut(dim, axis)))
        };
        let rotates = self.rotates();
        let (k, v) = (along(&k, 2, rotates)?, along(&v, 2, rotates)?);
        let of_queries = documents.map(|d| along(d, 1, true)).transpose()?;
        let of_keys = match rotates {
            true => None,
            false => documents.map(|d| along(d, 1, false)).transpose()?,
        };
        let operands: SmallVec<[&Tensor; 5]> = [&q, &k, &v]
            .into_iter()
            .chain(&of_queries)
            .chain(&of_keys)
            .collect();
        let missing = [of_queries.as_ref(), of_keys.as_ref()];
        let missing = if rotates { &missing[..1] } else { &missing[..] };
        let mut brought = Call::of(self.info, &operands)
            .variant(self.sizes.variant(&q, &k))
            .optional(3, missing)
            .bring()?
            .into_iter();
        let mut next = || brought.next().ok_or_else(|| self.unbrought());
        let (q, k, v) = (next()?, next()?, next()?);
        let documents = match (documents, rotates) {
            (None, _) => None,
            (Some(_), true) => {
                let own = next()?;
                Some([own.clone(), own])
            }
            (Some(_), false) => Some([next()?, next()?]),
        };
        if let SequenceOrder::Paired { ranks } = self.order
            && parts_of(&q, 2) != ranks
        {
            let detail = format!(
                "the order is for {ranks} ranks, and {} is cut over {}",
                q.type_string(),
                parts_of(&q, 2)
            );
            return Err(Error::argument(self.info.name, "order", detail).of([&q]));
        }
        Ok(Brought { q, k, v, documents })
    }

    pub(super) fn unbrought(&self) -> Error {
        Error::argument(
            self.info.name,
            "inputs",
            "an operand of the rule is missing",
        )
    }
}
