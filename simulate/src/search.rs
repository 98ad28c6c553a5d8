//! The search over layouts: all of them by closed forms, the best by their real schedules.

use crate::{
    Error, Estimate, Layout, Machine, Model, Recompute, Result, Spent, bytes_text, estimate,
    layout::{Attention, Plan},
    seconds_text,
    stages::{Priced, Stage, priced},
};
use anymesh_schedule::Name;

/// What a search keeps to.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// What is not searched, or pinned, is as here.
    pub layout: Layout,
    /// Fields of the layout that are not searched, by their names.
    pub pinned: Vec<String>,
    /// How many layouts are told.
    pub best: usize,
    /// How many of the best by closed forms are timed with their real schedules.
    pub timed: usize,
}

impl Limits {
    /// For sequences of so many tokens and steps of so many sequences; nothing is pinned.
    pub fn new(sequence: usize, batch: usize) -> Limits {
        Limits {
            layout: Layout {
                sequence,
                batch,
                ..Layout::default()
            },
            pinned: vec![],
            best: 3,
            timed: 48,
        }
    }

    fn pins(&self, name: &str) -> bool {
        self.pinned.iter().any(|p| p == name)
    }

    /// What is pinned, or what could be.
    fn choices<T: Clone>(&self, name: &str, pinned: T, open: impl FnOnce() -> Vec<T>) -> Vec<T> {
        match self.pins(name) {
            true => vec![pinned],
            false => open(),
        }
    }
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best ones, the fastest first.
    pub ranked: Vec<Ranked>,
    /// Layouts that were priced.
    pub candidates: usize,
    /// Those that fit into memory.
    pub fitting: usize,
}

/// A layout, what it costs, and why it is among the best.
#[derive(Clone, Debug)]
pub struct Ranked {
    /// What it costs, with its real schedule.
    pub estimate: Estimate,
    /// What would be otherwise if one thing was: a line for each.
    pub why: Vec<String>,
    /// What holds it back most.
    pub limit: String,
    /// What the real step gives in this layout, or why it cannot be run: whoever can run it puts it
    /// here, a search by itself knows closed forms only.
    pub real: Option<std::result::Result<Estimate, String>>,
}

/// A layout by closed forms alone.
#[derive(Clone, Debug)]
struct Candidate {
    layout: Layout,
    spent: Spent,
    seconds: f64,
    memory: f64,
    /// Whether these are of its real schedule.
    timed: bool,
}

fn divisors(n: usize, most: usize) -> Vec<usize> {
    (1..=n.min(most)).filter(|d| n.is_multiple_of(*d)).collect()
}

/// The best layouts of a model on so many ranks that fit into memory.
pub fn search(model: &Model, machine: &Machine, ranks: usize, limits: &Limits) -> Result<Found> {
    model.check()?;
    machine.check()?;
    crate::model::number("ranks", ranks, 1 << 24)?;
    let mut all = vec![];
    // What is wrong with the last one that cannot be: the answer where nothing can.
    let mut wrong = None;
    axes(
        model,
        ranks,
        limits,
        &mut |layout| match priced(model, machine, &layout) {
            Ok((plan, priced)) => all.push(quick(&plan, &priced, layout)),
            Err(error) => wrong = Some(error),
        },
    );
    let usable = machine.usable();
    let Some(smallest) = all.iter().min_by(|a, b| a.memory.total_cmp(&b.memory)) else {
        return Err(wrong.unwrap_or_else(|| Error::Conflict {
            what: format!("no layout of {ranks} ranks has what is pinned"),
            instead: "pin less, or change the ranks or the batch".into(),
        }));
    };
    let nothing = || Error::NothingFits {
        candidates: all.len(),
        needs: smallest.memory / (1u64 << 30) as f64,
        has: usable / (1u64 << 30) as f64,
        layout: smallest.layout.summary(),
        instead: "take more ranks, a shorter sequence, or pin less".into(),
    };
    let mut order: Vec<usize> = (0..all.len())
        .filter(|i| all[*i].memory <= usable)
        .collect();
    if order.is_empty() {
        return Err(nothing());
    }
    order.sort_by(|a, b| all[*a].seconds.total_cmp(&all[*b].seconds));
    let fitting = order.len();
    let nothing = nothing();
    let mut timed = vec![];
    for at in order.into_iter().take(limits.timed.max(limits.best)) {
        let candidate = &mut all[at];
        match estimate(model, machine, &candidate.layout) {
            Ok(step) => {
                candidate.seconds = step.seconds;
                candidate.spent = step.spent;
                candidate.memory = step.memory.iter().map(|m| m.total).fold(0.0, f64::max);
                candidate.timed = true;
                if step.fits {
                    timed.push(step);
                }
            }
            // A schedule that does not exist for these numbers.
            Err(error) => wrong = Some(error),
        }
    }
    // Of two that take as long the one that sends less.
    let order = |a: &Estimate, b: &Estimate| {
        let bytes = |e: &Estimate| e.bytes.total();
        (a.seconds.total_cmp(&b.seconds)).then(bytes(a).total_cmp(&bytes(b)))
    };
    timed.sort_by(order);
    timed.truncate(limits.best);
    if timed.is_empty() {
        return Err(wrong.unwrap_or(nothing));
    }
    let ranked = timed.into_iter().map(|step| Ranked {
        why: why(&step, &all, usable),
        limit: limit(&step),
        estimate: step,
        real: None,
    });
    Ok(Found {
        ranked: ranked.collect(),
        candidates: all.len(),
        fitting,
    })
}

