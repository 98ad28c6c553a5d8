//! Meshes, and who holds what on them.

use crate::{cpu, inspect::check, mesh, svg, ty};
use anymesh_core::{Mesh, Reduction, Sharding};
use anymesh_show::{Parts, Show};

const MESHES: [&str; 12] = [
    "x=1",
    "dp=2",
    "dp=2, tp=4",
    "a=3, b=1, c=5",
    "pp=2, dp=3, tp=2",
    "a=2, b=2, c=2, d=2, e=2, f=2",
    "tp=40",
    "dp=33, tp=9",
    "dp=2048, tp=8",
    "a_rather_long_name_of_an_axis_that_somebody_chose=3, another_name_that_is_as_long_as_that=2",
    "pp=16, dp=32, tp=32",
    "x=1000000",
];

#[test]
fn every_mesh_has_a_picture_of_bounded_size() {
    for axes in MESHES {
        let picture = svg(&mesh(axes));
        assert!(picture.len() < 120_000, "{axes}: {}", picture.len());
    }
    svg(&Mesh::single(&cpu()));
}

#[test]
fn ranks_are_drawn_once_each_where_there_are_few() {
    let picture = svg(&mesh("pp=2, dp=2, tp=3"));
    for rank in 0..12 {
        assert_eq!(
            picture.matches(&format!("<title>rank {rank}: ")).count(),
            1,
            "{rank}"
        );
    }
    assert!(picture.contains("pp=0") && picture.contains("dp ↓  tp →"));
}

#[test]
fn a_mesh_of_many_ranks_says_how_many_it_leaves_out() {
    let figure = mesh("dp=2048, tp=8").text();
    assert!(figure.contains("16,384 ranks"), "{figure}");
    let picture = svg(&mesh("dp=2048, tp=8"));
    assert!(
        picture.contains("of 16,384 ranks"),
        "what is left out is said"
    );
    assert!(
        picture.contains("<title>rank 16383: "),
        "the last one is drawn"
    );
}

#[test]
fn ranks_of_other_processes_are_told_apart() {
    let here = Mesh::new("dp=4", &cpu()).unwrap().addressing(&[1]).unwrap();
    let picture = svg(&here);
    assert_eq!(picture.matches("in another process").count(), 3);
    assert!(picture.contains("in other processes: 3 ranks"));
}

#[test]
fn who_holds_what_on_every_mesh() {
    let types = [
        "f32[]",
        "f32[8]",
        "bf16[7, 5]",
        "f32[64, 0]",
        "f32[3, 4, 5, 6]",
        "i64[1000000, 1000000]",
    ];
    // The last mesh is for its size only.
    for axes in &MESHES[..MESHES.len() - 1] {
        let mesh = mesh(axes);
        for text in types {
            let mut ty = ty(text, &mesh);
            let rank = ty.shape.rank();
            svg(&Parts::new(&ty, &mesh));
            check(&ty);
            // Every axis cuts a dimension, in turn, or has terms of a sum.
            for skip in 0..=rank {
                ty.sharding = Sharding::replicated();
                for axis in 0..mesh.axes().len() {
                    let dim = (axis + skip) % (rank + 1);
                    ty.sharding = match dim < rank {
                        true => ty.sharding.cut(dim, axis),
                        false => ty.sharding.partial_over(axis, Reduction::Sum),
                    };
                }
                svg(&Parts::new(&ty, &mesh));
                check(&ty);
                check(&ty.sharding);
            }
        }
    }
}

#[test]
fn a_part_names_exactly_the_ranks_whose_region_it_is() {
    let mesh = mesh("a=2, b=3, c=2");
    for text in [
        "f32[7@b, 5@a]",
        "f32[6@a@b, 4]",
        "f32[4@c, 6@b, 2]",
        "f32[5, 9@c@a]{sum:b}",
        "f32[2@b]",
    ] {
        let ty = ty(text, &mesh);
        let parts = Parts::new(&ty, &mesh);
        let table = parts.text();
        for rank in 0..mesh.ranks() {
            let region = ty.sharding.region(&mesh, rank, &ty.shape);
            let spans: Vec<String> = (region.start.iter().zip(&region.shape))
                .map(|(s, n)| format!("{s}..{}", s + n))
                .collect();
            let part = format!("[{}]", spans.join(", "));
            let line = (table.lines().find(|l| l.starts_with(&part)))
                .unwrap_or_else(|| panic!("{text}: no line for {part}\n{table}"));
            let ranks = line.split("  ").last().unwrap();
            let listed = ranks
                .split(", ")
                .any(|range| match range.trim().split_once('–') {
                    Some((a, b)) => (a.parse().unwrap()..=b.parse().unwrap()).contains(&rank),
                    None => range.trim().parse() == Ok(rank),
                });
            assert!(listed, "{text}: rank {rank} holds {part}: {line}");
        }
    }
}

#[test]
fn a_sharding_that_the_mesh_does_not_have_is_no_reason_to_panic() {
    let mesh = mesh("a=2");
    let mut ty = ty("f32[4, 4]", &mesh);
    ty.sharding = Sharding::replicated()
        .cut(7, 0)
        .cut(0, 9)
        .cut(0, 0)
        .partial_over(3, Reduction::Max);
    svg(&Parts::new(&ty, &mesh));
    assert!(
        ty.html().contains("cuts dimension 7") && ty.sharding.text().contains("terms of a max")
    );
}
