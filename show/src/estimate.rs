//! Estimates of steps under a cost model.

use crate::{Bar, Bars, Cell, Figure, Show, Table, Unit, bytes, number::grouped, seconds, value};
use anymesh_core::cost::{Estimate, OpEstimate};

/// Where the time of a step goes: bars by op, of computing and of communication, and a table.
impl Show for Estimate {
    fn figure(&self) -> Figure {
        let mut ops: Vec<(&str, &OpEstimate)> =
            self.by_op.iter().map(|(name, op)| (*name, op)).collect();
        let time = |o: &OpEstimate| o.compute + o.communication;
        ops.sort_by(|a, b| time(b.1).total_cmp(&time(a.1)));
        let bars = Bars {
            title: "seconds of a rank, by op".into(),
            unit: Unit::Seconds,
            parts: vec!["computing".into(), "communication".into()],
            totals: true,
            bars: (ops.iter())
                .map(|(name, o)| Bar::new(*name, [o.compute, o.communication]))
                .collect(),
        };
        let heads = [
            "op",
            "kernels",
            "GFLOP",
            "touched",
            "computing",
            "received",
            "communication",
        ];
        let mut table = Table::new("", &heads).numbers(&[1, 2, 3, 4, 5, 6]);
        for (name, o) in ops.into_iter().chain([("total", &self.total)]) {
            table.row::<Cell>([
                name.into(),
                grouped(o.kernels).into(),
                value(o.products / 1e9).into(),
                bytes(o.touched).into(),
                seconds(o.compute).into(),
                Cell::bytes(o.received),
                seconds(o.communication).into(),
            ]);
        }
        let title = format!(
            "{} on {}, at most {} held by a rank",
            seconds(self.seconds()),
            self.cost.name,
            bytes(self.memory as f64)
        );
        Figure::new(title).picture(bars.picture()).table(table)
    }

    fn text(&self) -> String {
        self.to_string()
    }
}
