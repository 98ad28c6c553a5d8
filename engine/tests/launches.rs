//! How many launches a list becomes, what is computed at all, and what is told when it fails.

mod support;

use anymesh_engine::{Options, deferred_with};
use anymesh_kernel::{
    DType, Device, Error, Kernel, Layout, Scalar, View,
    backend::{Addend, MatmulCall, ReduceOp, RowBuilder, RowProgramCall},
    map::Builder,
};
use smallvec::smallvec;
use std::sync::{Arc, Mutex};
use support::{add, call, floats, one, read, seen, sum, watched, watched_with};

#[test]
fn a_chain_is_one_launch_and_nothing_runs_before_somebody_reads() {
    let (device, told) = watched();
    let x = floats(&device, [2], &[1.0, 2.0]);
    let y = one(&device, "double", &x, |v| v * 2.0);
    let z = one(&device, "next", &y, |v| v + 1.0);
    drop(y);
    let w = one(&device, "negative", &z, |v| -v);
    drop(z);
    assert!(seen(&told).is_empty());
    assert_eq!(read(&device, &w), Ok(vec![-3.0, -5.0]));
    assert_eq!(seen(&told), ["map double+next+negative"]);
}

#[test]
fn what_is_held_is_an_output_of_the_same_launch() {
    let (device, told) = watched();
    let x = floats(&device, [2], &[1.0, 2.0]);
    let y = one(&device, "exp", &x, |v| v.exp());
    let z = one(&device, "next", &y, |v| v + 1.0);
    assert_eq!(
        read(&device, &z),
        Ok(vec![1f32.exp() + 1.0, 2f32.exp() + 1.0])
    );
    assert_eq!(read(&device, &y), Ok(vec![1f32.exp(), 2f32.exp()]));
    assert_eq!(seen(&told), ["map exp+next"]);
}

#[test]
fn what_nobody_reads_is_computed_all_the_same() {
    let (device, told) = watched();
    let x = floats(&device, [2], &[1.0, 2.0]);
    drop(one(&device, "exp", &x, |v| v.exp()));
    drop(sum(&device, &one(&device, "log", &x, |v| v.log()), 0));
    device.sync().expect("nothing is wrong");
    assert_eq!(seen(&told), ["map exp", "reduce log+sum"]);
}

#[test]
fn a_list_is_fused_when_it_comes_again() {
    let mut options = Options::host();
    options.first = false;
    let (device, told) = watched_with(options);
    let x = floats(&device, [2], &[1.0, 2.0]);
    let run = |n: f64| {
        let y = one(&device, "double", &x, |v| v * n);
        let z = one(&device, "next", &y, |v| v + 1.0);
        drop(y);
        let read = read(&device, &z);
        (read, seen(&told))
    };
    assert_eq!(
        run(2.0),
        (
            Ok(vec![3.0, 5.0]),
            vec!["map double".into(), "map next".into()]
        )
    );
    let fused = (Ok(vec![3.0, 5.0]), vec!["map double+next".to_string()]);
    assert_eq!([run(2.0), run(2.0)], [fused.clone(), fused]);
    // Another program is another list.
    assert_eq!(run(4.0).1.len(), 2);
}

