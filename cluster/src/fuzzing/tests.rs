//! Random bytes and real messages with random changes. `ANYMESH_FUZZ` is how many of each; what a
//! fuzzer starts from is written into the folder that `ANYMESH_SEEDS` names.

use super::*;
use crate::{
    frame::{Card, Hello, Purpose, frame},
    recorder::{Begun, Recorder, State},
};
use message::{Step, Verdict};

/// Numbers of a generator that is good enough for this.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n.max(1)
    }
}

fn card() -> Card {
    Card {
        process: 1,
        size: 4,
        run: "run 0".into(),
        program: "train".into(),
        version: "0.1.0".into(),
        host: "node1".into(),
        pid: 77,
        listens: ([127, 0, 0, 1], 29500).into(),
    }
}

fn record() -> Record {
    let recorder = Recorder::new(&card());
    for peer in [0, 2, 3, 0] {
        let call = recorder.begin(Begun {
            op: "all_reduce",
            group: [0, 1, peer].into(),
            together: peer == 2,
            detail: "f32[4, 2]".into(),
            digest: 5,
            waits_for: vec![peer],
            pairs: vec![(peer, 8)],
        });
        if peer == 2 {
            recorder.end(call, State::Done, None);
        }
    }
    let mut record = recorder.record(8);
    record.decisions.push(crate::recorder::Decided {
        n: 3,
        op: "matmul".into(),
        caller: "main.rs:3:1".into(),
        hash: "ab".into(),
    });
    record
}

type Seeds = Vec<Vec<u8>>;

fn seeds() -> [(&'static str, fn(&[u8]), Seeds); 4] {
    let hello = |purpose, epoch| Hello {
        purpose,
        token: "secret \"quoted\" \u{1F600}".into(),
        card: card(),
        epoch,
    };
    let text = |text: &str| text.to_string();
    let to_hub = [
        ToHub::Set {
            key: text("k"),
            value: vec![0, 255],
        },
        ToHub::Get { key: text("k") },
        ToHub::Failed { error: text("e") },
        ToHub::Trouble(Trouble::Late {
            from: vec![0, 2],
            seconds: 2.5,
        }),
        ToHub::Trouble(Trouble::Differs { from: 1 }),
        ToHub::Trouble(Trouble::Gone {
            who: 3,
            detail: text("reset"),
        }),
        ToHub::Status {
            inquiry: 1,
            record: Box::new(record()),
        },
        ToHub::Goodbye,
    ];
    let step = |process| Step {
        process,
        op: text("sum"),
        caller: text("main.rs:1:2"),
    };
    let to_member = [
        ToMember::Start {
            cards: vec![card(), card()],
        },
        ToMember::NotAll {
            missing: vec![3],
            seconds: 1.0,
        },
        ToMember::Value {
            key: text("k"),
            value: vec![1],
        },
        ToMember::Left { process: 2 },
        ToMember::Inquiry { inquiry: 9 },
        ToMember::Verdict(Verdict::Died {
            process: 0,
            detail: text("d"),
        }),
        ToMember::Verdict(Verdict::Failed {
            process: 1,
            error: text("e"),
        }),
        ToMember::Verdict(Verdict::Missing {
            processes: vec![2],
            seconds: 0.5,
            detail: text("d"),
        }),
        ToMember::Verdict(Verdict::Diverged {
            calls: Box::new([step(0), step(1)]),
        }),
    ];
    let store = [
        vec![
            0, 0, 3, 0, 0, 0, 0, 0, 0, 0, b'a', b'b', b'c', 1, 0, 0, 0, 0, 0, 0, 0,
        ],
        vec![0, 0, 255, 255, 255, 255, 255, 255, 255, 255],
        vec![1],
    ];
    [
        (
            "handshake",
            handshake,
            [(Purpose::Control, 0), (Purpose::Data, 3)]
                .map(|(purpose, epoch)| opening(&hello(purpose, epoch)).unwrap())
                .into(),
        ),
        (
            "to_hub",
            super::to_hub,
            to_hub.iter().map(|m| frame(m).unwrap()).collect(),
        ),
        (
            "to_member",
            super::to_member,
            to_member.iter().map(|m| frame(m).unwrap()).collect(),
        ),
        ("torch_store", torch_store, store.into()),
    ]
}

/// Changes some bytes; the length in front of a frame mostly goes along.
fn changed(random: &mut Random, seeds: &[Vec<u8>], prefix: usize) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..random.below(5) {
        let at = random.below(bytes.len());
        match random.below(7) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.below(256) as u8),
            2 if !bytes.is_empty() => drop(bytes.remove(at)),
            3 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            4 if !bytes.is_empty() => bytes[at] = b"0123456789-eE.\"\\{}[],:nul"[random.below(25)],
            5 => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len());
                let piece = &other[from..][..random.below(other.len() - from).min(64)];
                bytes.splice(at..at, piece.iter().copied());
            }
            _ => {
                let more = seeds[random.below(seeds.len())].clone();
                bytes.extend(more);
            }
        }
    }
    if prefix > 0 && random.below(4) > 0 && bytes.len() > prefix {
        let length = (bytes.len() - prefix) as u32;
        bytes[prefix - 4..prefix].copy_from_slice(&length.to_le_bytes());
    }
    bytes
}

#[test]
fn no_bytes_do_harm() {
    let times: usize = std::env::var("ANYMESH_FUZZ").map_or(3000, |n| n.parse().unwrap());
    for (name, target, seeds) in seeds() {
        if let Some(folder) = std::env::var_os("ANYMESH_SEEDS") {
            let folder = std::path::Path::new(&folder).join(name);
            std::fs::create_dir_all(&folder).unwrap();
            for (i, seed) in seeds.iter().enumerate() {
                std::fs::write(folder.join(format!("{i}")), seed).unwrap();
            }
        }
        seeds.iter().for_each(|seed| target(seed));
        let (prefix, times) = match name {
            "handshake" => (12, times),
            // A connection for each takes longer.
            "torch_store" => (0, times / 20),
            _ => (4, times),
        };
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        for i in 0..times {
            match i % 8 {
                0 => {
                    let length = random.below(200);
                    let bytes: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
                    target(&bytes);
                }
                _ => target(&changed(&mut random, &seeds, prefix)),
            }
        }
    }
}
