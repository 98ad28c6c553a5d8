//! What the proof says about schedules that are wrong, and what texts that are none are told.

use anymesh_schedule::{Action, Costs, Error, Fault, Kind, Limits, Placement, Schedule, build};

fn proof(csv: &str) -> Result<Vec<usize>, String> {
    let proof = Schedule::from_csv(csv).and_then(|s| s.prove(&Limits::none()));
    proof.map(|p| p.peak().to_vec()).map_err(|e| e.to_string())
}

#[test]
fn errors_name_rank_position_action_and_what_is_wrong() {
    for (csv, wrong) in [
        // Every pass once.
        (
            "0F0,0F0,0B0\n",
            "rank 0, position 1, 0F0: already done at position 0 (0F0)",
        ),
        (
            "0F0,0B0,0W0\n",
            "rank 0, position 2, 0W0: already done at position 1 (0B0)",
        ),
        (
            "0F0,0I0,0B0,0W0\n",
            "rank 0, position 2, 0B0: already done at position 1 (0I0)",
        ),
        (
            "0F0,0F1,0B0\n",
            "rank 0, position 3, 0B1: missing: nothing in the list does it",
        ),
        (
            "0F0,0I0\n",
            "rank 0, position 2, 0W0: missing: nothing in the list does it",
        ),
        // In order.
        ("0B0,0F0\n", "rank 0, position 0, 0B0: needs 0F0 before it"),
        (
            "0F0,0W0,0I0\n",
            "rank 0, position 1, 0W0: needs 0I0 before it",
        ),
        (
            "1F0,0F0,1B0,0B0\n",
            "rank 0, position 0, 1F0: needs 0F0 before it",
        ),
        (
            "0F0,1F0,0B0,1B0\n",
            "rank 0, position 2, 0B0: needs 1B0 before it",
        ),
        // By its rank.
        (
            "0F0,1F0\n1B0,0B0\n",
            "rank 1, position 0, 1B0: the stage is rank 0's",
        ),
        // Transfers.
        (
            "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n",
            "rank 0, position 2, 0B0: needs 0RECV_B0 before it",
        ),
        (
            "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            "rank 0, position 0, 0SEND_F0: needs 0F0 before it",
        ),
        (
            "0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            "rank 1, position 0, 1RECV_F0: its other half, 0SEND_F0 of rank 0, is missing",
        ),
        (
            "0F0,0SEND_F0,1F0,1B0,0B0\n",
            "rank 0, position 1, 0SEND_F0: no other rank is on the other side",
        ),
        (
            "0RECV_F0,0F0,0B0\n",
            "rank 0, position 0, 0RECV_F0: no other rank is on the other side",
        ),
    ] {
        assert_eq!(proof(csv), Err(wrong.to_string()), "{csv}");
    }
}

#[test]
fn a_deadlock_tells_who_waits_for_whom() {
    // Both send first: with sends that wait for their receive nobody ever gets on.
    let both = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    assert_eq!(
        proof(both),
        Err(
            "deadlock: rank 0 at position 3 (0SEND_F1) waits for rank 1 to reach 1RECV_F1; \
             rank 1 at position 3 (1SEND_B0) waits for rank 0 to reach 0RECV_B0"
                .into()
        )
    );
    let good = both.replace("0SEND_F1,0RECV_B0", "0RECV_B0,0SEND_F1");
    assert_eq!(proof(&good), Ok(vec![2, 1]));
}

#[test]
fn limits_are_for_all_ranks_or_for_each() {
    let schedule = build("1f1b", 4, 1, 8).expect("it is made");
    let each = |live: &[usize]| {
        schedule.prove(&Limits {
            live: live.to_vec(),
        })
    };
    assert!(each(&[4]).is_ok() && each(&[4, 3, 2, 1]).is_ok());
    assert!(matches!(
        each(&[4, 2, 2, 1]),
        Err(Error::Invalid {
            rank: 1,
            position: 2,
            action: Action {
                kind: Kind::F,
                stage: 1,
                micro: 2,
                ..
            },
            fault: Fault::Live { live: 3, limit: 2 }
        })
    ));
    assert!(matches!(each(&[4, 3]), Err(Error::Number { .. })));
}