#[test]
fn a_map_moves_into_the_reduction_that_reads_it() {
    let (device, told) = watched();
    let x = floats(&device, [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let y = one(&device, "square", &x, |v| v * v);
    let total = sum(&device, &y, 1);
    drop(y);
    assert_eq!(read(&device, &total), Ok(vec![5.0, 25.0]));
    assert_eq!(seen(&told), ["reduce square+sum"]);
}

#[test]
fn cheap_values_move_through_views() {
    let (device, told) = watched();
    let x = floats(&device, [2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let row = floats(&device, [3], &[10.0, 20.0, 30.0]);
    let (x, row) = (
        one(&device, "copy", &x, |v| v),
        one(&device, "double", &row, |v| v * 2.0),
    );
    let turned = View {
        layout: x.layout.permute(&[1, 0]),
        ..x.clone()
    };
    let column = View {
        layout: row.layout.unsqueeze(1).expand(&[3, 2].into()),
        ..row.clone()
    };
    let y = add(&device, &turned, &column);
    drop((x, row, turned, column));
    assert_eq!(
        read(&device, &y),
        Ok(vec![21.0, 24.0, 42.0, 45.0, 63.0, 66.0])
    );
    assert_eq!(seen(&told), ["map copy+double+add"]);
}

#[test]
fn a_value_that_others_wait_for_does_not_make_a_circle() {
    let (device, told) = watched();
    let x = floats(&device, [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let y = one(&device, "exp", &x, |v| v.exp());
    let product = MatmulCall {
        op: "matmul",
        a: y.clone(),
        b: x.clone(),
        scales: None,
        bias: None,
        addend: None,
        dtype: DType::F32,
    };
    let p = device.launch(product).expect("launches").swap_remove(0);
    // Needs y itself, and y by way of the product.
    let z = add(&device, &y, &p);
    drop((y, p));
    let alone = anymesh_backend_cpu::device();
    let e = one(&alone, "exp", &x, |v| v.exp());
    let product = MatmulCall {
        op: "matmul",
        a: e.clone(),
        b: x.clone(),
        scales: None,
        bias: None,
        addend: None,
        dtype: DType::F32,
    };
    let p = alone.launch(product).expect("launches").swap_remove(0);
    assert_eq!(read(&device, &z), read(&alone, &add(&alone, &e, &p)));
    assert_eq!(seen(&told), ["map exp", "matmul matmul", "map add"]);
}

#[test]
fn numbers_that_programs_are_given_are_no_part_of_a_plan() {
    let (device, _) = watched();
    let x = floats(&device, [2], &[1.0, 2.0]);
    for factor in [2.0, 3.0] {
        let b = Builder::new();
        let y = b.load(DType::F32) * b.param(DType::F32);
        let mut times = call("times", &[&x], b.finish(&[(y, DType::F32)]).expect("valid"));
        times.params.push(Scalar::Float(factor));
        let y = device.launch(times).expect("launches").swap_remove(0);
        let z = one(&device, "next", &y, |v| v + 1.0);
        drop(y);
        let factor = factor as f32;
        assert_eq!(
            read(&device, &z),
            Ok(vec![factor + 1.0, 2.0 * factor + 1.0])
        );
    }
}

#[test]
fn a_fault_is_told_once_and_stays_with_what_is_computed_from_it() {
    let (device, told) = watched();
    let x = floats(&device, [2], &[1.0, 2.0]);
    let zeros = View {
        buffer: device.upload(&[0; 8]).expect("uploads"),
        dtype: DType::I32,
        layout: Layout::contiguous([2].into()),
    };
    let bad = one(&device, "divide", &zeros, |v| v.floor_div(v));
    let worse = one(&device, "after", &bad, |v| v + 1i64);
    // Nobody reads this one, and it runs all the same.
    drop(one(&device, "unread", &zeros, |v| v.rem(v)));
    let good = one(&device, "good", &x, |v| v + 1.0);
    let fault = Error::DivisionByZero { op: "divide" };
    assert_eq!(device.sync(), Err(fault.clone()));
    assert_eq!(device.sync(), Ok(()));
    assert_eq!(seen(&told).len(), 3);
    assert_eq!(read(&device, &good), Ok(vec![2.0, 3.0]));
    for lost in [&bad, &worse] {
        assert_eq!(read(&device, lost), Err(fault.clone()));
        let b = Builder::new();
        let program = b
            .finish(&[(b.load(DType::I32), DType::I32)])
            .expect("valid");
        let after = device.launch(call("later", &[lost], program));
        assert_eq!(after.map(drop), Err(fault.clone()));
    }
}

#[test]
fn what_fails_below_is_an_error_of_its_results_and_the_rest_goes_on() {
    let failing = anymesh_backend_cpu::device().decorated(|backend, kernel| match kernel {
        Kernel::Matmul(_) => Err(Error::OutOfMemory {
            device: "cpu".into(),
            bytes: 7,
        }),
        kernel => backend.launch(kernel),
    });
    // With what is only held stored, and left to be made where it is read.
    for recipes in [u64::MAX, 0] {
        let mut options = Options::host();
        options.recipes = recipes;
        let device = deferred_with(&failing, options);
        let x = floats(&device, [2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let product = MatmulCall {
            op: "matmul",
            a: x.clone(),
            b: x.clone(),
            scales: None,
            bias: None,
            addend: None,
            dtype: DType::F32,
        };
        let p = device.launch(product).expect("launches").swap_remove(0);
        let y = one(&device, "next", &x, |v| v + 1.0);
        let z = add(&device, &y, &p);
        let later = one(&device, "later", &p, |v| -v);
        let full = Error::OutOfMemory {
            device: "cpu".into(),
            bytes: 7,
        };
        let told = read(&device, &y);
        assert_eq!(told, Err(full.clone()), "told by the first read");
        assert_eq!(read(&device, &y), Ok(vec![2.0, 3.0, 4.0, 5.0]));
        assert_eq!(read(&device, &z), Err(full.clone()));
        assert_eq!(read(&device, &later), Err(full));
    }
}

#[test]
fn a_kernel_that_the_device_refuses_is_launched_in_parts() {
    let narrow = anymesh_backend_cpu::device().decorated(|backend, kernel| match &kernel {
        Kernel::Map(call) if call.op.contains('+') => Err(Error::DeviceFailed {
            device: "cpu".into(),
            detail: "too long".into(),
        }),
        _ => backend.launch(kernel),
    });
    let device = deferred_with(&narrow, Options::host());
    let x = floats(&device, [2], &[1.0, 2.0]);
    let y = one(
        &device,
        "next",
        &one(&device, "double", &x, |v| v * 2.0),
        |v| v + 1.0,
    );
    assert_eq!(read(&device, &y), Ok(vec![3.0, 5.0]));
    assert_eq!(device.sync(), Ok(()));
}

#[test]
fn memory_is_what_there_is_and_never_more_than_without_the_engine() {
    let eager = Device::new(anymesh_backend_cpu::CpuBackend::new());
    let chain = |device: &Device| {
        let mut x = floats(device, [1000], &[1.0; 1000]);
        device.reset_peak();
        for _ in 0..5 {
            let total = sum(device, &one(device, "exp", &x, |v| v.exp()), 0);
            let total = View {
                layout: total.layout.expand(&[1000].into()),
                ..total
            };
            x = add(device, &x, &total);
        }
        read(device, &x).expect("reads");
        device.memory()
    };
    let without = chain(&eager);
    let mut options = Options::host();
    options.slack = 0;
    let device = deferred_with(&eager, options);
    let with = chain(&device);
    assert_eq!(with.in_use, without.in_use);
    assert!(with.peak <= without.peak, "{with:?} {without:?}");
    let x = floats(&device, [1000], &[1.0; 1000]);
    let y = one(&device, "exp", &x, |v| v.exp());
    assert_eq!(device.memory().in_use, 4000, "nothing is there yet");
    device.sync().expect("nothing is wrong");
    assert_eq!(device.memory().in_use, 8000);
    drop((x, y));
    assert_eq!(device.memory().in_use, 0);
}

#[test]
fn memory_is_given_back_so_many_launches_and_bytes_later() {
    let peak = |lag: (usize, u64)| {
        let mut options = Options::host();
        // Every launch by itself.
        (options.compiles, options.new_programs, options.lag) = (true, 0, lag);
        let device = deferred_with(&anymesh_backend_cpu::device(), options);
        let x = floats(&device, [1000], &[1.0; 1000]);
        device.reset_peak();
        let mut y = one(&device, "exp", &x, |v| v.exp());
        for _ in 0..8 {
            y = one(&device, "exp", &y, |v| v.exp());
        }
        device.sync().expect("nothing is wrong");
        assert_eq!(device.memory().in_use, 8000, "what is held");
        device.memory().peak / 4000
    };
    // What is held, what is read and what is written.
    assert_eq!(peak((0, u64::MAX)), 3);
    assert_eq!(peak((2, u64::MAX)), 5);
    assert_eq!(peak((2, 4000)), 4, "only so many bytes");
    assert_eq!(peak((2, 3999)), 3);
    assert_eq!(peak((100, u64::MAX)), 10, "all of the list");
}

#[test]
fn threads_share_a_device() {
    let (device, _) = watched();
    std::thread::scope(|scope| {
        for t in 0..4 {
            let device = &device;
            scope.spawn(move || {
                for i in 0..50 {
                    let start = (t * 100 + i) as f32;
                    let x = floats(device, [2], &[start, start + 0.5]);
                    let y = one(device, "double", &x, |v| v * 2.0);
                    let z = add(device, &y, &x);
                    drop((x, y));
                    assert_eq!(read(device, &z), Ok(vec![3.0 * start, 3.0 * start + 1.5]));
                }
            });
        }
    });
}

#[test]
fn values_of_two_deferred_devices_do_not_mix() {
    let (one_device, _) = watched();
    let (other, _) = watched();
    let x = floats(&one_device, [2], &[1.0, 2.0]);
    let y = one(&one_device, "next", &x, |v| v + 1.0);
    let b = Builder::new();
    let program = b
        .finish(&[(b.load(DType::F32), DType::F32)])
        .expect("valid");
    assert!(other.launch(call("copy", &[&y], program)).is_err());
}

#[test]
fn kernels_that_are_launched_together_reach_the_device_together_after_what_waits() {
    let (device, told) = watched();
    let x = floats(&device, [2], &[1.0, 2.0]);
    let y = one(&device, "wait", &x, |x| x + 1.0);
    let twice = |x: &View| -> Kernel {
        let b = Builder::new();
        let y = b.load(DType::F32) * 2.0;
        let program = b.finish(&[(y, DType::F32)]).expect("valid");
        call("twice", &[x], program).into()
    };
    let given = device
        .launch_all(vec![twice(&x).into(), twice(&y).into()])
        .expect("they run");
    assert_eq!(seen(&told), ["map wait", "map twice", "map twice"]);
    let values = |k: usize| read(&device, &given[k][0]).expect("it was computed");
    assert_eq!((values(0), values(1)), (vec![2.0, 4.0], vec![4.0, 6.0]));
    // Their results are operands like any other.
    let z = add(&device, &given[0][0], &given[1][0]);
    assert_eq!(read(&device, &z).expect("runs"), [6.0, 10.0]);
}

#[test]
fn memory_is_given_up_only_where_nobody_holds_it_and_no_launch_that_waits_reads_it() {
    /// Shorter rows are no row programs on the host.
    const N: usize = 1024;
    let seen = Arc::new(Mutex::new(vec![]));
    let told = seen.clone();
    let inner = anymesh_backend_cpu::device().decorated(move |backend, kernel| {
        if let Kernel::RowProgram(call) = &kernel {
            told.lock().expect("nobody panics").push(call.over);
        }
        backend.launch(kernel)
    });
    let device = deferred_with(&inner, Options::host());
    let mut b = RowBuilder::new(&[DType::F32], 0);
    let largest = b.fold(ReduceOp::Max, None, |a| a.x[0]).expect("valid");
    b.each([DType::F32], |a| [a.x[0] - a.r[largest]])
        .expect("valid");
    let program = b.finish().expect("valid");
    let less = |x: &View, over: bool| {
        let call = RowProgramCall {
            op: "less",
            program: program.clone(),
            shape: [1, N].into(),
            inputs: smallvec![x.clone()],
            params: smallvec![],
            over,
        };
        device.launch(call).expect("it waits").swap_remove(0)
    };
    let values: Vec<f32> = (0..N).map(|k| k as f32).collect();
    let x = floats(&device, [1, N], &values);
    let expected: Vec<f32> = values.iter().map(|v| v - (N - 1) as f32).collect();
    // The second launch is written down behind the first, which may give its operand up; it reads it
    // all the same.
    let (first, second) = (less(&x, true), less(&x, false));
    assert_eq!(read(&device, &first).expect("runs"), expected);
    assert_eq!(read(&device, &second).expect("runs"), expected);
    let third = less(&x, true);
    assert_eq!(read(&device, &third).expect("runs"), expected);
    // Nobody holds it any more when the last one runs.
    let fourth = less(&x, true);
    drop(x);
    assert_eq!(read(&device, &fourth).expect("runs"), expected);
    let told = seen.lock().expect("nobody panics");
    assert_eq!(*told, [false, false, false, true]);
}

#[test]
fn a_map_takes_the_memory_of_an_operand_that_only_the_list_holds() {
    let seen = Arc::new(Mutex::new(vec![]));
    let told = seen.clone();
    let inner = anymesh_backend_cpu::device().decorated(move |backend, kernel| {
        let mut told = told.lock().expect("nobody panics");
        told.push((kernel.op(), kernel.over().to_vec()));
        drop(told);
        backend.launch(kernel)
    });
    let device = deferred_with(&inner, Options::host());
    let now = || std::mem::take(&mut *seen.lock().expect("nobody panics"));
    let mut weight = one(&device, "new", &floats(&device, [2], &[1.0, 2.0]), |v| {
        v * 1.0
    });
    device.sync().expect("nothing is wrong");
    now();
    // A step of gradient descent: the old weight is read by the new one last, and nobody holds it.
    let gradient = one(&device, "double", &weight, |v| v * 2.0);
    weight = add(&device, &weight, &gradient);
    drop(gradient);
    assert_eq!(read(&device, &weight), Ok(vec![3.0, 6.0]));
    assert_eq!(now(), [("double+add", vec![(0, 0)])]);
    // Somebody holds it.
    let next = one(&device, "next", &weight, |v| v + 1.0);
    assert_eq!(read(&device, &next), Ok(vec![4.0, 7.0]));
    assert_eq!(now(), [("next", vec![])]);
    // A reduction reads it afterwards.
    let (sum, exp) = (
        sum(&device, &weight, 0),
        one(&device, "exp", &weight, |v| v.exp()),
    );
    drop(weight);
    assert_eq!(read(&device, &exp), Ok(vec![3f32.exp(), 6f32.exp()]));
    assert_eq!(read(&device, &sum), Ok(vec![9.0]));
    assert_eq!(now(), [("sum", vec![]), ("exp", vec![(0, 0)])]);
    // It is read through a view that lies otherwise, too.
    let matrix = floats(&device, [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let turned = View {
        layout: matrix.layout.permute(&[1, 0]),
        ..matrix.clone()
    };
    let both = add(&device, &matrix, &turned);
    drop((matrix, turned));
    assert_eq!(read(&device, &both), Ok(vec![2.0, 5.0, 5.0, 8.0]));
    assert_eq!(now(), [("add", vec![])]);
}

#[test]
fn a_sum_gives_its_memory_up_only_where_nobody_holds_it_and_no_launch_that_waits_reads_it() {
    let seen = Arc::new(Mutex::new(vec![]));
    let told = seen.clone();
    let takes = |kernel: &Kernel| matches!(kernel, Kernel::Matmul(_));
    let inner =
        anymesh_backend_cpu::device().decorated_for(takes, takes, move |backend, kernel| {
            match kernel {
                Kernel::Matmul(call) => {
                    let over = call.addend.as_ref().map(|addend| addend.over);
                    told.lock().expect("nobody panics").push(over);
                    call.by_steps(|kernel| backend.launch(kernel))
                }
                kernel => backend.launch(kernel),
            }
        });
    let device = deferred_with(&inner, Options::host());
    let x = floats(&device, [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let sum = floats(&device, [2, 2], &[10.0, 20.0, 30.0, 40.0]);
    let onto = |sum: &View, over: bool| {
        let call = MatmulCall {
            op: "matmul",
            a: x.clone(),
            b: x.clone(),
            scales: None,
            bias: None,
            addend: Some(Box::new(Addend {
                view: sum.clone(),
                over,
            })),
            dtype: DType::F32,
        };
        device.launch(call).expect("it waits").swap_remove(0)
    };
    let expected = [17.0, 30.0, 45.0, 62.0];
    let (first, second) = (onto(&sum, true), onto(&sum, false));
    assert_eq!(read(&device, &first).expect("runs"), expected);
    assert_eq!(read(&device, &second).expect("runs"), expected);
    let third = onto(&sum, true);
    assert_eq!(read(&device, &third).expect("runs"), expected);
    let fourth = onto(&sum, true);
    drop(sum);
    assert_eq!(read(&device, &fourth).expect("runs"), expected);
    let told = seen.lock().expect("nobody panics");
    assert_eq!(*told, [Some(false), Some(false), Some(false), Some(true)]);
}

/// The values of a small float, as `f32`, and rounded again.
fn convert(device: &Device, x: &View, dtype: DType) -> View {
    let b = Builder::new();
    let y = b.load(x.dtype).cast(dtype);
    let program = b.finish(&[(y, dtype)]).expect("valid");
    let made = device.launch(call("cast", &[x], program));
    made.expect("it waits").swap_remove(0)
}

#[test]
fn row_kernels_make_the_conversions_around_them_that_nobody_else_needs() {
    const N: usize = 1024;
    let mut b = RowBuilder::new(&[DType::F32], 0);
    let sum = b.fold(ReduceOp::Sum, None, |a| a.x[0]).expect("valid");
    b.each([DType::F32], |a| [a.x[0] / a.r[sum]])
        .expect("valid");
    let program = b.finish().expect("valid");
    let run = |rows: bool, hold: [bool; 2]| {
        let mut options = Options::host();
        options.rows = rows;
        let (device, told) = watched_with(options);
        let values: Vec<f32> = (0..2 * N).map(|k| 1.0 + (k % 37) as f32 / 7.0).collect();
        let small = convert(&device, &floats(&device, [2, N], &values), DType::BF16);
        device.sync().expect("nothing is wrong");
        seen(&told);
        let wide = convert(&device, &small, DType::F32);
        let shares = || {
            let call = RowProgramCall {
                op: "shares",
                program: program.clone(),
                shape: [2, N].into(),
                inputs: smallvec![wide.clone()],
                params: smallvec![],
                over: false,
            };
            device.launch(call).expect("it waits").swap_remove(0)
        };
        let results = [shares(), shares()];
        let rounded = results.each_ref().map(|x| convert(&device, x, DType::F16));
        let held = (hold[0].then_some(wide), hold[1].then_some(results));
        let bytes = |x: &View| pollster::block_on(device.backend().download(&x.buffer, 0..4 * N));
        let bytes = rounded.map(|x| bytes(&x).expect("runs"));
        drop(held);
        (bytes, seen(&told))
    };
    let (expected, plainly) = run(false, [false; 2]);
    assert_eq!(plainly.len(), 5, "{plainly:?}");
    let (got, launches) = run(true, [false; 2]);
    assert_eq!(launches, ["row_program cast+shares+cast"; 2]);
    assert_eq!(got, expected);
    // What somebody holds is made as it was written down.
    let (got, launches) = run(true, [true, false]);
    assert_eq!(launches[1..], ["row_program shares+cast"; 2]);
    assert_eq!(got, expected);
    let (got, launches) = run(true, [false, true]);
    assert_eq!(launches[..2], ["row_program cast+shares"; 2]);
    assert_eq!((got, launches.len()), (expected, 4));
}
