//! Selections from a tensor that is cut over ranks: every part says how much it selects, and then
//! what was selected crosses, not what it was selected from.

use super::Caller;
use crate::{
    DType, Error, Mesh, Result, Shape, Sharding, Tensor, ledger,
    map::Builder,
    ops::{Side, map1},
    reshard::Held,
    transport::{InProcess, Part, Transport},
};
use smallvec::SmallVec;

/// A tensor that is cut, with nothing partial.
pub(super) struct Parts {
    pub(super) x: Tensor,
    /// The axes that cut it: major first, by dimension.
    axes: SmallVec<[usize; 4]>,
    /// On whose behalf things cross.
    caller: Caller,
}

/// Elements that parts select.
pub(super) struct Selected {
    /// How many each part does.
    counts: Vec<usize>,
    /// Which, counted in the part: for each addressable rank (i32).
    pub(super) positions: Vec<Tensor>,
}

impl Selected {
    /// How many all parts do.
    pub(super) fn total(&self) -> usize {
        self.counts.iter().sum()
    }
}

impl Parts {
    pub(super) fn new(x: &Tensor, caller: Caller) -> Self {
        Self {
            axes: x.sharding().cuts().map(|(_, axis)| axis).collect(),
            x: x.clone(),
            caller,
        }
    }

    pub(super) fn caller(&self) -> Caller {
        self.caller
    }

    fn mesh(&self) -> &Mesh {
        self.x.mesh()
    }

    /// What each addressable rank holds, as vectors.
    pub(super) fn flat(&self) -> Result<Vec<Tensor>> {
        (0..self.mesh().addressable().len())
            .map(|i| {
                let part = self.x.part(i);
                part.reshape([part.numel()])
            })
            .collect()
    }

    /// Whether the parts one after the other are the elements in row-major order.
    pub(super) fn in_order(&self) -> bool {
        let mut cuts = self.x.sharding().cuts().map(|(dim, _)| dim);
        cuts.next().is_some_and(|first| {
            self.x.dims()[..first].iter().all(|n| *n == 1) && cuts.all(|dim| dim == first)
        })
    }

    /// Bytes that the worst rank receives if it gets everything.
    pub(super) fn whole_bytes(&self) -> Result<u64> {
        let (x, sharding) = (&self.x, self.x.sharding());
        Held::new(self.mesh(), x.shape(), x.dtype(), sharding).exact(&Sharding::replicated())
    }

    /// Counts the marks (i32, 0 or 1) of each rank's part, and finds them. Reads how many there are.
    pub(super) async fn select(&self, op: &'static str, marks: &[Tensor]) -> Result<Selected> {
        let counting = {
            let _scope = ledger::enter(self.caller.0, self.caller.1);
            let mut totals = Vec::with_capacity(marks.len());
            let mut running = Vec::with_capacity(marks.len());
            for marks in marks {
                super::check_positions(op, marks.numel())?;
                let counted = marks.cumsum(0)?;
                totals.push(match marks.numel() {
                    0 => Tensor::zeros([1], DType::I32, marks.device())?,
                    n => counted.narrow(0, n - 1, 1)?,
                });
                running.push(counted);
            }
            let cut = (self.axes.iter()).fold(Sharding::replicated(), |s, axis| s.cut(0, *axis));
            let parts: usize = self.axes.iter().map(|a| self.mesh().size(*a)).product();
            let totals =
                Tensor::from_parts(self.mesh(), cut, DType::I32, Shape::from([parts]), totals);
            (totals.to_vec_async::<i32>(), running)
        };
        let (counts, running) = (counting.0.await?, counting.1);
        let counts: Vec<usize> = counts.iter().map(|n| *n as usize).collect();
        let mut positions = Vec::with_capacity(running.len());
        for (rank, running) in self.mesh().addressable().zip(&running) {
            let last = counts[self.number(rank)] as i64 + 1;
            let numbers = Tensor::arange(1, last, 1, DType::I32, running.device())?;
            positions.push(if numbers.numel() == 0 {
                numbers
            } else {
                running.searchsorted(&numbers, Side::Left)?
            });
        }
        Ok(Selected { counts, positions })
    }

    /// Which part a rank has.
    fn number(&self, rank: usize) -> usize {
        self.mesh().part(rank, self.axes.iter().copied()).0
    }

