//! Programs whose ranks are in different processes, here threads that act as such.

use crate::support::device;
use anymesh_conformance::processes::{SPREADS, programs, run, run_on};
use anymesh_core::{
    Backend, Buffer, Capabilities, DType, Device, Error, Mesh, Result, Tensor,
    backend::{BoxFuture, Buffers, Kernel, ScatterOp},
    i,
    ops::CrossEntropyOptions,
    spmd::Ledger,
};
use std::{ops::Range, time::Duration};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn programs_give_the_same_however_their_ranks_are_spread() -> Result<()> {
    for groups in SPREADS {
        for (name, program) in programs::ALL {
            let ended = run(&device(), "a=2, b=2", groups, LIMIT, program)?;
            for (process, result) in ended.into_iter().enumerate() {
                if let Err(error) = result {
                    panic!("{name}, process {process} of {groups:?}: {error}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn programs_run_on_uneven_meshes_and_in_one_process() -> Result<()> {
    let groups: &[&[usize]] = &[&[0, 4], &[1, 2, 3], &[5]];
    for result in run(&device(), "a=3, b=2", groups, LIMIT, programs::run_all)? {
        result?;
    }
    programs::run_all(&Mesh::new("a=2, b=2", &device())?)
}

#[test]
fn exactly_one_process_is_the_first() -> Result<()> {
    for groups in SPREADS {
        let first = run(&device(), "a=4", groups, LIMIT, |mesh| Ok(mesh.is_first()))?;
        let first = first.into_iter().collect::<Result<Vec<_>>>()?;
        assert_eq!(first.iter().filter(|first| **first).count(), 1);
    }
    Ok(())
}

#[test]
fn ledgers_that_differ_name_the_first_step_that_does() -> Result<()> {
    let program = |mesh: &Mesh| {
        let x = Tensor::ones([8, 4], DType::F32, (mesh, "[@a, _]"))?;
        let (result, mut ledger) = Ledger::record(|| x.reshard("[_, @a]")?.reshard("[_, _]"));
        result?;
        if mesh.is_first() {
            ledger.entries.pop();
        }
        ledger.gather(mesh).map(drop)
    };
    for result in run(&device(), "a=2", &[&[0], &[1]], LIMIT, program)? {
        let Err(Error::Diverged { calls }) = result else {
            panic!("{result:?}");
        };
        assert_eq!((calls[0].rank, calls[0].op.as_str()), (0, "nothing"));
        assert!(calls[1].op.starts_with("reshard (all-gather"), "{calls:?}");
        assert!(calls[1].caller.contains("processes.rs"), "{calls:?}");
    }
    Ok(())
}

/// Indices of which only the last rank of four has one that is out of range.
fn indices(shape: &[usize], mesh: &Mesh) -> Result<Tensor> {
    let layout = if shape.len() == 1 { "[@x]" } else { "[@x, _]" };
    Tensor::from_fn(shape, (mesh, layout), |at| if at[0] == 7 { 99 } else { 1 })
}

fn ones(shape: &[usize], mesh: &Mesh, layout: &str) -> Result<Tensor> {
    Tensor::ones(shape, DType::F32, (mesh, layout))
}

type Faulty = (&'static str, fn(&Mesh) -> Result<Tensor>);

/// A call of every family of ops that looks at values, with a bad one on the last rank.
const FAULTS: [Faulty; 15] = [
    ("index_select", |m| {
        ones(&[5, 3], m, "[_, _]")?.index_select(0, &indices(&[8], m)?)
    }),
    ("gather", |m| {
        ones(&[8, 3], m, "[@x, _]")?.gather(1, &indices(&[8, 3], m)?)
    }),
    ("take_along_axis", |m| {
        ones(&[8, 3], m, "[@x, _]")?.take_along_axis(1, &indices(&[8, 3], m)?)
    }),
    ("gather_nd", |m| {
        ones(&[5, 3], m, "[_, _]")?.gather_nd(&indices(&[8, 1], m)?)
    }),
    ("embedding", |m| {
        ones(&[5, 3], m, "[_, _]")?.embedding(&indices(&[8], m)?)
    }),
    ("get", |m| {
        ones(&[5, 3], m, "[_, _]")?.get(i![&indices(&[8], m)?])
    }),
    ("set", |m| {
        ones(&[5, 3], m, "[_, _]")?.set(i![&indices(&[8], m)?], 2.0)
    }),
    ("add_at", |m| {
        ones(&[5, 3], m, "[_, _]")?.add_at(i![&indices(&[8], m)?], 2.0)
    }),
    ("scatter", |m| {
        let x = ones(&[8, 3], m, "[@x, _]")?;
        x.scatter(1, &indices(&[8, 3], m)?, &x, ScatterOp::Set)
    }),
    ("index_add", |m| {
        let rows = ones(&[8, 3], m, "[@x, _]")?;
        ones(&[5, 3], m, "[_, _]")?.index_add(0, &indices(&[8], m)?, &rows)
    }),
    ("one_hot", |m| indices(&[8], m)?.one_hot(5)),
    ("cross_entropy", |m| {
        let options = CrossEntropyOptions::default();
        ones(&[8, 3], m, "[@x, _]")?.cross_entropy(&indices(&[8], m)?, &options)
    }),
    ("div", |m| {
        let x = indices(&[8], m)?;
        x.floor_div(&x.sub(99)?)
    }),
    ("rem", |m| {
        let x = indices(&[8], m)?;
        x.remainder(&x.sub(99)?)
    }),
    ("gradient of embedding", |m| {
        let table = ones(&[5, 3], m, "[_, _]")?.require_grad()?;
        let y = table.embedding(&indices(&[8], m)?)?;
        y.sum(&[], false)?.backward()?.of(&table)
    }),
];

/// How each of four processes ends, of which the last one has an error. They do not tell each other
/// by ending, so that it must have been told before.
fn ends(
    device: impl Fn(usize) -> Device,
    program: impl Fn(&Mesh) -> Result<()> + Sync,
) -> Result<Vec<Error>> {
    let groups: &[&[usize]] = &[&[0], &[1], &[2], &[3]];
    let ended = run_on(device, "x=4", groups, LIMIT, |mesh| Ok(program(mesh).err()))?;
    let error = |ended: Result<Option<Error>>| Ok(ended?.expect("all of them have an error"));
    ended.into_iter().map(error).collect()
}

fn elsewhere(error: &Error) -> bool {
    matches!(error, Error::Elsewhere { rank: 3, .. })
}

#[test]
fn a_value_that_is_wrong_on_one_rank_is_an_error_on_all() -> Result<()> {
    let mut told = 0;
    for (name, op) in FAULTS {
        let errors = ends(
            |_| device(),
            |mesh| {
                let y = op(mesh)?;
                y.cast(DType::F32)?.sum(&[], false)?.item().map(drop)
            },
        )?;
        let own = &errors[3];
        let wrong = matches!(own, Error::IndexOutOfRange { index: 99, .. })
            || matches!(own, Error::DivisionByZero { .. });
        assert!(wrong, "{name}: {own}");
        for error in &errors[..3] {
            // Where every rank looked at all values, all found it themselves.
            assert!(elsewhere(error) || error == own, "{name}: {error}");
            told += usize::from(elsewhere(error));
        }
    }
    assert!(told >= 3 * 8, "only {told} processes were told");
    Ok(())
}

#[test]
fn memory_that_one_rank_lacks_is_an_error_on_all() -> Result<()> {
    let full = |rank: usize| match rank {
        3 => device().decorated(|backend, kernel| match kernel {
            Kernel::Map(_) => Err(Error::OutOfMemory {
                device: "full".into(),
                bytes: 1,
            }),
            kernel => backend.launch(kernel),
        }),
        _ => device(),
    };
    type Step = fn(&Tensor) -> Result<Tensor>;
    let steps: [Step; 4] = [
        |x| x.exp(),
        |x| x.reshard("[_, @x]")?.neg(),
        |x| x.gt(0)?.nonzero(),
        |x| x.require_grad()?.sum(&[], false)?.backward()?.of(x),
    ];
    for (n, step) in steps.into_iter().enumerate() {
        let errors = ends(full, |mesh| {
            let x = Tensor::from_fn([8, 4], (mesh, "[@x, _]"), |at| at[0] as f32)?;
            let y = step(&x)?;
            y.cast(DType::F32)?.sum(&[], false)?.item()?;
            // Whoever needed no memory meets the others.
            y.reshard("[_, _]")?.cast(DType::F64)?.exp()?.item_of_all()
        })?;
        assert!(
            matches!(errors[3], Error::OutOfMemory { .. }),
            "{n}: {}",
            errors[3]
        );
        assert!(errors[..3].iter().all(elsewhere), "{n}: {errors:?}");
    }
    Ok(())
}

trait ItemOfAll {
    fn item_of_all(&self) -> Result<()>;
}

impl ItemOfAll for Tensor {
    fn item_of_all(&self) -> Result<()> {
        self.sum(&[], false)?.reshard("[]")?.item().map(drop)
    }
}

/// A device that tells of faults only when something is read, as GPUs do.
#[derive(Debug)]
struct Late(Device);

impl Late {
    fn fault() -> Error {
        Error::IndexOutOfRange {
            op: "gather",
            index: 7,
            len: 5,
        }
    }
}

impl Backend for Late {
    fn name(&self) -> &str {
        "late"
    }

    fn capabilities(&self) -> &Capabilities {
        self.0.backend().capabilities()
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.0.backend().upload(bytes)
    }

    fn download<'a>(&'a self, _: &'a Buffer, _: Range<usize>) -> BoxFuture<'a, Result<Vec<u8>>> {
        Box::pin(async { Err(Self::fault()) })
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Err(Self::fault()) })
    }

    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        self.0.backend().launch(kernel)
    }
}

#[test]
fn a_fault_that_shows_late_is_an_error_on_all() -> Result<()> {
    let late = |rank: usize| match rank {
        3 => Device::new(Late(device())),
        _ => device(),
    };
    type Step = fn(&Tensor) -> Result<()>;
    let steps: [Step; 4] = [
        // Found when it is sent.
        |x| x.exp()?.to_vec::<f32>().map(drop),
        |x| x.exp()?.sum(&[], false)?.item().map(drop),
        |x| x.reshard("[_]")?.exp().map(drop),
        // Found when it is read, after nothing had to be sent.
        |x| {
            let y = Tensor::ones([4], DType::F32, x.mesh())?;
            y.to_vec::<f32>()?;
            x.reshard("[_]").map(drop)
        },
    ];
    for (n, step) in steps.into_iter().enumerate() {
        let errors = ends(late, |mesh| {
            let x = Tensor::from_fn([8], (mesh, "[@x]"), |at| at[0] as f32)?;
            step(&x)
        })?;
        assert_eq!(errors[3], Late::fault(), "{n}");
        assert!(errors[..3].iter().all(elsewhere), "{n}: {errors:?}");
    }
    Ok(())
}
