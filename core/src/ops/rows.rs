//! Rows that go to ranks which the data names: what expert parallelism needs.
//!
//! How many rows a rank gets is known only at run time. Tensors are cut evenly, so the rows that
//! arrive lie in a tensor with room for as many on each rank as the fullest one gets, with zeros
//! behind those that are there; [`RowExchange::counts`] and [`RowExchange::mask`] say which are. Only
//! rows that are there cross, and the ledger has their bytes.
//!
//! It is not in the [catalog](super::catalog) of ops: what those give does not depend on how their
//! operands lie, and here that is the question.

use super::{Order, Side};
use crate::wait::wait;
use crate::{
    DType, Dry, Error, Mesh, Result, Shape, Sharding, Tensor,
    fingerprint::{self, Digest},
    grad::{Back, Pulled, record1},
    ledger, split,
    transport::{Message, Part, told},
};
use smallvec::SmallVec;
use std::{panic::Location, sync::Arc};

const OP: &str = "exchange_rows";

/// Who sends which rows to whom along a mesh axis, and the way back.
///
/// ```
/// # use anymesh_core::{Mesh, Tensor, ops::RowExchange};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("ep=2", &device)?;
/// let x = Tensor::from_slice(&[1f32, 2., 3., 4., 5., 6.], [6, 1], (&mesh, "[@ep, _]"))?;
/// // Rank 0 has the rows 1, 2, 3 and keeps one of them; all of rank 1 stay there.
/// let destinations = Tensor::from_slice(&[1, 0, 1, 1, 1, 1], [6], (&mesh, "[@ep]"))?;
/// let exchange = RowExchange::new(&destinations, "ep")?;
/// let rows = exchange.send(&x)?;
/// assert_eq!((exchange.counts(), exchange.most()), (vec![1, 5], 5));
/// assert_eq!(rows.to_vec::<f32>()?, [2., 0., 0., 0., 0., 1., 3., 4., 5., 6.]);
/// let there = (rows * 10.0)?;
/// assert_eq!(exchange.back(&there)?.to_vec::<f32>()?, [10., 20., 30., 40., 50., 60.]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
///
/// Rows arrive by the rank that they come from, then in their order there. Both ways have gradients:
/// each is that of the other.
///
/// Every process of the mesh makes the same calls. Making one reads the counts, which all ranks
/// need; [`send`](Self::send) and [`back`](Self::back) read nothing.
///
/// # Without values
/// Counts are values. On [`meta()`](crate::meta()), while a step is planned, and in a process that
/// has no rank of the mesh, there are none to read, and [`new`](Self::new) says so. With a bound
/// ([`within`](Self::within)) sizes are known all the same; the ledger then has what would cross if
/// every rank sent as much to each.
#[derive(Clone)]
pub struct RowExchange(Arc<Routes>);

impl std::fmt::Debug for RowExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let axis = &self.0.mesh.axes()[self.0.axis].0;
        write!(
            f,
            "RowExchange({} rows over {axis}, {:?} arrive)",
            self.0.rows,
            self.counts()
        )
    }
}

struct Routes {
    mesh: Mesh,
    /// The axis that rows cross.
    axis: usize,
    /// All axes that cut the rows, major first.
    axes: SmallVec<[usize; 3]>,
    /// Rows in all.
    rows: usize,
    /// For each part of the rows, how many of them go to each rank along the axis.
    counts: Vec<Vec<usize>>,
    /// Room for arriving rows on each rank.
    most: usize,
    /// For each held rank its rows by destination (i32), and where each of them is in that order.
    orders: Vec<(Tensor, Tensor)>,
}

/// An exchange of which the counts are not known yet.
struct Begun {
    routes: Routes,
    most: Option<usize>,
    caller: &'static Location<'static>,
}

impl RowExchange {
    /// For rows whose destinations (i32, one for each row, from 0 to the size of the axis) are cut
    /// over the axis. Other axes may cut them too: rows stay where they are along those.
    #[track_caller]
    pub fn new(destinations: &Tensor, axis: &str) -> Result<Self> {
        wait("RowExchange::new", Self::new_async(destinations, axis))
    }

    /// [`new`](Self::new) without waiting for the counts.
    #[track_caller]
    pub fn new_async(
        destinations: &Tensor,
        axis: &str,
    ) -> impl Future<Output = Result<Self>> + use<> {
        Self::made(destinations, axis, None)
    }

