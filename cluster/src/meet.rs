//! The meeting: processes that know one address become a cluster.

use crate::{
    control::{Control, hub},
    door::{Closed, Door, Guest, dial, introduce, knock},
    frame::{Card, Hello, Patience, Purpose},
};
use anymesh_core::{Error, Result};
use std::{
    net::{SocketAddr, TcpListener, ToSocketAddrs},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Who meets, where, and how long they wait for each other.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    pub(crate) process: usize,
    pub(crate) size: usize,
    pub(crate) token: String,
    pub(crate) run: String,
    pub(crate) place: Place,
    /// How long all may take to come.
    pub(crate) within: Duration,
}

/// Where the hub is.
#[derive(Debug)]
pub(crate) enum Place {
    /// Process 0 listens here.
    Address(SocketAddr),
    /// This is process 0, and it listens already.
    Here(TcpListener),
}

impl Clone for Place {
    fn clone(&self) -> Self {
        match self {
            Self::Address(address) => Self::Address(*address),
            Self::Here(listener) => match (listener.try_clone(), listener.local_addr()) {
                (Ok(listener), _) => Self::Here(listener),
                (Err(_), Ok(address)) => Self::Address(address),
                (Err(_), Err(_)) => Self::Address(SocketAddr::from(([0, 0, 0, 0], 0))),
            },
        }
    }
}

/// A process among others.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) control: Arc<Control>,
    pub(crate) door: Arc<Door>,
    pub(crate) guest: Guest,
    pub(crate) epoch: u32,
}

/// The address of a host by name, as an error of the meeting otherwise.
pub(crate) fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let unknown = |detail: String| {
        Error::argument(
            "init",
            "MASTER_ADDR",
            format!("'{host}' is no address of a machine: {detail}"),
        )
    };
    let mut found = (host, port)
        .to_socket_addrs()
        .map_err(|e| unknown(e.to_string()))?;
    // Addresses of the fourth version first: of `localhost` programs listen at that.
    let all: Vec<SocketAddr> = found.by_ref().collect();
    let first = all.iter().find(|a| a.is_ipv4()).or(all.first());
    first.copied().ok_or_else(|| unknown("it has none".into()))
}

/// Listens at an address of this machine and at no other.
pub(crate) fn listen_at(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|e| {
        Error::argument(
            "init",
            "MASTER_PORT",
            format!(
                "process 0 cannot listen at {address}: {e}; MASTER_ADDR must be an address of its machine and MASTER_PORT one that is free"
            ),
        )
    })
}

/// What this process says of itself.
fn card(meeting: &Meeting, listens: SocketAddr) -> Card {
    Card {
        process: meeting.process,
        size: meeting.size,
        run: meeting.run.clone(),
        program: program(),
        version: env!("CARGO_PKG_VERSION").into(),
        host: host(),
        pid: std::process::id(),
        listens,
    }
}

/// The program by its file's name, or as `ANYMESH_PROGRAM` says.
fn program() -> String {
    std::env::var("ANYMESH_PROGRAM").unwrap_or_else(|_| {
        let path = std::env::current_exe().unwrap_or_default();
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    })
}

/// The name of this machine.
pub(crate) fn host() -> String {
    let told = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let told = told.or_else(|| std::env::var("HOSTNAME").ok());
    told.map(|name| name.trim().to_string())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "this machine".into())
}

/// Meets all others.
pub(crate) fn meet(meeting: &Meeting) -> Result<World> {
    let until = Instant::now() + meeting.within;
    let patience = Patience::until(until);
    let io = |what: &str, e: std::io::Error| Error::Transport {
        op: "init",
        detail: format!("{what}: {e}"),
        ranks: vec![meeting.process],
    };
    let (listener, hub) = match meeting.place.clone() {
        Place::Here(listener) => {
            let address = listener.local_addr().map_err(|e| io("no address", e))?;
            (listener, Err(address))
        }
        Place::Address(address) => {
            // The interface that reaches the hub is the one that others reach.
            let stream = dial(address, &patience).map_err(|e| unreachable(meeting, e))?;
            let local = stream.local_addr().map_err(|e| io("no address", e))?;
            let own = TcpListener::bind((local.ip(), 0)).map_err(|e| io("cannot listen", e))?;
            (own, Ok((stream, address)))
        }
    };
    let listens = listener.local_addr().map_err(|e| io("no address", e))?;
    let guest = Guest {
        token: meeting.token.clone(),
        card: card(meeting, listens),
    };
    let door = Door::open(listener, guest.clone()).map_err(|e| io("cannot listen", e))?;
    let hello = Hello {
        purpose: Purpose::Control,
        token: guest.token.clone(),
        card: guest.card.clone(),
        epoch: 0,
    };
    let door = Arc::new(door);
    let stream = match hub {
        Ok((stream, address)) => {
            // Only the hub's door lets anybody in for messages about the run.
            door.complete(Purpose::Control, 0);
            introduce(&stream, address, &hello, &patience).map_err(|e| unreachable(meeting, e))?;
            stream
        }
        Err(address) => {
            let expected = (0..meeting.size).collect();
            start_hub(&door, 0, expected, until, meeting.within, false)?;
            knock(address, &hello, &patience).map_err(|e| unreachable(meeting, e))?
        }
    };
    // The hub waits as long as this process does; its word may come a little later.
    let grace = until + Duration::from_millis(1500);
    let control = Control::begin(stream, &guest.card, grace, meeting.within.as_secs_f64())?;
    Ok(World {
        control: Arc::new(control),
        door,
        guest,
        epoch: 0,
    })
}

