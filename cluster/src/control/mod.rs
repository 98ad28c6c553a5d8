//! How processes know of each other: who is there, who died, who failed, and who is to blame when
//! something does not arrive. Tensors go another way; nothing here is needed while all goes well.

mod alarm;
pub(crate) mod hub;
mod judge;
pub(crate) mod message;

pub(crate) use alarm::Alarm;
#[cfg(any(test, fuzzing))]
pub(crate) use judge::{Witness, judge};
pub(crate) use message::{Trouble, Verdict};

use crate::{
    door::in_words,
    frame::{Card, FRAME_BYTES, Patience, read_frame, write_frame},
    recorder::{Recorder, TOLD},
    wire::Broken,
};
use anymesh_core::{Error, Result};
use message::{ToHub, ToMember};
use std::{
    io,
    net::{Shutdown, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long the hub may take for a verdict: its inquiry, and some more.
const VERDICT: Duration = Duration::from_millis(1500);
/// How long a message to the hub may take.
const WRITE: Duration = Duration::from_millis(500);

/// A process's connection to the hub, and what it heard there.
#[derive(Debug)]
pub(crate) struct Control {
    line: Arc<Line>,
    pub(crate) alarm: Arc<Alarm>,
    pub(crate) recorder: Arc<Recorder>,
    /// Everybody, by number.
    pub(crate) cards: Vec<Card>,
    pub(crate) process: usize,
}

/// The connection; two threads write to it.
#[derive(Debug)]
struct Line {
    stream: TcpStream,
    turn: Mutex<()>,
    /// This process is leaving: that the connection ends means nothing any more.
    leaving: AtomicBool,
}

impl Line {
    fn say(&self, message: &ToHub) -> io::Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = Patience::until(Instant::now() + WRITE);
        write_frame(&self.stream, message, &patience).inspect_err(|_| {
            // Half a message is worse than none.
            let _ = self.stream.shutdown(Shutdown::Both);
        })
    }
}

impl Control {
    /// Waits on a connection to the hub until everybody is there. `own` is how this process
    /// introduced itself.
    pub(crate) fn begin(
        stream: TcpStream,
        own: &Card,
        until: Instant,
        seconds: f64,
    ) -> Result<Self> {
        let op = "init";
        let failed = |detail: String| Error::Lost {
            op,
            ranks: [0].into(),
            detail,
        };
        let cards = match read_frame(&stream, FRAME_BYTES, &Patience::until(until)) {
            Ok(ToMember::Start { cards }) => cards,
            Ok(ToMember::NotAll { missing, seconds }) => {
                return Err(Error::Timeout {
                    op,
                    seconds,
                    missing: missing.into(),
                    detail: "; they never came to the meeting".into(),
                });
            }
            Ok(ToMember::Verdict(verdict)) => return Err(verdict.error(op, |p| vec![p])),
            Ok(other) => return Err(failed(format!("the hub spoke out of turn: {other:?}"))),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => {
                return Err(Error::Timeout {
                    op,
                    seconds,
                    missing: [0].into(),
                    detail: "; the hub, which is in it, said nothing".into(),
                });
            }
            Err(e) => {
                let detail = format!("process 0, which has the hub, is gone ({})", in_words(&e));
                return Err(failed(detail));
            }
        };
        let process = cards.iter().position(|card| card.process == own.process);
        let Some(process) = process else {
            return Err(failed("the hub's list lacks this process".into()));
        };
        let mut card = own.clone();
        (card.process, card.size) = (process, cards.len());
        let control = Self {
            line: Arc::new(Line {
                stream,
                turn: Mutex::new(()),
                leaving: AtomicBool::new(false),
            }),
            alarm: Arc::default(),
            recorder: Arc::new(Recorder::new(&card)),
            cards,
            process,
        };
        control
            .listen()
            .map_err(|e| failed(format!("no thread for the control connection: {e}")))?;
        Ok(control)
    }

    /// Answers the hub in a thread, also while the program computes.
    fn listen(&self) -> io::Result<()> {
        let (line, alarm, recorder) =
            (self.line.clone(), self.alarm.clone(), self.recorder.clone());
        let hub = self.cards[0].to_string();
        line.stream.set_read_timeout(None)?;
        let run = move || {
            loop {
                match read_frame(&line.stream, FRAME_BYTES, &Patience::forever()) {
                    Ok(ToMember::Inquiry { inquiry }) => {
                        let record = Box::new(recorder.record(TOLD));
                        // A hub that cannot be reached is noticed by the next read.
                        let _ = line.say(&ToHub::Status { inquiry, record });
                    }
                    Ok(ToMember::Verdict(verdict)) => {
                        alarm.ring(verdict);
                    }
                    Ok(ToMember::Left { process }) => alarm.left(process),
                    Ok(ToMember::Go) => alarm.go(),
                    Ok(ToMember::Value { key, value }) => alarm.tell(key, value),
                    Ok(ToMember::Start { .. } | ToMember::NotAll { .. }) => {}
                    Err(_) if line.leaving.load(Ordering::Relaxed) => return,
                    Err(_) if alarm.left_since(0).is_some() => return,
                    Err(e) => {
                        let detail = format!("{hub}, which had the hub, died ({})", in_words(&e));
                        alarm.ring(Verdict::Died { process: 0, detail });
                        return;
                    }
                }
            }
        };
        thread::Builder::new()
            .name("anymesh control".into())
            .spawn(run)
            .map(|_| ())
    }

    /// Why a transfer broke, as all processes are told. `seconds` is how long it waited.
    pub(crate) fn conclude(&self, broken: Broken, seconds: f64) -> Verdict {
        let (trouble, fallback) = match broken {
            Broken::Stopped => {
                let lost = || self.silent_hub(seconds);
                return self.alarm.wait(VERDICT).unwrap_or_else(lost);
            }
            Broken::Late(from) => {
                let from = if from.is_empty() { vec![0] } else { from };
                (
                    Trouble::Late {
                        from: from.clone(),
                        seconds,
                    },
                    None,
                )
            }
            Broken::Differs(from) => (Trouble::Differs { from }, None),
            Broken::Gone(who, detail) => {
                let detail = match self.alarm.left_since(who) {
                    Some(_) => format!("{} has left", self.name(who)),
                    None => format!("{} is gone ({detail})", self.name(who)),
                };
                let fallback = Verdict::Died {
                    process: who,
                    detail: detail.clone(),
                };
                (Trouble::Gone { who, detail }, Some(fallback))
            }
        };
        // A process that died is seen by the hub at the same time: its word is the better one.
        if fallback.is_some()
            && let Some(verdict) = self.alarm.wait(Duration::from_millis(200))
        {
            return verdict;
        }
        let said = self.line.say(&ToHub::Trouble(trouble));
        let heard = match said {
            Ok(()) => self.alarm.wait(VERDICT),
            Err(_) => self.alarm.wait(Duration::from_millis(100)),
        };
        heard.unwrap_or_else(|| {
            let verdict = fallback.unwrap_or_else(|| self.silent_hub(seconds));
            self.alarm.ring(verdict)
        })
    }

    /// The hub itself does not answer.
    fn silent_hub(&self, seconds: f64) -> Verdict {
        Verdict::Missing {
            processes: vec![0],
            seconds,
            detail: format!(
                "\n  {}, which has the hub, does not answer: it is stopped, or its machine cannot be reached",
                self.name(0)
            ),
        }
    }

    /// A process in words.
    pub(crate) fn name(&self, process: usize) -> String {
        match self.cards.get(process) {
            Some(card) => card.to_string(),
            None => format!("process {process}"),
        }
    }

    /// Says that this process has all its connections, and waits until all have: so either every
    /// process has a cluster or none.
    pub(crate) fn ready(&self, within: Duration) -> Result<()> {
        self.line
            .say(&ToHub::Ready)
            .map_err(|e| self.hub_gone(&e))?;
        match self.alarm.wait_for_go(within) {
            Ok(()) => Ok(()),
            Err(Some(verdict)) => Err(verdict.error("init", |p| vec![p])),
            Err(None) => Err(Error::Timeout {
                op: "init",
                seconds: within.as_secs_f64(),
                missing: [].into(),
                detail: "; not all processes got their connections".into(),
            }),
        }
    }

    /// Tells all others of an error that only this process has.
    pub(crate) fn failed(&self, error: &str) {
        if !self.alarm.has_rung() {
            let _ = self.line.say(&ToHub::Failed {
                error: error.into(),
            });
        }
    }

    /// Leaves a value for others.
    #[cfg_attr(not(any(feature = "mpi", feature = "nccl")), allow(dead_code))]
    pub(crate) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let message = ToHub::Set {
            key: key.into(),
            value: value.into(),
        };
        self.line.say(&message).map_err(|e| self.hub_gone(&e))
    }

    /// A value that another process leaves, waiting for it.
    #[cfg_attr(not(any(feature = "mpi", feature = "nccl")), allow(dead_code))]
    pub(crate) fn get(&self, key: &str, within: Duration) -> Result<Vec<u8>> {
        self.line
            .say(&ToHub::Get { key: key.into() })
            .map_err(|e| self.hub_gone(&e))?;
        match self.alarm.value(key, Instant::now() + within) {
            Ok(value) => Ok(value),
            Err(Some(verdict)) => Err(verdict.error("init", |p| vec![p])),
            Err(None) => Err(Error::Timeout {
                op: "init",
                seconds: within.as_secs_f64(),
                missing: [].into(),
                detail: format!("; nobody gave the value of '{key}'"),
            }),
        }
    }

    fn hub_gone(&self, error: &io::Error) -> Error {
        Error::Lost {
            op: "init",
            ranks: [0].into(),
            detail: format!(
                "{}, which has the hub, is gone ({})",
                self.name(0),
                in_words(error)
            ),
        }
    }

    /// Says goodbye. The process with the hub stays until the others have left too, since they would
    /// miss it.
    pub(crate) fn leave(&self, within: Duration) {
        self.line.leaving.store(true, Ordering::Relaxed);
        let _ = self.line.say(&ToHub::Goodbye);
        if self.process == 0 {
            let others: Vec<usize> = (1..self.cards.len()).collect();
            self.alarm.wait_until_left(&others, within);
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.line.leaving.store(true, Ordering::Relaxed);
        let _ = self.line.stream.shutdown(Shutdown::Both);
    }
}
