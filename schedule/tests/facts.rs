//! Schedules that torch 2.15 and Paddle made, recorded by running them: ours are the same.

use anymesh_schedule::{Action, Costs, Error, Job, Kind, Limits, Schedule, build, f_then_b};
use serde_json::Value;

fn facts(file: &str) -> Vec<Value> {
    let path = format!("{}/tests/facts/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("the facts are there");
    let facts: Value = serde_json::from_str(&text).expect("they are JSON");
    facts["rows"].as_array().expect("there are rows").clone()
}

fn number(row: &Value, key: &str) -> usize {
    row[key].as_u64().expect("a number") as usize
}

/// The lists under a key, a CSV line for each rank.
fn lines(row: &Value, key: &str) -> Vec<String> {
    let lists = row[key].as_object().expect("lists by rank");
    let list = |rank: usize| {
        let cells = lists[&rank.to_string()].as_array().expect("a list");
        let cells: Vec<&str> = cells.iter().map(|c| c.as_str().expect("a text")).collect();
        cells.join(",")
    };
    (0..lists.len()).map(list).collect()
}

fn read(row: &Value, key: &str) -> Schedule {
    Schedule::from_csv(&(lines(row, key).join("\n") + "\n")).expect("torch's lists can be read")
}

/// Which built-in a row of torch's is.
fn built(row: &Value) -> Result<Schedule, Error> {
    build(
        row["schedule"].as_str().expect("a name"),
        number(row, "pp_size"),
        number(row, "num_local_stages"),
        number(row, "num_microbatches"),
    )
}

#[test]
fn every_schedule_of_torch_is_made_action_by_action_and_every_refusal_is_one() {
    let (mut made, mut refused) = (0, 0);
    for row in facts("torch_pipeline_schedules.json") {
        let title = format!(
            "{} {} x {}, {}",
            row["schedule"], row["pp_size"], row["num_local_stages"], row["num_microbatches"]
        );
        if row.get("expect_error").is_some() {
            let error = built(&row).expect_err(&title);
            assert!(matches!(error, Error::Refused { .. }), "{title}: {error}");
            refused += 1;
            continue;
        }
        let ours = built(&row).unwrap_or_else(|e| panic!("{title}: {e}"));
        // Free slots are where torch's generator waits; they are no actions.
        assert_eq!(
            ours.ranks,
            read(&row, "compute").without_idle().ranks,
            "{title}"
        );
        for (stage, rank) in row["stage_to_rank"].as_object().expect("a map") {
            let stage: usize = stage.parse().expect("a number");
            assert_eq!(Some(ours.owner[stage] as u64), rank.as_u64(), "{title}");
        }
        made += 1;
    }
    assert_eq!((made, refused), (27, 7));
}

#[test]
fn times_bubbles_and_activations_are_those_that_were_recorded() {
    for row in facts("torch_pipeline_schedules.json") {
        let Some(model) = row.get("unit_model") else {
            continue;
        };
        let timing = built(&row)
            .and_then(|s| s.timing(&Costs::default()))
            .expect("it was made");
        assert_eq!(Some(timing.makespan), model["makespan"].as_f64());
        let fraction = model["bubble_fraction"].as_f64().expect("a number");
        assert!((timing.fraction - fraction).abs() < 1e-6, "{row}");
        let peak: Vec<u64> = timing.peak.iter().map(|p| *p as u64).collect();
        assert_eq!(serde_json::json!(peak), model["peak_live_activations"]);
    }
}

/// torch puts transfers in twice: into the lists with free slots, which it shows, and into lists with
/// the gathering of parameters, which it runs. Both come out, from the same slots. Exception: what
/// torch's lists have besides (UNSHARD, RESHARD, REDUCE_GRAD and its wait, WAIT_SEND) is about buffers
/// of its parameters and of its sends, not about the pipeline, and is left out here.
#[test]
fn transfers_are_put_where_torch_puts_them() {
    let (mut shown, mut run) = (0, 0);
    for row in facts("torch_pipeline_schedules.json") {
        if row.get("expect_error").is_some() {
            continue;
        }
        let with = read(&row, "compute").with_transfers().expect("it runs");
        assert_eq!(
            with.to_csv(),
            lines(&row, "lowered_send_recv").join("\n") + "\n"
        );
        with.prove(&Limits::none()).expect("no deadlock");
        shown += 1;
        if row.get("runtime_lowered_full").is_some() {
            let full = read(&row, "runtime_lowered_full");
            let again = full.with_transfers().expect("it runs");
            assert_eq!(again, full.without_idle());
            full.prove(&Limits::none()).expect("no deadlock");
            // And the passes are those of the built-in.
            let ours = built(&row).expect("it was made");
            let passes = full.without_idle().without_transfers();
            assert_eq!(passes.ranks, ours.ranks);
            run += 1;
        }
    }
    assert_eq!((shown, run), (27, 20));
}

#[test]
fn every_list_of_torch_goes_through_text_unchanged() {
    for row in facts("torch_pipeline_schedules.json") {
        for key in ["compute", "lowered_send_recv"] {
            if row.get(key).is_some() {
                let read = read(&row, key);
                assert_eq!(read.to_csv(), lines(&row, key).join("\n") + "\n");
                let json = read.to_json().to_string();
                assert_eq!(Schedule::from_json(&json).as_ref(), Ok(&read));
            }
        }
    }
}

/// What Paddle refuses and we do not, with the reason.
fn exception(name: &str, ranks: usize, micros: usize) -> Option<&'static str> {
    match name {
        "1F1B" if micros < ranks => Some(
            "a pipe that never fills is slow but right: the forwards ahead are at most the micro-batches",
        ),
        "Eager1F1B" if micros < 2 * ranks - 1 => {
            Some("the same: the forwards ahead are at most the micro-batches")
        }
        "VPP" if micros < ranks => Some("the same: one round of all micro-batches"),
        _ => None,
    }
}

