//! A timing as letters, for terminals.

use crate::{Kind, Schedule, Timing};

impl Timing {
    /// Who does what when: for each rank a line with the kind of pass and one with the last digit of the
    /// micro-batch; where ranks have several stages also one that counts the rank's stages from 0. A
    /// column is the shortest pass, or more if that takes more than `width` columns.
    ///
    /// ```
    /// use anymesh_schedule::{Costs, build};
    /// let schedule = build("1f1b", 2, 1, 2)?;
    /// let chart = schedule.timing(&Costs::default())?.chart(&schedule, 80);
    /// assert_eq!(chart, "\
    /// rank 0  FF..BB.BB
    ///         01  00 11
    /// rank 1  .FBBFBB..
    ///          000111
    /// ");
    /// # Ok::<(), anymesh_schedule::Error>(())
    /// ```
    pub fn chart(&self, schedule: &Schedule, width: usize) -> String {
        let lanes = || schedule.ranks.iter().zip(&self.spans);
        let passes = lanes().flat_map(|(list, spans)| list.iter().zip(spans));
        let shortest = passes
            .filter(|(a, s)| a.kind.computes() && s.end > s.start)
            .map(|(_, s)| s.end - s.start)
            .fold(self.makespan, f64::min);
        let width = width.max(1);
        let least = self.makespan / width as f64;
        let unit = shortest.max(least);
        let columns = match unit > 0.0 {
            true => ((self.makespan / unit - 1e-9).ceil() as usize).min(width),
            false => 0,
        };
        let name = |rank: usize| format!("rank {rank}");
        let left = name(self.spans.len().saturating_sub(1)).len() + 2;
        let chunks = schedule.stages() > schedule.ranks.len();
        let digit = |n: usize| char::from(b'0' + (n % 10) as u8);
        let mut text = String::new();
        for (rank, (list, spans)) in lanes().enumerate() {
            let own = schedule.stages_of(rank);
            let mut lines = [vec!['.'; columns], vec![' '; columns], vec![' '; columns]];
            for (action, span) in list.iter().zip(spans) {
                let letter = match action.kind {
                    Kind::F => 'F',
                    Kind::B => 'B',
                    Kind::I => 'I',
                    Kind::W => 'W',
                    _ => continue,
                };
                // Columns whose middle it covers.
                let from = (span.start / unit - 0.5 + 1e-9).ceil().max(0.0) as usize;
                let to = (span.end / unit - 0.5 - 1e-9).ceil().max(0.0) as usize;
                let chunk = own.iter().position(|s| *s == action.stage).unwrap_or(0);
                let to = to.min(columns);
                let letters = [letter, digit(action.micro), digit(chunk)];
                for (line, letter) in lines.iter_mut().zip(letters) {
                    line[from.min(to)..to].fill(letter);
                }
            }
            for (i, line) in lines.iter().take(if chunks { 3 } else { 2 }).enumerate() {
                let head = if i == 0 { name(rank) } else { String::new() };
                let line: String = line.iter().collect();
                text += format!("{head:left$}{line}").trim_end();
                text.push('\n');
            }
        }
        text
    }
}