#[test]
fn a_schedule_by_hand_may_have_absurd_numbers() {
    let mut own = build("1f1b", 2, 1, 2).expect("it is made");
    own.micros = usize::MAX;
    assert!(matches!(
        own.prove(&Limits::none()),
        Err(Error::Invalid {
            fault: Fault::Missing,
            ..
        })
    ));
    own.micros = 0;
    assert!(matches!(
        own.prove(&Limits::none()),
        Err(Error::Number { .. })
    ));
    own.micros = 2;
    own.ranks[0][0].stage = usize::MAX;
    assert!(matches!(
        own.prove(&Limits::none()),
        Err(Error::Invalid {
            fault: Fault::Stage { .. },
            ..
        })
    ));
    assert!(own.with_transfers().is_err() && own.timing(&Costs::default()).is_err());
    own.ranks[0][0] = Action {
        joined: true,
        ..Action::idle()
    };
    assert!(matches!(
        own.prove(&Limits::none()),
        Err(Error::Invalid {
            fault: Fault::Joined,
            ..
        })
    ));
    own.owner = vec![0, 7];
    assert!(matches!(
        own.prove(&Limits::none()),
        Err(Error::Number { .. })
    ));
    let empty = Schedule {
        name: String::new(),
        micros: 1,
        owner: vec![],
        ranks: vec![],
    };
    assert!(matches!(
        empty.prove(&Limits::none()),
        Err(Error::Number { .. })
    ));
    assert!(empty.timing(&Costs::default()).is_err() && empty.to_paddle(true).is_err());
}

#[test]
fn numbers_that_no_schedule_has_are_refused_with_what_would_be_valid() {
    for (ranks, chunks, micros) in [
        (0, 1, 1),
        (1, 0, 1),
        (1, 1, 0),
        (usize::MAX, 2, 2),
        (1 << 20, 4, 4),
    ] {
        for name in anymesh_schedule::NAMES {
            let error = build(name, ranks, chunks, micros).expect_err("nobody has that");
            assert!(matches!(error, Error::Number { .. }), "{name}: {error}");
        }
    }
    for name in ["zbh1", "dualpipev"] {
        let chunks = if name == "zbh1" { 1 } else { 2 };
        let error = build(name, 4, chunks, 3)
            .expect_err("too few micro-batches")
            .to_string();
        assert!(
            error.contains("needs at least") && error.contains("searched"),
            "{error}"
        );
    }
    let error = build("zbv", 4, 3, 12)
        .expect_err("three stages")
        .to_string();
    assert!(error.contains("exactly 2"), "{error}");
}

#[test]
fn texts_that_are_no_schedules_are_told_why() {
    for csv in [
        "",
        "\n\n",
        ",,\n",
        "0F0;0B0",
        "x",
        "0F0,0B9999999",
        "5F0,5B0",
        "18446744073709551615F0",
        "(0F0,0B0)OVERLAP_F_B",
        "(0F0)OVERLAP_F_B",
    ] {
        assert!(Schedule::from_csv(csv).is_err(), "{csv:?}");
    }
    for json in [
        "",
        "[]",
        "{}",
        "null",
        r#"{"micros": 1, "owner": [0], "ranks": [[1]]}"#,
        r#"{"micros": -1, "owner": [0], "ranks": []}"#,
        r#"{"micros": 1, "owner": [0], "ranks": [["0F0"]], "speed": 3}"#,
    ] {
        let error = Schedule::from_json(json).expect_err(json).to_string();
        assert!(error.contains("expected"), "{error}");
    }
    for jobs in [
        "",
        "{}",
        "[[]]",
        "[[[\"forward\", -1]]]",
        "[[[\"sideways\", 0]]]",
        "[[[\"forward99999999999999999999\", 0]]]",
        "[[\"forward\"]]",
    ] {
        assert!(Schedule::from_paddle(jobs).is_err(), "{jobs:?}");
    }
    for costs in [
        "f",
        "f=",
        "f=x",
        "f=-1",
        "f=inf",
        "speed=1",
        "f=1/2,i=1/2/3",
        "transfer=1/2",
        "overlap=2",
    ] {
        assert!(costs.parse::<Costs>().is_err(), "{costs:?}");
    }
}

#[test]
fn times_by_hand() {
    let schedule = build("1f1b", 2, 1, 2).expect("it is made");
    let costs: Costs = "f=1,i=1,w=1,transfer=0.5".parse().expect("costs");
    let timing = schedule.timing(&costs).expect("it runs");
    // Rank 1 gets F0 at 1.5, is done with B0 at 4.5; rank 0 has its gradient at 5.
    let starts: Vec<f64> = timing.spans[0].iter().map(|s| s.start).collect();
    assert_eq!(starts, [0.0, 1.0, 5.0, 8.0]);
    assert_eq!(
        (timing.makespan, timing.busy.as_slice()),
        (10.0, &[6.0, 6.0][..])
    );
    assert_eq!(timing.bound, 7.5);
    let waits: Vec<String> = timing.waits.iter().map(|w| w.to_string()).collect();
    assert_eq!(
        waits,
        [
            "rank 0 waits 3 with 0B0 for rank 1's 1B0",
            "rank 0 waits 1 with 0B1 for rank 1's 1B1",
            "rank 1 waits 1.5 with 1F0 for rank 0's 0F0",
        ]
    );
    assert_eq!(
        timing.live[0],
        [(0.0, 0), (0.0, 1), (1.0, 2), (7.0, 1), (10.0, 0)]
    );
    // Sends and receives are beside the passes, and change nothing.
    let full = schedule.with_transfers().expect("it runs");
    let with = full.timing(&costs).expect("it runs");
    assert_eq!((with.makespan, &with.waits.len()), (10.0, &3));
    let send = full.ranks[1]
        .iter()
        .position(|a| a.kind == Kind::SendB)
        .expect("a send");
    assert_eq!(
        (with.spans[1][send].start, with.spans[1][send].end),
        (4.5, 5.0)
    );
    let bad = Costs {
        stages: vec![costs.stage(0); 3],
        ..costs
    };
    assert!(schedule.timing(&bad).is_err());
}

