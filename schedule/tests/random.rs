//! The proof against threads: it accepts exactly what runs to its end.

mod threads;

use anymesh_schedule::{Action, Error, Kind, Limits, NAMES, Placement, Schedule, Search, build};
use std::collections::BTreeMap;
use threads::{Outcome, run};

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 13) as usize % n.max(1)
    }
}

/// A valid schedule with transfers: a built-in one, or passes in an order by chance.
fn valid(random: &mut Random) -> Schedule {
    let ranks = 1 + random.below(4);
    let chunks = 1 + random.below(3);
    let micros = 1 + random.below(5);
    let plain = match random.below(3) {
        0 => {
            let name = NAMES[random.below(NAMES.len() - 1)];
            build(name, ranks, chunks, micros)
        }
        1 if chunks == 2 => build("zbv", ranks, 2, micros),
        _ => Err(Error::UnknownName {
            name: String::new(),
        }),
    };
    let plain = plain.unwrap_or_else(|_| by_chance(ranks, chunks, micros, random));
    plain.with_transfers().expect("it is valid")
}

/// Passes in an order by chance that respects what they need.
fn by_chance(ranks: usize, chunks: usize, micros: usize, random: &mut Random) -> Schedule {
    let placement = [Placement::Loop, Placement::V][random.below(2)];
    let owner = placement.owners(ranks, chunks);
    let stages = owner.len();
    let mut lists = vec![vec![]; ranks];
    let mut left: Vec<Action> = (0..stages)
        .flat_map(|s| (0..micros).map(move |m| (s, m)))
        .flat_map(|(s, m)| match random.below(2) {
            0 => vec![Action::f(s, m), Action::b(s, m)],
            _ => vec![Action::f(s, m), Action::i(s, m), Action::w(s, m)],
        })
        .collect();
    let mut done: Vec<(Kind, usize, usize)> = vec![];
    while !left.is_empty() {
        let at = random.below(left.len());
        let a = left[at];
        let has = |kind, stage| done.contains(&(kind, stage, a.micro));
        let back = |stage| has(Kind::B, stage) || has(Kind::I, stage);
        let ready = match a.kind {
            Kind::F => a.stage == 0 || has(Kind::F, a.stage - 1),
            Kind::W => has(Kind::I, a.stage),
            _ => has(Kind::F, a.stage) && (a.stage + 1 == stages || back(a.stage + 1)),
        };
        if ready {
            done.push((a.kind, a.stage, a.micro));
            lists[owner[a.stage]].push(a);
            left.swap_remove(at);
        }
    }
    Schedule {
        name: "by chance".into(),
        micros,
        owner,
        ranks: lists,
    }
}

/// Changes something: mostly the order of transfers, sometimes what must not be.
fn change(schedule: &mut Schedule, random: &mut Random) {
    let rank = random.below(schedule.ranks.len());
    let list = &mut schedule.ranks[rank];
    if list.is_empty() {
        return;
    }
    let at = random.below(list.len());
    match random.below(24) {
        // An action somewhere else.
        0..=4 => {
            let action = list.remove(at);
            let far = random.below(5);
            let to = match random.below(2) {
                0 => at.saturating_sub(far),
                _ => (at + far).min(list.len()),
            };
            list.insert(to, action);
        }
        // A transfer somewhere else.
        5..=20 => {
            let transfers: Vec<usize> = (0..list.len())
                .filter(|i| list[*i].kind.transfers())
                .collect();
            if let Some(at) = transfers.get(random.below(transfers.len())) {
                let action = list.remove(*at);
                let far = random.below(7) as isize - 3;
                let to = (*at as isize + far).clamp(0, list.len() as isize);
                list.insert(to as usize, action);
            }
        }
        21 => {
            list.remove(at);
        }
        22 => {
            let action = list[at];
            list.insert(random.below(list.len()), action);
        }
        _ => match random.below(3) {
            0 => list[at].kind = Kind::ALL[random.below(8)],
            1 => list[at].stage = random.below(schedule.owner.len() + 1),
            _ => list[at].micro = random.below(schedule.micros + 1),
        },
    }
}

/// Schedules of one seed: what became of how many.
fn compare(seed: u64, count: usize) -> BTreeMap<&'static str, usize> {
    let mut random = Random(seed);
    let mut seen = BTreeMap::new();
    for number in 0..count {
        let mut schedule = valid(&mut random);
        let changes = [0, 1, 1, 1, 2, 4][random.below(6)];
        for _ in 0..changes {
            change(&mut schedule, &mut random);
        }
        for action in schedule.ranks.iter_mut().flatten() {
            action.joined = false;
        }
        let limit = match random.below(3) {
            0 => 1 + random.below(8),
            _ => usize::MAX,
        };
        let proof = schedule.prove(&Limits::live(limit));
        let outcome = run(&schedule, limit);
        let agree = match (&proof, &outcome) {
            (Ok(proof), Outcome::Done { peak }) => proof.peak() == peak,
            (Err(Error::Deadlock { .. }), Outcome::Deadlock) => true,
            // What is wrong in itself is refused before it runs; when it runs it fails or, if that
            // comes first, stands still.
            (Err(Error::Invalid { .. }), Outcome::Failed | Outcome::Deadlock) => true,
            _ => false,
        };
        assert!(
            agree,
            "{seed} {number}: {proof:?} but {outcome:?}\n{}",
            schedule.to_csv()
        );
        let kind = match (&proof, changes) {
            (Ok(_), 0) => "accepted, unchanged",
            (Ok(_), _) => "accepted, changed",
            (Err(Error::Deadlock { .. }), _) => "deadlock",
            (Err(_), _) => "invalid",
        };
        *seen.entry(kind).or_insert(0) += 1;
    }
    seen
}

