use super::*;

const MIB: u64 = 1 << 20;

/// A pool with a slab for pieces of these bytes.
fn pool(wanted: &[u64]) -> Pool {
    let mut pool = Pool::new(Pieces::OfSlabs);
    let mut at = 1 << 40;
    for &bytes in wanted {
        let [best, _] = Pieces::OfSlabs.slab(bytes);
        pool.add(at, best, bytes);
        at += 2 * best;
    }
    pool
}

#[test]
fn what_is_given_back_is_taken_again_at_once() {
    let mut pool = pool(&[1000]);
    let a = pool.take(1000).expect("room");
    let b = pool.take(1000).expect("room");
    assert_eq!(b - a, 1024);
    pool.give(a);
    assert_eq!(
        pool.take(700),
        Some(a),
        "the smallest piece that is large enough"
    );
    assert_eq!(pool.report().live, 1024 + 1024);
    assert_eq!(pool.report().live + pool.report().cached, SMALL_SLAB);
}

#[test]
fn neighbours_that_are_free_become_one() {
    let mut pool = pool(&[LARGE_SLAB]);
    let all: Vec<_> = (0..4).map(|_| pool.take(16 * MIB).expect("room")).collect();
    assert_eq!(pool.take(2 * MIB), None);
    for order in [[1, 3, 2, 0], [0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        for i in order {
            pool.give(all[i]);
        }
        assert_eq!(pool.take(LARGE_SLAB), Some(all[0]), "in order {order:?}");
        pool.give(all[0]);
        let again: Vec<_> = (0..4).filter_map(|_| pool.take(16 * MIB)).collect();
        assert_eq!(again, all);
    }
}

#[test]
fn small_pieces_do_not_cut_large_slabs() {
    let mut pool = pool(&[8 * MIB]);
    assert_eq!(pool.take(1000), None);
    assert!(pool.take(8 * MIB).is_some());
}

#[test]
fn slabs_beside_each_other_stay_apart() {
    let mut pool = Pool::new(Pieces::OfSlabs);
    pool.add(1 << 40, LARGE_SLAB, 8 * MIB);
    pool.add((1 << 40) + LARGE_SLAB, LARGE_SLAB, 8 * MIB);
    assert_eq!(pool.take(2 * LARGE_SLAB), None);
    let (a, b) = (pool.take(LARGE_SLAB), pool.take(LARGE_SLAB));
    pool.give(a.expect("room"));
    assert_eq!(pool.release(), vec![1 << 40]);
    pool.give(b.expect("room"));
    assert_eq!(pool.release(), vec![(1 << 40) + LARGE_SLAB]);
    assert_eq!(pool.report().cached, 0);
}

#[test]
fn only_slabs_without_a_buffer_are_released() {
    let mut pool = pool(&[1000, 8 * MIB, 300 * MIB]);
    let kept = pool.take(8 * MIB).expect("room");
    let large = pool.take(300 * MIB).expect("room");
    pool.give(large);
    assert_eq!(pool.release().len(), 2);
    assert_eq!(
        pool.report(),
        MemoryUse {
            live: 8 * MIB,
            peak: 308 * MIB,
            cached: 56 * MIB
        }
    );
    pool.give(kept);
    pool.give(kept);
    assert_eq!(pool.report().live, 0, "a second time changes nothing");
    assert_eq!(pool.release().len(), 1);
}

#[test]
fn nothing_and_everything_has_a_size() {
    assert_eq!(Pieces::OfSlabs.rounded(0), ALIGNMENT);
    assert_eq!(Pieces::OfSlabs.slab(0), [SMALL_SLAB, PAGE]);
    assert_eq!(Pieces::OfSlabs.slab(MIB + 1), [LARGE_SLAB, PAGE]);
    assert_eq!(
        Pieces::OfSlabs.slab(LARGE_SLAB + 1),
        [LARGE_SLAB + PAGE, LARGE_SLAB + PAGE]
    );
}

/// Random takes and gives against a list of what is held: pieces never overlap, and nothing is lost.
#[test]
fn pieces_never_overlap() {
    let mut pool = pool(&[1000, 8 * MIB, 8 * MIB, 100 * MIB]);
    let reserved = pool.report().cached;
    let mut held: Vec<(u64, u64)> = vec![];
    let (mut before, mut at_places) = (vec![], 0);
    let mut state = 1u64;
    let mut random = move |below: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for _ in 0..20_000 {
        if random(2) == 0 && !held.is_empty() {
            let (at, end) = held.swap_remove(random(held.len() as u64) as usize);
            pool.give(at);
            before.push((at, end));
        } else if random(2) == 0 && !before.is_empty() {
            let (at, end) = before[random(before.len() as u64) as usize];
            let free = held.iter().all(|&(a, b)| end <= a || b <= at);
            assert_eq!(
                pool.take_at(end - at, at),
                free,
                "all that is free can be taken"
            );
            if free {
                at_places += 1;
                held.push((at, end));
            }
        } else {
            let most = [5000, 20 * MIB][random(2) as usize];
            let bytes = 1 + random(most);
            if let Some(at) = pool.take(bytes) {
                let end = at + Pieces::OfSlabs.rounded(bytes);
                assert_eq!(at % ALIGNMENT, 0);
                assert!(held.iter().all(|&(a, b)| end <= a || b <= at));
                held.push((at, end));
            }
        }
        let live: u64 = held.iter().map(|(a, b)| b - a).sum();
        let report = pool.report();
        assert_eq!((report.live, report.cached), (live, reserved - live));
    }
    assert!(at_places > 100, "{at_places}");
    for (at, _) in held {
        pool.give(at);
    }
    assert_eq!(pool.release().len(), 4, "all of it is whole again");
}

#[test]
fn what_will_be_free_can_be_taken_once_it_is_given() {
    let mut pool = pool(&[8 * MIB, 1000]);
    let all: Vec<_> = (0..8).map(|_| pool.take(8 * MIB).expect("room")).collect();
    let at = |k: usize| all[k]..all[k] + 8 * MIB;
    (pool.give(all[1]), pool.give(all[5]));
    // All of them in one, parts, and across neighbours.
    let part = all[1] + MIB..all[1] + 2 * MIB;
    let across = all[0] + MIB..all[2] + MIB;
    let cases: [(&[Range<u64>], &[usize], bool); 8] = [
        (&[], &[], true),
        (&[at(1), at(5)], &[], true),
        (&[part.clone(), at(5)], &[], true),
        (&[at(1), at(2)], &[], false),
        (&[at(1), at(2)], &[2], true),
        (std::slice::from_ref(&across), &[0], false),
        (std::slice::from_ref(&across), &[2, 0], true),
        (&[all[7]..all[7] + 9 * MIB], &[7], false),
    ];
    for (ranges, given, expected) in cases {
        let given: Vec<u64> = given.iter().map(|k| all[*k]).collect();
        let found = pool.will_be_free(ranges, &given);
        assert_eq!(found, expected, "{ranges:x?} and {given:x?}");
    }
    (pool.give(all[0]), pool.give(all[2]));
    assert!(pool.take_at(across.end - across.start, across.start));
    assert!(!pool.will_be_free(&[part], &[]));

    assert!(pool.is_within_a_slab(8 * MIB, all[3]));
    assert!(!pool.is_within_a_slab(8 * MIB, all[7] + MIB), "its end");
    assert!(!pool.is_within_a_slab(1000, all[3]), "of another kind");
    assert!(!pool.is_within_a_slab(8 * MIB, 1 << 39), "none at all");
}

#[test]
fn what_passes_counts_for_the_peak_alone() {
    let mut pool = pool(&[8 * MIB]);
    pool.take(8 * MIB);
    pool.pass(3 * MIB);
    pool.pass(MIB);
    let MemoryUse { live, peak, .. } = pool.report();
    assert_eq!([live, peak], [8 * MIB, 11 * MIB]);
}

#[test]
fn buffers_have_few_sizes_and_serve_others_of_their_size() {
    let sizes: std::collections::BTreeSet<u64> = (0..1 << 20)
        .step_by(64)
        .map(|bytes| Pieces::Buffers.rounded(bytes))
        .collect();
    assert!(sizes.len() < 120, "{} sizes up to a MiB", sizes.len());
    for bytes in [1, 700, 5000, 65_537, 3 * MIB + 1, 100 * MIB + 1] {
        let size = Pieces::Buffers.rounded(bytes);
        assert!(size >= bytes && size - bytes <= (bytes / 8).max(ALIGNMENT));
        assert_eq!(Pieces::Buffers.slab(bytes), [size, size]);
    }
    let mut pool = Pool::new(Pieces::Buffers);
    pool.add(4096, Pieces::Buffers.slab(3 * MIB)[0], 3 * MIB);
    assert_eq!(pool.take(MIB), None, "a buffer is not cut");
    assert_eq!(pool.take(3 * MIB), Some(4096));
    assert_eq!(pool.take(3 * MIB), None);
    pool.give(4096);
    assert!(pool.take_at(3 * MIB - 1, 4096));
}

#[test]
fn buffers_that_nobody_wants_again_are_noticed() {
    let mut pool = Pool::new(Pieces::Buffers);
    let mut address = 0;
    for size in 1..200 {
        let bytes = size * 2 * MIB;
        let most = 400 * MIB;
        assert_eq!(pool.is_wasteful(), pool.reserved > 2 * pool.peak + SPARE);
        if pool.is_wasteful() {
            assert!(pool.release().len() > 1);
            assert_eq!(pool.reserved, 0);
        }
        address += most;
        pool.add(address, Pieces::Buffers.slab(bytes)[0], bytes);
        assert_eq!(pool.take(bytes), Some(address));
        pool.give(address);
        assert!(pool.reserved <= 3 * pool.peak + SPARE + bytes);
    }
    assert!(pool.reserved < 2000 * MIB, "{}", pool.reserved);
}
