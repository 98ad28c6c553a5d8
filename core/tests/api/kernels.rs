//! A launch is a value: what it says of itself is what happens, a decorator sees all of it, and the
//! device counts what it leaves behind.

use anymesh_backend_cpu::{CpuBackend, device};
use anymesh_conformance::registry::{self, Attrs};
use anymesh_core::{
    Backend, DType, Device, Error, Layout, Mesh, Result, Tensor, Timing, View,
    backend::{CheckIndexCall, Effects, Kernel, MatmulCall},
    map::{
        Builder,
        formulas::{Formula, Gelu, GeluPull, GeluTanh, GeluTanhPull, Silu, SiluTimes},
    },
    meta,
};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

/// A CPU device of this test's own, so that no other test is counted.
fn own_device() -> Device {
    Device::new(CpuBackend::new())
}

/// A device that notes something of each kernel.
fn noting<T: Send + 'static>(
    inner: &Device,
    of: impl Fn(&Kernel) -> Option<T> + Send + Sync + 'static,
) -> (Device, Arc<Mutex<Vec<T>>>) {
    let seen = Arc::new(Mutex::new(vec![]));
    let notes = seen.clone();
    let device = inner.decorated(move |backend, kernel| {
        notes.lock().expect("notes").extend(of(&kernel));
        backend.launch(kernel)
    });
    (device, seen)
}

#[test]
fn every_kernel_gives_the_outputs_that_it_announced() {
    let families = Arc::new(Mutex::new(BTreeSet::new()));
    let seen = families.clone();
    let device = device().decorated(move |backend, kernel| {
        assert!(backend.supports(&kernel));
        let (outputs, shown) = (kernel.outputs(), format!("{} {kernel:?}", kernel.op()));
        seen.lock().expect("families").insert(kernel.family());
        let buffers = backend.launch(kernel)?;
        assert_eq!(buffers.len(), outputs.len(), "{shown}");
        for (buffer, (dtype, shape)) in buffers.iter().zip(outputs) {
            let bytes = (shape.numel() * dtype.size()) as u64;
            assert_eq!(buffer.bytes(), bytes, "{shown}");
        }
        Ok(buffers)
    });
    for entry in registry::entries() {
        for sample in entry.samples() {
            let run = || -> Result<()> {
                let attrs = Attrs::new(entry, &sample.attrs)?;
                entry.call(&sample.make(7, &device)?, &attrs, &device)?;
                Ok(())
            };
            run().unwrap_or_else(|error| panic!("{} {sample:?}: {error}", entry.name));
        }
    }
    let families: Vec<_> = families.lock().expect("families").iter().copied().collect();
    assert_eq!(
        families,
        [
            "attention",
            "attention_backward",
            "check_index",
            "conv",
            "gather",
            "grouped",
            "map",
            "matmul",
            "reduce",
            "row",
            "scan",
            "scatter",
            "search",
            "sort"
        ],
        "every family"
    );
}

#[test]
fn a_check_of_indices_is_a_kernel_of_its_own_with_an_effect() {
    let (inner, seen) = noting(&device(), |kernel| Some(kernel.family()));
    let mesh = Mesh::new("a=2", &inner).expect("a mesh");
    let table = Tensor::arange(0, 8, 1, DType::F32, &inner)
        .and_then(|t| t.to_mesh(&mesh, "[@a]"))
        .expect("a table");
    let ids = |ids: &[i32]| {
        Tensor::from_slice(ids, [ids.len()], &inner)
            .and_then(|t| t.to_mesh(&mesh, "[_]"))
            .expect("ids")
    };
    let taken = table.index_select(0, &ids(&[7, 0, -1])).expect("in range");
    assert_eq!(
        taken.full_tensor().and_then(|t| t.to_vec::<f32>()),
        Ok(vec![7.0, 0.0, 7.0])
    );
    let checks = |seen: &[&str]| seen.iter().filter(|f| **f == "check_index").count();
    assert_eq!(checks(&seen.lock().expect("notes")), 2, "one for each rank");
    assert_eq!(
        table.index_select(0, &ids(&[8])).err(),
        Some(Error::IndexOutOfRange {
            op: "index_select",
            index: 8,
            len: 8
        })
    );
}