/// Every layout that the limits leave open, also some that cannot be.
fn axes(model: &Model, ranks: usize, limits: &Limits, each: &mut impl FnMut(Layout)) {
    let base = &limits.layout;
    let tps = limits.choices("tp", base.tp, || divisors(ranks, 64));
    for tp in tps
        .into_iter()
        .filter(|tp| model.heads.is_multiple_of((*tp).max(1)))
    {
        let rest = ranks / tp.max(1);
        for pp in limits.choices("pp", base.pp, || divisors(rest, model.layers + 2)) {
            let rest = rest / pp.max(1);
            // Shorter parts than this are not worth a context of their own.
            let longest = (base.sequence / 2048).max(1);
            for cp in limits.choices("cp", base.cp, || divisors(rest, longest.min(64))) {
                let dp = match limits.pins("dp") {
                    true => base.dp,
                    false => rest / cp.max(1),
                };
                if tp.checked_mul(pp * cp).and_then(|n| n.checked_mul(dp)) != Some(ranks) {
                    continue;
                }
                let layout = Layout {
                    dp,
                    tp,
                    pp,
                    cp,
                    ..base.clone()
                };
                rest_of(model, limits, &layout, each);
            }
        }
    }
}

fn rest_of(model: &Model, limits: &Limits, layout: &Layout, each: &mut impl FnMut(Layout)) {
    let replicas = layout.replicas();
    let eps = limits.choices("ep", layout.ep, || match &model.experts {
        Some(e) => divisors(replicas, e.routed),
        None => vec![1],
    });
    let zeros = limits.choices("zero", layout.zero, || match replicas {
        1 => vec![0],
        _ => vec![0, 1, 2, 3],
    });
    let sequences = layout.batch / layout.dp.max(1);
    let micros = limits.choices("micro", layout.micro, || divisors(sequences, 16));
    let recomputes = limits.choices("recompute", layout.recompute, || match layout.attention {
        Attention::Plain => vec![Recompute::None, Recompute::Selective, Recompute::Full],
        Attention::Flash => vec![Recompute::None, Recompute::Full],
    });
    let pinned: Option<Name> = match limits.pins("schedule") {
        true => layout.schedule.parse().ok(),
        false => None,
    };
    let chunks = limits.choices("chunks", layout.chunks, || match (layout.pp, pinned) {
        (1, _) | (_, Some(Name::OneFOneB | Name::EagerOneFOneB | Name::ZeroBubbleH1)) => vec![1],
        (_, Some(Name::ZeroBubbleV | Name::DualPipeV)) => vec![2],
        _ => {
            let several = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16];
            let fits = |c: &usize| layout.pp * c <= model.layers + 2;
            several.into_iter().filter(fits).collect()
        }
    });
    for ep in eps {
        for zero in &zeros {
            for micro in &micros {
                for recompute in &recomputes {
                    for chunks in &chunks {
                        let schedule = match (pinned.is_some(), chunks) {
                            (true, _) => layout.schedule.clone(),
                            (_, 1) => "1f1b".into(),
                            _ => "interleaved".into(),
                        };
                        each(Layout {
                            ep,
                            zero: *zero,
                            micro: *micro,
                            recompute: *recompute,
                            chunks: *chunks,
                            schedule,
                            ..layout.clone()
                        });
                    }
                }
            }
        }
    }
}

