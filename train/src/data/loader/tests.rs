use super::*;
use crate::data::{
    Concat, Document, Each, FirstFit, JsonLines, Memory, Records, Tokenized, Tokenizer,
    tests::{Folder, Numbers},
};
use anymesh_core::{Device, meta};

fn device() -> Device {
    anymesh_backend_cpu::device()
}

fn meshes() -> Vec<Mesh> {
    let device = device();
    let mut meshes = vec![Mesh::single(&device)];
    for axes in ["dp=2", "dp=3", "dp=8", "dp=2, tp=2", "tp=3"] {
        meshes.push(Mesh::new(axes, &device).expect("a mesh"));
    }
    meshes
}

fn options(batch: usize, micro_batches: usize) -> LoaderOptions {
    LoaderOptions {
        batch,
        micro_batches,
        seed: 5,
        ..LoaderOptions::default()
    }
}

fn values(t: &Tensor) -> Vec<i32> {
    t.to_vec().expect("values")
}

/// The rows of all steps after so many samples: tokens, labels, documents, positions of each.
fn rows(loader: &Loader, consumed: u64, count: usize) -> Vec<[Vec<i32>; 4]> {
    let mut rows = vec![];
    for step in loader.steps(consumed) {
        for batch in step.expect("a step").micro_batches {
            let (documents, positions) = (batch.documents.as_ref(), batch.positions.as_ref());
            let all = [
                values(&batch.ids),
                values(&batch.labels),
                values(documents.expect("documents")),
                values(positions.expect("positions")),
            ];
            for row in 0..batch.ids.dims()[0] {
                let of = |t: &Vec<i32>| t[row * loader.length()..][..loader.length()].to_vec();
                rows.push([of(&all[0]), of(&all[1]), of(&all[2]), of(&all[3])]);
            }
        }
        if rows.len() >= count {
            break;
        }
    }
    rows.truncate(count);
    rows
}

/// Documents of many lengths, packed.
fn packed() -> FirstFit<Memory> {
    let documents = (0..60u32).map(|i| Document::new(vec![i; 1 + (i as usize * 7) % 11]));
    FirstFit::new(Memory::new(documents), 8, None).expect("tokens")
}

#[test]
fn batches_are_the_same_rows_on_every_mesh_and_however_they_are_cut() {
    let one = Loader::new(packed(), &Mesh::single(&device()), options(1, 1)).expect("a loader");
    let expected = rows(&one, 0, 120);
    for mesh in meshes() {
        for (batch, micro_batches) in [(6, 1), (6, 2), (6, 6), (7, 1), (40, 4)] {
            let loader = Loader::new(packed(), &mesh, options(batch, micro_batches));
            let loader = loader.expect("a loader");
            assert_eq!(
                rows(&loader, 0, 120),
                expected,
                "{mesh}, {batch} in {micro_batches}"
            );
        }
    }
}

#[test]
fn a_run_resumes_anywhere_on_another_mesh_with_another_batch() {
    let one = Loader::new(packed(), &Mesh::single(&device()), options(4, 1)).expect("a loader");
    let expected = rows(&one, 0, 90);
    let meshes = meshes();
    for consumed in 0..60u64 {
        let mesh = &meshes[consumed as usize % meshes.len()];
        let batch = 1 + (consumed as usize * 5) % 9;
        let loader = Loader::new(packed(), mesh, options(batch, 1)).expect("a loader");
        let resumed = rows(&loader, consumed, 30);
        assert_eq!(
            resumed,
            expected[consumed as usize..][..30],
            "{consumed} on {mesh}"
        );
    }
}

#[test]
fn a_mixture_resumes_anywhere_too() {
    let mixture = || {
        let source = |count| Arc::new(Numbers::new(count)) as Arc<dyn Source>;
        Mixture::with_block(
            vec![(source(10), 0.5), (source(7), 0.3), (source(900), 0.2)],
            10,
        )
        .expect("weights")
    };
    let meshes = meshes();
    let loader = Loader::new(mixture(), &meshes[0], options(3, 1)).expect("a loader");
    let expected = rows(&loader, 0, 100);
    for consumed in (0..70).step_by(9) {
        let mesh = &meshes[consumed % meshes.len()];
        let loader = Loader::new(mixture(), mesh, options(1 + consumed % 8, 1));
        let resumed = rows(&loader.expect("a loader"), consumed as u64, 30);
        assert_eq!(resumed, expected[consumed..][..30], "{consumed} on {mesh}");
    }
    // What only the third source has is a fifth of it.
    let third = expected.iter().filter(|row| row[0][0] >= 10).count();
    assert!((18..=20).contains(&third), "{third}");
}

