//! Calls that make no sense: a typed error before anything is sent, in every process.

use super::{Suite, host::Array};
use anymesh_core::{
    Error, Reduction, Result, Tensor,
    transport::{Message, Part},
};

type Collective<'a> = (
    &'a str,
    Box<dyn Fn(&[Part]) -> Result<Vec<Option<Tensor>>> + 'a>,
);

pub(super) fn check(suite: &mut Suite<'_>) {
    if let Err(e) = try_check(suite) {
        suite.record("the inputs of mistaken calls", Err(e.to_string()));
    }
}

fn try_check(suite: &mut Suite<'_>) -> Result<()> {
    let (transport, mesh, group) = (suite.transport.clone(), suite.mesh.clone(), suite.group);
    let (first, outside) = (group[0], mesh.ranks());
    let arrays: Vec<Array<f32>> = group
        .iter()
        .map(|rank| Array::of_rank(*rank, &[4, 4]))
        .collect();
    let parts = suite.parts(&arrays)?;
    let collectives: [Collective<'_>; 4] = [
        (
            "all_reduce",
            Box::new(|parts| transport.all_reduce(&mesh, parts, Reduction::Sum)),
        ),
        (
            "all_gather",
            Box::new(|parts| transport.all_gather(&mesh, parts, 0)),
        ),
        (
            "reduce_scatter",
            Box::new(|parts| transport.reduce_scatter(&mesh, parts, Reduction::Max, 0)),
        ),
        (
            "all_to_all",
            Box::new(|parts| transport.all_to_all(&mesh, parts, 0, 1)),
        ),
    ];
    for (op, call) in &collectives {
        suite.refuses(&format!("{op} of nobody"), call(&[]), |e| {
            matches!(e, Error::Transport { .. })
        });
        let strange = [
            &parts[..],
            &[Part::elsewhere(outside, parts[0].dtype, [4, 4])],
        ]
        .concat();
        suite.refuses(
            &format!("{op} with a rank outside the mesh"),
            call(&strange),
            names(outside),
        );
        let twice = [&parts[..], &parts[..1]].concat();
        suite.refuses(
            &format!("{op} with a rank twice"),
            call(&twice),
            names(first),
        );
        // Every process leaves out its own data, so that each has something to refuse.
        if parts.iter().any(|p| p.data.is_some()) {
            let lacking: Vec<Part> = parts
                .iter()
                .map(|p| Part {
                    data: None,
                    ..p.clone()
                })
                .collect();
            suite.refuses(
                &format!("{op} without the data of a rank"),
                call(&lacking),
                |e| matches!(e, Error::Transport { .. }),
            );
            let lying: Vec<Part> = parts
                .iter()
                .map(|p| Part {
                    shape: [4, 5].into(),
                    ..p.clone()
                })
                .collect();
            suite.refuses(
                &format!("{op} of a part that is not as announced"),
                call(&lying),
                |e| matches!(e, Error::Shape { .. }),
            );
        }
        if parts.len() > 1 {
            let last = suite.part(group[group.len() - 1], &Array::<i32>::of_rank(0, &[4, 4]))?;
            suite.refuses(
                &format!("{op} of two dtypes"),
                call(&replaced(&parts, last)),
                names(group[group.len() - 1]),
            );
            let last = suite.part(group[group.len() - 1], &Array::<f32>::of_rank(0, &[3, 3]))?;
            suite.refuses(
                &format!("{op} of shapes that do not fit"),
                call(&replaced(&parts, last)),
                |e| matches!(e, Error::Shape { .. }),
            );
            let last = suite.part(group[group.len() - 1], &Array::<f32>::of_rank(0, &[4]))?;
            suite.refuses(
                &format!("{op} of different ranks"),
                call(&replaced(&parts, last)),
                |e| matches!(e, Error::Shape { .. }),
            );
        }
    }
    for dim in [2, usize::MAX] {
        let axis = |e: &Error| matches!(e, Error::Axis { .. });
        suite.refuses(
            "all_gather along no dimension",
            transport.all_gather(&mesh, &parts, dim),
            axis,
        );
        suite.refuses(
            "reduce_scatter along no dimension",
            transport.reduce_scatter(&mesh, &parts, Reduction::Sum, dim),
            axis,
        );
        suite.refuses(
            "all_to_all from no dimension",
            transport.all_to_all(&mesh, &parts, dim, 0),
            axis,
        );
        suite.refuses(
            "all_to_all to no dimension",
            transport.all_to_all(&mesh, &parts, 0, dim),
            axis,
        );
    }
    suite.refuses(
        "broadcast to nobody",
        transport.broadcast(&mesh, &parts[0], &[]),
        |e| matches!(e, Error::Transport { .. }),
    );
    suite.refuses(
        "broadcast to a rank outside the mesh",
        transport.broadcast(&mesh, &parts[0], &[first, outside]),
        names(outside),
    );
    if let Some(other) = (0..mesh.ranks()).find(|r| *r != first) {
        suite.refuses(
            "broadcast from outside the group",
            transport.broadcast(&mesh, &parts[0], &[other]),
            names(first),
        );
    }
    suite.refuses(
        "a message to a rank outside the mesh",
        transport.exchange(
            &mesh,
            vec![Message {
                part: parts[0].clone(),
                to: outside,
            }],
        ),
        names(outside),
    );
    suite.refuses(
        "sending to a rank outside the mesh",
        transport.send(&mesh, parts[0].clone(), outside),
        names(outside),
    );
    if mesh.position_of(first).is_some() {
        let lacking = Part {
            data: None,
            ..parts[0].clone()
        };
        suite.refuses(
            "a message without data",
            transport.exchange(
                &mesh,
                vec![Message {
                    part: lacking,
                    to: first,
                }],
            ),
            names(first),
        );
        let own = transport.recv(&mesh, first, parts[0].dtype, parts[0].shape.clone(), first);
        suite.refuses("receiving from a rank of the same process", own, |e| {
            matches!(e, Error::Transport { .. })
        });
    }
    suite.refuses("a barrier of nobody", transport.barrier(&mesh, &[]), |e| {
        matches!(e, Error::Transport { .. })
    });
    suite.refuses(
        "a barrier with a rank outside the mesh",
        transport.barrier(&mesh, &[first, outside]),
        names(outside),
    );
    Ok(())
}

fn replaced(parts: &[Part], last: Part) -> Vec<Part> {
    [&parts[..parts.len() - 1], &[last]].concat()
}

/// A failure that names the rank.
fn names(rank: usize) -> impl Fn(&Error) -> bool {
    move |e| matches!(e, Error::Transport { ranks, .. } if ranks.contains(&rank))
}
