//! Plans of reshards: shardings one below the other, and what leads from each to the next.

use crate::{
    Cell, Figure, Parts, Picture, Show, Table, bytes,
    number::count,
    seconds,
    style::color,
    svg::{fitted, line, pixels, rect, text},
    xml::tag,
};
use anymesh_core::{
    Mesh, Sharding, TensorType,
    reshard::{Plan, Step, Transfer},
};

/// Steps that are drawn.
const MOST: usize = 12;
/// Pixels of the longest bar of bytes.
const LENGTH: f64 = 150.0;

/// What leads from one sharding to the next.
struct Arrow {
    what: String,
    bytes: u64,
    seconds: f64,
}

fn arrow(mesh: &Mesh, step: &Step) -> Arrow {
    let axes: Vec<&str> = (step.axes.iter())
        .filter_map(|a| mesh.axes().get(*a).map(|(name, _)| name.as_str()))
        .collect();
    let over = match axes.is_empty() {
        true => String::new(),
        false => format!(" over {}", axes.join(", ")),
    };
    Arrow {
        what: format!("{}{over}", step.kind),
        bytes: step.recv_bytes,
        seconds: step.seconds,
    }
}

/// A type with its parts in small, and how it is called.
struct State {
    name: String,
    parts: Parts,
}

fn state(plan: &Plan, sharding: &Sharding, mesh: &Mesh) -> State {
    let ty = TensorType {
        dtype: plan.dtype,
        shape: plan.shape.clone(),
        sharding: sharding.clone(),
    };
    State {
        name: ty.to_string_on(mesh),
        parts: Parts::new(&ty, mesh),
    }
}

/// States below each other with arrows between them.
fn picture(label: String, states: &[State], arrows: &[Arrow]) -> Picture {
    const MAP: (f64, f64) = (60.0, 42.0);
    const GAP: f64 = 46.0;
    let names = states
        .iter()
        .map(|s| pixels("mono", &s.name))
        .fold(60.0, f64::max)
        .min(420.0);
    let most = arrows.iter().map(|a| a.bytes).max().unwrap_or(0).max(1) as f64;
    let left = MAP.0 + 16.0;
    let bars = left + 250.0;
    let mut picture = Picture::new(label, (left + names).max(bars + LENGTH + 150.0), 0.0);
    let mut y = 2.0;
    for (i, state) in states.iter().enumerate() {
        let map = state.parts.mini(MAP);
        picture.place(0.0, y, map);
        picture.draw(fitted(
            "mono",
            left,
            y + MAP.1 / 2.0 + 4.0,
            picture.width - left,
            &state.name,
        ));
        y += MAP.1;
        let Some(arrow) = arrows.get(i) else {
            continue;
        };
        let x = MAP.0 / 2.0;
        picture.draw(line("axis", (x, y + 5.0), (x, y + GAP - 8.0)));
        let (x1, y1) = (x - 4.0, y + GAP - 12.0);
        let head = format!(
            "M{} {}L{} {}L{} {}",
            crate::number::coordinate(x1),
            crate::number::coordinate(y1),
            crate::number::coordinate(x),
            crate::number::coordinate(y1 + 6.0),
            crate::number::coordinate(x1 + 8.0),
            crate::number::coordinate(y1)
        );
        picture.draw(tag("path").set("class", "axis").set("d", head));
        let middle = y + GAP / 2.0 + 4.0;
        picture.draw(fitted("", left, middle, bars - left - 10.0, &arrow.what));
        let width = arrow.bytes as f64 / most * LENGTH;
        if arrow.bytes > 0 {
            let shape = rect(
                &format!("full {}", color(0)),
                bars,
                middle - 10.0,
                width.max(1.0),
                12.0,
            );
            picture.draw(shape.tip(format!("{} bytes", arrow.bytes)));
        }
        let words = match arrow.bytes {
            0 => "nothing is sent".to_string(),
            n => format!("{}, {}", bytes(n as f64), seconds(arrow.seconds)),
        };
        picture.draw(text("soft", bars + width + 6.0, middle, &words));
        y += GAP;
    }
    picture.height = y + 4.0;
    picture
}