    /// As [`new`](Self::new), with room for `most` arriving rows on each rank; more are an error on
    /// all of them. So sizes do not depend on values.
    #[track_caller]
    pub fn within(destinations: &Tensor, axis: &str, most: usize) -> Result<Self> {
        wait(
            "RowExchange::within",
            Self::made(destinations, axis, Some(most)),
        )
    }

    /// [`within`](Self::within) without waiting for the counts.
    #[track_caller]
    pub fn within_async(
        destinations: &Tensor,
        axis: &str,
        most: usize,
    ) -> impl Future<Output = Result<Self>> + use<> {
        Self::made(destinations, axis, Some(most))
    }

    /// Communicates at once and not when the future is first polled, because processes must
    /// communicate in the same order.
    #[track_caller]
    fn made(
        destinations: &Tensor,
        axis: &str,
        most: Option<usize>,
    ) -> impl Future<Output = Result<Self>> + use<> {
        let _scope = ledger::on_behalf_of(OP, destinations);
        let begun = Begun::new(destinations, axis, most);
        let told = begun.as_ref().ok().map(|(_, told)| told.to_vec_async());
        async move {
            let (begun, _) = begun?;
            let told = match told {
                Some(told) if begun.routes.mesh.has_values() => Some(told.await?),
                _ => None,
            };
            begun.finish(told.as_deref())
        }
    }

    /// Rows at their destinations: a tensor of as many rows as [`most`](Self::most) for each part.
    /// It lies as the rows do, and those behind the [count](Self::counts) of a part are zero.
    #[track_caller]
    pub fn send(&self, rows: &Tensor) -> Result<Tensor> {
        self.0.check(rows, self.0.rows)?;
        let way_back = self.clone();
        record1(
            OP,
            &[rows],
            || self.0.sent(rows),
            |_| {
                Ok(move |b: &Back<'_>| -> Result<Pulled> {
                    Ok(smallvec::smallvec![Some(way_back.back(b.grad()?)?)])
                })
            },
        )
    }

    /// What became of the rows, back where they came from and in the order they had there. Rows that
    /// were none are left out.
    #[track_caller]
    pub fn back(&self, rows: &Tensor) -> Result<Tensor> {
        self.0.check(rows, self.0.parts() * self.0.most)?;
        let way_back = self.clone();
        record1(
            OP,
            &[rows],
            || self.0.returned(rows),
            |_| {
                Ok(move |b: &Back<'_>| -> Result<Pulled> {
                    Ok(smallvec::smallvec![Some(way_back.send(b.grad()?)?)])
                })
            },
        )
    }

    /// How many rows arrive in each part of the dimension.
    pub fn counts(&self) -> Vec<usize> {
        let rank = |part| self.0.mesh.with_part(0, &self.0.axes, part);
        let parts = 0..self.0.parts();
        parts.map(|part| self.0.received(rank(part))).collect()
    }

    /// For how many arriving rows there is room in each part: as many as the fullest one gets, or
    /// the bound that was given.
    pub fn most(&self) -> usize {
        self.0.most
    }

    /// For each row of what [`send`](Self::send) gives whether it is one (bool).
    pub fn mask(&self) -> Result<Tensor> {
        let (counts, most) = (self.counts(), self.0.most);
        let place = (
            &self.0.mesh,
            self.0
                .axes
                .iter()
                .fold(Sharding::replicated(), |s, a| s.cut(0, *a)),
        );
        Tensor::from_fn([counts.len() * most], place, |at| {
            at[0] % most < counts[at[0] / most]
        })
    }
}

