//! How a training run is laid out, and which layouts cannot be.

use crate::{Error, Model, Result, model::number};
use anymesh_schedule::Name;
use serde::{Deserialize, Serialize};

/// How a step is cut over ranks.
///
/// Ranks are numbered with `tp` fastest, then `cp`, then `dp`, then `pp`; `ep` is a factor of
/// `dp * cp`. That decides which groups stay inside of a node.
///
/// ```
/// use anymesh_simulate::{Layout, preset};
/// let model = preset("llama-3-405b")?.model;
/// // A row of a paper's first version: the axes make half of the GPUs that it says.
/// let layout = Layout { dp: 4, tp: 8, pp: 16, cp: 16, sequence: 131_072, batch: 64, ..Layout::default() };
/// let error = layout.check(&model, 16_384).unwrap_err();
/// assert_eq!(error.to_string(), "dp 4 * tp 8 * pp 16 * cp 16 is 8192 ranks, not 16384: dp 8 would do");
/// # Ok::<(), anymesh_simulate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Layout {
    /// Data parallel ranks: each has other sequences.
    pub dp: usize,
    /// Tensor parallel ranks: each has a part of every matrix.
    pub tp: usize,
    /// Pipeline ranks: each has some of the layers.
    pub pp: usize,
    /// Context parallel ranks: each has a part of every sequence.
    pub cp: usize,
    /// Expert parallel ranks, a factor of `dp * cp`: each has some of the experts.
    pub ep: usize,
    /// Stages of a pipeline rank.
    pub chunks: usize,
    /// What data parallel ranks share out: 0 nothing, 1 optimizer state, 2 gradients too, 3
    /// parameters too.
    pub zero: u8,
    /// Sequences of a micro-batch.
    pub micro: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Sequences of a step, over all ranks.
    pub batch: usize,
    /// What is computed again in backward passes.
    pub recompute: Recompute,
    /// Whether norms and the residual stream are cut over `tp` too (Megatron's sequence parallel).
    pub sequence_parallel: bool,
    /// Whether what a forward pass gathered, inputs of products over `tp` and weights over `dp` (ZeRO
    /// 3), is dropped and gathered again in the backward pass, as Megatron and FSDP do. Otherwise it
    /// is kept: fewer bytes, more memory.
    pub regather: bool,
    /// The pipeline's schedule, by a name of [`anymesh_schedule::NAMES`].
    pub schedule: String,
    /// The kernel of attention.
    pub attention: Attention,
    /// How context parallel ranks see each other's keys and values.
    pub context: Context,
    /// What products are computed in.
    pub precision: Precision,
    /// Bytes of a gradient: 4, or 2.
    pub gradient_bytes: usize,
}

impl Default for Layout {
    /// One rank, one sequence of 2048 tokens, ZeRO 1 for whoever has `dp`, flash attention, nothing
    /// computed again.
    fn default() -> Layout {
        Layout {
            dp: 1,
            tp: 1,
            pp: 1,
            cp: 1,
            ep: 1,
            chunks: 1,
            zero: 1,
            micro: 1,
            sequence: 2048,
            batch: 1,
            recompute: Recompute::None,
            sequence_parallel: true,
            regather: true,
            schedule: "1f1b".into(),
            attention: Attention::Flash,
            context: Context::Gather,
            precision: Precision::Bf16,
            gradient_bytes: 4,
        }
    }
}

/// What is computed again in backward passes instead of kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// The squares of plain attention. Flash attention never keeps them.
    Selective,
    /// Each layer, from its input.
    Full,
}

/// A kernel of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Products and a softmax that write all scores; the whole square, also what the mask hides.
    Plain,
    /// One kernel that keeps nothing of the size of a square, and skips what the mask hides.
    #[default]
    Flash,
}

impl Attention {
    /// The part of the square that is computed.
    pub(crate) fn share(self) -> f64 {
        match self {
            Attention::Plain => 1.0,
            Attention::Flash => 0.5,
        }
    }
}

/// How ranks that have parts of a sequence see all keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Context {
    /// They gather them (Llama 3).
    #[default]
    Gather,
    /// They pass them on in a ring, while they compute.
    Ring,
    /// They exchange heads for sequence (Ulysses).
    Heads,
}

/// What products are computed in. Activations and parameters are 16 bits wide either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 16 bits.
    #[default]
    Bf16,
    /// 8 bits; tokens go to experts in 8 bits too.
    Fp8,
}

/// A layout that was checked, with what follows from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The schedule.
    pub schedule: Name,
    /// Micro-batches of a step.
    pub micros: usize,
    /// Layers of each of the `pp * chunks` stages.
    pub split: Vec<usize>,
}

