//! What the search for a layout found.

use crate::{Bar, Bars, Cell, Figure, Show, Table, Unit, bytes, number::count, seconds};
use anymesh_layout::Report;

/// Layouts that are drawn.
const MOST: usize = 12;

/// The fastest layouts of each kind: bars of computing and waiting, and a table with the reason why
/// each is not the best.
impl Show for Report {
    fn figure(&self) -> Figure {
        let title = format!(
            "layouts on {} of {}: {} of {} tokens a step",
            count(self.ranks, "rank"),
            self.cost.name,
            count(self.sequences, "sequence"),
            self.length
        );
        let kinds = self.of_each_kind();
        let (fit, rest): (Vec<_>, Vec<_>) = kinds.into_iter().partition(|c| c.fits);
        let shown = || fit.iter().take(MOST).chain(rest.iter().take(MOST / 2));
        let bars = Bars {
            title: "seconds of a step".into(),
            unit: Unit::Seconds,
            parts: vec!["computing".into(), "waiting".into()],
            totals: false,
            bars: (fit.iter().take(MOST))
                .map(|c| Bar::new(c.layout.summary(), [c.compute, c.exposed]))
                .collect(),
        };
        let heads = ["layout", "memory", "computing", "waiting", "step", "why"];
        let mut table = Table::new("", &heads).numbers(&[1, 2, 3, 4]).code(&[0]);
        for c in shown() {
            table.row::<Cell>([
                c.layout.summary().into(),
                bytes(c.memory).into(),
                seconds(c.compute).into(),
                seconds(c.exposed).into(),
                seconds(c.seconds).into(),
                self.why(c).into(),
            ]);
        }
        let figure = Figure::new(title).picture(bars.picture()).table(table);
        let Some(best) = self.best() else {
            return figure.note("Nothing fits: take more ranks or shorter sequences.");
        };
        let mut cuts = Table::new("the best layout", &["tensor", "sharding"]).code(&[0, 1]);
        cuts.row([
            "residual stream".to_string(),
            best.layout.stream.to_string(),
        ]);
        for (pattern, sharding) in &best.layout.parameters {
            cuts.row([pattern.clone(), sharding.to_string()]);
        }
        figure.table(cuts)
    }

    fn text(&self) -> String {
        self.to_string()
    }
}
