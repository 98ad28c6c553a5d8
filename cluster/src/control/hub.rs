//! The hub: one process to which all keep a connection. It sees who dies, hears who is in trouble,
//! asks everybody what they do, and tells everybody the same.

use super::{
    judge::{Witness, judge},
    message::{ToHub, ToMember, Trouble, Verdict},
};
use crate::{
    door::{Door, in_words},
    frame::{Answer, Card, FRAME_BYTES, Hello, Patience, Purpose, read_frame, refuse, write_frame},
};
use std::{
    collections::HashMap,
    io,
    net::TcpStream,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How long processes may take to say what they do.
const INQUIRY: Duration = Duration::from_millis(1000);
/// How long a message to a process may take; it is small, so only a stopped one takes longer.
const WRITE: Duration = Duration::from_millis(300);

/// Shared by the hub's threads, one for each member.
#[derive(Debug)]
struct Hub {
    cards: Vec<Card>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    members: Vec<Member>,
    values: HashMap<String, Vec<u8>>,
    /// Who asked for a value that there is not yet.
    asking: Vec<(usize, String)>,
    inquiry: Option<Inquiry>,
    inquiries: u64,
    over: bool,
}

#[derive(Debug)]
struct Member {
    stream: Arc<TcpStream>,
    standing: Standing,
    /// Whether it has all its connections.
    ready: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Here,
    Left,
    Dead,
}

/// Who has answered what.
#[derive(Debug)]
struct Inquiry {
    number: u64,
    reporter: usize,
    trouble: Trouble,
    answers: Vec<Option<Box<crate::recorder::Record>>>,
}

/// Waits at the door until all processes of the run have come, then serves them in threads of its
/// own. `expected` are the numbers of those who should come. Returns when everybody was told who is
/// there, or that some are missing.
pub(crate) fn gather(
    door: &Door,
    epoch: u32,
    expected: &[usize],
    until: Instant,
    seconds: f64,
    enough: bool,
) -> Result<(), String> {
    let mut came: HashMap<usize, (Card, TcpStream)> = HashMap::new();
    let (mut expected, mut died) = (expected.to_vec(), None);
    while came.len() < expected.len() {
        let dead = || came.values().any(|(_, stream)| is_closed(stream));
        let patience = Patience {
            until: Some(until),
            stopped: &dead,
        };
        match door.next(Purpose::Control, epoch, &patience) {
            Ok((hello, stream)) => join(&mut came, &expected, hello, stream),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => break,
            Err(_) => {
                let gone = came
                    .iter()
                    .find(|(_, (_, stream))| is_closed(stream))
                    .map(|(process, _)| *process);
                let Some((process, (card, _))) = gone.and_then(|p| came.remove_entry(&p)) else {
                    continue;
                };
                // It will not come again: its launcher would have to start it. The others are waited
                // for in any case, so that all are told.
                expected.retain(|p| *p != process);
                let detail = format!("{card} died while the others were coming");
                died.get_or_insert(Verdict::Died { process, detail });
            }
        }
    }
    if let Some(verdict) = died.filter(|_| !enough) {
        tell_all(&came, &ToMember::Verdict(verdict));
        return Ok(());
    }
    let missing: Vec<usize> = expected
        .iter()
        .copied()
        .filter(|p| !came.contains_key(p))
        .collect();
    if !missing.is_empty() && !enough {
        tell_all(&came, &ToMember::NotAll { missing, seconds });
        return Ok(());
    }
    let mut members: Vec<(Card, TcpStream)> = came.into_values().collect();
    members.sort_by_key(|(card, _)| card.process);
    serve(members).map_err(|e| format!("the hub cannot start its threads: {e}"))
}

fn join(
    came: &mut HashMap<usize, (Card, TcpStream)>,
    expected: &[usize],
    hello: Hello,
    stream: TcpStream,
) {
    let process = hello.card.process;
    if let Some((card, _)) = came.get(&process) {
        return refuse(
            &stream,
            format!("{card} is here already: two processes have the same rank"),
        );
    }
    if !expected.contains(&process) {
        return refuse(&stream, format!("process {process} is not expected"));
    }
    let patience = Patience::until(Instant::now() + WRITE);
    if write_frame(&stream, &Answer::Welcome, &patience).is_ok() {
        came.insert(process, (hello.card, stream));
    }
}

/// As [`Hub::tell`], the process that has the hub last.
fn tell_all(came: &HashMap<usize, (Card, TcpStream)>, message: &ToMember) {
    let mut order: Vec<&usize> = came.keys().collect();
    order.sort_unstable_by(|a, b| b.cmp(a));
    for process in order {
        let (_, stream) = &came[process];
        let _ = write_frame(stream, message, &Patience::until(Instant::now() + WRITE));
    }
}

/// Whether the other end has closed a connection on which nothing is expected.
fn is_closed(stream: &TcpStream) -> bool {
    let closed = match stream.set_nonblocking(true) {
        Ok(()) => match stream.peek(&mut [0]) {
            Ok(n) => n == 0,
            Err(e) => e.kind() != io::ErrorKind::WouldBlock,
        },
        Err(_) => true,
    };
    closed || stream.set_nonblocking(false).is_err()
}

/// Tells everybody who is there and listens to each in a thread.
fn serve(members: Vec<(Card, TcpStream)>) -> io::Result<()> {
    let cards: Vec<Card> = members.iter().map(|(card, _)| card.clone()).collect();
    let member = |(_, stream): (Card, TcpStream)| Member {
        stream: Arc::new(stream),
        standing: Standing::Here,
        ready: false,
    };
    let members: Vec<Member> = members.into_iter().map(member).collect();
    let streams: Vec<Arc<TcpStream>> = members.iter().map(|m| m.stream.clone()).collect();
    let hub = Arc::new(Hub {
        cards: cards.clone(),
        state: Mutex::new(State {
            members,
            values: HashMap::new(),
            asking: vec![],
            inquiry: None,
            inquiries: 0,
            over: false,
        }),
    });
    for (number, stream) in streams.into_iter().enumerate() {
        stream.set_read_timeout(None)?;
        let hub = hub.clone();
        thread::Builder::new()
            .name(format!("anymesh hub {number}"))
            .spawn(move || hub.listen(number, &stream))?;
    }
    hub.tell(&mut hub.state(), &ToMember::Start { cards });
    Ok(())
}

impl Hub {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens to one member until it leaves or dies.
    fn listen(self: &Arc<Self>, number: usize, stream: &TcpStream) {
        loop {
            let message: io::Result<ToHub> = read_frame(stream, FRAME_BYTES, &Patience::forever());
            let mut state = self.state();
            match message {
                Ok(ToHub::Goodbye) => {
                    state.members[number].standing = Standing::Left;
                    self.tell(&mut state, &ToMember::Left { process: number });
                    return;
                }
                Ok(message) => self.hear(&mut state, number, message),
                Err(e) => {
                    state.members[number].standing = Standing::Dead;
                    // One that is there and cannot be understood must not wait for an answer.
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                    let detail = format!("{} died ({})", self.cards[number], in_words(&e));
                    self.conclude(
                        &mut state,
                        Verdict::Died {
                            process: number,
                            detail,
                        },
                    );
                    return;
                }
            }
        }
    }

    fn hear(self: &Arc<Self>, state: &mut State, number: usize, message: ToHub) {
        match message {
            ToHub::Ready => {
                state.members[number].ready = true;
                if state.members.iter().all(|m| m.ready) {
                    self.tell(state, &ToMember::Go);
                }
            }
            ToHub::Set { key, value } => {
                let (asked, still): (Vec<_>, Vec<_>) = std::mem::take(&mut state.asking)
                    .into_iter()
                    .partition(|(_, wanted)| *wanted == key);
                state.asking = still;
                for (who, key) in asked {
                    let value = value.clone();
                    send(&state.members[who], &ToMember::Value { key, value });
                }
                state.values.insert(key, value);
            }
            ToHub::Get { key } => match state.values.get(&key).cloned() {
                Some(value) => send(&state.members[number], &ToMember::Value { key, value }),
                None => state.asking.push((number, key)),
            },
            ToHub::Failed { error } => self.conclude(
                state,
                Verdict::Failed {
                    process: number,
                    error,
                },
            ),
            ToHub::Trouble(trouble) => self.inquire(state, number, trouble),
            ToHub::Status { inquiry, record } => {
                if let Some(open) = state.inquiry.as_mut().filter(|open| open.number == inquiry) {
                    open.answers[number] = Some(record);
                    let silent = |(n, m): (usize, &Member)| {
                        m.standing == Standing::Here && open.answers[n].is_none()
                    };
                    if !state.members.iter().enumerate().any(silent) {
                        self.close_inquiry(state, inquiry);
                    }
                }
            }
            ToHub::Goodbye => {}
        }
    }

    /// Asks everybody what they do; the answers are judged once all have come, or a little later.
    fn inquire(self: &Arc<Self>, state: &mut State, reporter: usize, trouble: Trouble) {
        if state.over || state.inquiry.is_some() {
            return;
        }
        state.inquiries += 1;
        let number = state.inquiries;
        state.inquiry = Some(Inquiry {
            number,
            reporter,
            trouble,
            answers: vec![None; state.members.len()],
        });
        self.tell(state, &ToMember::Inquiry { inquiry: number });
        let hub = self.clone();
        let timer = thread::Builder::new()
            .name("anymesh inquiry".into())
            .spawn(move || {
                thread::sleep(INQUIRY);
                hub.close_inquiry(&mut hub.state(), number);
            });
        if timer.is_err() {
            self.close_inquiry(state, number);
        }
    }

    fn close_inquiry(&self, state: &mut State, number: u64) {
        let Some(inquiry) = state.inquiry.take_if(|inquiry| inquiry.number == number) else {
            return;
        };
        let witness = |(answer, member): (Option<_>, &Member)| match (answer, member.standing) {
            (Some(record), _) => Witness::Told(record),
            (None, Standing::Left) => Witness::Left,
            (None, _) => Witness::Silent,
        };
        let witnesses: Vec<Witness> = inquiry
            .answers
            .into_iter()
            .zip(&state.members)
            .map(witness)
            .collect();
        let who = |p: usize| match self.cards.get(p) {
            Some(card) => card.to_string(),
            None => format!("process {p}"),
        };
        let verdict = judge(inquiry.reporter, &inquiry.trouble, &witnesses, &who);
        self.conclude(state, verdict);
    }

    /// The first verdict is told to everybody, and is the last.
    fn conclude(&self, state: &mut State, verdict: Verdict) {
        if !std::mem::replace(&mut state.over, true) {
            self.tell(state, &ToMember::Verdict(verdict));
        }
    }

    /// Tells everybody, the process that has the hub last: it may end as soon as it knows, and the
    /// others would never hear of it.
    fn tell(&self, state: &mut State, message: &ToMember) {
        let there = |m: &&Member| m.standing != Standing::Dead;
        for member in state.members.iter().rev().filter(there) {
            send(member, message);
        }
    }
}

/// A message to one member. One that does not take it is cut off, since half a message is worse than
/// none; its own thread notices.
fn send(member: &Member, message: &ToMember) {
    let patience = Patience::until(Instant::now() + WRITE);
    if write_frame(&*member.stream, message, &patience).is_err() {
        let _ = member.stream.shutdown(std::net::Shutdown::Both);
    }
}
