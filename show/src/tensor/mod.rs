//! Tensors: values with their cuts, or a map of them, and who holds which part.

mod color;
mod draw;
mod map;
mod read;

use crate::{Figure, Parts, Show, number::count};
use anymesh_core::Tensor;
use read::Sample;

/// A tensor as it is shown: its type, who holds what, and its values or what kept them from being
/// read.
///
/// Natively a [`Tensor`] shows itself. In a browser values are awaited:
///
/// ```
/// use anymesh_core::Tensor;
/// use anymesh_show::{Show, TensorView};
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::new(&[[1f32, f32::NAN], [3.0, 4.0]], &device)?;
/// let view = pollster::block_on(TensorView::read(&x));
/// assert!(view.svg().unwrap().contains(">NaN</text>"));
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TensorView {
    title: String,
    parts: Parts,
    /// Whether several ranks are to be told apart.
    on_mesh: bool,
    /// What was read, or why nothing was.
    values: Result<Sample, String>,
}

impl TensorView {
    /// Reads what is shown: everything, or of a large tensor a sample. Nothing is communicated.
    pub async fn read(x: &Tensor) -> Self {
        let values = match no_values(x) {
            Some(why) => Err(why),
            None => (read::sample(x).await).map_err(|e| format!("Its values cannot be shown: {e}")),
        };
        Self {
            values,
            ..Self::without_values(x)
        }
    }

    /// Its type and who holds what.
    pub fn without_values(x: &Tensor) -> Self {
        Self {
            title: title(x),
            parts: Parts::of(x),
            on_mesh: !x.is_plain(),
            values: Err(String::new()),
        }
    }
}

/// Type and place: `f32[8@dp, 4] on mesh(dp=2) of cpu`.
fn title(x: &Tensor) -> String {
    let mut title = format!("{} on {}", x.type_string(), x.mesh());
    if !x.is_plain() {
        let mut names: Vec<String> = vec![];
        // Ranks beyond these are rarely on yet other devices.
        for i in 0..x.mesh().addressable().len().min(1024) {
            let name = x.mesh().device(i).to_string();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        if names.len() > 3 {
            names.truncate(3);
            names.push("…".into());
        }
        if !names.is_empty() {
            title = format!("{title} of {}", names.join(", "));
        }
    }
    if x.requires_grad() {
        title.push_str(", requires_grad");
    }
    title
}

/// Why a tensor has no values to read, where that is known before.
fn no_values(x: &Tensor) -> Option<String> {
    if x.numel() == 0 {
        return Some("It has no elements.".into());
    }
    if x.mesh().addressable().len() == 0 {
        return Some("Its parts lie in other processes.".into());
    }
    let device = x.mesh().device(0);
    (!device.has_values()).then(|| {
        let elements = count(x.numel(), "element");
        format!("{elements} without values: {device} plans and does not compute.")
    })
}

impl Show for TensorView {
    fn figure(&self) -> Figure {
        let mut figure = Figure::new(&*self.title);
        match &self.values {
            Ok(sample) => {
                let legend = self.on_mesh.then_some(&self.parts);
                figure = figure.picture(draw::picture(&self.title, sample, &self.parts, legend));
                for note in sample.notes() {
                    figure = figure.note(note);
                }
                if let Some((rows, columns)) = map::averaged(sample) {
                    figure = figure.note(format!(
                        "Each cell is the mean of a block of up to {rows} × {columns} of the values read; a NaN or an infinity in it takes the whole cell."
                    ));
                }
            }
            Err(why) => {
                let parts = self.parts.figure();
                figure.blocks = match self.on_mesh {
                    true => parts.blocks,
                    false => vec![],
                };
                if !why.is_empty() {
                    figure = figure.note(&**why);
                }
                return figure;
            }
        }
        self.parts
            .partial_note()
            .into_iter()
            .fold(figure, Figure::note)
    }

    fn text(&self) -> String {
        let mut lines = vec![self.title.clone()];
        match &self.values {
            Ok(sample) => lines.extend(sample.notes()),
            Err(why) if !why.is_empty() => lines.push(why.clone()),
            Err(_) => {}
        }
        lines.extend(self.parts.partial_note());
        lines.join("\n")
    }
}

/// Small tensors as tables of values, in the colours of who holds them; larger ones as a map of
/// colours. Lines are where the tensor is cut. What was left out or averaged is said below.
///
/// Values of tensors with parts in other processes are shown as far as they are in this one.
impl Show for Tensor {
    fn figure(&self) -> Figure {
        #[cfg(not(target_family = "wasm"))]
        return pollster::block_on(TensorView::read(self)).figure();
        #[cfg(target_family = "wasm")]
        return TensorView::without_values(self).figure();
    }

    fn text(&self) -> String {
        match self.mesh().is_local() {
            true => self.to_string(),
            // The other form gathers, which a single process must not begin.
            false => format!("{self:?}"),
        }
    }
}