fn table(plan: &Plan) -> Table {
    let ty = |s: &Sharding| s.type_string(plan.dtype, &plan.shape, &plan.mesh);
    let heads = [
        "step",
        "collective",
        "from",
        "to",
        "received",
        "peak",
        "time",
    ];
    let mut table = Table::new("", &heads).numbers(&[0, 4, 5, 6]).code(&[2, 3]);
    for (i, step) in plan.steps.iter().enumerate() {
        table.row::<Cell>([
            (i + 1).to_string().into(),
            arrow(&plan.mesh, step).what.into(),
            ty(&step.from).into(),
            ty(&step.to).into(),
            Cell::bytes(step.recv_bytes),
            Cell::bytes(step.peak_bytes),
            seconds(step.seconds).into(),
        ]);
    }
    table
}

fn totals(received: u64, bound: Option<u64>, peak: u64, time: f64) -> String {
    let bound = match bound {
        Some(bound) => format!("no plan can do with less than {}", bytes(bound as f64)),
        None => "partial values are combined".into(),
    };
    format!(
        "The worst rank receives {} ({bound}) and holds at most {}; {} under the cost model.",
        bytes(received as f64),
        bytes(peak as f64),
        seconds(time)
    )
}

/// The states of the first steps, and the arrows between them.
fn path(plan: &Plan) -> (Vec<State>, Vec<Arrow>) {
    let steps = &plan.steps[..plan.steps.len().min(MOST)];
    let first = state(plan, &plan.from, &plan.mesh);
    let states = steps.iter().map(|s| state(plan, &s.to, &plan.mesh));
    (
        [first].into_iter().chain(states).collect(),
        steps.iter().map(|s| arrow(&plan.mesh, s)).collect(),
    )
}

/// Shardings one below the other, in small and as types, with the collective that leads from each
/// to the next, its bytes and its time.
///
/// ```
/// use anymesh_core::{Mesh, TensorType, meta, reshard::{Objective, plan}};
/// use anymesh_show::Show;
/// let mesh = Mesh::new("dp=2, tp=4", &meta())?;
/// let from = TensorType::parse("f32[64@tp, 64]", &mesh)?;
/// let to = TensorType::parse("f32[64, 64@tp]", &mesh)?;
/// let plan = plan(&mesh, &from.shape, from.dtype, &from.sharding, &to.sharding, Objective::Bytes)?;
/// assert!(plan.svg().unwrap().contains("all_to_all over tp"));
/// # Ok::<(), anymesh_core::Error>(())
/// ```
impl Show for Plan {
    fn figure(&self) -> Figure {
        let ty = |s: &Sharding| s.type_string(self.dtype, &self.shape, &self.mesh);
        let title = format!("{} → {} on {}", ty(&self.from), ty(&self.to), self.mesh);
        let (states, arrows) = path(self);
        let label = format!("plan: {title}");
        let figure = Figure::new(title).picture(picture(label, &states, &arrows));
        let figure = match self.steps.len() {
            0 => figure.note("Nothing is to do."),
            n if n > MOST => figure.note(format!(
                "Drawn are the first {MOST} of {}.",
                count(n, "step")
            )),
            _ => figure,
        };
        let note = totals(
            self.recv_bytes,
            self.lower_bound,
            self.peak_bytes,
            self.seconds,
        );
        match self.steps.is_empty() {
            true => figure,
            false => figure.note(note).table(table(self)),
        }
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// A plan on the first mesh, and the way to the second.
impl Show for Transfer {
    fn figure(&self) -> Figure {
        let plan = &self.source;
        let title = format!(
            "{} on {} → {} on {}",
            plan.from.type_string(plan.dtype, &plan.shape, &plan.mesh),
            plan.mesh,
            self.to.type_string(plan.dtype, &plan.shape, &self.mesh),
            self.mesh
        );
        let (mut states, mut arrows) = path(plan);
        states.push(state(plan, &self.to, &self.mesh));
        arrows.push(Arrow {
            what: format!("transfer to {}", self.mesh),
            bytes: self.moved_bytes,
            seconds: self.seconds - plan.seconds,
        });
        let label = format!("plan: {title}");
        let figure = Figure::new(title).picture(picture(label, &states, &arrows));
        figure
            .note(totals(
                self.recv_bytes,
                self.lower_bound,
                self.peak_bytes,
                self.seconds,
            ))
            .table(table(plan))
    }

    fn text(&self) -> String {
        self.to_string()
    }
}