#[test]
fn every_job_list_of_paddle_is_made_job_by_job() {
    let (mut made, mut refused, mut excepted) = (0, 0, 0);
    for row in facts("paddle_pipeline_schedules.json") {
        let name = row["schedule"].as_str().expect("a name");
        let attrs = &row["attrs"];
        let [ranks, micros, stage] =
            ["pp_degree", "num_micro_batches", "pp_stage"].map(|key| number(attrs, key));
        let chunks = attrs["vpp_degree"].as_u64().unwrap_or(1) as usize;
        let halves = attrs["split_backward"] == true;
        let ours = build(name, ranks, chunks, micros);
        if row.get("error").is_some() {
            match exception(name, ranks, micros) {
                Some(reason) => {
                    let ours = ours.expect("we make it");
                    let proof = ours.with_transfers().and_then(|s| s.prove(&Limits::none()));
                    assert!(proof.is_ok(), "{reason}");
                    excepted += 1;
                }
                None => {
                    let error = ours.expect_err("Paddle refuses it");
                    assert!(matches!(error, Error::Refused { .. }), "{error}");
                    refused += 1;
                }
            }
            continue;
        }
        // With as many micro-batches as ranks, Paddle's split VPP is all forwards, all gradients of
        // inputs, all gradients of weights, without jobs for transfers; with more, `split_backward`
        // changes nothing.
        let all_first = name == "VPP" && halves && micros == ranks;
        let ours = match all_first {
            true => f_then_b(ranks, chunks, micros)
                .expect("it is made")
                .with_weights_last(),
            false => ours.expect("it is made"),
        };
        ours.prove(&Limits::none()).expect("it runs");
        let transfers = matches!(name, "1F1B" | "VPP") && !all_first;
        let jobs = ours
            .to_paddle(transfers)
            .expect("a loop")
            .swap_remove(stage);
        let want: Vec<Job> = row["jobs"]
            .as_array()
            .expect("jobs")
            .iter()
            .map(|j| {
                (
                    j[0].as_str().expect("a type").into(),
                    j[1].as_u64().expect("a number") as usize,
                )
            })
            .collect();
        assert_eq!(jobs, want, "{name} {attrs}");
        made += 1;
    }
    assert_eq!((made, refused, excepted), (32, 2, 7));
}

#[test]
fn jobs_can_be_read_again() {
    for (name, chunks) in [("fthenb", 1), ("1f1b", 1), ("zbh1", 1), ("vpp", 3)] {
        for transfers in [false, true] {
            let ours = build(name, 4, chunks, 8).expect("it is made");
            let jobs = ours.to_paddle(transfers).expect("a loop");
            let text = serde_json::to_string(&jobs).expect("it is JSON");
            let read = Schedule::from_paddle(&text).expect("it is read");
            assert_eq!((read.ranks, read.owner), (ours.ranks, ours.owner));
        }
    }
    let v = build("zbv", 2, 2, 4).expect("it is made");
    assert!(matches!(v.to_paddle(false), Err(Error::Refused { .. })));
}

#[test]
fn the_numbers_of_the_table_of_one_stage_a_rank() {
    let costs = Costs::default();
    let row = |name: &str| {
        [(4, 8), (8, 32)].map(|(ranks, micros)| {
            let timing = build(name, ranks, 1, micros).and_then(|s| s.timing(&costs));
            timing.expect("it is made")
        })
    };
    for (name, spans) in [
        ("fthenb", [33.0, 117.0]),
        ("1f1b", [33.0, 117.0]),
        ("zbh1", [29.0, 109.0]),
    ] {
        assert_eq!(row(name).map(|t| t.makespan), spans, "{name}");
        assert_eq!(row(name).map(|t| t.bound), [27.0, 103.0], "{name}");
    }
    assert_eq!(row("fthenb").map(|t| t.peak[0]), [8, 32]);
    assert_eq!(row("1f1b")[1].peak, [8, 7, 6, 5, 4, 3, 2, 1]);
    assert_eq!(
        row("zbh1").map(|t| t.peak.into_iter().max()),
        [Some(4), Some(8)]
    );
    // The closed form of 1F1B: a bubble of (P - 1)(F + B) on each rank.
    assert!(row("1f1b")[1].bubble.iter().all(|b| *b == 7.0 * 3.0));
}

#[test]
fn an_action_of_each_kind_has_torchs_text() {
    let kinds = [
        (Kind::F, "3F12"),
        (Kind::B, "3B12"),
        (Kind::I, "3I12"),
        (Kind::W, "3W12"),
        (Kind::SendF, "3SEND_F12"),
        (Kind::RecvF, "3RECV_F12"),
        (Kind::SendB, "3SEND_B12"),
        (Kind::RecvB, "3RECV_B12"),
    ];
    for (kind, text) in kinds {
        assert_eq!(Action::new(kind, 3, 12).to_string(), text);
        assert_eq!(text.parse(), Ok(Action::new(kind, 3, 12)));
    }
    for bad in [
        "",
        "F",
        "0F",
        "F0",
        "0F0F",
        "-1F0",
        "0 F0",
        "0X0",
        "99999999999999999999F0",
    ] {
        assert!(bad.parse::<Action>().is_err(), "{bad:?}");
    }
}
