//! Elements that are only moved.

use anymesh_backend_cpu as cpu;
use anymesh_conformance::bits;

#[test]
fn whatever_is_only_moved_keeps_its_bits() {
    let wrong = pollster::block_on(bits::moved(&cpu::device())).unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
