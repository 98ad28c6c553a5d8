//! Paddle's job lists: a name such as `forward`, `backward_b1` or `recv_forward0`, and a micro-batch.

use super::csv::inferred;
use crate::{Action, Error, Kind, Placement, Result, Schedule};
use serde_json::Value;

/// A job: its type, which ends in the chunk if a rank has several stages, and the micro-batch.
pub type Job = (String, usize);

impl Schedule {
    /// Paddle's jobs of each rank.
    ///
    /// With `transfers` the lists have `recv_forward` and `send_backward` as Paddle's 1F1B and VPP have
    /// them: where a forward pass follows a backward pass, it is received before the gradient is sent,
    /// so that both are on their way at once. Paddle has no jobs for the other two directions.
    pub fn to_paddle(&self, transfers: bool) -> Result<Vec<Vec<Job>>> {
        let ranks = self.ranks.len();
        let chunks = self.stages() / ranks.max(1);
        if ranks == 0 || self.owner != Placement::Loop.owners(ranks, chunks) {
            return Err(Error::Refused {
                name: "Paddle's job lists",
                what: "stages that are not placed in a loop".into(),
                instead: "stage s must be on rank s % ranks".into(),
            });
        }
        let job = |kind: &str, action: &Action| match chunks {
            1 => (kind.to_string(), action.micro),
            _ => (format!("{kind}{}", action.stage / ranks), action.micro),
        };
        let list = |list: &Vec<Action>| {
            let passes: Vec<&Action> = list.iter().filter(|a| a.kind.computes()).collect();
            let mut jobs = vec![];
            for (at, action) in passes.iter().enumerate() {
                let back = |a: &&&Action| matches!(a.kind, Kind::B | Kind::I);
                let before = at.checked_sub(1).map(|p| passes[p]).filter(|a| back(&a));
                match action.kind {
                    Kind::F => {
                        if transfers {
                            jobs.push(job("recv_forward", action));
                            jobs.extend(before.map(|b| job("send_backward", b)));
                        }
                        jobs.push(job("forward", action));
                    }
                    Kind::W => jobs.push(job("backward_w", action)),
                    kind => {
                        let name = if kind == Kind::B {
                            "backward"
                        } else {
                            "backward_b"
                        };
                        jobs.push(job(name, action));
                        let next = passes.get(at + 1);
                        if transfers && next.is_none_or(|n| n.kind != Kind::F) {
                            jobs.push(job("send_backward", action));
                        }
                    }
                }
            }
            jobs.push(("optimizer".into(), 0));
            jobs
        };
        Ok(self.ranks.iter().map(list).collect())
    }

    /// Reads Paddle's jobs, a list for each rank: `[[["forward", 0], ["backward", 0], ["optimizer", 0]]]`.
    /// Jobs of transfers are left out: [`with_transfers`](Schedule::with_transfers) puts all in.
    ///
    /// ```
    /// use anymesh_schedule::{Limits, Schedule, build};
    /// let jobs = build("zbh1", 4, 1, 8)?.to_paddle(false)?;
    /// let read = Schedule::from_paddle(&serde_json::to_string(&jobs).unwrap())?;
    /// assert_eq!(read.prove(&Limits::none())?.peak(), [4, 4, 4, 4]);
    /// # Ok::<(), anymesh_schedule::Error>(())
    /// ```
    pub fn from_paddle(text: &str) -> Result<Schedule> {
        let bad = |text: &str| {
            Error::Parse {
            what: "list of Paddle's jobs",
            text: text.chars().take(60).collect(),
            expected: "for each rank a list of [type, micro-batch] with types forward, backward, backward_b, backward_w, recv_forward, send_backward, with the chunk after them if there are several, and optimizer".into(),
        }
        };
        let value: Value = serde_json::from_str(text).map_err(|_| bad(text))?;
        let lists: Option<Vec<&Vec<Value>>> = value
            .as_array()
            .and_then(|lists| lists.iter().map(Value::as_array).collect());
        let lists = lists.ok_or_else(|| bad(text))?;
        let count = lists.len();
        let mut ranks = vec![];
        for (rank, jobs) in lists.into_iter().enumerate() {
            let mut list = vec![];
            for job in jobs {
                let parts = job.as_array().map(Vec::as_slice);
                let Some([Value::String(kind), micro]) = parts else {
                    return Err(bad(&job.to_string()));
                };
                let micro = micro.as_u64().and_then(|m| usize::try_from(m).ok());
                let micro = micro.ok_or_else(|| bad(&job.to_string()))?;
                let plain = kind.trim_end_matches(|c: char| c.is_ascii_digit());
                let chunk = match &kind[plain.len()..] {
                    "" => Some(0),
                    digits => digits.parse::<usize>().ok(),
                };
                let stage = chunk
                    .and_then(|c| c.checked_mul(count))
                    .and_then(|s| s.checked_add(rank))
                    .ok_or_else(|| bad(kind))?;
                list.push(match plain {
                    "forward" => Action::f(stage, micro),
                    "backward" => Action::b(stage, micro),
                    "backward_b" => Action::i(stage, micro),
                    "backward_w" => Action::w(stage, micro),
                    "recv_forward" | "send_backward" | "optimizer" => continue,
                    _ => return Err(bad(kind)),
                });
            }
            ranks.push(list);
        }
        inferred("paddle", ranks)
    }
}
