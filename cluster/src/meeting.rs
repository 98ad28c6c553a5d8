//! Where the processes of each launcher meet: how process 0 says where it listens.

use crate::{
    meet::{self, Place, listen_at, resolve},
    start::{Meeting, Start},
};
use anymesh_core::{Error, Result};
use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    time::Instant,
};

/// Where the processes of a launcher meet.
pub(crate) fn meeting(start: &Start) -> Result<meet::Meeting> {
    let (place, told) = match &start.meeting {
        Meeting::Alone => {
            let detail = format!("{} processes have no place to meet", start.size);
            return Err(Error::argument("init", "environment", detail));
        }
        Meeting::Bind { host, port } => {
            let address = resolve(host, *port)?;
            let place = match start.rank {
                0 => Place::Here(listen_at(address)?),
                _ => Place::Address(address),
            };
            (place, None)
        }
        Meeting::TorchStore { host, port } => through_store(start, host, *port)?,
        Meeting::ThroughMpi => through_mpi(start)?,
    };
    Ok(meet::Meeting {
        process: start.rank,
        size: start.size,
        token: start.token.clone().or(told).unwrap_or_default(),
        run: format!("{} {}", start.run.as_deref().unwrap_or("-"), start.restart),
        place,
        within: start.start_timeout,
    })
}

/// A listener at an address of this machine that others reach, and what they must know: the address
/// and a token in one text.
fn announce(host: IpAddr) -> Result<(Place, String, String)> {
    let listener = listen_at(SocketAddr::new(host, 0))?;
    let address = address_of(&listener)?;
    let token = secret();
    Ok((Place::Here(listener), format!("{address} {token}"), token))
}

fn address_of(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|e| Error::Transport {
        op: "init",
        detail: format!("process 0 has no address: {e}"),
        ranks: vec![0],
    })
}

/// What process 0 announced.
fn understood(text: &[u8]) -> Result<(Place, Option<String>)> {
    let read = || {
        let (address, token) = std::str::from_utf8(text).ok()?.split_once(' ')?;
        Some((Place::Address(address.parse().ok()?), Some(token.into())))
    };
    read().ok_or_else(|| Error::Parse {
        what: "announcement of process 0",
        text: String::from_utf8_lossy(&text[..text.len().min(100)]).into(),
        expected: "an address and a token".into(),
    })
}

/// By the store that torchrun's agent serves.
fn through_store(start: &Start, host: &str, port: u16) -> Result<(Place, Option<String>)> {
    use crate::torch_store::TorchStore;
    let until = Instant::now() + start.start_timeout;
    let failed = |e: crate::torch_store::StoreError| Error::Transport {
        op: "init",
        detail: format!("the store of torchrun at {host}:{port}: {e}"),
        ranks: vec![start.rank],
    };
    let key = format!(
        "anymesh/{}/{}",
        start.run.as_deref().unwrap_or("-"),
        start.restart
    );
    let mut store = TorchStore::connect(host, port, until).map_err(failed)?;
    if start.rank == 0 {
        let (place, text, token) = announce(outward(resolve(host, port)?))?;
        store.set(&key, text.as_bytes(), until).map_err(failed)?;
        return Ok((place, Some(token)));
    }
    store.wait(&[&key], until).map_err(failed)?;
    understood(&store.get(&key, until).map_err(failed)?)
}

/// By a broadcast of MPI.
#[cfg(feature = "mpi")]
fn through_mpi(start: &Start) -> Result<(Place, Option<String>)> {
    use crate::wire::mpi::{World, failed};
    let until = Instant::now() + start.start_timeout;
    let failed = |e| failed(e, start.start_timeout);
    let world = World::join(until).map_err(failed)?;
    if (world.rank(), world.size()) != (start.rank, start.size) {
        let detail = format!(
            "the launcher says process {} of {}, MPI says {} of {}: was the program built with the MPI that started it?",
            start.rank,
            start.size,
            world.rank(),
            world.size()
        );
        return Err(Error::argument("init", "environment", detail));
    }
    if start.rank > 0 {
        return understood(&world.share(&[], until).map_err(failed)?);
    }
    let host = match start.local_size == Some(start.size) {
        true => IpAddr::from([127, 0, 0, 1]),
        // Where packets to the world would leave: nothing is sent.
        false => outward(SocketAddr::from(([192, 0, 2, 1], 9))),
    };
    // Where it cannot listen, the others are told, which wait for it.
    let (place, text, token) =
        announce(host).inspect_err(|_| drop(world.share(b"nowhere", until)))?;
    world.share(text.as_bytes(), until).map_err(failed)?;
    Ok((place, Some(token)))
}

/// By MPI, which this build does not have; [`Start`] refuses it before.
#[cfg(not(feature = "mpi"))]
fn through_mpi(_: &Start) -> Result<(Place, Option<String>)> {
    let detail = "this build has no MPI: build with the feature `mpi`, or set MASTER_ADDR and MASTER_PORT with `mpirun -x`";
    Err(Error::argument("init", "environment", detail))
}

/// The address of this machine by which it reaches another, which is likely to be the one by which
/// others reach it; that of the machine itself where there is no network.
fn outward(other: SocketAddr) -> IpAddr {
    let any: SocketAddr = match other.ip() {
        IpAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        IpAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let local = UdpSocket::bind(any).and_then(|socket| {
        socket.connect(other)?;
        socket.local_addr()
    });
    local.map_or(IpAddr::from([127, 0, 0, 1]), |address| address.ip())
}

/// A text that nobody can guess: the system's randomness, as hash maps take it.
fn secret() -> String {
    let word = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", word(), word())
}
