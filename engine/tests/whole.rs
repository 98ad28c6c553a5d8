//! Lists that the device below makes as a whole: what it is asked for, and what it is promised.

use anymesh_engine::{Options, deferred_with};
use anymesh_kernel::{
    Buffer, DType, Device, Kernel, Layout, Result, View,
    backend::{
        Backend, Buffers, Capabilities, List, Operands, RowCall, RowOp, SortCall, Steps, Wanted,
    },
};
use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Mutex},
};

/// What a device was asked for.
#[derive(Default)]
struct Asked {
    launches: usize,
    /// Of each whole what was wanted, and which operands were given up.
    wholes: Vec<(Vec<Wanted>, Vec<usize>)>,
    /// The results of lists.
    known: HashMap<u64, Vec<Buffers>>,
    /// Whether promises are broken.
    fails: bool,
}

/// The host, which keeps the results of lists and gives them again: right where operands are the same.
struct Keeping {
    host: Device,
    asked: Arc<Mutex<Asked>>,
}

impl std::fmt::Debug for Keeping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keeping")
    }
}

impl Backend for Keeping {
    fn name(&self) -> &str {
        "keeping"
    }
    fn capabilities(&self) -> &Capabilities {
        self.host.backend().capabilities()
    }
    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.host.backend().upload(bytes)
    }
    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> anymesh_kernel::backend::BoxFuture<'a, Result<Vec<u8>>> {
        self.host.backend().download(buffer, bytes)
    }
    fn sync(&self) -> anymesh_kernel::backend::BoxFuture<'_, Result<()>> {
        self.host.backend().sync()
    }
    fn supports(&self, kernel: &Kernel) -> bool {
        self.host.backend().supports(kernel)
    }
    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        self.asked.lock().expect("nobody panics").launches += 1;
        self.host.backend().launch(kernel)
    }
    fn list<'a>(&'a self, list: &List<'_>) -> Option<Box<dyn Steps + 'a>> {
        Some(Box::new(Going {
            number: list.number,
            operands: list.operands.len(),
            made: vec![],
            promised: None,
            asked: self.asked.clone(),
        }))
    }
}

struct Going {
    number: u64,
    operands: usize,
    made: Vec<Buffers>,
    promised: Option<Buffers>,
    asked: Arc<Mutex<Asked>>,
}

impl Steps for Going {
    fn again(&mut self, _: Operands<'_>) -> Option<Buffers> {
        None
    }
    fn made(&mut self, _: Operands<'_>, results: &[Buffer]) {
        self.made.push(results.into());
    }
    fn whole(&mut self, wanted: &[Wanted], given_up: Operands<'_>) -> bool {
        let mut asked = self.asked.lock().expect("nobody panics");
        let Some(known) = asked.known.get(&self.number) else {
            return false;
        };
        let result = |w: &Wanted| known[w.launch as usize][usize::from(w.result)].clone();
        self.promised = Some(wanted.iter().map(result).collect());
        let given = (0..self.operands).filter(|k| given_up(*k).is_some());
        asked.wholes.push((wanted.to_vec(), given.collect()));
        true
    }
    fn results(&mut self) -> Option<Buffers> {
        let fails = self.asked.lock().expect("nobody panics").fails;
        self.promised.take().filter(|_| !fails)
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        if !self.made.is_empty() {
            let mut asked = self.asked.lock().expect("nobody panics");
            asked
                .known
                .insert(self.number, std::mem::take(&mut self.made));
        }
    }
}

fn keeping() -> (Device, Device, Arc<Mutex<Asked>>) {
    let asked = Arc::<Mutex<Asked>>::default();
    let below = Device::new(Keeping {
        host: anymesh_backend_cpu::device(),
        asked: asked.clone(),
    });
    (deferred_with(&below, Options::host()), below, asked)
}

const SIZE: usize = 64;

fn floats(device: &Device) -> View {
    let values = (0..SIZE).flat_map(|k| (k as f32).sin().to_le_bytes());
    View {
        buffer: device
            .upload(&values.collect::<Vec<u8>>())
            .expect("uploads"),
        dtype: DType::F32,
        layout: Layout::contiguous([1, SIZE].into()),
    }
}

fn softmax(device: &Device, input: &View) -> View {
    let call = RowCall {
        op: "softmax",
        input: input.clone(),
        residual: None,
        mode: RowOp::Softmax,
    };
    device.launch(call).expect("launches").swap_remove(0)
}

fn sorted(device: &Device, input: &View) -> View {
    let call = SortCall {
        op: "argsort",
        input: input.clone(),
        descending: false,
    };
    device.launch(call).expect("launches").swap_remove(0)
}

fn bytes(device: &Device, view: &View) -> Result<Vec<u8>> {
    let bytes = view.buffer.bytes() as usize;
    pollster::block_on(device.backend().download(&view.buffer, 0..bytes))
}

#[test]
fn a_whole_is_asked_for_what_is_held_and_given_what_is_let_go() {
    let (device, below, asked) = keeping();
    let (mut seen, mut peaks) = (vec![], vec![]);
    for pass in 0..3 {
        let (kept, given) = (floats(&device), floats(&device));
        let once = softmax(&device, &kept);
        let twice = softmax(&device, &once);
        let other = softmax(&device, &given);
        let last = sorted(&device, &twice);
        drop((twice, given));
        below.reset_peak();
        let before = below.memory().in_use;
        seen.push([&once, &other, &last].map(|view| bytes(&device, view).expect("computed")));
        // Also what is passed on at once counts.
        peaks.push(below.memory().peak - before);
        let asked = asked.lock().expect("nobody panics");
        assert_eq!(asked.launches, 4, "pass {pass}");
        assert_eq!(asked.wholes.len(), pass);
        drop(kept);
    }
    assert!(seen.iter().all(|pass| *pass == seen[0]));
    assert!(
        peaks[0] > 0 && peaks.iter().all(|pass| *pass == peaks[0]),
        "{peaks:?}"
    );
    let asked = asked.lock().expect("nobody panics");
    for (wanted, given) in &asked.wholes {
        assert_eq!(wanted.len(), 3, "not the one that was let go");
        assert_eq!(given[..], [1], "not the one that is kept");
    }
}

#[test]
fn a_promise_that_is_broken_is_an_error_of_what_was_held() {
    let (device, _, asked) = keeping();
    let x = floats(&device);
    let expected = bytes(&device, &softmax(&device, &x)).expect("computed");
    asked.lock().expect("nobody panics").fails = true;
    let y = softmax(&device, &x);
    let error = bytes(&device, &y).expect_err("nothing was made");
    assert!(
        error.to_string().contains("mistake of the engine"),
        "{error}"
    );
    // It is told once, and what comes later is made.
    asked.lock().expect("nobody panics").known.clear();
    let y = softmax(&device, &x);
    assert_eq!(bytes(&device, &y).expect("computed"), expected);
}
