//! Rows that go to ranks which the data names, against the same with matrices of zeros and ones.

use crate::support::device;
use anymesh_conformance::processes::run;
use anymesh_core::{
    DType, Error, Mesh, Result, Tensor, meta,
    ops::{Rng, RowExchange},
    split,
    spmd::Ledger,
};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// Where each row arrives: by destination, then by the rank it comes from, then in order.
fn arrivals(destinations: &[i32], ranks: usize) -> (Vec<usize>, Vec<usize>, usize) {
    let counts: Vec<usize> = (0..ranks)
        .map(|rank| {
            destinations
                .iter()
                .filter(|to| **to as usize == rank)
                .count()
        })
        .collect();
    let most = counts.iter().max().copied().unwrap_or(0);
    let mut next = vec![0; ranks];
    // Parts of the rows are in order, so rows that go to one rank arrive in the order they have.
    let arrival = |to: &i32| {
        let to = *to as usize;
        next[to] += 1;
        to * most + next[to] - 1
    };
    (destinations.iter().map(arrival).collect(), counts, most)
}

/// The exchange as a product with a matrix that has a one for each row.
fn permutation(places: &[usize], rows: usize, device: &anymesh_core::Device) -> Result<Tensor> {
    Tensor::from_fn([rows, places.len()], device, |at| {
        f32::from(u8::from(places[at[1]] == at[0]))
    })
}

/// Values, gradients, counts, order and bytes of one exchange.
fn check(mesh: &Mesh, destinations: &[i32], width: usize) -> Result<()> {
    let (ranks, n, device) = (mesh.ranks(), destinations.len(), mesh.device(0));
    let (places, counts, most) = arrivals(destinations, ranks);
    let matrix = permutation(&places, ranks * most, device)?;
    let value = |at: &[usize]| (at[0] * width + at[1]) as f32 - 5.0;
    let to = Tensor::from_slice(destinations, [n], (mesh, "[@ep]"))?;
    let x = Tensor::from_fn([n, width], (mesh, "[@ep, _]"), value)?.require_grad()?;
    let plain = Tensor::from_fn([n, width], device, value)?;
    let exchange = RowExchange::new(&to, "ep")?;
    assert_eq!((exchange.counts(), exchange.most()), (counts, most));

    let (there, ledger) = Ledger::record(|| exchange.send(&x));
    let there = there?;
    let dense = matrix.matmul(&plain)?;
    assert_eq!(there.dims(), [ranks * most, width]);
    assert_eq!(there.to_vec::<f32>()?, dense.to_vec::<f32>()?);
    // Only rows that another rank needs cross: what the worst rank receives.
    let crossing = |rank: usize| {
        let own = split(n, rank, ranks);
        let arrive = (0..n).filter(|row| destinations[*row] as usize == rank);
        arrive.filter(|row| !own.contains(row)).count()
    };
    let worst = (0..ranks).map(crossing).max().unwrap_or(0);
    assert_eq!(
        ledger.bytes(),
        (worst * width * 4) as u64,
        "{destinations:?}"
    );

    // The gradient of sending is what comes back, and the other way around.
    let weights = |at: &[usize]| ((at[0] * 7 + at[1] * 3) % 11) as f32;
    let seed = Tensor::from_fn([ranks * most, width], (mesh, "[@ep, _]"), weights)?;
    let plain_seed = Tensor::from_fn([ranks * most, width], device, weights)?;
    let gradient = there.backward_with(&seed)?.of(&x)?;
    let expected = matrix.t()?.matmul(&plain_seed)?;
    assert_eq!(gradient.to_vec::<f32>()?, expected.to_vec::<f32>()?);
    let y = seed.require_grad()?;
    let returned = exchange.back(&y)?;
    assert_eq!(returned.to_vec::<f32>()?, expected.to_vec::<f32>()?);
    let gradient = returned.backward_with(&x.detach())?.of(&y)?;
    assert_eq!(gradient.to_vec::<f32>()?, dense.to_vec::<f32>()?);
    let mask = exchange.mask()?.to_vec::<bool>()?;
    let marked = (0..ranks * most).map(|at| places.contains(&at));
    assert_eq!(mask, marked.collect::<Vec<_>>());
    Ok(())
}

