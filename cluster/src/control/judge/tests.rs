//! Judgements over records that are written down by hand.

use super::*;
use crate::recorder::{Decided, Pair};

/// A call with peers: each with the number of the call between the two, and a digest.
fn call(n: u64, op: &str, state: State, waits_for: &[usize], pairs: &[(usize, u64, &str)]) -> Call {
    let pair = |(peer, n, digest): &(usize, u64, &str)| Pair {
        peer: *peer,
        n: *n,
        digest: digest.to_string(),
    };
    Call {
        n,
        group: pairs.iter().map(|(peer, ..)| *peer).collect(),
        in_group: 0,
        op: op.into(),
        detail: "f32[4]".into(),
        digest: format!("{pairs:?}"),
        caller: format!("main.rs:{}", 10 + n),
        on_behalf_of: String::new(),
        state,
        waits_for: waits_for.into(),
        pairs: pairs.iter().map(pair).collect(),
        seconds: 0.0,
    }
}

fn told_by(process: usize, calls: Vec<Call>) -> Witness {
    deciding(process, calls, &[])
}

/// With decisions: number, op and hash.
fn deciding(process: usize, calls: Vec<Call>, decisions: &[(u64, &str, &str)]) -> Witness {
    let decided = |(n, op, hash): &(u64, &str, &str)| Decided {
        n: *n,
        op: op.to_string(),
        caller: format!("train.rs:{n}"),
        hash: hash.to_string(),
    };
    Witness::Told(Box::new(Record {
        format: crate::recorder::FORMAT.into(),
        process,
        size: 4,
        host: "here".into(),
        pid: 1,
        version: "0".into(),
        error: None,
        unix_time: 0.0,
        calls,
        decisions: decisions.iter().map(decided).collect(),
    }))
}

fn late(reporter: usize, from: &[usize], witnesses: &[Witness]) -> Verdict {
    let trouble = Trouble::Late {
        from: from.into(),
        seconds: 2.0,
    };
    judge(reporter, &trouble, witnesses, &|p| format!("process {p}"))
}

/// Who is missing, and the detail.
fn missing(verdict: Verdict) -> (Vec<usize>, String) {
    match verdict {
        Verdict::Missing {
            processes, detail, ..
        } => (processes, detail),
        other => panic!("{other:?}"),
    }
}

/// Processes, ops and lines of a difference.
fn apart(verdict: Verdict) -> [(usize, String, String); 2] {
    match verdict {
        Verdict::Diverged { calls } => calls.map(|s| (s.process, s.op, s.caller)),
        other => panic!("{other:?}"),
    }
}

use State::{Done, Waiting};

#[test]
fn a_silent_process_is_missing_whatever_the_others_do() {
    let shared = call(3, "all_reduce", Done, &[], &[(1, 0, "a")]);
    let waits = call(4, "barrier", Waiting, &[2], &[(1, 1, "b"), (2, 0, "b")]);
    let witnesses = [
        told_by(0, vec![shared, waits]),
        Witness::Silent,
        told_by(2, vec![]),
    ];
    let (who, detail) = missing(late(0, &[2], &witnesses));
    assert_eq!(who, [1]);
    assert!(detail.contains("process 1 does not answer"), "{detail}");
    assert!(
        detail.contains("all_reduce f32[4] at main.rs:13"),
        "{detail}"
    );
}

#[test]
fn one_that_is_in_no_call_is_missing_with_its_last_call() {
    let waits = |peer| call(1, "all_reduce", Waiting, &[peer], &[(peer, 1, "a")]);
    let witnesses = [
        told_by(0, vec![waits(1)]),
        told_by(1, vec![call(0, "barrier", Done, &[], &[(0, 0, "b")])]),
    ];
    let (who, detail) = missing(late(0, &[1], &witnesses));
    assert_eq!(who, [1]);
    assert!(
        detail.contains("is in no call: the last one it finished is barrier f32[4] at main.rs:10"),
        "{detail}"
    );
    let nothing = [told_by(0, vec![waits(1)]), told_by(1, vec![])];
    let (_, detail) = missing(late(0, &[1], &nothing));
    assert!(detail.contains("has not called anything yet"), "{detail}");
}

#[test]
fn a_chain_of_waits_leads_to_its_end() {
    // 0 waits for 1, which waits for 2, which waits for 3, which computes.
    let waits = |at: usize| {
        let next = at + 1;
        told_by(
            at,
            vec![call(0, "recv", Waiting, &[next], &[(next, 0, "x")])],
        )
    };
    let witnesses = [waits(0), waits(1), waits(2), told_by(3, vec![])];
    assert_eq!(missing(late(0, &[1], &witnesses)).0, [3]);
}