/// A view of some bytes that are not there.
fn view(dtype: DType, dims: &[usize]) -> View {
    let layout = Layout::contiguous(dims.into());
    View {
        buffer: anymesh_core::Buffer::new((), layout.shape.numel() * dtype.size()),
        dtype,
        layout,
    }
}

#[test]
fn effects_and_operands_are_known_without_running() {
    let check: Kernel = CheckIndexCall {
        op: "take",
        indices: view(DType::I32, &[5]),
        len: 3,
    }
    .into();
    assert_eq!((check.family(), check.op()), ("check_index", "take"));
    assert!(check.outputs().is_empty() && !check.effects().is_pure());
    assert_eq!(check.operands().count(), 1);

    let product: Kernel = MatmulCall {
        op: "matmul",
        a: view(DType::BF16, &[7, 2, 3]),
        b: view(DType::BF16, &[7, 3, 4]),
        scales: None,
        bias: None,
        addend: None,
        dtype: DType::F32,
    }
    .into();
    assert!(product.effects().is_pure() && !product.is_fused());
    assert_eq!(product.outputs()[..], [(DType::F32, [7, 2, 4].into())]);

    let (device, effects) = {
        let effects = Arc::new(Mutex::new(vec![]));
        let notes = effects.clone();
        let device = device().decorated(move |backend, kernel| {
            notes.lock().expect("notes").push(kernel.effects());
            backend.launch(kernel)
        });
        (device, effects)
    };
    let x = Tensor::from_slice(&[5i32, 6], [2], &device).expect("values");
    x.add(&x).expect("adds");
    x.floor_div(&x).expect("divides");
    assert_eq!(
        effects.lock().expect("notes")[..],
        [
            Effects::default(),
            Effects {
                division_fault: true,
                ..Effects::default()
            }
        ]
    );
}

#[test]
fn programs_that_are_equal_are_equal_and_hash_alike_wherever_they_were_built() {
    let build = |factor: f64| {
        let b = Builder::new();
        let x = b.load(DType::F32);
        b.finish(&[(x * factor, DType::F32)]).expect("valid")
    };
    let hash = |program: &anymesh_core::MapProgram| {
        use std::hash::BuildHasher;
        std::hash::BuildHasherDefault::<std::hash::DefaultHasher>::default().hash_one(program)
    };
    let (a, b, c) = (build(2.0), build(2.0), build(3.0));
    assert_eq!((a.clone(), hash(&a)), (b.clone(), hash(&b)));
    assert_ne!(a, c);
}

#[test]
fn memory_in_use_and_its_peak_follow_the_tensors() {
    let device = own_device();
    assert_eq!(device.memory(), Default::default());
    let x = Tensor::zeros([256], DType::F32, &device).expect("fits");
    let view = x.narrow(0, 3, 5).expect("a view");
    assert_eq!(device.memory().in_use, 1024, "views take nothing");
    let y = x.exp().expect("runs");
    drop((x, y));
    let memory = device.memory();
    assert_eq!(
        (memory.in_use, memory.peak),
        (1024, 2048),
        "the view holds it"
    );
    device.reset_peak();
    drop(view);
    let memory = device.memory();
    assert_eq!((memory.in_use, memory.peak), (0, 1024));
    device.reset_peak();
    assert_eq!(device.memory(), Default::default());
}

#[test]
fn memory_of_a_decorated_device_is_its_own_and_is_counted_once() {
    let inner = own_device();
    let outer = inner.decorated(|backend, kernel| backend.launch(kernel));
    let x = Tensor::ones([8], DType::F64, &outer).expect("fits");
    assert_eq!(outer.memory().in_use, 64);
    assert_eq!(inner.memory().in_use, 0);
    assert!(x.to_device(&inner).is_ok());
    assert_ne!(inner, outer);
}

#[test]
fn a_device_without_memory_counts_what_it_would_need() {
    let device = meta();
    device.reset_peak();
    let before = device.memory().in_use;
    let x = Tensor::zeros([1 << 20, 1 << 20], DType::BF16, &device).expect("nothing is allocated");
    let sum = x.sum(&[1], false).expect("nothing is computed");
    let memory = device.memory();
    assert_eq!(memory.in_use - before, (2 << 40) + (2 << 20));
    drop((x, sum));
    assert_eq!(device.memory().in_use, before);
}