/// Random destinations, all to one, none to some, and fewer rows than ranks.
fn cases(ranks: usize) -> Result<Vec<Vec<i32>>> {
    let mut cases = vec![vec![0; 9], vec![ranks as i32 - 1; 6], vec![1; 2], vec![]];
    for (seed, n) in [(1, 1), (2, 5), (3, 16), (4, 23), (5, 40)] {
        let high = ranks as i64;
        let to = Tensor::randint([n], 0, high, DType::I32, &device(), Rng::new(seed))?;
        cases.push(to.to_vec::<i32>()?);
        // Only to the odd ranks.
        let odd = |to: i32| (to / 2 * 2 + 1).min(ranks as i32 - 1);
        cases.push(to.to_vec::<i32>()?.into_iter().map(odd).collect());
    }
    Ok(cases)
}

#[test]
fn rows_go_where_data_says_and_come_back() -> Result<()> {
    for ranks in [2, 3, 4] {
        let mesh = Mesh::new(&format!("ep={ranks}"), &device())?;
        for destinations in cases(ranks)? {
            check(&mesh, &destinations, 3)?;
        }
    }
    Ok(())
}

/// Rows that name several ranks, against a product with a matrix that has a one for each row that
/// arrives.
fn check_several(mesh: &Mesh, named: &[Vec<i32>]) -> Result<()> {
    let (ranks, n, width, several) = (mesh.ranks(), named.len(), 3, named[0].len());
    let device = mesh.device(0);
    let goes = |row: usize, rank: usize| named[row].contains(&(rank as i32));
    let arrive = |rank: usize| (0..n).filter(|row| goes(*row, rank)).collect::<Vec<_>>();
    let most = (0..ranks).map(|rank| arrive(rank).len()).max().unwrap_or(0);
    let to = Tensor::from_fn([n, several], (mesh, "[@ep, _]"), |at| named[at[0]][at[1]])?;
    let exchange = RowExchange::new(&to, "ep")?;
    let counts: Vec<usize> = (0..ranks).map(|rank| arrive(rank).len()).collect();
    assert_eq!((exchange.counts(), exchange.most()), (counts, most));
    let times = |rank: usize| {
        named
            .iter()
            .flatten()
            .filter(|to| **to == rank as i32)
            .count()
    };
    assert_eq!(exchange.named(), (0..ranks).map(times).collect::<Vec<_>>());

    let matrix = Tensor::from_fn([ranks * most, n], device, |at| {
        let arrived = arrive(at[0] / most.max(1));
        f32::from(u8::from(arrived.get(at[0] % most.max(1)) == Some(&at[1])))
    })?;
    let value = |at: &[usize]| (at[0] * width + at[1]) as f32 - 5.0;
    let x = Tensor::from_fn([n, width], (mesh, "[@ep, _]"), value)?.require_grad()?;
    let (there, ledger) = Ledger::record(|| exchange.send(&x));
    let there = there?;
    let dense = matrix.matmul(&Tensor::from_fn([n, width], device, value)?)?;
    assert_eq!(there.to_vec::<f32>()?, dense.to_vec::<f32>()?, "{named:?}");
    let crossing = |rank: usize| {
        let own = split(n, rank, ranks);
        arrive(rank).iter().filter(|row| !own.contains(row)).count()
    };
    let worst = (0..ranks).map(crossing).max().unwrap_or(0);
    assert_eq!(ledger.bytes(), (worst * width * 4) as u64, "{named:?}");

    let seed = |at: &[usize]| ((at[0] * 7 + at[1] * 3) % 11) as f32;
    let plain = Tensor::from_fn([ranks * most, width], device, seed)?;
    let seed = Tensor::from_fn([ranks * most, width], (mesh, "[@ep, _]"), seed)?;
    let expected = matrix.t()?.matmul(&plain)?.to_vec::<f32>()?;
    let gradient = there.backward_with(&seed)?.of(&x)?;
    assert_eq!(gradient.to_vec::<f32>()?, expected, "{named:?}");
    let y = seed.require_grad()?;
    let returned = exchange.back(&y)?;
    assert_eq!(returned.to_vec::<f32>()?, expected, "{named:?}");
    let gradient = returned.backward_with(&x.detach())?.of(&y)?;
    assert_eq!(gradient.to_vec::<f32>()?, dense.to_vec::<f32>()?);
    Ok(())
}

