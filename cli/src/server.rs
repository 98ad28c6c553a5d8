//! Answers requests, one JSON object a line, and outlives each of them.
//!
//! Whatever a line holds, one line answers it: `{"ok": true, ..}` or `{"ok": false, "error": ".."}`.
//! Empty lines are passed over. Sizes that an answer would have no time or memory for are refused
//! with the bound that they exceed, by those who read the request. What is found out too late is
//! stopped waiting for after [`TIME`], and a panic is an answer too.

use crate::request::{bad, reply};
use anymesh::Result;
use serde_json::Value;
use std::{
    io::{BufRead, Read, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    time::Duration,
};

/// The longest line that is read.
const MAX_LINE: usize = 1 << 20;

/// How long an answer may take.
const TIME: Duration = Duration::from_secs(60);

/// What computes an answer.
pub(crate) type Answer = fn(&Value) -> Result<Value>;

/// Answers every line of stdin on stdout.
pub(crate) fn serve(answer: Answer) -> Result<()> {
    let served = Server::new(answer, TIME).run(std::io::stdin().lock(), std::io::stdout().lock());
    match served {
        // Whoever asked has gone.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        served => served.map_err(|e| bad(e.to_string())),
    }
}

/// Requests are answered on a thread of their own, one after the other, so that the time that they
/// take can be limited and what was learned for one is there for the next.
pub(crate) struct Server {
    answer: Answer,
    time: Duration,
    worker: Option<(Sender<Value>, Receiver<Value>)>,
}

impl Server {
    pub(crate) fn new(answer: Answer, time: Duration) -> Self {
        Self {
            answer,
            time,
            worker: None,
        }
    }

    /// Answers every line of `input` on a line of `out`.
    pub(crate) fn run(&mut self, mut input: impl BufRead, out: impl Write) -> std::io::Result<()> {
        let mut out = std::io::BufWriter::new(out);
        while let Some(line) = next_line(&mut input)? {
            let answer = match line {
                Line::Of(bytes) if bytes.trim_ascii().is_empty() => continue,
                Line::Of(bytes) => match serde_json::from_slice(&bytes) {
                    Ok(request) => self.ask(request),
                    Err(error) => reply(Err(bad(format!("not JSON: {error}")))),
                },
                Line::TooLong => reply(Err(bad(format!(
                    "a line of more than {MAX_LINE} bytes: send less at once"
                )))),
            };
            writeln!(out, "{answer}")?;
            out.flush()?;
        }
        Ok(())
    }

    /// The answer to one request.
    fn ask(&mut self, request: Value) -> Value {
        let (requests, answers) = self
            .worker
            .get_or_insert_with(|| work_on_a_thread(self.answer));
        let gone = "the thread that answers has ended";
        let answer = match requests.send(request) {
            Ok(()) => answers.recv_timeout(self.time),
            Err(_) => Err(RecvTimeoutError::Disconnected),
        };
        answer.unwrap_or_else(|why| {
            // The thread ends with what it is at, if that ends; the next request gets another.
            self.worker = None;
            let limit = format!(
                "this takes longer than {} s, which is as long as an answer may take: ask for less",
                self.time.as_secs_f64()
            );
            reply(Err(bad(match why {
                RecvTimeoutError::Timeout => limit,
                RecvTimeoutError::Disconnected => gone.into(),
            })))
        })
    }
}

fn work_on_a_thread(answer: Answer) -> (Sender<Value>, Receiver<Value>) {
    let (requests, inbox) = channel::<Value>();
    let (outbox, answers) = channel();
    std::thread::spawn(move || {
        while let Ok(request) = inbox.recv() {
            let result = catch_unwind(AssertUnwindSafe(|| answer(&request)));
            let result = result.unwrap_or_else(|panic| {
                let what = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied())
                    .unwrap_or("no message");
                Err(bad(format!(
                    "the program failed, which is its fault and not the request's: {what}"
                )))
            });
            if outbox.send(reply(result)).is_err() {
                return;
            }
        }
    });
    (requests, answers)
}

enum Line {
    Of(Vec<u8>),
    TooLong,
}

/// The next line, of which no more than [`MAX_LINE`] is kept; `None` at the end.
fn next_line(input: &mut impl BufRead) -> std::io::Result<Option<Line>> {
    let mut line = vec![];
    let limit = MAX_LINE as u64 + 1;
    input.by_ref().take(limit).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    if line.len() <= MAX_LINE || line.ends_with(b"\n") {
        return Ok(Some(Line::Of(line)));
    }
    loop {
        let more = input.fill_buf()?;
        let (used, end) = match more.iter().position(|b| *b == b'\n') {
            Some(at) => (at + 1, true),
            None => (more.len(), more.is_empty()),
        };
        input.consume(used);
        if end {
            return Ok(Some(Line::TooLong));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn answers(answer: Answer, time: Duration, input: &[u8]) -> Vec<Value> {
        let mut out = vec![];
        Server::new(answer, time)
            .run(input, &mut out)
            .expect("memory can be read and written");
        let text = String::from_utf8(out).expect("answers are text");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("answers are JSON"))
            .collect()
    }

    /// What a test asks for in one word.
    fn play(request: &Value) -> Result<Value> {
        match request.as_str() {
            Some("panic") => panic!("on purpose"),
            Some("sleep") => std::thread::sleep(Duration::from_secs(20)),
            _ => {}
        }
        Ok(json!({ "heard": request }))
    }

    #[test]
    fn a_panic_is_answered_and_the_next_request_too() {
        let answers = answers(play, TIME, b"\"panic\"\n\n1\n");
        assert_eq!(answers.len(), 2);
        let error = answers[0]["error"].as_str().unwrap_or("");
        assert!(error.contains("on purpose"), "{error}");
        assert_eq!(answers[1], json!({ "heard": 1, "ok": true }));
    }

    #[test]
    fn an_answer_that_takes_too_long_is_not_waited_for() {
        let time = Duration::from_millis(200);
        let answers = answers(play, time, b"\"sleep\"\n2\n");
        let error = answers[0]["error"].as_str().unwrap_or("");
        assert!(error.contains("0.2 s"), "{error}");
        assert_eq!(answers[1]["heard"], 2);
    }

    #[test]
    fn lines_that_are_no_json_are_answered() {
        let mut input = b"\xff\xfe\n{\"a\":\n".to_vec();
        input.extend([b'['; 100_000]);
        input.push(b'\n');
        // One line of just the limit, one beyond it, and a last one without an end.
        for len in [MAX_LINE - 2, 3 * MAX_LINE] {
            input.push(b'"');
            input.extend(vec![b'x'; len]);
            input.extend(b"\"\n");
        }
        input.extend(b"3");
        let answers = answers(|_| Ok(json!({})), TIME, &input);
        let errors: Vec<&str> = answers
            .iter()
            .map(|a| a["error"].as_str().unwrap_or("fine"))
            .collect();
        assert_eq!(errors.len(), 6);
        assert!(
            errors[..3].iter().all(|e| e.contains("not JSON")),
            "{errors:?}"
        );
        assert!(errors[2].contains("recursion"), "{}", errors[2]);
        assert_eq!((errors[3], errors[5]), ("fine", "fine"));
        assert!(errors[4].contains("1048576 bytes"), "{}", errors[4]);
    }
}