#[test]
fn who_has_sent_already_is_not_waited_for() {
    // All are in a barrier but 2. What 1 waits for begins with 0, which has sent.
    let pairs =
        |own: usize| -> Vec<_> { (0..4).filter(|p| *p != own).map(|p| (p, 0, "b")).collect() };
    let waits = |own: usize| {
        let pairs = pairs(own);
        let from: Vec<usize> = pairs.iter().map(|(p, ..)| *p).collect();
        told_by(own, vec![call(0, "barrier", Waiting, &from, &pairs)])
    };
    let witnesses = [waits(0), waits(1), told_by(2, vec![]), waits(3)];
    assert_eq!(missing(late(0, &[1, 2], &witnesses)).0, [2]);
    assert_eq!(missing(late(3, &[2], &witnesses)).0, [2]);
}

#[test]
fn a_ring_of_waits_is_programs_that_differ() {
    let waits = |own: usize, next: usize| {
        told_by(
            own,
            vec![call(0, "recv", Waiting, &[next], &[(next, 0, "x")])],
        )
    };
    let witnesses = [waits(0, 1), waits(1, 2), waits(2, 0)];
    let [a, b] = apart(late(0, &[1], &witnesses));
    assert_eq!((a.0, b.0), (1, 2));
    assert_eq!(a.1, "recv f32[4]");
    // Also where the reporter is outside of the ring.
    let witnesses = [waits(0, 1), waits(1, 2), waits(2, 3), waits(3, 1)];
    let [a, b] = apart(late(0, &[1], &witnesses));
    assert_eq!((a.0, b.0), (1, 2));
}

#[test]
fn one_that_ended_is_missing() {
    let waits = call(0, "barrier", Waiting, &[1], &[(1, 0, "b")]);
    let (who, detail) = missing(late(0, &[1], &[told_by(0, vec![waits]), Witness::Left]));
    assert_eq!(who, [1]);
    assert!(detail.contains("has ended already"), "{detail}");
}

#[test]
fn what_was_sent_and_did_not_arrive_is_said_so() {
    let waits = |peer| call(0, "barrier", Waiting, &[peer], &[(peer, 0, "b")]);
    let witnesses = [told_by(0, vec![waits(1)]), told_by(1, vec![waits(0)])];
    let (who, detail) = missing(late(0, &[1], &witnesses));
    assert_eq!(who, [1]);
    assert!(detail.contains("has not arrived"), "{detail}");
}

/// Two processes that agreed once, and then one of them skipped a call.
fn skipped() -> [Vec<Call>; 2] {
    [
        vec![
            call(5, "all_reduce", Done, &[], &[(1, 7, "a")]),
            call(6, "all_gather", Waiting, &[1], &[(1, 8, "g")]),
        ],
        vec![
            call(4, "all_reduce", Done, &[], &[(0, 7, "a")]),
            call(5, "barrier", Waiting, &[0], &[(0, 8, "b")]),
        ],
    ]
}

#[test]
fn the_first_call_that_two_made_differently_is_named_by_both_lines() {
    let [x, y] = skipped();
    let witnesses = [told_by(0, x), told_by(1, y)];
    let expected = [
        (0, "all_gather f32[4]".into(), "main.rs:16".into()),
        (1, "barrier f32[4]".into(), "main.rs:15".into()),
    ];
    assert_eq!(apart(late(0, &[1], &witnesses)), expected);
    let differs = judge(1, &Trouble::Differs { from: 0 }, &witnesses, &|_| "".into());
    assert_eq!(apart(differs), expected);
}

#[test]
fn calls_of_a_group_are_known_by_their_number_in_it() {
    let grouped = |n, in_group, digest: &str| Call {
        group: vec![0, 1],
        in_group,
        digest: digest.into(),
        ..call(n, "all_reduce", Waiting, &[], &[])
    };
    let witnesses = [
        told_by(0, vec![grouped(0, 1, "a"), grouped(1, 2, "b")]),
        told_by(1, vec![grouped(0, 1, "a"), grouped(1, 2, "c")]),
    ];
    let [a, b] = apart(late(0, &[1], &witnesses));
    assert_eq!((a.2.as_str(), b.2.as_str()), ("main.rs:11", "main.rs:11"));
}

#[test]
fn an_earlier_decision_is_the_cause() {
    let [x, y] = skipped();
    let decisions = |op: &'static str, hash| [(1, "matmul", "1"), (2, op, hash), (3, "sum", "9")];
    let witnesses = [
        deciding(0, x, &decisions("gelu", "2a")),
        deciding(1, y, &decisions("relu", "2b")),
    ];
    let [a, b] = apart(late(0, &[1], &witnesses));
    assert_eq!((a.0, a.1.as_str(), a.2.as_str()), (0, "gelu", "train.rs:2"));
    assert_eq!((b.0, b.1.as_str()), (1, "relu"));
}

