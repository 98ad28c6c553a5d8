//! What only moves data.

use super::{
    Suite,
    host::{Array, Sample},
};
use anymesh_core::{Shape, split, transport::Message};

/// Sizes of parts: even over every group, uneven, fewer than ranks, empty.
const SHAPES: [&[usize]; 5] = [&[12, 4], &[5, 3], &[2, 7], &[0, 3], &[4, 0]];

pub(super) async fn check<T: Sample>(suite: &mut Suite<'_>) {
    gather::<T>(suite).await;
    all_to_all::<T>(suite).await;
    broadcast::<T>(suite).await;
    exchange::<T>(suite).await;
}

async fn gather<T: Sample>(suite: &mut Suite<'_>) {
    let k = suite.group.len();
    for dims in SHAPES {
        for dim in 0..2 {
            // Once the cut of a tensor, once as many more as the rank says, the first with nothing.
            for grown in [false, true] {
                let size = |i: usize| {
                    if grown {
                        suite.group[i]
                    } else {
                        split(dims[dim], i, k).len()
                    }
                };
                let own = |i: usize| {
                    [dims[0], dims[1]]
                        .iter()
                        .enumerate()
                        .map(|(d, n)| if d == dim { size(i) } else { *n })
                        .collect::<Vec<_>>()
                };
                let arrays: Vec<Array<T>> = (0..k)
                    .map(|i| Array::of_rank(suite.group[i], &own(i)))
                    .collect();
                let whole = vec![Array::concat(&arrays, dim); k];
                suite
                    .expect(&format!("all_gather along {dim}"), &whole, |s| {
                        s.transport.all_gather(&s.mesh, &s.parts(&arrays)?, dim)
                    })
                    .await;
            }
        }
    }
}

async fn all_to_all<T: Sample>(suite: &mut Suite<'_>) {
    let k = suite.group.len();
    for dims in SHAPES {
        for (cut, join) in [(0, 1), (1, 0), (0, 0), (1, 1)] {
            let own = |i: usize| {
                [0, 1].map(|d| {
                    if d == join {
                        split(dims[d], i, k).len()
                    } else {
                        dims[d]
                    }
                })
            };
            let arrays: Vec<Array<T>> = (0..k)
                .map(|i| Array::of_rank(suite.group[i], &own(i)))
                .collect();
            let piece = |a: &Array<T>, i: usize| a.cut(cut, split(a.dims[cut], i, k));
            let expected: Vec<Array<T>> = (0..k)
                .map(|i| {
                    Array::concat(
                        &arrays.iter().map(|a| piece(a, i)).collect::<Vec<_>>(),
                        join,
                    )
                })
                .collect();
            suite
                .expect(
                    &format!("all_to_all from {cut} to {join}"),
                    &expected,
                    |s| {
                        s.transport
                            .all_to_all(&s.mesh, &s.parts(&arrays)?, cut, join)
                    },
                )
                .await;
        }
    }
}

async fn broadcast<T: Sample>(suite: &mut Suite<'_>) {
    for dims in [&[][..], &[5, 3], &[0, 3], &[2, 1, 3]] {
        for root in suite.group.iter().copied() {
            let array = Array::<T>::of_rank(root, dims);
            let expected = vec![array.clone(); suite.group.len()];
            suite
                .expect(&format!("broadcast from {root}"), &expected, |s| {
                    s.transport
                        .broadcast(&s.mesh, &s.part(root, &array)?, s.group)
                })
                .await;
        }
    }
}

/// A ring of messages, two between each pair in their order, with sizes that differ; some are empty
/// and some 0-d. Then a single one.
async fn exchange<T: Sample>(suite: &mut Suite<'_>) {
    let k = suite.group.len();
    let before = |i: usize| suite.group[(i + k - 1) % k];
    let first: Vec<Array<T>> = (0..k)
        .map(|i| Array::of_rank(before(i), &[before(i), 3]))
        .collect();
    let second: Vec<Array<T>> = (0..k).map(|i| Array::of_rank(before(i) + 9, &[])).collect();
    for odd in [0, 1] {
        let expected = if odd == 0 { &first } else { &second };
        suite
            .expect(
                &format!("exchange, message {odd} of a ring"),
                expected,
                |s| {
                    let both = (0..k).flat_map(|i| [(i, &first[i]), (i, &second[i])]);
                    // A process names the messages of which it has an end.
                    let near: Vec<(usize, &Array<T>)> = both
                        .filter(|(i, _)| {
                            s.mesh
                                .position_of(before(*i))
                                .or(s.mesh.position_of(s.group[*i]))
                                .is_some()
                        })
                        .collect();
                    let message = |(i, array): &(usize, &Array<T>)| {
                        Ok(Message {
                            part: s.part(before(*i), array)?,
                            to: s.group[*i],
                        })
                    };
                    let mut answers = s
                        .transport
                        .exchange(
                            &s.mesh,
                            near.iter()
                                .map(message)
                                .collect::<anymesh_core::Result<_>>()?,
                        )?
                        .into_iter();
                    let mut out = vec![None; k];
                    for (n, (i, _)) in near.iter().enumerate() {
                        let answer = answers.next().flatten();
                        if n % 2 == odd {
                            out[*i] = answer;
                        }
                    }
                    Ok(out)
                },
            )
            .await;
    }
    let (from, to) = (suite.group[0], suite.group[k - 1]);
    let array = Array::<T>::of_rank(from, &[3, 2]);
    let mut sent = Suite {
        mesh: suite.mesh.clone(),
        transport: suite.transport.clone(),
        group: &[to],
        sums: suite.sums,
        report: &mut *suite.report,
    };
    let what = format!("a message from {from}");
    let send = |s: &Suite<'_>| {
        let here = (s.mesh.position_of(from), s.mesh.position_of(to));
        Ok(vec![match here {
            (None, None) => None,
            (None, Some(_)) => {
                Some(
                    s.transport
                        .recv(&s.mesh, from, T::DTYPE, Shape::from(&array.dims[..]), to)?,
                )
            }
            (Some(_), _) => s.transport.send(&s.mesh, s.part(from, &array)?, to)?,
        }])
    };
    sent.expect(&what, std::slice::from_ref(&array), send).await;
}

pub(super) fn barrier(suite: &mut Suite<'_>) {
    // Processes without a member do not take part.
    if suite
        .group
        .iter()
        .any(|rank| suite.mesh.position_of(*rank).is_some())
    {
        let outcome = suite
            .transport
            .barrier(&suite.mesh, suite.group)
            .map_err(|e| e.to_string());
        suite.record("barrier", outcome);
    }
    let nothing = suite
        .transport
        .exchange(&suite.mesh, vec![])
        .map_err(|e| e.to_string());
    suite.record(
        "an exchange of no messages",
        nothing.and_then(|got| {
            if got.is_empty() {
                Ok(())
            } else {
                Err("has results".into())
            }
        }),
    );
}