/// Time and memory without the real schedule: the busiest rank's work, the bubble by its closed form,
/// and activations by how many the schedule has alive.
fn quick(plan: &Plan, priced: &Priced, layout: Layout) -> Candidate {
    let (micros, chunks) = (plan.micros as f64, layout.chunks as f64);
    let sum = |rank: usize, of: &dyn Fn(usize) -> f64| -> f64 {
        priced.ranks[rank].stages.iter().map(|s| of(*s)).sum()
    };
    let all = |s: usize| priced.stages[s].passes.all().total();
    let work: Vec<f64> = (0..layout.pp).map(|r| sum(r, &all)).collect();
    let busiest = (0..layout.pp)
        .max_by(|a, b| work[*a].total_cmp(&work[*b]))
        .unwrap_or(0);
    let bubble: f64 = (0..layout.pp)
        .filter(|r| *r != busiest)
        .map(|r| match plan.schedule {
            Name::ZeroBubbleH1
            | Name::InterleavedZeroBubble
            | Name::ZeroBubbleV
            | Name::DualPipeV => {
                let weights = sum(r, &|s| priced.stages[s].passes.w.total());
                (work[r] - 2.0 * weights).max(0.0) / chunks
            }
            _ => work[r] / chunks,
        })
        .sum();
    let hops = 2.0 * (layout.pp as f64 - 1.0) * priced.transfer;
    let mut spent = Spent::default();
    for stage in &priced.ranks[busiest].stages {
        spent += priced.stages[*stage].passes.all() * micros;
    }
    spent.pipeline = bubble + hops;
    spent.dp += priced.ranks.iter().map(|r| r.exposed).fold(0.0, f64::max);
    spent.optimizer = priced.ranks.iter().map(|r| r.optimizer).fold(0.0, f64::max);
    let memory = (0..layout.pp).map(|rank| {
        let own = &priced.ranks[rank].stages;
        let most = |of: fn(&Stage) -> f64| {
            own.iter()
                .map(|s| of(&priced.stages[*s]))
                .fold(0.0, f64::max)
        };
        let alive = alive(plan.schedule, &layout, plan.micros, rank) as f64;
        let ends = sum(rank, &|s| priced.stages[s].ends);
        let ahead = if rank == 0 { alive / chunks } else { 1.0 };
        let state: f64 = priced.ranks[rank].state.iter().sum();
        let kept = sum(rank, &|s| priced.stages[s].kept) / chunks;
        state + alive * kept + ends * ahead + most(|s| s.forward.max(s.backward))
    });
    Candidate {
        seconds: spent.total(),
        memory: memory.fold(0.0, f64::max),
        spent,
        timed: false,
        layout,
    }
}

/// Activations of stages that a rank has alive at most.
fn alive(schedule: Name, layout: &Layout, micros: usize, rank: usize) -> usize {
    let (pp, chunks) = (layout.pp, layout.chunks);
    let behind = pp - 1 - rank;
    let wanted = match schedule {
        Name::FThenB | Name::LoopedBfs => usize::MAX,
        Name::OneFOneB => pp - rank,
        Name::EagerOneFOneB => 2 * behind + 1,
        Name::Interleaved => {
            let rounds = (micros / pp).max(1);
            (chunks - 1) * micros.div_ceil(rounds) + 2 * behind + 1
        }
        _ => pp * chunks + 1,
    };
    wanted.min(micros * chunks)
}