/// The divisors of `count` around `value`: the next smaller and the next larger one.
fn around(count: usize, value: usize) -> Vec<usize> {
    let value = value.min(count.saturating_add(1));
    let divides = |d: &usize| count.is_multiple_of(*d);
    let below = (1..value).rev().find(divides);
    let above = (value.max(1)..=count).find(divides);
    below.into_iter().chain(above).collect()
}

pub(crate) fn divide(what: &str, count: usize, by: &str, divisor: usize) -> Error {
    Error::Divide {
        what: what.into(),
        count,
        by: by.into(),
        divisor,
        nearest: around(count, divisor),
    }
}

fn divides(what: &str, count: usize, by: &str, divisor: usize) -> Result<()> {
    match count.is_multiple_of(divisor) {
        true => Ok(()),
        false => Err(divide(what, count, by, divisor)),
    }
}

impl Layout {
    /// How many ranks the axes make, if that is a number.
    pub fn ranks(&self) -> Option<usize> {
        [self.tp, self.pp, self.cp]
            .iter()
            .try_fold(self.dp, |all, n| all.checked_mul(*n))
    }

    /// Ranks that have the same parameters: `dp * cp`.
    pub(crate) fn replicas(&self) -> usize {
        self.dp * self.cp
    }

    /// Whether norms and the residual stream are cut: for several tensor parallel ranks only.
    pub(crate) fn cuts_stream(&self) -> bool {
        self.sequence_parallel && self.tp > 1
    }

    /// Whether gathered inputs of products are dropped after the forward pass.
    pub(crate) fn gathers_again(&self) -> bool {
        self.cuts_stream() && self.regather
    }

    /// Tokens of a micro-batch on a rank.
    pub(crate) fn tokens(&self) -> f64 {
        self.micro as f64 * self.sequence as f64 / self.cp as f64
    }