fn unreachable(meeting: &Meeting, closed: Closed) -> Error {
    let Meeting { process, size, .. } = meeting;
    let (op, detail) = (
        "init",
        format!("process {process} of {size} did not get to process 0: {closed}"),
    );
    match closed {
        Closed::Late(_) => Error::Timeout {
            op,
            seconds: meeting.within.as_secs_f64(),
            missing: [0].into(),
            detail: format!("; {detail}"),
        },
        Closed::Gone(_) => Error::Lost {
            op,
            ranks: [0].into(),
            detail,
        },
        Closed::Refused(_) | Closed::Stopped => Error::Transport {
            op,
            detail,
            ranks: vec![0],
        },
    }
}

fn start_hub(
    door: &Arc<Door>,
    epoch: u32,
    expected: Vec<usize>,
    until: Instant,
    within: Duration,
    enough: bool,
) -> Result<()> {
    let door = door.clone();
    let run = move || {
        // What went wrong is told by the connections that close.
        let _ = hub::gather(&door, epoch, &expected, until, within.as_secs_f64(), enough);
        door.complete(Purpose::Control, epoch);
    };
    thread::Builder::new()
        .name("anymesh hub".into())
        .spawn(run)
        .map(|_| ())
        .map_err(|e| Error::Transport {
            op: "init",
            detail: format!("no thread for the hub: {e}"),
            ranks: vec![],
        })
}

impl World {
    /// Those who are still there meet again, without `lost`. Whoever has not come `within` this time
    /// stays out.
    pub(crate) fn meet_again(&self, lost: &[usize], within: Duration) -> Result<World> {
        // Also an attempt that fails is one, for all who took part in it.
        let epoch = self.door.next_epoch();
        let until = Instant::now() + within;
        let cards = &self.control.cards;
        let left: Vec<usize> = (0..cards.len()).filter(|p| !lost.contains(p)).collect();
        let hello = Hello {
            purpose: Purpose::Control,
            token: self.guest.token.clone(),
            card: self.guest.card.clone(),
            epoch,
        };
        let mut reasons = String::new();
        for (at, candidate) in left.iter().enumerate() {
            let own = *candidate == self.control.process;
            if own {
                let expected = left[at..].iter().map(|p| cards[*p].process).collect();
                start_hub(&self.door, epoch, expected, until, within, true)?;
            }
            // All of them listen since the first meeting: one that does not has died since then, and
            // does not keep the others long.
            let reach = Patience::until(until.min(Instant::now() + Duration::from_secs(1)));
            let address = cards[*candidate].listens;
            let stream = dial(address, &reach).and_then(|stream| {
                introduce(&stream, address, &hello, &Patience::until(until))?;
                Ok(stream)
            });
            match stream {
                Ok(stream) => {
                    let grace = until + Duration::from_millis(1500);
                    let seconds = within.as_secs_f64();
                    let control = Control::begin(stream, &self.guest.card, grace, seconds)?;
                    self.door.complete(Purpose::Control, epoch);
                    return Ok(World {
                        control: Arc::new(control),
                        door: self.door.clone(),
                        guest: self.guest.clone(),
                        epoch,
                    });
                }
                Err(reason) => {
                    reasons.push_str(&format!("\n  {}: {reason}", cards[*candidate]));
                }
            }
        }
        Err(Error::Transport {
            op: "rebuild",
            detail: format!("no process could be met again:{reasons}"),
            ranks: lost.to_vec(),
        })
    }
}
