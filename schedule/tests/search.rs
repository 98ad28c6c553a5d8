//! What the search finds.

use anymesh_schedule::{Costs, Error, Limits, Placement, Search, build};

#[test]
fn the_searched_schedule_is_as_short_as_the_best_known_at_the_same_memory() {
    for (ranks, micros, live, known) in [
        (4, 8, 4, 29.0),
        (4, 8, 6, 27.0),
        (8, 32, 8, 105.0),
        (8, 32, 12, 103.0),
    ] {
        let search = Search {
            live,
            ..Search::new(ranks, 1, micros)
        };
        let found = search.run().expect("it is found");
        let proof = found
            .with_transfers()
            .and_then(|s| s.prove(&Limits::live(live)));
        let peak = proof.expect("it runs within the limit").peak().to_vec();
        let timing = found.timing(&search.costs).expect("it runs");
        assert!(timing.makespan >= found.bound_within(&search.costs, live));
        println!(
            "P={ranks} M={micros} live {live}: {} (bound {}), peak {peak:?}",
            timing.makespan, timing.bound
        );
        assert!(timing.makespan <= known, "{} at {live}", timing.makespan);
    }
}

#[test]
fn more_memory_never_makes_it_longer_than_what_is_built_in() {
    let costs: Costs = "f=1.1/0.9/1/1.4,i=1.2,w=0.7,transfer=0.2"
        .parse()
        .expect("costs");
    for live in 1..10 {
        let search = Search {
            live,
            costs: costs.clone(),
            effort: 1_000_000,
            ..Search::new(4, 1, 9)
        };
        let found = search.run().expect("it is found");
        assert!(found.prove(&Limits::live(live)).is_ok());
        let within = found.bound_within(&costs, live);
        let found = found.timing(&costs).expect("it runs");
        assert!(
            found.makespan >= found.bound - 1e-9,
            "{} < {}",
            found.makespan,
            found.bound
        );
        assert!(found.makespan >= within - 1e-9 && within >= found.bound - 1e-9);
        for name in ["fthenb", "1f1b", "eager-1f1b", "zbh1"] {
            let known = build(name, 4, 1, 9).expect("it is made");
            if known.prove(&Limits::live(live)).is_ok() {
                let known = known.timing(&costs).expect("it runs");
                assert!(found.makespan <= known.makespan + 1e-9, "{name}, {live}");
            }
        }
    }
}

#[test]
fn two_stages_a_rank_within_the_memory_of_zbv() {
    let v = build("zbv", 4, 2, 8).expect("it is made");
    let search = Search {
        placement: Placement::V,
        live: 8,
        ..Search::new(4, 2, 8)
    };
    let found = search.run().expect("it is found");
    assert_eq!(found.owner, v.owner);
    assert!(found.prove(&Limits::live(8)).is_ok());
    let span = |s: &anymesh_schedule::Schedule| s.timing(&search.costs).expect("it runs").makespan;
    println!("V: {} (zbv {})", span(&found), span(&v));
    assert!(span(&found) <= span(&v));
}

#[test]
fn the_same_search_finds_the_same() {
    let search = Search {
        effort: 300_000,
        ..Search::new(4, 2, 6)
    };
    assert_eq!(search.run(), search.run());
}

#[test]
fn a_limit_that_nothing_can_keep_is_refused_with_the_least_that_works() {
    let search = Search {
        live: 2,
        ..Search::new(2, 3, 4)
    };
    let error = search.run().expect_err("three stages need three");
    assert!(matches!(error, Error::Number { .. }));
    assert!(error.to_string().contains("needs 3"), "{error}");
    let least = Search { live: 3, ..search };
    let found = least.run().expect("three are enough");
    assert!(found.prove(&Limits::live(3)).is_ok());
}

/// The bound under a limit holds for every built-in schedule at the memory that it takes.
#[test]
fn no_schedule_is_shorter_than_the_bound_under_its_own_memory() {
    for (ranks, chunks, micros) in [(2, 1, 3), (3, 1, 5), (2, 2, 4), (4, 3, 6), (8, 1, 12)] {
        for costs in [
            "",
            "f=1,i=2,w=0.5,transfer=0.3",
            "f=2,i=1,w=1,b=1.5,transfer=1",
        ] {
            let costs: Costs = costs.parse().expect("costs");
            for name in anymesh_schedule::NAMES {
                let Ok(schedule) = build(name, ranks, chunks, micros) else {
                    continue;
                };
                let timing = schedule.timing(&costs).expect("it runs");
                let live = timing.peak.iter().copied().max().unwrap_or(1);
                let bound = schedule.bound_within(&costs, live);
                assert!(
                    timing.makespan >= bound - 1e-9,
                    "{name}: {} < {bound}",
                    timing.makespan
                );
                assert!(bound >= timing.bound);
            }
        }
    }
}
