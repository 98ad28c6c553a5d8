//! A training step of a small model whose two ranks are in threads that act as processes, with and
//! without communication beside compute. `cargo bench -p anymesh-core --bench overlap`.
//!
//! The link is a sleep: it takes no core, as a network card would not, so what is hidden does not
//! depend on how many cores there are. What is gained at most is the smaller one of computing and
//! communicating; a step that waits for its first gather and its last reduction gains less.

use anymesh_core::{
    DType, Mesh, Result, Tensor,
    grad::{Overlap, with_overlap},
    ops::Rng,
    spmd::{Held, Ledger, with_held},
    transport::{Background, Message, Threads, Transport},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const LAYERS: usize = 12;
const WIDTH: usize = 256;
const ROWS: usize = 512;
const STEPS: u32 = 5;

/// Threads behind a link: a message takes a while, and longer if it is large.
#[derive(Debug)]
struct Link(Arc<Threads>);

impl Transport for Link {
    fn name(&self) -> &str {
        "a slow link"
    }

    fn deadline(&self) -> Option<Duration> {
        self.0.deadline()
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        let received = |m: &&Message| m.part.data.is_none();
        let size = |m: &Message| m.part.shape.numel() * m.part.dtype.size();
        let bytes: usize = messages.iter().filter(received).map(size).sum();
        // 200 us, and 100 MB/s.
        std::thread::sleep(Duration::from_micros(200 + bytes as u64 / 100));
        self.0.exchange(mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.0.barrier(mesh, group)
    }
}

/// What a step does of it.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    beside: bool,
    overlap: Overlap,
    /// Whether the forward pass gathers the next layer while it computes one.
    prefetch: bool,
}

fn step(mesh: &Mesh, layout: &str, way: Way) -> Result<()> {
    let layer = |i| {
        Tensor::normal(
            [WIDTH, WIDTH],
            0.0,
            0.05,
            DType::F32,
            (mesh, layout),
            Rng::new(i),
        )
    };
    let mut layers = (0..LAYERS as u64)
        .map(|i| layer(i)?.require_grad())
        .collect::<Result<Vec<_>>>()?;
    let x = Tensor::normal(
        [ROWS, WIDTH],
        0.0,
        1.0,
        DType::F32,
        (mesh, "[@dp, _]"),
        Rng::new(99),
    )?;
    let mut run = || {
        let mut h = x.clone();
        let ahead = |i: usize| match layers.get(i) {
            Some(w) if way.prefetch => w.prefetch("[_, _]").map(Some),
            _ => Ok(None),
        };
        let mut here = ahead(0)?;
        for (i, w) in layers.iter().enumerate() {
            let next = ahead(i + 1)?;
            h = h.matmul(w)?.tanh()?;
            here = next;
        }
        drop(here);
        let mut grads = h.square()?.sum(&[], false)?.backward()?;
        for w in &mut layers {
            let g = grads.take(w)?;
            w.update(|w| w.sub(&g.mul(1e-4)?))?;
        }
        Ok::<_, anymesh_core::Error>(())
    };
    run()?;
    let barrier = || {
        mesh.transport()
            .map_or(Ok(()), |t| t.barrier(mesh, &[0, 1]))
    };
    barrier()?;
    let start = Instant::now();
    let (result, ledger) = Ledger::record(|| (0..STEPS).try_for_each(|_| run()));
    result?;
    barrier()?;
    if mesh.addressable().next() == Some(0) {
        let (ran, hidden) = (ledger.ran().as_secs_f64(), ledger.hidden().as_secs_f64());
        println!(
            "  {:<44} {:7.1} ms a step; communication ran {:6.1} ms, hidden {:3.0} %",
            way.name,
            start.elapsed().as_secs_f64() * 1e3 / f64::from(STEPS),
            ran * 1e3 / f64::from(STEPS),
            100.0 * hidden / ran,
        );
    }
    Ok(())
}

fn main() -> Result<()> {
    let none = Overlap::default();
    let layer = (WIDTH * WIDTH * 4) as u64;
    let each = Overlap { bucket: 0, ..none };
    let some = Overlap {
        bucket: 3 * layer,
        ..none
    };
    let whole = Overlap {
        whole: true,
        ..some
    };
    let ahead = Overlap {
        ahead: 3 * layer,
        ..some
    };
    let way = |name, beside, overlap, prefetch| Way {
        name,
        beside,
        overlap,
        prefetch,
    };
    let replicated = [
        way("one after the other", false, none, false),
        way("beside, reduced in the pass", true, whole, false),
    ];
    let sharded = [
        way("one after the other", false, none, false),
        way("beside, each gradient by itself", true, each, false),
        way("beside, buckets of three layers", true, some, false),
        way(
            "beside, and gathered ahead in both passes",
            true,
            ahead,
            true,
        ),
    ];
    let cases: [(&str, &str, &[Way]); 2] = [
        ("parameters whole on both ranks", "[_, _]", &replicated),
        ("parameters cut over both ranks", "[@dp, _]", &sharded),
    ];
    // Gathered layers are let go of after their op, as in a model that does not fit otherwise.
    let soon = Held {
        calls: 2,
        ..Held::default()
    };
    for (name, layout, ways) in cases {
        println!("{name}");
        for way in ways {
            let threads = Threads::new(Duration::from_secs(60));
            let run = |rank: usize| {
                let link = Arc::new(Link(threads.clone()));
                let transport: Arc<dyn Transport> = match way.beside {
                    true => Background::new(link),
                    false => link,
                };
                let mesh = Mesh::new("dp=2", &anymesh_backend_cpu::device())?;
                let mesh = mesh.with_transport(transport).addressing(&[rank])?;
                with_held(soon, || {
                    with_overlap(way.overlap, || step(&mesh, layout, *way))
                })
            };
            std::thread::scope(|scope| {
                let threads = [0, 1].map(|rank| scope.spawn(move || run(rank)));
                let ended = threads.map(|thread| thread.join().expect("no panic"));
                ended.into_iter().collect::<Result<()>>()
            })?;
        }
    }
    Ok(())
}