impl Begun {
    /// Puts the rows of each rank in the order of their destinations. The tensor tells of each part
    /// how many go where, for everybody.
    #[track_caller]
    fn new(destinations: &Tensor, axis: &str, most: Option<usize>) -> Result<(Self, Tensor)> {
        let (x, caller) = (destinations.detach(), ledger::caller());
        let mesh = x.mesh().clone();
        if x.is_plain() {
            let detail = "the rows lie on a single device: put them on a mesh, cut over the axis";
            return Err(Error::argument(OP, "destinations", detail).of([destinations]));
        }
        if x.dtype() != DType::I32 {
            return Err(Error::DType {
                op: OP,
                dtype: x.dtype(),
                expected: "i32 destinations",
            });
        }
        if x.rank() != 1 {
            let detail = format!("there is one destination for each row, got {}", x.shape());
            return Err(Error::shape(OP, [destinations], detail));
        }
        let named = mesh.axis(axis)?;
        let axes: SmallVec<[usize; 3]> = x.sharding().axes_of(0).collect();
        if !axes.contains(&named) {
            let detail = format!(
                "{OP}: {} is not cut over {axis}, so that its rows are on no rank along it: reshard them to [@{axis}]",
                x.type_string()
            );
            return Err(Error::Sharding {
                sharding: crate::operand::sharding_text(x.sharding(), 1, &mesh),
                detail,
            });
        }
        if most.is_none() {
            mesh.check_here(OP)?;
            Dry::check("counting rows")?;
            if !mesh.has_values() {
                return Err(crate::meta::no_values(mesh.device(0).name()));
            }
        }
        let x = x.reshard(x.sharding().whole())?;
        let ends = mesh.size(named);
        let (mut orders, mut tellings) = (vec![], vec![]);
        for (i, rank) in mesh.held() {
            let (order, telling) = told(&mesh, Some(rank), sorted(&x.held(i), ends))?;
            orders.push(order);
            tellings.push(telling);
        }
        let routes = Routes {
            axis: named,
            rows: x.numel(),
            counts: vec![],
            most: 0,
            orders,
            axes,
            mesh,
        };
        let shape = Shape::from([routes.parts() * (ends + 3)]);
        let whole = x.sharding().clone();
        let telling = Tensor::from_parts(&routes.mesh, whole, DType::I32, shape, tellings);
        let begun = Self {
            routes,
            most,
            caller,
        };
        Ok((begun, telling))
    }

    /// Without counts every part sends as much to each rank.
    fn finish(self, told: Option<&[i32]>) -> Result<RowExchange> {
        let Self {
            mut routes,
            most,
            caller,
        } = self;
        let ends = routes.mesh.size(routes.axis);
        let parts = routes.parts();
        for part in 0..parts {
            let rows = split(routes.rows, part, parts).len();
            let even = || (0..ends).map(|end| split(rows, end, ends).len()).collect();
            routes.counts.push(match told {
                Some(told) => counted(&told[part * (ends + 3)..][..ends + 3], rows)?,
                None => even(),
            });
        }
        let received = |rank| (routes.received(rank), rank);
        let (fullest, rank) = (0..routes.mesh.ranks())
            .map(received)
            .max()
            .unwrap_or_default();
        routes.most = most.unwrap_or(fullest);
        if fullest > routes.most {
            let detail = format!(
                "rank {rank} gets {fullest} rows and has room for {}",
                routes.most
            );
            return Err(Error::argument(OP, "most", detail));
        }
        let decision = [routes.axis, routes.rows, routes.most].map(|n| n as u64);
        fingerprint::fold(OP, caller, Digest::default().words(decision).0);
        Ok(RowExchange(Arc::new(routes)))
    }
}

/// The rows of a rank by their destinations, and where each is in that order; and where the rows of
/// each destination begin, with the smallest and the largest.
fn sorted(destinations: &Tensor, ends: usize) -> Result<((Tensor, Tensor), Tensor)> {
    let (n, device) = (destinations.numel(), destinations.device());
    if n == 0 {
        let nothing = Tensor::zeros([0], DType::I32, device)?;
        let telling = Tensor::zeros([ends + 3], DType::I32, device)?;
        return Ok(((nothing.clone(), nothing), telling));
    }
    let (sorted, order) = destinations.sort(0, Order::Ascending)?;
    let places = order.argsort(0, Order::Ascending)?;
    let numbers = Tensor::arange(0, ends as i64 + 1, 1, DType::I32, device)?;
    let begins = sorted.searchsorted(&numbers, Side::Left)?;
    let (first, last) = (sorted.narrow(0, 0, 1)?, sorted.narrow(0, n - 1, 1)?);
    Ok((
        (order, places),
        Tensor::concat(&[&begins, &first, &last], 0)?,
    ))
}

