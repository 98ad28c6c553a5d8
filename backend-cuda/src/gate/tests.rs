//! On the CPU: the gate knows nothing of GPUs.

use super::*;
use anymesh_kernel::{
    DType, Layout, MapProgram, View,
    backend::{MapCall, MapInput},
    map::Builder,
};
use std::sync::atomic::AtomicUsize;

fn gated() -> (Arc<Gate>, Device) {
    let gate = Arc::new(Gate::default());
    let device = behind(gate.clone(), &anymesh_backend_cpu::device());
    (gate, device)
}

fn at_least_7(device: &Device, buffer: &Buffer) -> Result<Buffer> {
    let program = || -> Result<MapProgram> {
        let b = Builder::new();
        let x = b.load(DType::F32);
        b.finish(&[(x.max(7.0), DType::F32)])
    };
    let view = View {
        buffer: buffer.clone(),
        dtype: DType::F32,
        layout: Layout::contiguous([1].into()),
    };
    let call = MapCall {
        op: "max",
        program: program()?,
        shape: [1].into(),
        inputs: [MapInput { view, window: None }].into_iter().collect(),
        indices: Default::default(),
        params: Default::default(),
        over: Default::default(),
    };
    Ok(device.launch(call)?.remove(0).buffer)
}

fn read(device: &Device, buffer: &Buffer) -> Result<Vec<u8>> {
    pollster::block_on(device.backend().download(buffer, 0..4))
}

fn broken() -> Error {
    Error::Lost {
        op: "all_reduce",
        ranks: [3].into(),
        detail: "process 3 died".into(),
    }
}

/// Expects buffers, and counts how often that was joined.
fn expect(gate: &Gate, number: u64, buffers: &[&Buffer]) -> Arc<AtomicUsize> {
    let joined = Arc::new(AtomicUsize::new(0));
    let count = joined.clone();
    gate.expect(
        number,
        buffers.iter().map(|b| b.serial()).collect(),
        move || {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        },
    );
    joined
}

#[test]
fn work_is_joined_when_its_result_is_first_used_and_once() -> Result<()> {
    let (gate, device) = gated();
    let (other, result) = (device.upload(&[0; 4])?, device.upload(&[0; 4])?);
    let joined = expect(&gate, 1, &[&result]);
    at_least_7(&device, &other)?;
    read(&device, &other)?;
    assert_eq!(joined.load(Ordering::Relaxed), 0, "nothing needs it yet");
    at_least_7(&device, &result)?;
    at_least_7(&device, &result)?;
    read(&device, &result)?;
    assert_eq!(joined.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn what_is_behind_later_work_is_behind_earlier_work() -> Result<()> {
    let (gate, device) = gated();
    let (first, second) = (device.upload(&[0; 4])?, device.upload(&[0; 4])?);
    let (one, two) = (expect(&gate, 1, &[&first]), expect(&gate, 2, &[&second]));
    read(&device, &second)?;
    read(&device, &first)?;
    let counts = [one, two].map(|n| n.load(Ordering::Relaxed));
    assert_eq!(counts, [0, 1]);
    Ok(())
}

#[test]
fn finished_work_need_not_be_joined_and_a_sync_joins_all() -> Result<()> {
    let (gate, device) = gated();
    let (first, second) = (device.upload(&[0; 4])?, device.upload(&[0; 4])?);
    let one = expect(&gate, 1, &[&first]);
    gate.finished(1);
    let two = expect(&gate, 2, &[&second]);
    device.sync()?;
    read(&device, &first)?;
    let counts = [one, two].map(|n| n.load(Ordering::Relaxed));
    assert_eq!(counts, [0, 1]);
    assert!(!gate.shut.load(Ordering::Relaxed), "nothing is left to do");
    Ok(())
}

#[test]
fn after_a_failure_nothing_is_read_and_the_first_reason_is_told() -> Result<()> {
    let (gate, device) = gated();
    let good = device.upload(&[0; 4])?;
    let received = device.upload(&[0; 4])?;
    expect(&gate, 1, &[&received]);
    gate.fail(broken(), received.serial());
    let second = Error::DeviceFailed {
        device: "cuda:0".into(),
        detail: "something that came of it".into(),
    };
    gate.fail(second, received.serial());
    for buffer in [&good, &received] {
        assert_eq!(read(&device, buffer), Err(broken()));
        assert_eq!(at_least_7(&device, buffer).map(|_| ()), Err(broken()));
    }
    assert_eq!(device.sync(), Err(broken()));
    Ok(())
}

#[test]
fn once_healed_what_was_there_before_is_good_and_what_came_of_garbage_is_not() -> Result<()> {
    let (gate, device) = gated();
    let good = device.upload(&1f32.to_le_bytes())?;
    let received = device.upload(&[0; 4])?;
    let of_garbage = at_least_7(&device, &received)?;
    gate.fail(broken(), received.serial());
    gate.heal();
    assert_eq!(read(&device, &good)?, 1f32.to_le_bytes());
    for buffer in [&received, &of_garbage] {
        let read = read(&device, buffer);
        assert!(matches!(read, Err(Error::DeviceFailed { .. })), "{read:?}");
        assert!(at_least_7(&device, buffer).is_err());
    }
    let fresh = at_least_7(&device, &good)?;
    assert_eq!(read(&device, &fresh)?, 7f32.to_le_bytes());
    device.sync()
}

#[test]
fn a_read_that_was_waiting_when_work_failed_gives_the_error() -> Result<()> {
    let gate = Arc::new(Gate::default());
    let failing = gate.clone();
    // The inner device's read ends only because the failed work was let go.
    let cpu = anymesh_backend_cpu::device();
    let inner = Device::new(FailsInRead {
        cpu: cpu.clone(),
        gate: failing,
    });
    let device = behind(gate, &inner);
    let buffer = device.upload(&[0; 4])?;
    assert_eq!(read(&device, &buffer), Err(broken()));
    Ok(())
}

#[derive(Debug)]
struct FailsInRead {
    cpu: Device,
    gate: Arc<Gate>,
}

impl Backend for FailsInRead {
    fn name(&self) -> &str {
        self.cpu.name()
    }
    fn capabilities(&self) -> &Capabilities {
        self.cpu.backend().capabilities()
    }
    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.cpu.backend().upload(bytes)
    }
    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        self.gate.fail(broken(), buffer.serial());
        self.cpu.backend().download(buffer, bytes)
    }
    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        self.cpu.backend().sync()
    }
    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        self.cpu.backend().launch(kernel)
    }
}
