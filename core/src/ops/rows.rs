//! Rows that go to ranks which the data names: what expert parallelism needs.
//!
//! How many rows a rank gets is known only at run time. Tensors are cut evenly, so the rows that
//! arrive lie in a tensor with room for as many on each rank as the fullest one gets, with zeros
//! behind those that are there; [`RowExchange::counts`] and [`RowExchange::mask`] say which are. Only
//! rows that are there cross, and the ledger has their bytes.
//!
//! It is not in the [catalog](super::catalog) of ops: what those give does not depend on how their
//! operands lie, and here that is the question.

mod way;

use super::{Order, Side};
use crate::wait::wait;
use crate::{
    DType, Dry, Error, Mesh, Reduction, Result, Shape, Sharding, Tensor,
    fingerprint::{self, Digest},
    grad::{Back, Pulled, record1},
    ledger, split,
    transport::told,
};
use smallvec::SmallVec;
use std::{panic::Location, sync::Arc};
use way::Way;

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
/// A row may go to several ranks: destinations `[rows, several]` name them. Each gets it once,
/// however often it is named, a negative number names nobody, and what comes back is added up for
/// each row.
///
/// ```
/// # use anymesh_core::{Mesh, Tensor, ops::RowExchange};
/// # let device = anymesh_backend_cpu::device();
/// # let mesh = Mesh::new("ep=2", &device)?;
/// # let x = Tensor::from_slice(&[1f32, 2.], [2, 1], (&mesh, "[@ep, _]"))?;
/// let destinations = Tensor::from_slice(&[0, 1, 1, 1], [2, 2], (&mesh, "[@ep, _]"))?;
/// let exchange = RowExchange::new(&destinations, "ep")?;
/// assert_eq!(exchange.send(&x)?.to_vec::<f32>()?, [1., 0., 1., 2.]);
/// assert_eq!((exchange.counts(), exchange.named()), (vec![1, 2], vec![1, 3]));
/// assert_eq!(exchange.back(&exchange.send(&x)?)?.to_vec::<f32>()?, [2., 2.]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
///
/// Every process of the mesh makes the same calls. Making one reads the counts, which all ranks
/// need; [`send`](Self::send) and [`back`](Self::back) read nothing.
///
/// # Without values
/// Counts are values. On [`meta()`](crate::meta()), while a step is planned, and in a process that
/// has no rank of the mesh, there are none to read, and [`new`](Self::new) says so. With a bound
/// ([`within`](Self::within)) or a guess ([`expecting`](Self::expecting)) sizes are known all the
/// same; the ledger then has what would cross if every rank sent as much to each.
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
    /// How many destinations each names.
    several: usize,
    /// For each part of the rows, how many of them go to each rank along the axis.
    counts: Vec<Vec<usize>>,
    /// The same with every time that a row names the rank.
    named: Vec<Vec<usize>>,
    /// Room for arriving rows on each rank.
    most: usize,
    /// For each held rank its rows by destination (i32), and where each of its destinations is in
    /// that order: behind it, where none is there.
    orders: Vec<(Tensor, Tensor)>,
}

/// For how many arriving rows there is room.
#[derive(Clone, Copy)]
enum Room {
    /// For those that come.
    Counted,
    /// For so many.
    Within(usize),
    /// For those that come; where that is not known, for so many.
    Expecting(usize),
}

/// An exchange of which the counts are not known yet.
struct Begun {
    routes: Routes,
    room: Room,
    caller: &'static Location<'static>,
}