/// How many rows of a part go to each rank. All processes read the same, so all of them find the same
/// error.
fn counted(told: &[i32], rows: usize) -> Result<Vec<usize>> {
    let ends = told.len() - 3;
    let (begins, first, last) = (&told[..=ends], told[ends + 1], told[ends + 2]);
    let wrong = [first, last]
        .into_iter()
        .find(|to| usize::try_from(*to).map_or(true, |to| to >= ends));
    if let Some(index) = wrong.filter(|_| rows > 0) {
        return Err(Error::IndexOutOfRange {
            op: OP,
            index: index.into(),
            len: ends,
        });
    }
    let count = |pair: &[i32]| (pair[1] - pair[0]) as usize;
    Ok(begins.windows(2).map(count).collect())
}

impl Routes {
    fn parts(&self) -> usize {
        self.axes.iter().map(|a| self.mesh.size(*a)).product()
    }

    /// How many rows one rank sends to another of its group.
    fn count(&self, from: usize, to: usize) -> usize {
        let (part, _) = self.mesh.part(from, self.axes.iter().copied());
        self.counts[part][self.mesh.coordinate(to, self.axis)]
    }

    /// The ranks that exchange rows with a rank, itself among them.
    fn group(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.mesh.size(self.axis)).map(move |at| self.mesh.moved(rank, self.axis, at))
    }

    fn received(&self, rank: usize) -> usize {
        self.group(rank).map(|from| self.count(from, rank)).sum()
    }

    /// Refuses what are not the rows that go one way.
    fn check(&self, rows: &Tensor, count: usize) -> Result<()> {
        if *rows.mesh() != self.mesh {
            return Err(Error::MeshMismatch {
                op: OP,
                left: self.mesh.to_string(),
                right: rows.mesh().to_string(),
            });
        }
        match rows.dims().first() == Some(&count) {
            true => Ok(()),
            false => {
                let detail = format!("{count} rows were expected, got {}", rows.shape());
                Err(Error::shape(OP, [rows], detail))
            }
        }
    }

    /// Rows that lie as the destinations do, with nothing partial. Other dimensions may be cut over
    /// other axes.
    fn brought(&self, x: &Tensor) -> Result<Tensor> {
        let other = |(dim, axis): &(usize, usize)| *dim > 0 && !self.axes.contains(axis);
        let rows = self.axes.iter().map(|axis| (0, *axis));
        let cuts = rows.chain(x.sharding().cuts().filter(other));
        x.reshard(cuts.fold(Sharding::replicated(), |s, (dim, axis)| s.cut(dim, axis)))
    }

    /// [`RowExchange::send`] without its gradient.
    fn sent(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.brought(x)?;
        let ordered = |i: usize| x.held(i).index_select(0, &self.orders[i].0);
        let way = Way {
            routes: self,
            rows: self.parts() * self.most,
            returns: false,
        };
        way.run(&x, ordered, |rank, _, pieces| {
            let left = self.most - self.received(rank);
            match (pieces.is_empty(), left) {
                (true, _) => Ok(None),
                (false, 0) => joined(&pieces).map(Some),
                (false, left) => joined(&pieces)?.padded(0, 0, left).map(Some),
            }
        })
    }

    /// [`RowExchange::back`] without its gradient.
    fn returned(&self, y: &Tensor) -> Result<Tensor> {
        let y = self.brought(y)?;
        let way = Way {
            routes: self,
            rows: self.rows,
            returns: true,
        };
        way.run(
            &y,
            |i| Ok(y.held(i)),
            |_, i, pieces| match pieces.is_empty() {
                true => Ok(None),
                false => joined(&pieces)?
                    .index_select(0, &self.orders[i].1)
                    .map(Some),
            },
        )
    }
}

fn joined(pieces: &[Tensor]) -> Result<Tensor> {
    match pieces {
        [only] => Ok(only.clone()),
        _ => Tensor::concat(&pieces.iter().collect::<Vec<_>>(), 0),
    }
}

/// Rows on their way there or back.
struct Way<'a> {
    routes: &'a Routes,
    /// How many rows the result has.
    rows: usize,
    returns: bool,
}