/// Random ones with -1 for nobody, all to all, all to one, and nobody at all.
fn several_cases(ranks: usize) -> Result<Vec<Vec<Vec<i32>>>> {
    let mut cases = vec![
        vec![vec![0, 0]; 5],
        vec![vec![-1, -1]; 4],
        vec![vec![-1, 1]],
    ];
    cases.push(vec![(0..ranks as i32).collect(); 6]);
    for (seed, n, several) in [(1, 9, 2), (2, 16, 3), (3, 3, 6), (4, 12, 1)] {
        let (high, size) = (ranks as i64, [n, several]);
        let to = Tensor::randint(size, -1, high, DType::I32, &device(), Rng::new(seed))?;
        let to = to.to_vec::<i32>()?;
        cases.push(to.chunks(several).map(<[i32]>::to_vec).collect());
    }
    Ok(cases)
}

#[test]
fn a_row_goes_once_to_each_rank_that_it_names() -> Result<()> {
    for ranks in [2, 3, 4] {
        let mesh = Mesh::new(&format!("ep={ranks}"), &device())?;
        for named in several_cases(ranks)? {
            check_several(&mesh, &named)?;
        }
    }
    let groups: [&[&[usize]]; 2] = [&[&[0], &[1], &[2], &[3]], &[&[0, 3], &[1], &[2]]];
    let cases = several_cases(4)?;
    for groups in groups {
        let program = |mesh: &Mesh| {
            cases
                .iter()
                .try_for_each(|named| check_several(mesh, named))
        };
        for result in run(&device(), "ep=4", groups, LIMIT, program)? {
            result?;
        }
    }
    Ok(())
}

#[test]
fn sums_that_are_not_added_up_yet_cross_as_they_are() -> Result<()> {
    let mesh = Mesh::new("ep=2, tp=2", &device())?;
    let to = Tensor::from_fn([6, 2], (&mesh, "[@ep, _]"), |at| (at[0] % 2) as i32)?;
    let exchange = RowExchange::new(&to, "ep")?;
    let x = Tensor::from_fn([6, 2], (&mesh, "[@ep, _]{sum:tp}"), |at| at[0] as f32)?;
    let back = exchange.back(&exchange.send(&x)?)?;
    assert_eq!(back.type_string(), "f32[6@ep, 2]{sum:tp}");
    assert_eq!(back.to_vec::<f32>()?, x.to_vec::<f32>()?);
    Ok(())
}

#[test]
fn rows_cross_processes() -> Result<()> {
    let groups: [&[&[usize]]; 3] = [
        &[&[0], &[1], &[2], &[3]],
        &[&[0, 1], &[2, 3]],
        &[&[0, 3], &[1], &[2]],
    ];
    let cases = cases(4)?;
    for groups in groups {
        let program = |mesh: &Mesh| cases.iter().try_for_each(|to| check(mesh, to, 2));
        for result in run(&device(), "ep=4", groups, LIMIT, program)? {
            result?;
        }
    }
    Ok(())
}