impl RowExchange {
    /// For rows whose destinations (i32, one for each row, from 0 to the size of the axis, or several
    /// for each) are cut over the axis. Other axes may cut them too: rows stay where they are along
    /// those.
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
        Self::made(destinations, axis, Room::Counted)
    }

    /// As [`new`](Self::new), with room for `most` arriving rows on each rank; more are an error on
    /// all of them. So sizes do not depend on values.
    #[track_caller]
    pub fn within(destinations: &Tensor, axis: &str, most: usize) -> Result<Self> {
        wait(
            "RowExchange::within",
            Self::made(destinations, axis, Room::Within(most)),
        )
    }

    /// As [`new`](Self::new); where counts cannot be read, with room for `most` arriving rows on
    /// each rank.
    #[track_caller]
    pub fn expecting(destinations: &Tensor, axis: &str, most: usize) -> Result<Self> {
        wait(
            "RowExchange::expecting",
            Self::made(destinations, axis, Room::Expecting(most)),
        )
    }

    /// [`within`](Self::within) without waiting for the counts.
    #[track_caller]
    pub fn within_async(
        destinations: &Tensor,
        axis: &str,
        most: usize,
    ) -> impl Future<Output = Result<Self>> + use<> {
        Self::made(destinations, axis, Room::Within(most))
    }

    /// Communicates at once and not when the future is first polled, because processes must
    /// communicate in the same order.
    #[track_caller]
    fn made(
        destinations: &Tensor,
        axis: &str,
        room: Room,
    ) -> impl Future<Output = Result<Self>> + use<> {
        let _scope = ledger::on_behalf_of(OP, destinations);
        let begun = Begun::new(destinations, axis, room);
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

    /// What became of the rows, back where they came from and in the order they had there; what
    /// became of a row on several ranks is added up. Rows that were none are left out.
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

    /// How often rows name each part: as [`counts`](Self::counts), with every one of a row's
    /// destinations.
    pub fn named(&self) -> Vec<usize> {
        let rank = |part| self.0.mesh.with_part(0, &self.0.axes, part);
        let sum = |rank: usize| {
            let named = |from| self.0.of_part(&self.0.named, from, rank);
            self.0.group(rank).map(named).sum()
        };
        (0..self.0.parts()).map(|part| sum(rank(part))).collect()
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
    fn new(destinations: &Tensor, axis: &str, room: Room) -> Result<(Self, Tensor)> {
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
        let several = match x.dims() {
            [_] => 1,
            [_, several] if *several > 0 => *several,
            _ => {
                let detail = format!(
                    "there is one destination for each row or as many for each, got {}",
                    x.shape()
                );
                return Err(Error::shape(OP, [destinations], detail));
            }
        };
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
        if let Room::Counted = room {
            mesh.check_here(OP)?;
            Dry::check("counting rows")?;
            if !mesh.has_values() {
                return Err(crate::meta::no_values(mesh.device(0).name()));
            }
        }
        let rows = axes
            .iter()
            .fold(Sharding::replicated(), |s, a| s.cut(0, *a));
        let (named_once, x) = (x.rank() == 1, x.reshard(rows.clone())?);
        let ends = mesh.size(named);
        let (mut orders, mut tellings) = (vec![], vec![]);
        for (i, rank) in mesh.held() {
            let sorted = match named_once {
                true => sorted(&x.held(i), ends),
                false => sorted_several(&x.held(i), ends),
            };
            let (order, telling) = told(&mesh, Some(rank), sorted)?;
            orders.push(order);
            tellings.push(telling);
        }
        let routes = Routes {
            axis: named,
            rows: x.dims()[0],
            several,
            counts: vec![],
            named: vec![],
            most: 0,
            orders,
            axes,
            mesh,
        };
        let shape = Shape::from([routes.parts() * told_of(ends)]);
        let telling = Tensor::from_parts(&routes.mesh, rows, DType::I32, shape, tellings);
        let begun = Self {
            routes,
            room,
            caller,
        };
        Ok((begun, telling))
    }

    /// Without counts every part sends as much to each rank.
    fn finish(self, told: Option<&[i32]>) -> Result<RowExchange> {
        let Self {
            mut routes,
            room,
            caller,
        } = self;
        let (ends, several) = (routes.mesh.size(routes.axis), routes.several);
        let parts = routes.parts();
        for part in 0..parts {
            let rows = split(routes.rows, part, parts).len();
            let even = |rows: usize| (0..ends).map(|end| split(rows, end, ends).len()).collect();
            let (counts, named) = match told {
                Some(told) => counted(&told[part * told_of(ends)..][..told_of(ends)], rows)?,
                None => (even(rows * several.min(ends)), even(rows * several)),
            };
            routes.counts.push(counts);
            routes.named.push(named);
        }
        let received = |rank| (routes.received(rank), rank);
        let (fullest, rank) = (0..routes.mesh.ranks())
            .map(received)
            .max()
            .unwrap_or_default();
        routes.most = match (room, told) {
            (Room::Within(most), _) | (Room::Expecting(most), None) => most,
            _ => fullest,
        };
        if fullest > routes.most {
            let detail = format!(
                "rank {rank} gets {fullest} rows and has room for {}",
                routes.most
            );
            return Err(Error::argument(OP, "most", detail));
        }
        routes.only_those_that_go()?;
        // How many come is not for everybody to know: see `Expecting`.
        let most = match room {
            Room::Expecting(_) => 0,
            _ => routes.most,
        };
        let decision = [routes.axis, routes.rows, most].map(|n| n as u64);
        fingerprint::fold(OP, caller, Digest::default().words(decision).0);
        Ok(RowExchange(Arc::new(routes)))
    }
}

/// How many numbers a part tells: where the rows of each destination begin and end, the smallest
/// and the largest destination, and how often each is named.
fn told_of(ends: usize) -> usize {
    2 * ends + 3
}

/// The rows of a rank by their destinations, and where each is in that order; and what the rank
/// tells.
fn sorted(destinations: &Tensor, ends: usize) -> Result<((Tensor, Tensor), Tensor)> {
    let (n, device) = (destinations.numel(), destinations.device());
    if n == 0 {
        return nothing(ends, device);
    }
    let (sorted, order) = destinations.sort(0, Order::Ascending)?;
    let places = order.argsort(0, Order::Ascending)?;
    let numbers = Tensor::arange(0, ends as i64 + 1, 1, DType::I32, device)?;
    let begins = sorted.searchsorted(&numbers, Side::Left)?;
    let (first, last) = (sorted.narrow(0, 0, 1)?, sorted.narrow(0, n - 1, 1)?);
    let named = begins
        .narrow(0, 1, ends)?
        .sub(&begins.narrow(0, 0, ends)?)?;
    Ok((
        (order, places),
        Tensor::concat(&[&begins, &first, &last, &named], 0)?,
    ))
}

/// [`sorted`] of rows that name several: those that a row names again go behind all others.
fn sorted_several(destinations: &Tensor, ends: usize) -> Result<((Tensor, Tensor), Tensor)> {
    let (n, device) = (destinations.numel(), destinations.device());
    if n == 0 {
        return nothing(ends, device);
    }
    let several = destinations.dims()[1];
    let numbers = Tensor::arange(0, several as i64, 1, DType::I32, device)?;
    let earlier = numbers.unsqueeze(1)?.gt(&numbers.unsqueeze(0)?)?;
    let same = destinations.unsqueeze(2)?.eq(&destinations.unsqueeze(1)?)?;
    let again = same.logical_and(&earlier)?.any(&[-1], false)?;
    let goes = destinations.ge(0)?.logical_and(&again.logical_not()?)?;
    let once = goes.where_(destinations, ends as i64)?.reshape([n])?;
    let ((order, places), telling) = sorted(&once, ends)?;
    let every = destinations.reshape([n])?;
    let [first, last] = [every.min_all()?, every.max_all()?];
    let said = every.ge(0)?.where_(&every, ends as i64)?;
    let said = said.minimum(ends as i64)?.bincount_bins(None, ends + 1)?;
    let telling = Tensor::concat(
        &[
            &telling.narrow(0, 0, ends + 1)?,
            // Nobody is no destination that could be wrong.
            &first.maximum(0)?.reshape([1])?,
            &last.maximum(0)?.reshape([1])?,
            &said.narrow(0, 0, ends)?.cast(DType::I32)?,
        ],
        0,
    )?;
    let row = order.floor_div(several as i64)?;
    Ok(((row, places), telling))
}

/// What a rank without rows has and tells.
fn nothing(ends: usize, device: &crate::Device) -> Result<((Tensor, Tensor), Tensor)> {
    let nothing = Tensor::zeros([0], DType::I32, device)?;
    let telling = Tensor::zeros([told_of(ends)], DType::I32, device)?;
    Ok(((nothing.clone(), nothing), telling))
}

/// How many rows of a part go to each rank. All processes read the same, so all of them find the same
/// error.
fn counted(told: &[i32], rows: usize) -> Result<(Vec<usize>, Vec<usize>)> {
    let ends = (told.len() - 3) / 2;
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
    let named = told[ends + 3..].iter().map(|n| *n as usize);
    Ok((begins.windows(2).map(count).collect(), named.collect()))
}

impl Routes {
    fn parts(&self) -> usize {
        self.axes.iter().map(|a| self.mesh.size(*a)).product()
    }

    /// How many rows one rank sends to another of its group.
    fn count(&self, from: usize, to: usize) -> usize {
        self.of_part(&self.counts, from, to)
    }

    fn of_part(&self, counts: &[Vec<usize>], from: usize, to: usize) -> usize {
        let (part, _) = self.mesh.part(from, self.axes.iter().copied());
        counts[part][self.mesh.coordinate(to, self.axis)]
    }

    /// How many rows a rank sends, those to itself among them.
    fn sent_by(&self, rank: usize) -> usize {
        self.group(rank).map(|to| self.count(rank, to)).sum()
    }

    /// Forgets destinations that nothing goes to: their places are all behind those that do.
    fn only_those_that_go(&mut self) -> Result<()> {
        let sent: Vec<usize> = self.mesh.held().map(|(_, r)| self.sent_by(r)).collect();
        for ((order, places), sent) in self.orders.iter_mut().zip(sent) {
            if sent < order.numel() {
                *order = order.narrow(0, 0, sent)?;
                *places = places.minimum(sent as i64)?;
            }
        }
        Ok(())
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

    /// Rows that lie as the destinations do. Other dimensions may be cut over other axes, and values
    /// may be sums over those: what is moved and added up can be added up later.
    fn brought(&self, x: &Tensor) -> Result<Tensor> {
        let other = |(dim, axis): &(usize, usize)| *dim > 0 && !self.axes.contains(axis);
        let rows = self.axes.iter().map(|axis| (0, *axis));
        let cuts = rows.chain(x.sharding().cuts().filter(other));
        let there = cuts.fold(Sharding::replicated(), |s, (dim, axis)| s.cut(dim, axis));
        let sums = x.sharding().partial();
        let sums = sums.filter(|(axis, r)| *r == Reduction::Sum && !self.axes.contains(axis));
        x.reshard(sums.fold(there, |s, (axis, sum)| s.partial_over(axis, sum)))
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
            |_, i, pieces| {
                if pieces.is_empty() {
                    return Ok(None);
                }
                let (order, places) = &self.orders[i];
                let mut came = joined(&pieces)?;
                if order.numel() < places.numel() {
                    came = came.padded(0, 0, 1)?; // for those that nothing comes back from
                }
                let each = came.index_select(0, places)?;
                if self.several == 1 {
                    return Ok(Some(each));
                }
                let mut dims = vec![each.dims()[0] / self.several, self.several];
                dims.extend(&each.dims()[1..]);
                each.reshape(dims)?.sum(&[1], false).map(Some)
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
