use super::*;
use crate::{queue::Function, server::Launcher};
use anymesh_kernel::{Buffer, DType, Layout, View, backend::SearchCall};
use cubecl::server::Handle;
use cubecl_common::device::{DeviceId, ServiceId};
use cubecl_runtime::memory_management::ManagedMemoryHandle;

fn memory(address: u64, bytes: usize) -> Memory {
    let mut handle = Handle::from_memory(
        ManagedMemoryHandle::new(),
        ServiceId::of::<Launcher>(DeviceId::new(0, 0)),
        StreamId { value: 0 },
        address + bytes as u64,
    );
    handle.offset_start = Some(address);
    Memory::owned(handle, bytes, Arc::new(()))
}

/// A search of memory at 1000 for what lies at 2000.
fn search() -> Kernel {
    let view = |address| View {
        buffer: memory(address, 64).buffer(),
        dtype: DType::I32,
        layout: Layout::contiguous([16].into()),
    };
    SearchCall {
        op: "search",
        sorted: view(1000),
        queries: view(2000),
        right: false,
    }
    .into()
}

fn argument(place: Range<u64>, standing: bool) -> Argument {
    Argument {
        place,
        read: true,
        written: false,
        standing,
    }
}

fn taped(arguments: Vec<Argument>) -> Taped {
    Taped {
        launch: Prepared {
            name: "kernel".into(),
            function: Function(0),
            grid: [1, 2, 3],
            block: [32, 1, 1],
            shared: 0,
            info: vec![7],
        },
        arguments,
    }
}

fn made(addresses: &[(u64, usize)]) -> Buffers {
    let buffer = |(address, bytes): &(u64, usize)| memory(*address, *bytes).buffer();
    addresses.iter().map(buffer).collect::<Buffers>()
}

#[test]
fn addresses_are_those_of_operands_of_what_was_taken_or_fixed() {
    let first = taped(vec![
        argument(1000..1064, false),
        argument(5000..5032, false),
        argument(9000..9128, true),
    ]);
    let second = taped(vec![
        argument(2032..2064, false),
        argument(5000..5032, false),
        argument(4000..4064, false),
    ]);
    let taken = [memory(5000, 32), memory(4000, 64)];
    let call = learned(&search(), &made(&[(4000, 64)]), &taken, vec![first, second])
        .expect("all are known");
    assert_eq!(
        (call.taken, &call.results[..]),
        (vec![64, 32], &[None][..]),
        "results first"
    );
    let from: Vec<Vec<From>> = (call.launches.iter())
        .map(|launch| launch.slots.iter().map(|slot| slot.from).collect())
        .collect();
    let scratch = From::Taken(1, 0);
    assert_eq!(
        from,
        [
            [From::Operand(0, 0), scratch, From::Fixed(9000)],
            [From::Operand(1, 32), scratch, From::Taken(0, 0)],
        ]
    );
    let kept = &call.launches[0];
    assert_eq!(
        (kept.launch.grid, &kept.launch.info[..]),
        ([1, 2, 3], &[7][..])
    );
    assert!(kept.slots[0].is_read() && !kept.slots[0].is_written());
    assert!(!kept.slots[2].is_read(), "what stands is never garbage");
}

#[test]
fn a_call_with_an_address_from_elsewhere_is_not_repeated() {
    let taken = [memory(4000, 64)];
    let elsewhere = taped(vec![argument(7000..7064, false)]);
    let result = made(&[(4000, 64)]);
    assert!(learned(&search(), &result, &taken, vec![elsewhere]).is_none());
    let beyond = taped(vec![argument(1032..1096, false)]);
    assert!(learned(&search(), &result, &taken, vec![beyond]).is_none());
}

#[test]
fn a_result_may_have_the_memory_of_an_operand_but_no_two_the_same() {
    let tape = || vec![taped(vec![argument(1000..1064, false)])];
    let call = learned(&search(), &made(&[(2000, 64)]), &[], tape()).expect("all are known");
    assert_eq!((call.taken, &call.results[..]), (vec![], &[Some(1)][..]));
    let same = made(&[(2000, 64), (2000, 64)]);
    assert!(learned(&search(), &same, &[], tape()).is_none());
    assert!(learned(&search(), &made(&[(3000, 64)]), &[], tape()).is_none());
    let twice = made(&[(4000, 64), (4000, 64)]);
    assert!(learned(&search(), &twice, &[memory(4000, 64)], tape()).is_none());
}

#[test]
fn forms_tell_everything_but_the_memory() {
    let mut all: Vec<Kernel> = vec![search(), search()];
    assert_eq!(all[0].form(), all[1].form());
    let change = |f: fn(&mut SearchCall)| match search() {
        Kernel::Search(mut call) => {
            f(&mut call);
            Kernel::Search(call)
        }
        other => other,
    };
    all.truncate(1);
    all.push(change(|call| call.right = true));
    all.push(change(|call| call.queries.layout.offset = 1));
    all.push(change(|call| call.queries.dtype = DType::U32));
    all.push(change(|call| {
        call.queries.buffer = call.sorted.buffer.clone()
    }));
    all.push(change(|call| call.sorted.buffer = Buffer::new((), 128)));
    all.push(change(|call| {
        call.sorted.layout = call.sorted.layout.slice(0, 0, 1, 8)
    }));
    all.push(change(|call| {
        call.sorted.layout = call.sorted.layout.slice(0, 0, 2, 8)
    }));
    for (i, a) in all.iter().enumerate() {
        for b in &all[i + 1..] {
            assert_ne!(a.form(), b.form(), "{a:?} {b:?}");
        }
    }
}