#[test]
fn what_makes_no_exchange_is_refused() -> Result<()> {
    let mesh = Mesh::new("dp=2, ep=2", &device())?;
    let to = |values: &[i32], layout: &str| Tensor::from_slice(values, [4], (&mesh, layout));
    let new = |to: &Tensor, axis: &str| RowExchange::new(to, axis).map(drop);
    for index in [2, -1] {
        assert_eq!(
            new(&to(&[0, 1, index, 0], "[@ep]")?, "ep"),
            Err(Error::IndexOutOfRange {
                op: "exchange_rows",
                index: index.into(),
                len: 2
            })
        );
    }
    let uncut = new(&to(&[0; 4], "[@dp]")?, "ep");
    assert!(matches!(uncut, Err(Error::Sharding { .. })), "{uncut:?}");
    let unknown = new(&to(&[0; 4], "[@ep]")?, "tp");
    assert!(matches!(unknown, Err(Error::NoSuchAxis { .. })));
    let floats = Tensor::zeros([4], DType::F32, (&mesh, "[@ep]"))?;
    assert!(matches!(new(&floats, "ep"), Err(Error::DType { .. })));
    for shape in [&[4, 0][..], &[4, 1, 1]] {
        let wrong = Tensor::zeros(shape, DType::I32, &mesh)?.reshard(match shape.len() {
            2 => "[@ep, _]",
            _ => "[@ep, _, _]",
        })?;
        assert!(matches!(new(&wrong, "ep"), Err(Error::Shape { .. })));
    }
    let far = Tensor::from_slice(&[0, 1, -1, 5], [2, 2], (&mesh, "[@ep, _]"))?;
    assert_eq!(
        new(&far, "ep"),
        Err(Error::IndexOutOfRange {
            op: "exchange_rows",
            index: 5,
            len: 2
        })
    );
    let plain = Tensor::zeros([4], DType::I32, &device())?;
    assert!(matches!(new(&plain, "ep"), Err(Error::Argument { .. })));
    let exchange = RowExchange::new(&to(&[0, 0, 0, 1], "[@ep]")?, "ep")?;
    let short = exchange.send(&Tensor::ones([3, 2], DType::F32, &mesh)?);
    assert!(matches!(short, Err(Error::Shape { .. })));
    let other = exchange.send(&Tensor::ones([4, 2], DType::F32, &device())?);
    assert!(matches!(other, Err(Error::MeshMismatch { .. })));
    let crowded = RowExchange::within(&to(&[0, 0, 0, 1], "[@ep]")?, "ep", 2).map(drop);
    assert!(matches!(
        crowded,
        Err(Error::Argument {
            argument: "most",
            ..
        })
    ));
    Ok(())
}

#[test]
fn rows_that_lie_otherwise_are_brought_and_other_cuts_stay() -> Result<()> {
    let mesh = Mesh::new("dp=2, ep=2", &device())?;
    let values = |at: &[usize]| (at[0] * 4 + at[1]) as f32;
    let expected = Tensor::from_fn([8, 4], &device(), values)?.to_vec::<f32>()?;
    for cut in ["[@ep]", "[@dp@ep]", "[@ep@dp]"] {
        let to = |at: &[usize]| (at[0] / 3 % 2) as i32;
        let to = Tensor::from_fn([8], (&mesh, cut), to)?;
        let exchange = RowExchange::new(&to, "ep")?;
        for layout in ["[_, _]", "[@dp, @ep]", "[@ep, @dp]", "[_, @dp]{sum:ep}"] {
            let x = Tensor::from_fn([8, 4], (&mesh, layout), values)?;
            let back = exchange.back(&exchange.send(&x)?)?;
            assert_eq!(back.to_vec::<f32>()?, expected, "{layout} as {cut}");
        }
    }
    Ok(())
}

#[test]
fn without_values_a_bound_gives_the_sizes() -> Result<()> {
    let mesh = Mesh::new("ep=4", &meta())?;
    let to = Tensor::zeros([64], DType::I32, (&mesh, "[@ep]"))?;
    assert!(matches!(
        RowExchange::new(&to, "ep"),
        Err(Error::Unsupported { .. })
    ));
    let exchange = RowExchange::within(&to, "ep", 24)?;
    let x = Tensor::zeros([64, 8], DType::F32, (&mesh, "[@ep, _]"))?;
    let (there, ledger) = Ledger::record(|| exchange.send(&x));
    assert_eq!(there?.type_string(), "f32[96@ep, 8]");
    assert_eq!(
        ledger.bytes(),
        12 * 8 * 4,
        "four rows from each of three others"
    );
    Ok(())
}