#[test]
fn joined_passes_hide_each_other() {
    let pairs = build("dualpipev", 4, 2, 20).expect("it is made");
    let span = |overlap: f64| {
        let costs = Costs {
            overlap,
            ..Costs::default()
        };
        let timing = pairs.timing(&costs).expect("it runs");
        assert!(timing.makespan >= timing.bound - 1e-9);
        timing.makespan
    };
    assert!(span(0.0) > span(0.5) && span(0.5) > span(1.0));
}

#[test]
fn groups_of_one_and_short_runs_work() {
    for name in [
        "fthenb",
        "1f1b",
        "eager-1f1b",
        "zbh1",
        "interleaved",
        "looped-bfs",
        "interleaved-zb",
        "searched",
    ] {
        let alone = build(name, 1, 1, 3).expect("one rank is enough");
        let full = alone.with_transfers().expect("it runs");
        assert!(!full.has_transfers(), "{name}");
        let timing = full.timing(&Costs::default()).expect("it runs");
        assert_eq!(
            (timing.makespan, timing.bound, timing.fraction),
            (9.0, 9.0, 0.0),
            "{name}"
        );
    }
    let short = build("1f1b", 8, 1, 1).expect("one micro-batch is enough");
    assert_eq!(
        short.prove(&Limits::live(1)).expect("it runs").peak(),
        [1; 8]
    );
    assert_eq!(Placement::V.owners(3, 3), [0, 1, 2, 2, 1, 0, 0, 1, 2]);
}

/// Texts with a few bytes changed: an error, or a schedule about which everything can be asked.
#[test]
fn no_text_makes_anything_panic() {
    let schedule = build("dualpipev", 2, 2, 5).expect("it is made");
    let full = schedule.with_transfers().expect("it runs");
    let jobs = build("vpp", 2, 2, 3).and_then(|s| s.to_paddle(true));
    let texts = [
        full.to_csv(),
        full.to_json().to_string(),
        serde_json::to_string(&jobs.expect("a loop")).expect("it is JSON"),
    ];
    let letters = b"0123456789FBIW,;()[]{}\"_\n-SENDRCV \xff";
    let mut seed = 88_172_645_463_325_252u64;
    let mut below = |n: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 9) as usize % n
    };
    let (mut read, mut proven) = (0, 0);
    for i in 0..6000 {
        let mut bytes = texts[i % 3].clone().into_bytes();
        for _ in 0..1 + below(3) {
            if bytes.len() < 2 {
                break;
            }
            let at = below(bytes.len());
            match below(4) {
                0 => drop(bytes.remove(at)),
                1 => bytes.insert(at, letters[below(letters.len())]),
                2 => bytes.truncate(at.max(1)),
                _ => bytes[at] = letters[below(letters.len())],
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        for schedule in [
            Schedule::from_csv(&text),
            Schedule::from_json(&text),
            Schedule::from_paddle(&text),
        ]
        .into_iter()
        .flatten()
        {
            read += 1;
            let proof = schedule.prove(&Limits::none());
            let timing = schedule.timing(&Costs::default());
            assert_eq!(proof.is_ok(), timing.is_ok());
            if let (Ok(_), Ok(timing)) = (&proof, &timing) {
                proven += 1;
                assert!(timing.makespan >= timing.bound);
                assert!(!timing.chart(&schedule, 40).is_empty());
            }
            let again = schedule
                .with_transfers()
                .and_then(|s| s.prove(&Limits::none()));
            assert!(again.is_ok() || proof.is_err());
            assert_eq!(
                Schedule::from_json(&schedule.to_json().to_string()).as_ref(),
                Ok(&schedule)
            );
        }
    }
    assert!(read > 100 && proven > 10, "{read} were read, {proven} run");
}