    /// Positions in the part of the `i`-th addressable rank as positions in the tensor.
    pub(super) fn global(&self, op: &'static str, i: usize, positions: &Tensor) -> Result<Tensor> {
        let rank = self.mesh().addressable().nth(i).unwrap_or(0);
        let region = self.x.sharding().region(self.mesh(), rank, self.x.shape());
        let own = Shape::from(region.shape.clone());
        let whole = self.x.shape().strides();
        if positions.numel() == 0 {
            return Ok(positions.clone());
        }
        let table = |value: &dyn Fn(usize) -> usize| {
            let values: Vec<i32> = (0..own.rank()).map(|d| value(d) as i32).collect();
            Tensor::from_slice(&values, [values.len()], positions.device())
        };
        let strides = own.strides();
        let b = Builder::new();
        let load = || b.load(DType::I32);
        let (position, step, size, start, weight) = (load(), load(), load(), load(), load());
        let place = (position.floor_div(step).rem(size) + start) * weight;
        let program = b.finish(&[(place, DType::I32)])?;
        let places = map1(
            op,
            &program,
            &[
                &positions.unsqueeze(1)?,
                &table(&|d| strides[d] as usize)?,
                &table(&|d| own[d])?,
                &table(&|d| region.start[d])?,
                &table(&|d| whole[d] as usize)?,
            ],
            &[],
        )?;
        places.sum(&[1], false)
    }

    /// What the parts selected, one after the other, on every rank: a vector for each addressable
    /// rank, as long as it selects.
    pub(super) fn join(&self, selected: &Selected, parts: &[Tensor]) -> Result<Tensor> {
        let (mesh, dtype) = (self.mesh(), parts[0].dtype());
        let _scope = ledger::enter(self.caller.0, self.caller.1);
        let (counts, total) = (&selected.counts, selected.total());
        let received = total - counts.iter().min().copied().unwrap_or(0);
        let shape = Shape::from([total]);
        let cut = (self.axes.iter()).fold(Sharding::replicated(), |s, axis| s.cut(0, *axis));
        let whole = Sharding::replicated();
        let ty = |sharding: &Sharding| sharding.type_string(dtype, &shape, mesh);
        let bytes = (received * dtype.size()) as u64;
        let rounds = counts.len() as u64 - 1;
        let sent = ledger::Sent::along("all_gather", mesh, &self.axes, rounds, bytes);
        let types = || (ty(&cut), ty(&whole));
        ledger::write(sent, types, || {
            let parts = self.gather(counts, parts)?;
            let shape = shape.clone();
            Ok(Tensor::from_parts(mesh, whole.clone(), dtype, shape, parts))
        })
    }

    /// All parts on every addressable rank.
    fn gather(&self, counts: &[usize], parts: &[Tensor]) -> Result<Vec<Tensor>> {
        let mesh = self.mesh();
        let mut here = vec![None; mesh.ranks()];
        for (i, rank) in mesh.addressable().enumerate() {
            here[rank] = Some(i);
        }
        let transport: &dyn Transport = mesh.transport().map_or(&InProcess, |t| &**t);
        let mut out: Vec<Option<Tensor>> = vec![None; parts.len()];
        let first = |rank: &usize| self.axes.iter().all(|a| mesh.coordinate(*rank, *a) == 0);
        for leader in (0..mesh.ranks()).filter(first) {
            let group = mesh.group(leader, &self.axes);
            if group.iter().all(|rank| here[*rank].is_none()) {
                continue;
            }
            let given: Vec<Part> = (group.iter().zip(counts))
                .map(|(rank, count)| Part {
                    rank: *rank,
                    dtype: parts[0].dtype(),
                    shape: Shape::from([*count]),
                    data: here[*rank].map(|i| parts[i].clone()),
                })
                .collect();
            for (rank, got) in group.iter().zip(transport.all_gather(mesh, &given, 0)?) {
                if let Some(i) = here[*rank] {
                    out[i] = got;
                }
            }
        }
        let lost = || Error::Transport {
            op: "all_gather",
            detail: "the transport did not deliver what was sent to a rank of this process".into(),
            ranks: vec![],
        };
        out.into_iter().collect::<Option<_>>().ok_or_else(lost)
    }
}
