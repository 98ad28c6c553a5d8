//! How short a schedule can be at best.

use crate::{Costs, Schedule};

impl Schedule {
    /// No schedule of these stages on these ranks is shorter: a rank cannot begin before the first of
    /// its stages has an input, and then has all its work to do; and a micro-batch must get through.
    pub fn bound(&self, costs: &Costs) -> f64 {
        let way = Way::new(self, costs);
        let through = way.back.first().map_or(0.0, |b| b + costs.stage(0).whole());
        let rank = |rank: usize| match self.stages_of(rank).first() {
            Some(first) => way.there[*first] + self.work(rank, costs),
            None => 0.0,
        };
        (0..self.ranks.len()).map(rank).fold(through, f64::max)
    }

    /// The same for schedules in which no rank has more than `live` activations alive: until the first
    /// gradient is back a rank can do so many forward passes and then idles, and each activation
    /// stays for as long as its micro-batch takes to the end and back.
    ///
    /// ```
    /// use anymesh_schedule::{Costs, build};
    /// let schedule = build("1f1b", 4, 1, 8)?;
    /// let within = [2, 3, 4].map(|live| schedule.bound_within(&Costs::default(), live));
    /// assert_eq!(within, [36.0, 28.0, 27.0]);
    /// # Ok::<(), anymesh_schedule::Error>(())
    /// ```
    pub fn bound_within(&self, costs: &Costs, live: usize) -> f64 {
        let way = Way::new(self, costs);
        let mut bound = self.bound(costs);
        for rank in 0..self.ranks.len() {
            let own = self.stages_of(rank);
            let (Some(first), Some(last)) = (own.first(), own.last()) else {
                continue;
            };
            let head = way.there[*first];
            let longest = own.iter().map(|s| costs.stage(*s).f).fold(0.0, f64::max);
            let idle = way.back[*last] - head - live as f64 * longest;
            bound = bound.max(head + self.work(rank, costs) + idle.max(0.0));
            let stay = |s: &usize| way.back[*s] + costs.stage(*s).whole() - way.there[*s];
            let stays: f64 = own.iter().map(stay).sum();
            bound = bound.max(head + stays * self.micros as f64 / live.max(1) as f64);
        }
        bound
    }

    /// How long a rank computes at least.
    fn work(&self, rank: usize, costs: &Costs) -> f64 {
        let stage = |s: &usize| {
            let cost = costs.stage(*s);
            // Joined passes may hide some of it, at most the shorter one of each pair.
            let hidden = cost.f.min(cost.b) * costs.overlap;
            (cost.f + cost.whole() - hidden).max(0.0)
        };
        let once: f64 = self.stages_of(rank).iter().map(stage).sum();
        once * self.micros as f64
    }
}

/// When a micro-batch that nothing holds up is where.
struct Way {
    /// When it can enter each stage.
    there: Vec<f64>,
    /// When its gradient can.
    back: Vec<f64>,
}

impl Way {
    fn new(schedule: &Schedule, costs: &Costs) -> Way {
        let stages = schedule.stages();
        let hop = |a: usize, b: usize| match schedule.owner[a] == schedule.owner[b] {
            true => 0.0,
            false => costs.transfer,
        };
        let (mut there, mut back) = (vec![0.0; stages], vec![0.0; stages]);
        for s in 1..stages {
            there[s] = there[s - 1] + costs.stage(s - 1).f + hop(s - 1, s);
        }
        for s in (0..stages).rev() {
            back[s] = match s + 1 == stages {
                true => there[s] + costs.stage(s).f,
                false => back[s + 1] + costs.stage(s + 1).first() + hop(s + 1, s),
            };
        }
        Way { there, back }
    }
}
