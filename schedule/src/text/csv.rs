//! torch's CSV: a line for each rank, an action in each cell.

use crate::{Action, Error, Kind, Result, Schedule};

/// What torch writes besides: parameters that are gathered and reduced, and waits for buffers. They
/// are no actions here; except for the waits they take a turn.
const TURNS: [&str; 4] = ["UNSHARD", "RESHARD", "WAIT_REDUCE_GRAD", "REDUCE_GRAD"];
const PAIR: &str = "OVERLAP_F_B";

impl Schedule {
    /// In torch's format: a line for each rank, cells such as `0F0`, `1SEND_B3`, empty for a free
    /// slot, `(0F3;3B1)OVERLAP_F_B` for two joined passes.
    pub fn to_csv(&self) -> String {
        let mut text = String::new();
        for list in &self.ranks {
            text += &cells(list).join(",");
            text.push('\n');
        }
        text
    }

    /// Reads torch's format. The number of stages and of micro-batches and which rank has which stage
    /// are taken from the actions.
    ///
    /// ```
    /// use anymesh_schedule::Schedule;
    /// let own = Schedule::from_csv("0F0,,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n")?;
    /// assert_eq!((own.stages(), own.micros, &own.owner[..]), (2, 2, &[0, 1][..]));
    /// assert!(Schedule::from_csv("0F0,0Q0").is_err());
    /// # Ok::<(), anymesh_schedule::Error>(())
    /// ```
    pub fn from_csv(text: &str) -> Result<Schedule> {
        let ranks = text
            .trim_end_matches(['\n', '\r'])
            .lines()
            .map(|line| line.split(',').map(cell).collect::<Result<Vec<_>>>())
            .map(|list| Ok(list?.into_iter().flatten().collect()))
            .collect::<Result<Vec<Vec<Action>>>>()?;
        inferred("csv", ranks)
    }
}

/// The cells of a list: two joined actions are one.
pub(super) fn cells(list: &[Action]) -> Vec<String> {
    let mut cells = vec![];
    let mut at = 0;
    while let Some(action) = list.get(at) {
        match list.get(at + 1).filter(|_| action.joined) {
            Some(next) => {
                cells.push(format!("({action};{next}){PAIR}"));
                at += 1;
            }
            None if action.kind == Kind::Idle => cells.push(String::new()),
            None => cells.push(action.to_string()),
        }
        at += 1;
    }
    cells
}

/// The actions of a cell.
pub(super) fn cell(text: &str) -> Result<Vec<Action>> {
    let text = text.trim();
    let plain = text.trim_start_matches(|c: char| c.is_ascii_digit());
    if text.is_empty() || TURNS.contains(&plain) {
        return Ok(vec![Action::idle()]);
    }
    if plain.starts_with("WAIT_SEND_") {
        return Ok(vec![]);
    }
    let pair = text.strip_prefix('(').and_then(|t| t.strip_suffix(PAIR));
    let Some(pair) = pair.and_then(|t| t.strip_suffix(')')) else {
        return Ok(vec![text.parse()?]);
    };
    let (first, second) = pair.split_once(';').ok_or_else(|| Error::Parse {
        what: "pair of actions",
        text: text.into(),
        expected: format!("two actions, such as (0F3;3B1){PAIR}"),
    })?;
    let mut first: Action = first.trim().parse()?;
    first.joined = true;
    Ok(vec![first, second.trim().parse()?])
}

/// The schedule of lists that do not say how many stages and micro-batches there are.
pub(super) fn inferred(name: &str, ranks: Vec<Vec<Action>>) -> Result<Schedule> {
    let actions = || ranks.iter().flatten().filter(|a| a.kind.computes());
    let count = actions().count();
    let stages = actions()
        .map(|a| a.stage)
        .max()
        .map_or(0, |s| s.saturating_add(1));
    let micros = actions()
        .map(|a| a.micro)
        .max()
        .map_or(0, |m| m.saturating_add(1));
    if count == 0 {
        return Err(Error::Number {
            what: "the number of passes",
            got: "0".into(),
            valid: "a line for each rank with actions such as 0F0,0B0 is needed".into(),
        });
    }
    // Each stage and each micro-batch is in some action, so larger numbers are typing errors.
    for (what, got) in [
        ("the number of stages", stages),
        ("the number of micro-batches", micros),
    ] {
        if got > count {
            return Err(Error::Number {
                what,
                got: got.to_string(),
                valid: format!("{count} passes have between 1 and {count}, counted from 0"),
            });
        }
    }
    let mut owner = vec![None; stages];
    for (rank, list) in ranks.iter().enumerate() {
        for action in list.iter().filter(|a| a.kind.computes()) {
            owner[action.stage].get_or_insert(rank);
        }
    }
    let owner: Option<Vec<usize>> = owner.iter().copied().collect();
    let owner = owner.ok_or_else(|| Error::Number {
        what: "the number of stages",
        got: stages.to_string(),
        valid: "some stage below the last one is in no list".into(),
    })?;
    Ok(Schedule {
        name: name.into(),
        micros,
        owner,
        ranks,
    })
}
