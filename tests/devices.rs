//! Choosing devices, and devices that fail.

use anymesh::{
    Backend, Buffer, Capabilities, Device, Error, Result, Tensor,
    backend::{BoxFuture, Buffers, Kernel},
};
use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

#[test]
fn an_unknown_device_lists_the_backends_of_this_build() {
    let error = anymesh::device("tpu:0").expect_err("there is no such backend");
    assert!(matches!(error, Error::DeviceUnavailable { .. }));
    assert!(error.to_string().contains("cpu"), "{error}");
}

#[test]
fn the_same_name_gives_the_same_device() {
    assert_eq!(anymesh::device("cpu"), anymesh::device("cpu"));
}

#[cfg(feature = "wgpu")]
#[test]
fn an_adapter_that_is_not_there_is_an_error_with_a_hint() {
    let error = anymesh::device("wgpu:no such adapter").expect_err("no adapter is called that");
    assert!(matches!(error, Error::DeviceUnavailable { .. }));
    assert!(error.to_string().contains("doctor"), "{error}");
}

#[test]
fn every_listed_device_opens_or_says_why_not() {
    for found in anymesh::found() {
        match anymesh::device(&found.name) {
            Ok(device) => assert!(found.problem.is_none() && !device.name().is_empty()),
            Err(error) => assert!(matches!(error, Error::DeviceUnavailable { .. }), "{error}"),
        }
    }
}

/// A device that is lost after some calls, as when a cable is pulled or a driver resets.
#[derive(Debug)]
struct Vanishing {
    inner: Device,
    calls_left: AtomicUsize,
}

impl Vanishing {
    fn new(calls: usize) -> Result<Device> {
        Ok(Device::new(Vanishing {
            inner: anymesh::device("cpu")?,
            calls_left: AtomicUsize::new(calls),
        }))
    }

    fn alive(&self) -> Result<&dyn Backend> {
        let counted = self
            .calls_left
            .try_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        counted
            .map(|_| self.inner.backend())
            .map_err(|_| Error::DeviceFailed {
                device: "vanishing".into(),
                detail: "lost".into(),
            })
    }
}

impl Backend for Vanishing {
    fn name(&self) -> &str {
        "vanishing"
    }
    fn capabilities(&self) -> &Capabilities {
        self.inner.backend().capabilities()
    }
    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.alive()?.upload(bytes)
    }
    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        match self.alive() {
            Ok(backend) => backend.download(buffer, bytes),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }
    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(std::future::ready(self.alive().map(|_| ())))
    }
    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        self.alive()?.launch(kernel)
    }
}

fn program(device: &Device) -> Result<Vec<f32>> {
    let x = Tensor::from_slice(&[3f32, 1.0, 2.0, 5.0], [2, 2], device)?;
    let y = x.matmul(&x.t()?)?.softmax(-1)?.cumsum(0)?;
    y.reshape([4])?.sort(0, true)?.0.to_vec()
}

#[test]
fn a_device_that_disappears_at_any_call_is_an_error_and_never_a_panic() {
    let expected = program(&anymesh::device("cpu").expect("the CPU is there")).expect("runs");
    let mut survived = false;
    for calls in 0..40 {
        match program(&Vanishing::new(calls).expect("the CPU is there")) {
            Ok(values) => {
                survived = true;
                assert_eq!(values, expected);
            }
            Err(error) => {
                assert!(!survived, "more calls left, yet it failed");
                assert!(matches!(error, Error::DeviceFailed { .. }), "{error}");
            }
        }
    }
    assert!(survived);
}