#[test]
fn a_profile_sees_each_kernel_until_its_guard_is_dropped() {
    let device = own_device();
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], &device).expect("fits");
    let seen = Arc::new(Mutex::new(vec![]));
    let listen = |timing| {
        let seen = seen.clone();
        device.profile(timing, move |kernel, _| {
            let outputs = kernel.outputs();
            seen.lock()
                .expect("notes")
                .push((kernel.op(), kernel.family(), outputs[0].1.numel()))
        })
    };
    x.exp().expect("runs");
    let first = listen(Timing::Launch);
    x.matmul(&x).expect("runs");
    let second = listen(Timing::Done);
    x.softmax(-1).expect("runs");
    drop(first);
    x.sum(&[0], false).expect("runs");
    drop(second);
    x.exp().expect("runs");
    assert_eq!(
        seen.lock().expect("notes")[..],
        [
            ("matmul", "matmul", 4),
            ("softmax", "row", 4),
            ("softmax", "row", 4),
            ("sum", "reduce", 2)
        ]
    );
}

#[test]
fn a_failed_launch_reaches_the_caller_through_a_profile() {
    let device = own_device();
    let _profiling = device.profile(Timing::Done, |_, _| {});
    let x = Tensor::from_slice(&[1i32], [1], &device).expect("fits");
    let zero = Tensor::from_slice(&[0i32], [1], &device).expect("fits");
    assert!(matches!(
        x.floor_div(&zero),
        Err(Error::DivisionByZero { .. })
    ));
}

#[test]
fn a_fused_kernel_that_a_device_has_not_is_never_launched() {
    /// The CPU without its fused kernels.
    #[derive(Debug)]
    struct Plain(Device, Arc<Mutex<Vec<&'static str>>>);

    impl Backend for Plain {
        fn name(&self) -> &str {
            "plain"
        }
        fn capabilities(&self) -> &anymesh_core::Capabilities {
            self.0.backend().capabilities()
        }
        fn upload(&self, bytes: &[u8]) -> Result<anymesh_core::Buffer> {
            self.0.backend().upload(bytes)
        }
        fn download<'a>(
            &'a self,
            buffer: &'a anymesh_core::Buffer,
            bytes: std::ops::Range<usize>,
        ) -> anymesh_core::backend::BoxFuture<'a, Result<Vec<u8>>> {
            self.0.backend().download(buffer, bytes)
        }
        fn sync(&self) -> anymesh_core::backend::BoxFuture<'_, Result<()>> {
            self.0.backend().sync()
        }
        fn launch(&self, kernel: Kernel) -> Result<anymesh_core::backend::Buffers> {
            self.1.lock().expect("notes").push(kernel.family());
            self.0.backend().launch(kernel)
        }
    }

    let seen = Arc::new(Mutex::new(vec![]));
    let plain = Device::new(Plain(device(), seen.clone()));
    let on = |device: &Device| {
        let x = Tensor::from_slice(&[0f64, 1.0, 2.0, 4.0], [1, 4], device)?;
        x.softmax(-1)?.to_vec::<f64>()
    };
    let (got, expected) = (on(&plain).expect("runs"), on(&device()).expect("runs"));
    assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15));
    assert_eq!(seen.lock().expect("notes")[..], ["reduce", "reduce", "map"]);
}

#[test]
fn ops_launch_the_very_programs_that_are_compiled_ahead() -> Result<()> {
    let (device, seen) = noting(&own_device(), |kernel| match kernel {
        Kernel::Map(call) => Some(call.program.clone()),
        _ => None,
    });
    for dtype in [DType::F32, DType::BF16] {
        let x = Tensor::new(&[1f32, -2.0], &device)?.cast(dtype)?;
        x.silu()?;
        x.swiglu2(&x.neg()?)?;
        let x = x.require_grad()?;
        for y in [x.gelu()?, x.gelu_tanh()?] {
            y.backward_with(&y.ones_like()?)?;
        }
        for known in [
            Silu::program(dtype)?,
            SiluTimes::program(dtype)?,
            Gelu::program(dtype)?,
            GeluPull::program(dtype)?,
            GeluTanh::program(dtype)?,
            GeluTanhPull::program(dtype)?,
        ] {
            let seen = seen.lock().expect("notes");
            assert!(seen.contains(&known), "nothing launches\n{known}");
        }
    }
    Ok(())
}