/// The fields that a neighbour may differ in, as text.
fn fields(layout: &Layout) -> [(&'static str, String); 8] {
    [
        ("tp", layout.tp.to_string()),
        ("pp", layout.pp.to_string()),
        ("cp", layout.cp.to_string()),
        ("ep", layout.ep.to_string()),
        ("zero", layout.zero.to_string()),
        ("micro", layout.micro.to_string()),
        (
            "recompute",
            format!("{:?}", layout.recompute).to_lowercase(),
        ),
        ("chunks", layout.chunks.to_string()),
    ]
}

/// For each setting what another value of it would cost: the fastest one if it fits, else that it does
/// not, and the fastest one that does.
fn why(step: &Estimate, all: &[Candidate], usable: f64) -> Vec<String> {
    let own = fields(&step.layout);
    let mut lines = vec![];
    for at in 0..own.len() {
        if own[at].0 == "chunks" && step.layout.pp == 1 {
            continue;
        }
        // Others that differ in this setting and in as little else as can be; dp makes up for it.
        let mut near: Vec<&Candidate> = vec![];
        let mut closest = usize::MAX;
        for candidate in all {
            let theirs = fields(&candidate.layout);
            if theirs[at].1 == own[at].1 {
                continue;
            }
            let differ = (0..own.len()).filter(|i| *i != at && theirs[*i].1 != own[*i].1);
            let differ = differ.count();
            if differ < closest {
                closest = differ;
                near.clear();
            }
            if differ == closest {
                near.push(candidate);
            }
        }
        near.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let value = |c: &Candidate| fields(&c.layout)[at].1.clone();
        let mut parts = vec![];
        let Some(fastest) = near.first() else {
            continue;
        };
        if fastest.memory > usable {
            let needs = bytes_text(fastest.memory);
            parts.push(format!("{} needs {needs}", value(fastest)));
        }
        if let Some(other) = near.iter().find(|c| c.memory <= usable) {
            parts.push(format!("{} {}", value(other), against(other, step)));
        }
        let besides = if closest > 0 {
            ", with what goes along"
        } else {
            ""
        };
        lines.push(format!(
            "{} {}{besides}: {}",
            own[at].0,
            own[at].1,
            parts.join("; ")
        ));
    }
    lines
}

/// How much longer a candidate takes, and what for.
fn against(other: &Candidate, step: &Estimate) -> String {
    let much = other.seconds - step.seconds;
    let parts = other.spent.parts().into_iter().zip(step.spent.parts());
    let (name, more) = parts
        .map(|((name, theirs), (_, ours))| (name, theirs - ours))
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap_or(("", 0.0));
    match much {
        much if much.abs() < 1e-9 * step.seconds => "takes as long".into(),
        much if much > 0.0 => format!(
            "takes {} longer ({name} {} more)",
            seconds_text(much),
            seconds_text(more)
        ),
        much if other.timed => format!("takes {} less", seconds_text(-much)),
        much => format!(
            "takes {} less by closed forms, and is not among those that were timed",
            seconds_text(-much)
        ),
    }
}

/// The largest cost that is not the products themselves, and how near memory is to its end.
fn limit(step: &Estimate) -> String {
    let parts = step.spent.parts();
    let rest = parts.iter().filter(|p| p.0 != "products");
    let (name, seconds) = rest
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap_or(&("", 0.0));
    let fullest = step.memory.iter().map(|m| m.total).fold(0.0, f64::max);
    let what = match *name {
        "traffic" => "kernels that wait for memory",
        "tp" => "tensor parallel communication",
        "cp" => "context parallel communication",
        "ep" => "the exchange with experts",
        "dp" => "data parallel communication",
        "pipeline" => "the pipeline's bubble",
        _ => "the optimizer",
    };
    format!(
        "{what}: {:.1} % of the step; memory is {:.0} % full",
        seconds / step.seconds * 100.0,
        fullest / step.usable * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{machine, preset};

    #[test]
    fn closed_forms_are_near_the_real_schedule() {
        let machine = machine("h100").expect("it is one");
        for (name, pp, chunks, schedule, batch) in [
            ("llama-3-70b", 8, 1, "1f1b", 64),
            ("llama-3-70b", 8, 1, "zbh1", 64),
            ("llama-3-70b", 8, 5, "interleaved", 64),
            ("llama-3-70b", 8, 4, "interleaved", 40),
            ("llama-3-405b", 16, 8, "interleaved", 64),
            ("gpt-3-175b", 12, 2, "interleaved", 96),
            ("deepseek-v3", 16, 1, "1f1b", 64),
        ] {
            let model = preset(name).expect("it is one").model;
            let layout = Layout {
                tp: 4,
                pp,
                chunks,
                batch,
                schedule: schedule.into(),
                ..Layout::default()
            };
            let (plan, priced) = priced(&model, &machine, &layout).expect("it can be");
            let quick = quick(&plan, &priced, layout.clone());
            let step = estimate(&model, &machine, &layout).expect("it can be");
            let memory = step.memory.iter().map(|m| m.total).fold(0.0, f64::max);
            let (time, memory) = (quick.seconds / step.seconds, quick.memory / memory);
            println!("{name} {schedule} {chunks}: {time:.3} {memory:.3}");
            assert!((0.93..1.07).contains(&time), "{name} {schedule}: {time}");
            assert!(
                (0.93..1.07).contains(&memory),
                "{name} {schedule}: {memory}"
            );
        }
    }
}