impl Way<'_> {
    /// How many rows one rank gives to another.
    fn count(&self, from: usize, to: usize) -> usize {
        match self.returns {
            true => self.routes.count(to, from),
            false => self.routes.count(from, to),
        }
    }

    /// The rows that `give` has of each held rank at the other ends; `take` makes a rank's part of
    /// the result of the pieces that it got, in the order of the ranks they came from. Nothing means
    /// zeros.
    fn run(
        &self,
        x: &Tensor,
        give: impl Fn(usize) -> Result<Tensor>,
        take: impl Fn(usize, usize, Vec<Tensor>) -> Result<Option<Tensor>>,
    ) -> Result<Tensor> {
        let (routes, mesh) = (self.routes, x.mesh());
        let (dtype, shape) = (x.dtype(), x.shape().with(0, self.rows));
        let sharding = x.sharding();
        let local = |rank: usize| Shape::from(sharding.region(mesh, rank, &shape).shape);
        // What a rank's rows are, without their number.
        let row = |rank: usize| local(rank).dims()[1..].iter().product::<usize>();
        let lacked = |rank: usize| {
            let others = routes.group(rank).filter(|from| *from != rank);
            others.map(|from| self.count(from, rank)).sum::<usize>() * row(rank)
        };
        let worst = (0..mesh.ranks()).map(lacked).max().unwrap_or(0);
        let bytes = (worst * dtype.size()) as u64;
        let axes = [routes.axis];
        let sent = ledger::Sent::along("exchange", mesh, &axes, 1, bytes);
        let types = || (x.type_string(), sharding.type_string(dtype, &shape, mesh));
        ledger::write(sent, types, || {
            let parts = if mesh.has_values() {
                let given = (0..mesh.addressable().len()).map(give);
                let given = given.collect::<Result<Vec<_>>>()?;
                let mut got = self.exchange(x, &given, &local)?.into_iter();
                let mut parts = vec![];
                for (i, rank) in mesh.addressable().enumerate() {
                    let made = take(rank, i, got.next().unwrap_or_default())?;
                    parts.push(match made {
                        Some(part) => part,
                        None => Tensor::zeros(local(rank), dtype, mesh.device(i))?,
                    });
                }
                parts
            } else {
                let part = |(i, rank)| Tensor::placeholder(dtype, &local(rank), mesh.local_mesh(i));
                mesh.held().map(part).collect::<Result<_>>()?
            };
            Ok(Tensor::from_parts(
                mesh,
                sharding.clone(),
                dtype,
                shape.clone(),
                parts,
            ))
        })
    }

    /// For each addressable rank the pieces that it gets, by the ranks they come from.
    fn exchange(
        &self,
        x: &Tensor,
        given: &[Tensor],
        local: &dyn Fn(usize) -> Shape,
    ) -> Result<Vec<Vec<Tensor>>> {
        let (routes, mesh) = (self.routes, x.mesh());
        let mut pieces: Vec<Vec<Option<Tensor>>> = vec![vec![]; given.len()];
        let (mut messages, mut slots) = (vec![], vec![]);
        for to in 0..mesh.ranks() {
            let receiver = mesh.position_of(to);
            for from in routes.group(to) {
                let (count, sender) = (self.count(from, to), mesh.position_of(from));
                if count == 0 || (sender, receiver) == (None, None) {
                    continue;
                }
                let before = routes.group(from).take_while(|other| *other != to);
                let start = before.map(|other| self.count(from, other)).sum();
                let data = sender
                    .map(|i| given[i].narrow(0, start, count))
                    .transpose()?;
                if let (true, Some(i)) = (from == to, receiver) {
                    pieces[i].push(data);
                    continue;
                }
                if let Some(i) = receiver {
                    slots.push(Some((i, pieces[i].len())));
                    pieces[i].push(None);
                } else {
                    slots.push(None);
                }
                messages.push(Message {
                    part: Part {
                        rank: from,
                        dtype: x.dtype(),
                        shape: local(to).with(0, count),
                        data,
                    },
                    to,
                });
            }
        }
        let lost = || Error::Transport {
            op: OP,
            detail: "the transport did not deliver what was sent to a rank of this process".into(),
            ranks: vec![],
        };
        if let Some(transport) = mesh.transport().filter(|_| !messages.is_empty()) {
            let delivered = transport.exchange(mesh, messages)?;
            for (slot, data) in slots.into_iter().zip(delivered) {
                if let Some((i, piece)) = slot {
                    pieces[i][piece] = data;
                }
            }
        }
        let whole = |pieces: Vec<Option<Tensor>>| pieces.into_iter().collect::<Option<Vec<_>>>();
        let all = pieces.into_iter().map(whole).collect::<Option<Vec<_>>>();
        all.ok_or_else(lost)
    }
}
