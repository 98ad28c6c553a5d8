//! All layouts, priced by the closed form, rejected by memory, ranked by time.

use crate::{
    Layout,
    model::{Block, Matrix, Model},
    price::{Axis, Cuts, FACTORS, Form, Price, Setting, Stored},
    report::Report,
    text::{cut, matches},
};
use anymesh_core::{Error, Result, cost::CostModel};

/// What a layout is looked for.
pub struct Search<'a> {
    /// The model.
    pub model: &'a dyn Model,
    /// The machine; its node says how many ranks are close to each other.
    pub cost: &'a CostModel,
    /// Ranks of the mesh.
    pub ranks: usize,
    /// Sequences of a step, over all ranks and micro-batches.
    pub sequences: usize,
    /// Bytes for each element of a parameter that an optimizer keeps, beside the parameter and its
    /// gradient: 12 for Adam with f32 masters of 16-bit parameters.
    pub optimizer: f64,
}

impl std::fmt::Debug for Search<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Search")
            .field("cost", &self.cost.name)
            .field("ranks", &self.ranks)
            .field("sequences", &self.sequences)
            .finish_non_exhaustive()
    }
}

/// A layout and what it costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The layout.
    pub layout: Layout,
    /// What all blocks together cost for a micro-batch.
    pub price: Price,
    /// Seconds of a step.
    pub seconds: f64,
    /// Seconds of its kernels.
    pub compute: f64,
    /// Seconds of communication that kernels do not hide.
    pub exposed: f64,
    /// Bytes that a rank holds at most.
    pub memory: f64,
    /// Of them, parameters, gradients and the optimizer's state.
    pub state: f64,
    /// Whether a rank has that much.
    pub fits: bool,
}

/// Bytes of parameters, gradients and optimizer state that a rank holds under a stage of ZeRO over
/// `ranks`: 0 nothing is cut, 1 the optimizer's state, 2 gradients too, 3 parameters too.
///
/// ```
/// // 7.5 billion parameters of 16 bits with Adam, 64 ranks: in GB.
/// let gb = [0, 1, 2, 3].map(|stage| anymesh_layout::state_bytes(7.5e9, 2.0, 12.0, stage, 64) / 1e9);
/// assert_eq!(gb.map(|gb| (gb * 10.0).round() / 10.0), [120.0, 31.4, 16.6, 1.9]);
/// ```
pub fn state_bytes(
    elements: f64,
    element_bytes: f64,
    optimizer: f64,
    stage: u8,
    ranks: usize,
) -> f64 {
    let share = |from: u8| match stage >= from {
        true => 1.0 / ranks as f64,
        false => 1.0,
    };
    elements * (element_bytes * share(3) + element_bytes * share(2) + optimizer * share(1))
}

/// How much of a device's memory a layout may plan with: workspaces of kernels, buffers of
/// collectives and what lies between allocations need the rest.
const USABLE: f64 = 0.9;

/// Ways of a mesh and a stream.
#[derive(Clone, Copy)]
struct Way {
    dp: usize,
    fsdp: usize,
    tp: usize,
    stream: Form,
    microbatches: usize,
    recompute: bool,
}