#[test]
fn fields_of_the_same_records_come_in_the_same_order() {
    let folder = Folder::new("pairs");
    let lines: String = (0..20u8)
        .map(|i| {
            format!(
                "{{\"query\": \"q{0}\", \"positive\": \"p{0}\"}}\n",
                (b'a' + i) as char
            )
        })
        .collect();
    let records: Arc<dyn Records> =
        Arc::new(JsonLines::open(folder.write("a.jsonl", lines.as_bytes())).expect("lines"));
    let tokenizer = Arc::new(Tokenizer::bytes());
    for mesh in meshes() {
        let sides: Vec<Vec<[Vec<i32>; 4]>> =
            Tokenized::fields(&records, &tokenizer, &["query", "positive"])
                .into_iter()
                .map(|side| {
                    let rows_of = Each::new(side, 4).expect("rows");
                    let loader = Loader::new(rows_of, &mesh, options(8, 2)).expect("a loader");
                    rows(&loader, 0, 40)
                })
                .collect();
        for (query, positive) in sides[0].iter().zip(&sides[1]) {
            assert_eq!((query[0][0], positive[0][0]), (b'q'.into(), b'p'.into()));
            assert_eq!(query[0][1], positive[0][1], "of the same record");
            assert_eq!(query[2], [0, 0, -1, -1]);
        }
        let letters: std::collections::HashSet<i32> =
            sides[0][..20].iter().map(|row| row[0][1]).collect();
        assert_eq!(letters.len(), 20, "each once in an epoch");
    }
}

#[test]
fn every_epoch_has_every_sample_once_in_another_order() {
    let source = Numbers::new(10);
    let options = LoaderOptions {
        epochs: Some(3),
        ..options(4, 2)
    };
    let loader = Loader::new(source, &meshes()[1], options).expect("a loader");
    assert_eq!(
        (loader.samples(), loader.steps_after(0)),
        (Some(30), Some(8))
    );
    let ids: Vec<i32> = rows(&loader, 0, 1000).iter().map(|row| row[0][0]).collect();
    assert_eq!(ids.len(), 32, "the last batch is filled");
    let mut orders: Vec<Vec<i32>> = ids[..30].chunks(10).map(<[i32]>::to_vec).collect();
    assert!(orders[0] != orders[1] && orders[1] != orders[2]);
    for order in &mut orders {
        order.sort_unstable();
        assert_eq!(order, &(0..10).collect::<Vec<_>>());
    }
}

#[test]
fn a_process_reads_only_the_rows_that_its_ranks_hold() {
    let mesh = Mesh::new("dp=2, tp=2", &device()).expect("a mesh");
    let options = LoaderOptions {
        shuffle: false,
        ..options(12, 2)
    };
    for (ranks, expected) in [
        (&[0][..], vec![0, 1, 2, 6, 7, 8]),
        (&[1], vec![0, 1, 2, 6, 7, 8]),
        (&[2, 3], vec![3, 4, 5, 9, 10, 11]),
        (&[1, 2], (0..12).collect()),
    ] {
        let here = mesh.addressing(ranks).expect("they are there");
        let source = Numbers::new(100);
        let loader = Loader::new(source.clone(), &here, options.clone()).expect("a loader");
        let step = loader.step(0).expect("a step").expect("a step");
        assert_eq!(source.asked(), expected, "{ranks:?}");
        let batch = &step.micro_batches[1];
        assert_eq!(batch.ids.type_string(), "i32[6@dp, 3]");
        for (rank, part) in batch.ids.shards() {
            let first = 6 + 3 * (rank as i32 / 2);
            let expected: Vec<i32> = (first..first + 3).flat_map(|n| [n; 3]).collect();
            assert_eq!(values(&part), expected, "rank {rank}");
        }
    }
    // Rows that a mesh cuts unevenly, or that some ranks have none of.
    let mesh = Mesh::new("dp=5", &device()).expect("a mesh");
    for batch in [3, 7] {
        let mut all = vec![];
        for rank in 0..5 {
            let here = mesh.addressing(&[rank]).expect("it is there");
            let source = Numbers::new(100);
            let options = LoaderOptions {
                batch,
                micro_batches: 1,
                ..options.clone()
            };
            let loader = Loader::new(source.clone(), &here, options).expect("a loader");
            let step = loader.step(0).expect("a step").expect("a step");
            assert_eq!(step.micro_batches[0].ids.shards().len(), 1);
            all.extend(source.asked());
        }
        assert_eq!(all, (0..batch as u64).collect::<Vec<_>>());
    }
}