#[test]
fn decisions_that_never_agreed_say_nothing() {
    let [x, y] = skipped();
    let witnesses = [
        deciding(0, x, &[(2, "gelu", "a")]),
        deciding(1, y, &[(2, "relu", "b")]),
    ];
    let [a, _] = apart(late(0, &[1], &witnesses));
    assert_eq!(a.1, "all_gather f32[4]");
}

#[test]
fn a_missing_process_that_decided_differently_is_told_with_it() {
    let waits = call(0, "barrier", Waiting, &[1], &[(1, 0, "b")]);
    let witnesses = [
        deciding(0, vec![waits], &[(0, "exp", "0"), (1, "sum", "1")]),
        deciding(1, vec![], &[(0, "exp", "0"), (1, "mean", "2")]),
    ];
    let (who, detail) = missing(late(0, &[1], &witnesses));
    assert_eq!(who, [1]);
    assert!(
        detail.contains("process 0 did sum at train.rs:1, and process 1 did mean at train.rs:1"),
        "{detail}"
    );
}

#[test]
fn a_connection_that_broke_is_a_death() {
    let trouble = Trouble::Gone {
        who: 1,
        detail: "reset".into(),
    };
    let verdict = judge(0, &trouble, &[Witness::Silent, Witness::Silent], &|_| {
        "".into()
    });
    assert!(matches!(verdict, Verdict::Died { process: 1, .. }));
}

#[test]
fn sixty_four_processes_are_judged_at_once() {
    let n = 64;
    let calls = |own: usize| -> Vec<Call> {
        let call = |at: u64| {
            let pairs: Vec<_> = (0..n).filter(|p| *p != own).map(|p| (p, at, "x")).collect();
            let from: Vec<usize> = pairs.iter().map(|(p, ..)| *p).collect();
            let state = if at < 63 { Done } else { Waiting };
            call(at, "all_to_all", state, &from, &pairs)
        };
        (0..64).map(call).collect()
    };
    let told = |own: usize| told_by(own, calls(own).split_off(usize::from(own == 40)));
    let mut witnesses: Vec<Witness> = (0..n).map(told).collect();
    if let Witness::Told(record) = &mut witnesses[40] {
        record.calls.pop();
    }
    assert_eq!(missing(late(0, &[40], &witnesses)).0, [40]);
}

#[test]
fn records_of_strangers_do_not_lead_outside() {
    // Numbers that no process has, and one that waits for itself.
    let odd = call(0, "recv", Waiting, &[9, 0], &[(9, 0, "x"), (0, 0, "y")]);
    let witnesses = [told_by(0, vec![odd]), told_by(1, vec![])];
    let (who, _) = missing(late(0, &[9], &witnesses));
    assert_eq!(who, [9]);
    late(1, &[0], &witnesses);
    late(1, &[], &witnesses);
}

#[test]
fn where_calls_are_queued_behind_each_other_the_first_that_waits_tells_who_is_missing() {
    let collective = |n: u64, own: usize, state: State| Call {
        group: vec![0, 1, 2],
        in_group: n,
        digest: n.to_string(),
        ..call(
            n,
            "all_reduce",
            state,
            &(0..3).filter(|p| *p != own).collect::<Vec<_>>(),
            &[],
        )
    };
    // Two have queued the second call and one of their own behind it; the third is at the first.
    let ahead = |own: usize| {
        let alone = Call {
            group: vec![0, 1],
            in_group: 1,
            ..call(3, "all_gather", State::Waiting, &[1 - own], &[])
        };
        let done = collective(1, own, State::Done);
        told_by(own, vec![done, collective(2, own, State::Waiting), alone])
    };
    let behind = told_by(2, vec![collective(1, 2, State::Done)]);
    let witnesses = [ahead(0), ahead(1), behind];
    for (reporter, from) in [(0, [1, 2]), (1, [0, 2])] {
        assert_eq!(missing(late(reporter, &from, &witnesses)).0, [2]);
    }
}

/// Who is blamed is a peer's word: a long list, with repetitions, costs no more than its length, and
/// each is named once.
#[test]
fn a_long_list_of_the_blamed_is_gone_through_once() {
    let many = 200_000;
    let from: Vec<usize> = (0..many).chain(0..many).collect();
    let (processes, _) = missing(late(0, &from, &[Witness::Left]));
    assert_eq!(processes, (0..many).collect::<Vec<_>>());
}
