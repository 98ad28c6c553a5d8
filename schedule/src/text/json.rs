//! Our JSON: everything that a schedule is.

use super::csv::{cell, cells};
use crate::{Action, Error, Result, Schedule, schedule::MOST};
use serde_json::{Value, json};

impl Schedule {
    /// As JSON: `{"name": .., "micros": 2, "owner": [0, 1], "ranks": [["0F0", ..], ..]}`, with actions
    /// as in [CSV](Schedule::to_csv).
    pub fn to_json(&self) -> Value {
        let ranks: Vec<Vec<String>> = self.ranks.iter().map(|list| cells(list)).collect();
        json!({"name": self.name, "micros": self.micros, "owner": self.owner, "ranks": ranks})
    }

    /// Reads what [`to_json`](Schedule::to_json) writes.
    ///
    /// ```
    /// use anymesh_schedule::{Schedule, build};
    /// let schedule = build("dualpipev", 2, 2, 4)?;
    /// assert_eq!(Schedule::from_json(&schedule.to_json().to_string())?, schedule);
    /// assert!(Schedule::from_json(r#"{"ranks": [["0F0"]]}"#).unwrap_err().to_string().contains("micros"));
    /// # Ok::<(), anymesh_schedule::Error>(())
    /// ```
    pub fn from_json(text: &str) -> Result<Schedule> {
        let shown = || text.chars().take(60).collect::<String>();
        let bad = |expected: &str| Error::Parse {
            what: "schedule",
            text: shown(),
            expected: expected.into(),
        };
        let value: Value =
            serde_json::from_str(text).map_err(|e| bad(&format!("JSON, but {e}")))?;
        let object = value
            .as_object()
            .ok_or_else(|| bad("an object with micros, owner and ranks"))?;
        if let Some(unknown) = object
            .keys()
            .find(|k| !["name", "micros", "owner", "ranks"].contains(&k.as_str()))
        {
            return Err(bad(&format!(
                "only name, micros, owner and ranks, not {unknown:?}"
            )));
        }
        let number = |v: &Value| {
            v.as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .filter(|n| *n <= MOST)
        };
        let micros = object
            .get("micros")
            .and_then(number)
            .ok_or_else(|| bad("micros, the number of micro-batches"))?;
        let owner: Option<Vec<usize>> = object
            .get("owner")
            .and_then(Value::as_array)
            .and_then(|list| list.iter().map(number).collect());
        let owner = owner.ok_or_else(|| bad("owner, a list with the rank of each stage"))?;
        let lists = object.get("ranks").and_then(Value::as_array);
        let lists = lists.ok_or_else(|| bad("ranks, a list of actions for each rank"))?;
        let list = |list: &Value| -> Result<Vec<Action>> {
            let list = list
                .as_array()
                .ok_or_else(|| bad("ranks, a list of actions for each rank"))?;
            let mut actions = vec![];
            for action in list {
                let text = action
                    .as_str()
                    .ok_or_else(|| bad("actions as texts, such as \"0F0\""))?;
                actions.extend(cell(text)?);
            }
            Ok(actions)
        };
        Ok(Schedule {
            name: object
                .get("name")
                .and_then(Value::as_str)
                .unwrap_or("own")
                .into(),
            micros,
            owner,
            ranks: lists.iter().map(list).collect::<Result<_>>()?,
        })
    }
}