#[test]
fn ten_thousand_schedules_are_accepted_exactly_if_threads_run_them_to_the_end() {
    // Several at a time: threads of one schedule mostly wait for each other.
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..16)
            .map(|i| scope.spawn(move || compare(20_261_116 + i, 625)))
            .collect();
        for worker in workers {
            for (kind, count) in worker.join().expect("proof and threads agree") {
                *seen.entry(kind).or_default() += count;
            }
        }
    });
    println!("{seen:?}");
    assert_eq!(seen.values().sum::<usize>(), 10_000);
    assert!(
        seen.len() == 4 && seen.values().all(|n| *n > 500),
        "{seen:?}"
    );
}

/// The order of a proof, done action by action: everything is there when it is used.
#[test]
fn the_order_of_a_proof_is_one_in_which_everything_can_be_done() {
    let mut random = Random(3);
    for _ in 0..300 {
        let mut schedule = valid(&mut random).unjoined();
        if random.below(2) == 0 {
            schedule = schedule.without_transfers();
        }
        let proof = schedule.prove(&Limits::none()).expect("it is valid");
        let mut at = vec![0; schedule.ranks.len()];
        let mut done: Vec<(Kind, usize, usize)> = vec![];
        for &(rank, position) in proof.order() {
            assert_eq!(at[rank], position, "each list in its order");
            at[rank] += 1;
            let a = schedule.ranks[rank][position];
            let has = |kind, stage| done.contains(&(kind, stage, a.micro));
            let back = |stage| has(Kind::B, stage) || has(Kind::I, stage);
            assert!(match a.kind {
                Kind::F => a.stage == 0 || has(Kind::F, a.stage - 1),
                Kind::B | Kind::I =>
                    has(Kind::F, a.stage) && (a.stage + 1 == schedule.stages() || back(a.stage + 1)),
                Kind::W => has(Kind::I, a.stage),
                Kind::SendF => has(Kind::F, a.stage),
                Kind::SendB => back(a.stage),
                Kind::RecvF => done.last() == Some(&(Kind::SendF, a.stage - 1, a.micro)),
                Kind::RecvB => done.last() == Some(&(Kind::SendB, a.stage + 1, a.micro)),
                Kind::Idle => true,
            });
            done.push((a.kind, a.stage, a.micro));
        }
        let lengths: Vec<usize> = schedule.ranks.iter().map(Vec::len).collect();
        assert_eq!(at, lengths, "all of them");
    }
}

/// Reorders only sends and receives, so that nothing is wrong but who meets whom.
#[test]
fn reordered_transfers_alone_are_told_apart() {
    let mut random = Random(7);
    let (mut runs, mut stuck) = (0, 0);
    for _ in 0..2000 {
        let mut schedule = valid(&mut random).unjoined();
        for list in &mut schedule.ranks {
            for at in 1..list.len() {
                if list[at].kind.transfers()
                    && list[at - 1].kind.transfers()
                    && random.below(3) == 0
                {
                    list.swap(at - 1, at);
                }
            }
        }
        match (schedule.prove(&Limits::none()), run(&schedule, usize::MAX)) {
            (Ok(_), Outcome::Done { .. }) => runs += 1,
            (Err(Error::Deadlock { cycle }), Outcome::Deadlock) => {
                assert!(cycle.len() >= 2);
                for (i, wait) in cycle.iter().enumerate() {
                    assert_eq!(schedule.ranks[wait.rank][wait.position], wait.action);
                    assert_eq!(wait.peer, cycle[(i + 1) % cycle.len()].rank);
                }
                stuck += 1;
            }
            (proof, outcome) => panic!("{proof:?} but {outcome:?}\n{}", schedule.to_csv()),
        }
    }
    assert!(runs > 200 && stuck > 200, "{runs} run, {stuck} do not");
}

#[test]
fn every_built_in_is_proven_or_refused_with_a_reason() {
    let (mut proven, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for ranks in 1..=8 {
        for chunks in 1..=4 {
            for micros in 1..=24 {
                for name in NAMES {
                    let built = match name {
                        "searched" => Search {
                            effort: 2000,
                            ..Search::new(ranks, chunks, micros)
                        }
                        .run(),
                        _ => build(name, ranks, chunks, micros),
                    };
                    let title = format!("{name} {ranks} x {chunks}, {micros}");
                    match built {
                        Ok(schedule) => {
                            let plain = schedule.prove(&Limits::none());
                            let plain = plain.unwrap_or_else(|e| panic!("{title}: {e}"));
                            let full = schedule
                                .with_transfers()
                                .and_then(|s| s.prove(&Limits::none()));
                            let full = full.unwrap_or_else(|e| panic!("{title}: {e}"));
                            assert_eq!(plain.peak(), full.peak(), "{title}");
                            if name == "searched" {
                                assert!(
                                    plain.peak().iter().all(|p| *p <= ranks * chunks),
                                    "{title}"
                                );
                            }
                            *proven.entry(name).or_insert(0) += 1;
                        }
                        Err(error) => {
                            assert!(matches!(error, Error::Refused { .. }), "{title}: {error}");
                            *refused.entry(name).or_insert(0) += 1;
                        }
                    }
                }
            }
        }
    }
    println!("proven {proven:?}, refused {refused:?}");
    let all = 8 * 4 * 24;
    for name in [
        "fthenb",
        "interleaved",
        "looped-bfs",
        "interleaved-zb",
        "searched",
    ] {
        assert_eq!(proven[name], all, "{name}");
    }
    // One stage or two on a rank, whatever the number of micro-batches.
    for name in ["1f1b", "eager-1f1b", "zbv"] {
        assert_eq!(
            (proven[name], refused[name]),
            (8 * 24, 8 * 3 * 24),
            "{name}"
        );
    }
}