impl Search<'_> {
    /// Every way to use the ranks with the best cuts of the parameters for it, fastest first; those
    /// that do not fit into memory come last.
    pub fn run(&self) -> Result<Report> {
        if self.ranks == 0 || self.sequences == 0 {
            return Err(Error::argument(
                "layout",
                "ranks",
                format!(
                    "{} ranks and {} sequences: a step needs at least one of each",
                    self.ranks, self.sequences
                ),
            ));
        }
        let blocks = self.model.blocks();
        let mut candidates = vec![];
        for tp in divisors(self.ranks) {
            for fsdp in divisors(self.ranks / tp) {
                let dp = self.ranks / tp / fsdp;
                if !self.sequences.is_multiple_of(dp * fsdp) {
                    continue;
                }
                let streams: &[Form] = match tp {
                    1 => &[Form::Whole],
                    _ => &[Form::Whole, Form::Tokens],
                };
                for microbatches in divisors(self.sequences / (dp * fsdp)) {
                    for (stream, recompute) in streams
                        .iter()
                        .flat_map(|stream| [(*stream, false), (*stream, true)])
                    {
                        let way = Way {
                            dp,
                            fsdp,
                            tp,
                            stream,
                            microbatches,
                            recompute,
                        };
                        candidates.extend(self.best(&blocks, way));
                    }
                }
            }
        }
        candidates.sort_by(|a, b| {
            (!a.fits)
                .cmp(&!b.fits)
                .then(a.seconds.total_cmp(&b.seconds))
                .then(a.memory.total_cmp(&b.memory))
        });
        Ok(Report {
            candidates,
            ..self.report()
        })
    }

    /// A report without candidates.
    pub fn report(&self) -> Report {
        Report {
            cost: self.cost.clone(),
            ranks: self.ranks,
            sequences: self.sequences,
            length: self.model.length(),
            candidates: vec![],
        }
    }

    /// What a given layout costs.
    pub fn price(&self, layout: &Layout) -> Result<Candidate> {
        layout.check(self.ranks)?;
        let [dp, fsdp, tp] = ["dp", "fsdp", "tp"].map(|axis| layout.size(axis));
        let parts = dp * fsdp * layout.microbatches;
        if !self.sequences.is_multiple_of(parts) {
            return Err(Error::argument(
                "layout",
                "sequences",
                format!(
                    "{} sequences cannot be shared by {dp} * {fsdp} ranks in {} micro-batches",
                    self.sequences, layout.microbatches
                ),
            ));
        }
        let stream = layout.stream.to_string();
        let cut_stream = stream.split(',').nth(1).is_some_and(|d| d.contains("@tp"));
        let way = Way {
            dp,
            fsdp,
            tp,
            stream: if cut_stream {
                Form::Tokens
            } else {
                Form::Whole
            },
            microbatches: layout.microbatches,
            recompute: layout.recompute,
        };
        let setting = self.setting(way);
        let mut total = Price::default();
        let blocks = self.model.blocks();
        for block in &blocks {
            let stored = |matrix: Option<&Matrix>| matrix.map(|m| stored_in(layout, m));
            let wanted = (stored(block.reads.first()), stored(block.writes.as_ref()));
            let found = options(&setting, block).into_iter().filter(|(cuts, _)| {
                wanted.0.is_none_or(|s| s == cuts.reads.0)
                    && wanted.1.is_none_or(|s| s == cuts.writes.0)
            });
            let best = found.min_by(|a, b| {
                let time = |p: &Price| p.seconds(self.cost, way.microbatches, way.recompute);
                time(&a.1).total_cmp(&time(&b.1))
            });
            let (_, price) = best.ok_or_else(|| Error::Sharding {
                sharding: layout.to_string(),
                detail: format!("the matrices of {} cannot be cut so", block.name),
            })?;
            total = total.plus(&price, block.count as f64);
        }
        Ok(self.candidate(layout.clone(), way, layers(&blocks), total))
    }

    fn setting(&self, way: Way) -> Setting<'_> {
        let sequences = self.sequences / (way.dp * way.fsdp * way.microbatches);
        let axis = |name, size, apart| Axis::of(self.cost, name, size, apart);
        Setting {
            cost: self.cost,
            dtype: self.model.dtype(),
            width: self.model.width() as f64,
            tokens: (sequences * self.model.length()) as f64,
            dp: axis("dp", way.dp, way.tp * way.fsdp),
            fsdp: axis("fsdp", way.fsdp, way.tp),
            tp: axis("tp", way.tp, 1),
            stream: way.stream,
        }
    }

    /// The fastest cuts that fit, else those that need the least memory.
    fn best(&self, blocks: &[Block], way: Way) -> Option<Candidate> {
        let setting = self.setting(way);
        let seconds = |price: &Price| price.seconds(self.cost, way.microbatches, way.recompute);
        let layers = layers(blocks);
        let memory = |price: &Price| self.memory(price, way, layers).0;
        let mut totals: Vec<(Vec<Cuts>, Price)> = vec![(vec![], Price::default())];
        for block in blocks {
            let options = options(&setting, block);
            let options = pareto(options, |(_, p)| (seconds(p), memory(p)));
            let with = |(cuts, price): &(Vec<Cuts>, Price)| {
                let all = options.iter().map(|(more, p)| {
                    let cuts = cuts.iter().chain([more]).copied().collect();
                    (cuts, price.plus(p, block.count as f64))
                });
                all.collect::<Vec<_>>()
            };
            let joined = totals.iter().flat_map(with).collect();
            totals = pareto(joined, |(_, p)| (seconds(p), memory(p)));
        }
        let limit = self.limit();
        let key = |(_, p): &(Vec<Cuts>, Price)| match memory(p) <= limit {
            true => (false, seconds(p)),
            false => (true, memory(p)),
        };
        let best = totals.into_iter().min_by(|a, b| {
            let (a, b) = (key(a), key(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        let (cuts, price) = best?;
        Some(self.candidate(layout_of(blocks, &cuts, way), way, layers, price))
    }

    fn limit(&self) -> f64 {
        let memory = self.cost.device.memory;
        memory.map_or(f64::INFINITY, |bytes| bytes as f64 * USABLE)
    }

    /// Bytes that a rank holds at most, and of them those that it always holds.
    fn memory(&self, price: &Price, way: Way, layers: usize) -> (f64, f64) {
        let size = self.model.dtype().size() as f64;
        let state = state_bytes(price.parameters, size, self.optimizer, 0, 1);
        // With recompute one layer at a time has its activations.
        let kept = match way.recompute {
            true => price.entry + (price.activations - price.entry) / layers as f64,
            false => price.activations,
        };
        (state + kept + price.working, state)
    }

    fn candidate(&self, layout: Layout, way: Way, layers: usize, price: Price) -> Candidate {
        let seconds = price.seconds(self.cost, way.microbatches, way.recompute);
        let again = if way.recompute { price.again } else { 0.0 };
        let compute = (price.compute + again) * way.microbatches as f64;
        let (memory, state) = self.memory(&price, way, layers);
        Candidate {
            layout,
            price,
            seconds,
            compute,
            exposed: seconds - compute,
            memory,
            state,
            fits: memory <= self.limit(),
        }
    }
}

impl Layout {
    /// Refuses axes that do not make so many ranks.
    pub fn check(&self, ranks: usize) -> Result<()> {
        let product = self
            .mesh
            .iter()
            .try_fold(1usize, |n, (_, size)| n.checked_mul(*size));
        if product == Some(ranks) {
            return Ok(());
        }
        let sizes: Vec<String> = self.mesh.iter().map(|(_, n)| n.to_string()).collect();
        Err(Error::Mesh {
            axes: self.mesh.clone().into(),
            ranks: [].into(),
            detail: format!(
                "the axes make {} = {} ranks, there are {ranks}",
                sizes.join(" * "),
                product.map_or("too many".into(), |n| n.to_string())
            ),
        })
    }
}

/// The dimension of `[outputs, inputs]` that `tp` cuts in a layout.
fn stored_in(layout: &Layout, matrix: &Matrix) -> Stored {
    let found = layout
        .parameters
        .iter()
        .find(|(pattern, _)| *pattern == matrix.name || matches(pattern, &matrix.name))?;
    let text = found.1.to_string();
    let dim = text.split(',').position(|dim| dim.contains("@tp"))?;
    Some(if matrix.lookup { 1 - dim } else { dim })
}

/// All ways to cut the matrices of a block, with their prices. Those that read the same tensor are
/// cut alike: to mix them brings it in one more form and gains nothing.
fn options(setting: &Setting<'_>, block: &Block) -> Vec<(Cuts, Price)> {
    let dims: &[Stored] = match setting.tp.size {
        1 => &[None],
        _ => &[None, Some(0), Some(1)],
    };
    let factors = match setting.tp.size {
        1 => &FACTORS[3..],
        _ => &FACTORS[..],
    };
    let middles: &[Form] = match (setting.tp.size, block.middle.units) {
        (1, _) | (_, 0) => &[Form::Whole],
        _ => &[Form::Whole, Form::Tokens, Form::Features],
    };
    let ways = || {
        dims.iter()
            .flat_map(|dim| factors.iter().map(|factor| (*dim, *factor)))
    };
    let mut all = vec![];
    for (reads, middle) in ways().flat_map(|r| middles.iter().map(move |m| (r, *m))) {
        for writes in ways() {
            let cuts = Cuts {
                reads,
                middle,
                writes,
            };
            if let Some(price) = setting.block(block, &cuts) {
                all.push((cuts, price));
            }
            if block.writes.is_none() {
                break;
            }
        }
    }
    all
}

/// Those that no other one beats in both respects, in the order of the first.
fn pareto<T>(all: Vec<T>, key: impl Fn(&T) -> (f64, f64)) -> Vec<T> {
    let mut keyed: Vec<((f64, f64), T)> = all.into_iter().map(|item| (key(&item), item)).collect();
    keyed.sort_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut least = f64::INFINITY;
    keyed.retain(|((_, second), _)| {
        let kept = *second < least;
        least = least.min(*second);
        kept
    });
    keyed.into_iter().map(|(_, item)| item).collect()
}

/// Layers of a model: blocks of which there are most.
fn layers(blocks: &[Block]) -> usize {
    blocks.iter().map(|b| b.count).max().unwrap_or(1).max(1)
}

fn divisors(n: usize) -> Vec<usize> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}

fn layout_of(blocks: &[Block], cuts: &[Cuts], way: Way) -> Layout {
    let axes = [("dp", way.dp), ("fsdp", way.fsdp), ("tp", way.tp)];
    let there = axes.into_iter().filter(|(_, size)| *size > 1);
    let batch: Vec<&str> = there
        .clone()
        .map(|(a, _)| a)
        .filter(|a| *a != "tp")
        .collect();
    let tokens = match way.stream {
        Form::Tokens => vec!["tp"],
        _ => vec![],
    };
    let mut parameters = vec![];
    for (block, cuts) in blocks.iter().zip(cuts) {
        let reads = block.reads.iter().map(|m| (m, cuts.reads.0));
        let writes = block.writes.iter().map(|m| (m, cuts.writes.0));
        for (matrix, stored) in reads.chain(writes) {
            // [outputs, inputs]; fully sharded goes where tp is not.
            let mut dims = [vec![], vec![]];
            if let Some(dim) = stored {
                dims[dim].push("tp");
            }
            if way.fsdp > 1 {
                dims[stored.map_or(0, |dim| 1 - dim)].push("fsdp");
            }
            if matrix.lookup {
                dims.reverse();
            }
            if dims.iter().any(|d| !d.is_empty()) {
                parameters.push((matrix.name.clone(), cut(&dims)));
            }
        }
    }
    Layout {
        mesh: there.map(|(name, size)| (name.to_string(), size)).collect(),
        microbatches: way.microbatches,
        recompute: way.recompute,
        stream: cut(&[batch, tokens, vec![]]),
        parameters,
    }
}
