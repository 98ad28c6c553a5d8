//! A fault on purpose: an element that a kernel gets wrong, or a reduction that is lost.

use anymesh::{
    DType, Device, Error, Mesh, Result,
    backend::{Backend, Buffers, Kernel},
    transport::{InProcess, Lossy, on_behalf_of},
};
use std::{
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An element is off by as much as the largest one.
    Element,
    /// An element is no number.
    Nan,
    /// Ranks keep their terms instead of adding them up.
    Reduction,
}

/// A fault, and when it strikes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Injection {
    kind: Kind,
    at: u64,
}

impl FromStr for Injection {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (kind, at) = text.split_once(':').unwrap_or((text, "0"));
        let kind = match kind {
            "element" => Kind::Element,
            "nan" => Kind::Nan,
            "reduction" => Kind::Reduction,
            other => {
                return Err(format!(
                    "there is no fault '{other}': element, nan and reduction are"
                ));
            }
        };
        let at = at
            .parse()
            .map_err(|_| format!("'{at}' is no number of a launch or reduction"))?;
        Ok(Self { kind, at })
    }
}

/// What happened so far.
#[derive(Debug)]
pub(super) struct Fault {
    injection: Injection,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    count: u64,
    struck: Option<String>,
}

impl Fault {
    /// Whether it strikes what is about to be done; it counts.
    fn strikes(&self, what: &str) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = state.count;
        state.count += 1;
        if now != self.injection.at {
            return false;
        }
        let running = on_behalf_of();
        // An op runs kernels of other names: a gradient is added to others while its op is at work.
        state.struck = Some(match running {
            Some((op, line)) if op == what => format!("{op} at {line}"),
            Some((op, line)) => format!("{what}, run for {op} at {line}"),
            None => format!("{what}, run for no op"),
        });
        true
    }

    /// Where it struck, in words.
    pub(super) fn told(&self) -> String {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (what, of) = match self.injection.kind {
            Kind::Element => ("a wrong element", "launches"),
            Kind::Nan => ("a NaN", "launches"),
            Kind::Reduction => ("a lost reduction", "reductions"),
        };
        match &state.struck {
            Some(running) => format!("injected: {what} in {running}"),
            None => format!(
                "injected: nothing; the run had {} {of}, and {what} was asked for number {}",
                state.count, self.injection.at
            ),
        }
    }
}

impl Injection {
    /// A mesh on a device, with the fault in it.
    pub(super) fn put(self, device: &Device, axes: Option<&str>) -> Result<(Mesh, Arc<Fault>)> {
        let fault = Arc::new(Fault {
            injection: self,
            state: Mutex::default(),
        });
        let on = |device: &Device| match axes {
            Some(axes) => Mesh::new(axes, device),
            None => Ok(Mesh::single(device)),
        };
        let mesh = match (self.kind, axes) {
            (Kind::Reduction, None) => {
                let detail =
                    "a single device reduces nothing: give the second place axes, such as cpu:tp=2";
                return Err(Error::argument("diff-run", "inject", detail));
            }
            (Kind::Reduction, _) => {
                let struck = fault.clone();
                let lossy = Lossy::new(Arc::new(InProcess), move |what| struck.strikes(what));
                on(device)?.with_transport(Arc::new(lossy))
            }
            _ => on(&broken(device, fault.clone()))?,
        };
        Ok((mesh, fault))
    }
}

/// A device one of whose launches has a wrong element in the middle of a result.
fn broken(device: &Device, fault: Arc<Fault>) -> Device {
    device.decorated(
        move |backend: &dyn Backend, kernel: Kernel| -> Result<Buffers> {
            let (op, outputs) = (kernel.op(), kernel.outputs());
            let mut buffers = backend.launch(kernel)?;
            let float = outputs
                .iter()
                .position(|(dtype, shape)| *dtype == DType::F32 && shape.numel() > 0);
            let Some(o) = float.filter(|_| fault.strikes(op)) else {
                return Ok(buffers);
            };
            let bytes = 4 * outputs[o].1.numel();
            let mut data = pollster::block_on(backend.download(&buffers[o], 0..bytes))?;
            let number = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            let largest = (data.chunks_exact(4).map(|b| number(b).abs())).fold(1e-3, f32::max);
            let at = bytes / 8 * 4;
            let wrong = match fault.injection.kind {
                Kind::Nan => f32::NAN,
                _ => number(&data[at..at + 4]) + largest,
            };
            data[at..at + 4].copy_from_slice(&wrong.to_le_bytes());
            buffers[o] = backend.upload(&data)?;
            Ok(buffers)
        },
    )
}