#[test]
fn the_sequence_may_be_cut_too() {
    let mesh = Mesh::new("dp=2, sp=2", &device()).expect("a mesh");
    let options = LoaderOptions {
        sharding: "[@dp?, @sp?]".into(),
        shuffle: false,
        ..options(4, 1)
    };
    let tokens = Memory::new([Document::new((0..100).collect::<Vec<_>>())]);
    let loader = Loader::new(Concat::new(tokens, 5).expect("rows"), &mesh, options);
    let step = loader
        .and_then(|l| l.step(0))
        .expect("a step")
        .expect("a step");
    let ids = &step.micro_batches[0].ids;
    assert_eq!(ids.type_string(), "i32[4@dp, 5@sp]");
    assert_eq!(values(ids), (0..20).collect::<Vec<_>>());
    assert_eq!(values(&ids.shards()[3].1), [12, 13, 14, 17, 18, 19]);
}

#[test]
fn nothing_is_read_for_a_device_without_values() {
    let mesh = Mesh::new("dp=64, tp=8", &meta()).expect("a mesh");
    let source = Numbers::new(10_000);
    let loader = Loader::new(source.clone(), &mesh, options(1024, 2)).expect("a loader");
    let step = loader.step(0).expect("a step").expect("a step");
    assert_eq!(step.micro_batches[0].ids.type_string(), "i32[512@dp, 3]");
    let plain = Loader::new(source.clone(), &Mesh::single(&meta()), options(4, 1));
    let step = plain
        .and_then(|l| l.step(0))
        .expect("a step")
        .expect("a step");
    assert_eq!(step.micro_batches[0].labels.type_string(), "i32[4, 3]");
    assert_eq!(source.asked(), [0u64; 0]);
}

#[test]
fn valid_labels_are_counted_over_the_whole_global_batch() {
    // The last of ten samples has one label, the others three.
    for mesh in meshes() {
        for micro_batches in [1, 2, 5] {
            let options = LoaderOptions {
                epochs: Some(1),
                ..options(10, micro_batches)
            };
            let loader = Loader::new(Numbers::new(10), &mesh, options).expect("a loader");
            let step = loader.step(0).expect("a step").expect("a step");
            assert_eq!(step.valid().expect("a count"), 28, "{mesh}");
            // The last four of them, and six rows that are not there.
            let step = loader.step(6).expect("a step").expect("a step");
            assert_eq!(step.positions, 6..10);
            let expected: usize = (6..10)
                .map(|p| loader.sample(p).expect("a sample").valid())
                .sum();
            assert_eq!(step.valid().expect("a count"), expected as u64, "{mesh}");
        }
    }
}

#[test]
fn evaluation_sees_every_sample_once_in_order() {
    for mesh in meshes() {
        let loader = Loader::evaluation(Numbers::new(10), &mesh, options(4, 1)).expect("a loader");
        let rows = rows(&loader, 0, 1000);
        let ids: Vec<i32> = rows.iter().map(|row| row[0][0]).collect();
        assert_eq!(ids, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]);
        assert_eq!(rows[8], [vec![8; 3], vec![9; 3], vec![0; 3], vec![0, 1, 2]]);
        let [ids, labels, documents, positions] = rows[9].clone();
        assert_eq!((ids, labels), (vec![9, 0, 0], vec![10, -100, -100]));
        assert_eq!((documents, positions), (vec![0, -1, -1], vec![0, 0, 0]));
        assert_eq!(
            rows[10],
            [vec![0; 3], vec![-100; 3], vec![-1; 3], vec![0; 3]]
        );
        let valid: u64 = loader
            .steps(0)
            .map(|s| s.and_then(|s| s.valid()).expect("a count"))
            .sum();
        assert_eq!(valid, 28);
    }
}

