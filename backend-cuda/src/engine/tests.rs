use super::*;
use crate::Model;
use anymesh_launcher::place;
use anymesh_shaders::{Arena, Memory};
use cubecl::prelude::*;

#[cube(launch_unchecked)]
fn copy(from: &[u32], to: &mut [u32]) {
    to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
}

/// Not in NVRTC's language, once CubeCL has written it.
#[cube(launch_unchecked)]
fn impossible(to: &mut [u32]) {
    let value = to[ABSOLUTE_POS];
    gpu_asm!("no such instruction {};", in(_) value);
}

/// A device that compiles, or why there is none.
fn engine() -> Option<Engine> {
    if let Err(e) = crate::compile_only(Model::H200) {
        println!("skipped: {e}");
        return None;
    }
    Some(compile_only(Gpu::h200(), None).expect("NVRTC was found"))
}

fn list(memory: &Memory) -> BufferArg {
    // SAFETY: the memory's own length.
    unsafe { BufferArg::from_raw_parts(memory.handle().clone(), memory.bytes() / 4) }
}

fn one() -> (CubeCount, CubeDim) {
    (CubeCount::Static(1, 1, 1), CubeDim::new_1d(32))
}

#[test]
fn what_a_kernel_should_have_written_cannot_be_read_until_it_is_written() {
    let Some(engine) = engine() else { return };
    let (client, arena) = (engine.client(), engine.arena());
    let [a, b, c] = [0; 3].map(|_| arena.alloc(128).expect("room"));
    let read = |memory: &Memory| client.read_one(memory.handle().clone());
    let (count, dim) = one();
    // SAFETY: kernels that are never run.
    unsafe {
        copy::launch_unchecked(client, count.clone(), dim, list(&c), list(&a));
        assert_eq!(&read(&a).expect("it was compiled")[..], [0; 128]);
        impossible::launch_unchecked(client, count.clone(), dim, list(&a));
        let told = read(&a).expect_err("it cannot be compiled").to_string();
        assert!(told.contains("Impossible"), "{told}");
        copy::launch_unchecked(client, count.clone(), dim, list(&a), list(&b));
        assert!(
            read(&b)
                .expect_err("made of garbage")
                .to_string()
                .contains("Impossible")
        );
        assert!(read(&c).is_ok(), "others are as they were");
        copy::launch_unchecked(client, count, dim, list(&c), list(&a));
        assert!(read(&a).is_ok(), "filled by a kernel that runs");
    }
    client.write(
        b.handle(),
        cubecl::bytes::Bytes::from_bytes_vec(vec![1; 128]),
    );
    assert!(read(&b).is_ok(), "filled by the host");
}

#[test]
fn a_library_that_fails_is_told_by_what_it_should_have_written() {
    let Some(engine) = engine() else { return };
    let [a, b] = [0; 2].map(|_| engine.arena().alloc(128).expect("room"));
    let [a_at, b_at] = [&a, &b].map(place);
    engine.library(vec![], a_at.clone(), |_| Err("no such product".into()));
    engine.library(vec![a_at], b_at, |_| Ok(()));
    for memory in [&a, &b] {
        let told = engine.client().read_one(memory.handle().clone());
        assert!(
            told.expect_err("garbage")
                .to_string()
                .contains("no such product")
        );
    }
}

#[test]
fn memory_that_is_written_in_place_is_never_garbage() {
    let Some(engine) = engine() else { return };
    let (client, standing) = (engine.client(), engine.arena().standing(vec![0; 128]));
    let (standing, (count, dim)) = (standing.expect("room"), one());
    // SAFETY: a kernel that is never run.
    unsafe { impossible::launch_unchecked(client, count, dim, list(&standing)) };
    assert!(client.read_one(standing.handle().clone()).is_ok());
}

#[test]
fn memory_is_taken_and_given_back_by_the_thread_that_needs_it() {
    let Some(engine) = engine() else { return };
    let arena = engine.arena();
    let a = arena.alloc(1000).expect("room");
    let at = place(&a).start;
    let kept = a.clone();
    drop(a);
    let b = arena.alloc(1000).expect("room");
    assert_ne!(place(&b).start, at, "a copy still holds it");
    drop(kept);
    let c = arena.alloc(1000).expect("room");
    assert_eq!(place(&c).start, at);
    assert_eq!(arena.report().live, 2048);
}