    /// Refuses what cannot be, with the nearest numbers that can.
    pub fn check(&self, model: &Model, ranks: usize) -> Result<Plan> {
        model.check()?;
        let most = 1 << 24;
        for (what, got) in [
            ("dp", self.dp),
            ("tp", self.tp),
            ("pp", self.pp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("chunks", self.chunks),
            ("micro", self.micro),
            ("sequence", self.sequence),
            ("batch", self.batch),
        ] {
            number(what, got, most)?;
        }
        if self.zero > 3 {
            return Err(Error::Number {
                what: "zero".into(),
                got: self.zero.to_string(),
                valid: "it is 0, 1, 2 or 3".into(),
            });
        }
        if !matches!(self.gradient_bytes, 2 | 4) {
            return Err(Error::Number {
                what: "gradient_bytes".into(),
                got: self.gradient_bytes.to_string(),
                valid: "it is 2 or 4".into(),
            });
        }
        self.product(ranks)?;
        divides("heads", model.heads, "tp", self.tp)?;
        if model.latent.is_none()
            && !model.kv_heads.is_multiple_of(self.tp)
            && !self.tp.is_multiple_of(model.kv_heads)
        {
            return Err(divide("kv heads", model.kv_heads, "tp", self.tp));
        }
        divides(
            "columns of the feed-forward block",
            model.ffn,
            "tp",
            self.tp,
        )?;
        self.sequences()?;
        if self.context == Context::Heads && self.cp > 1 {
            let kv = (model.kv_heads / self.tp).max(1);
            divides("heads of a rank", model.heads / self.tp, "cp", self.cp)?;
            divides("kv heads of a rank", kv, "cp", self.cp)?;
        }
        self.experts(model)?;
        let schedule: Name = self.schedule.parse()?;
        let split = self.split(model)?;
        let micros = self.batch / (self.dp * self.micro);
        Ok(Plan {
            schedule,
            micros,
            split,
        })
    }

    fn product(&self, ranks: usize) -> Result<()> {
        let [dp, tp, pp, cp] = [self.dp, self.tp, self.pp, self.cp];
        let product = self.ranks();
        if product == Some(ranks) {
            return Ok(());
        }
        if product.is_some() {
            number("ranks", ranks, 1 << 31)?;
        }
        let rest = tp.checked_mul(pp).and_then(|n| n.checked_mul(cp));
        let instead = match rest.filter(|rest| ranks > 0 && ranks.is_multiple_of(*rest)) {
            Some(rest) => format!("dp {} would do", ranks / rest),
            None if product.is_none() => "take smaller axes".into(),
            None => {
                let near = |what: &str, value: usize| {
                    let rest = product.map_or(1, |p| p / value);
                    let whole = match ranks.is_multiple_of(rest.max(1)) {
                        true => vec![ranks / rest.max(1)],
                        false => around(ranks, value),
                    };
                    let whole: Vec<String> = whole.iter().map(usize::to_string).collect();
                    format!("{what} {}", whole.join(" or "))
                };
                format!(
                    "each axis must divide {ranks}, and so must their product; near are {}, {} and {}",
                    near("tp", tp),
                    near("pp", pp),
                    near("cp", cp)
                )
            }
        };
        Err(Error::Product {
            dp,
            tp,
            pp,
            cp,
            product: product.map_or("too many".into(), |p| p.to_string()),
            ranks,
            instead,
        })
    }

    /// Sequences must divide into ranks and micro-batches, tokens into parts.
    fn sequences(&self) -> Result<()> {
        let each = self.dp.saturating_mul(self.micro);
        if !self.batch.is_multiple_of(each) {
            let down = self.batch / each * each;
            let up = down.saturating_add(each);
            let near: Vec<String> = [down, up]
                .iter()
                .filter(|b| **b > 0)
                .map(usize::to_string)
                .collect();
            return Err(Error::Number {
                what: "batch".into(),
                got: format!("{} sequences", self.batch),
                valid: format!(
                    "it must divide by dp {} * micro {} = {each}: {} would do",
                    self.dp,
                    self.micro,
                    near.join(" or ")
                ),
            });
        }
        // Causal work is balanced by pairs of chunks, and sequence parallel cuts what is left.
        let parts = if self.cp > 1 { 2 * self.cp } else { 1 };
        divides("tokens of a sequence", self.sequence, "2 cp =", parts)?;
        if self.cuts_stream() {
            let part = self.sequence / self.cp;
            divides("tokens of a rank's sequence", part, "tp", self.tp)?;
        }
        Ok(())
    }

    fn experts(&self, model: &Model) -> Result<()> {
        let Some(experts) = &model.experts else {
            return match self.ep {
                1 => Ok(()),
                ep => Err(Error::Conflict {
                    what: format!("ep is {ep}, but {} has no experts", model.name),
                    instead: "ep 1 would do".into(),
                }),
            };
        };
        divides("ranks of dp * cp", self.replicas(), "ep", self.ep)?;
        divides("experts", experts.routed, "ep", self.ep)?;
        divides("columns of an expert", experts.width, "tp", self.tp)
    }

    /// Layers of each stage: as even as can be; what is left over goes to the middle, because the
    /// first stage has the embedding and the last one the output product. These two may have no
    /// layer at all.
    fn split(&self, model: &Model) -> Result<Vec<usize>> {
        let stages = self.pp.saturating_mul(self.chunks);
        let most = model.layers + 2;
        if stages > most && stages > 1 {
            return Err(Error::Number {
                what: "pp * chunks".into(),
                got: format!("{stages} stages"),
                valid: format!(
                    "{} layers make at most {most}, with the embedding and the output product alone at the ends: chunks {} or pp {} would do",
                    model.layers,
                    (most / self.pp).max(1),
                    (most / self.chunks).max(1)
                ),
            });
        }
        let mut split = vec![model.layers / stages; stages];
        let mut order: Vec<usize> = (1..stages.saturating_sub(1)).collect();
        // The output product costs more than the embedding.
        order.extend([0, stages - 1]);
        order.dedup();
        for stage in order.into_iter().take(model.layers % stages) {
            split[stage] += 1;
        }
        Ok(split)
    }

    /// In a line, without what is 1 or as usual.
    pub fn summary(&self) -> String {
        let axes = [
            ("dp", self.dp),
            ("tp", self.tp),
            ("pp", self.pp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("chunks", self.chunks),
        ];
        let mut parts: Vec<String> = (axes.iter())
            .filter(|(_, n)| *n > 1)
            .map(|(name, n)| format!("{name}={n}"))
            .collect();
        parts.push(format!("zero={}", self.zero));
        parts.push(format!("micro={}", self.micro));
        match self.recompute {
            Recompute::None => {}
            Recompute::Selective => parts.push("recompute=selective".into()),
            Recompute::Full => parts.push("recompute=full".into()),
        }
        if self.tp > 1 && !self.sequence_parallel {
            parts.push("sequence_parallel=false".into());
        }
        if !self.regather && (self.cuts_stream() || self.zero == 3) {
            parts.push("regather=false".into());
        }
        if self.pp > 1 {
            parts.push(self.schedule.clone());
        }
        parts.join(" ")
    }
}