#[test]
fn errors_come_in_order_and_end_the_steps() {
    for ahead in [0, 1, 5] {
        let mut source = Numbers::new(100);
        source.broken = Some(9);
        let options = LoaderOptions {
            ahead,
            shuffle: false,
            ..options(4, 1)
        };
        let loader = Loader::new(source, &meshes()[0], options).expect("a loader");
        let mut steps = loader.steps(0);
        for k in 0..2 {
            let step = steps.next().expect("a step").expect("whole");
            assert_eq!(step.positions, 4 * k..4 * k + 4);
        }
        assert_eq!(steps.consumed(), 8);
        let error = steps.next().expect("an error").expect_err("9 is broken");
        assert_eq!(error.to_string(), "test: 9 is broken");
        assert!(steps.next().is_none());
        assert_eq!(steps.consumed(), 8);
    }
}

#[test]
fn a_panic_while_reading_ahead_is_an_error() {
    let mut source = Numbers::new(100);
    source.panics = Some(5);
    let options = LoaderOptions {
        shuffle: false,
        ..options(4, 1)
    };
    let loader = Loader::new(source, &meshes()[0], options).expect("a loader");
    let mut steps = loader.steps(0);
    assert!(steps.next().expect("a step").is_ok());
    let error = steps.next().expect("an error").expect_err("it panicked");
    assert!(error.to_string().contains("panicked"), "{error}");
    assert!(steps.next().is_none());
}

#[test]
fn dropping_the_steps_ends_the_thread() {
    let source = Numbers::new(u64::MAX);
    let loader = Loader::new(source.clone(), &meshes()[0], options(4, 1)).expect("a loader");
    for taken in [0, 1, 7] {
        let mut steps = loader.steps(0);
        for _ in 0..taken {
            steps.next().expect("a step").expect("whole");
        }
        assert!(steps.waited() > Duration::ZERO || taken == 0);
        drop(steps);
        assert_eq!(Arc::strong_count(&loader.0), 1, "the thread has ended");
        // It read ahead, but not far: what was taken, two in the queue, one in its hand, and the
        // one that found nobody.
        let read = source.asked().len() / 4;
        assert!((taken..=taken + 4).contains(&read), "{read} of {taken}");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let mesh = Mesh::new("dp=2", &device()).expect("a mesh");
    let refused = |options: LoaderOptions, said: &str| {
        let error = Loader::new(Numbers::new(10), &mesh, options).expect_err(said);
        assert!(error.to_string().contains(said), "{error}");
    };
    refused(options(0, 1), "at least one of each");
    refused(options(1, 0), "at least one of each");
    refused(options(10, 4), "the nearest are 8 and 12");
    refused(options(3, 4), "the nearest is 4");
    let with = |f: fn(&mut LoaderOptions)| {
        let mut options = options(4, 1);
        f(&mut options);
        options
    };
    refused(with(|o| o.epochs = Some(0)), "0 epochs of 10 samples");
    refused(with(|o| o.epochs = Some(u64::MAX)), "epochs of 10 samples");
    refused(with(|o| o.pad = u32::MAX), "is no token");
    refused(with(|o| o.sharding = "[@xy, _]".into()), "xy");
    refused(
        with(|o| o.sharding = "[_, _]{sum:dp}".into()),
        "parts of sums",
    );
    let error = Loader::new(Numbers::new(0), &mesh, options(4, 1)).expect_err("empty");
    assert_eq!(error.to_string(), "data: source 0 is empty");
    let loader = Loader::new(Numbers::new(10), &mesh, options(4, 1)).expect("a loader");
    assert!(loader.step(u64::MAX - 1).is_err());
    let loader = Loader::evaluation(Numbers::new(10), &mesh, options(4, 1)).expect("a loader");
    assert!(loader.step(10).expect("the end").is_none());
    assert!(loader.step(11).expect("the end").is_none());
}
